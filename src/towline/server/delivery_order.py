"""Whose turn it is: the order in which a paced consumer is handed what waits for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.server.paced import HELD, PacedConsumer, paced_consumer, running
from towline.server.pacing import Slack


class DeliveryOrder:
    """One call of a paced consumer. What is about to be too old comes first; what may wait leaves room for what may not."""

    def __init__(self, consumer: PacedConsumer):
        self.consumer = consumer
        self.withheld = 0

    @classmethod
    async def of(cls, tx: AsyncConnection, known: Row[Any], version: int) -> Self:
        return cls(await paced_consumer(tx, known, await running(tx), version))

    def sort(self, rows: Iterable[Row[Any]]) -> list[Row[Any]]:
        return sorted(rows, key=lambda row: (not self._free(row), *_rank(self._slack(row)), row.seq))

    def comes(self, row: Row[Any]) -> bool:
        """Whether the result is handed out in this call; it takes a place in an update if so."""
        if self._free(row):
            return True
        pace, slack = self.consumer.pace, self._slack(row)
        if not pace.delivers(slack):
            self.withheld += 1
            return False
        pace.deliver(slack)
        return True

    def _slack(self, row: Row[Any]) -> Slack:
        return self.consumer.slacks.get(row.task_id)

    @staticmethod
    def _free(row: Row[Any]) -> bool:
        """Results that take no place: those that the consumer had before, and groups without sessions."""
        return row.delivery > HELD or not row.usable


def _rank(slack: Slack) -> tuple[bool, int]:
    return slack is None, slack or 0
