"""Tenants: their weights and limits, from the settings and from the store, where `towline tenants set` writes them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from sqlalchemy import select

from towline.server.store import tables
from towline.server.store.database import Store

log = logging.getLogger("towline.server")
WEIGHT = 1.0
"""The weight of a tenant for which none is set."""


class Tenants:
    """What the operator has set for each tenant. `refresh` reads what another process has changed."""

    def __init__(self, store: Store):
        self.store = store
        self._weights: Mapping[str, float] = {}

    async def refresh(self) -> None:
        table = tables.tenants
        async with self.store.read() as tx:
            rows = list(await tx.execute(select(table)))
        self._weights = {row.name: row.weight for row in rows if row.weight is not None and row.weight > 0}

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, WEIGHT)
