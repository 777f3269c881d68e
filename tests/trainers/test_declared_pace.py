"""What the reference trainer declares as a consumer, and what it says of groups that it does not learn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from towline.client import Conflict
from towline.trainers.grpo import Grpo, GrpoSettings


class Told:
    """A service that takes down what it is told."""

    def __init__(self, refuses: bool = False):
        self.refuses = refuses
        self.leases: list[dict[str, Any]] = []

    def lease(self, consumer: str, unit: str, **options: Any) -> None:
        self.leases.append({"consumer": consumer, "unit": unit, **options})
        if self.refuses:
            raise Conflict("consumer 'run' follows tasks that begin with ''", status=409, field="prefix")


def declared(told: Told, **settings: Any) -> Grpo:
    trainer = Grpo(told, None, None, Path(), GrpoSettings("run", groups=6, **settings))  # type: ignore[arg-type]
    trainer._declare()
    return trainer


def test_the_pace_is_declared_before_anything_is_submitted() -> None:
    told = Told()
    trainer = declared(told, max_staleness=3)
    (lease,) = told.leases
    assert (lease["max"], lease["max_staleness"], lease["groups_per_update"], lease["prefix"]) == (0, 3, 6, "run/")
    assert trainer._pace == {"groups_per_update": 6, "prefix": "run/"}


@pytest.mark.parametrize("settings", [{"pacing": False}, {"max_staleness": None}])
def test_a_run_without_a_bound_or_a_pace_declares_none(settings: dict[str, Any]) -> None:
    told = Told()
    assert declared(told, **settings)._pace == {}
    assert told.leases == []


def test_a_run_that_an_older_version_began_goes_on_without_a_pace(caplog: pytest.LogCaptureFixture) -> None:
    trainer = declared(Told(refuses=True))
    assert trainer._pace == {}
    assert "no pacing, old groups are dropped" in caplog.text
