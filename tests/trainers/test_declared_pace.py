"""What the reference trainer declares as a consumer, and what it says of groups that it does not learn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from towline.client import Conflict
from towline.trainers.grpo.loop import Grpo, GrpoSettings


class LeaseRecorder:
    """A service that takes down what it is recorder."""

    def __init__(self, refuses: bool = False):
        self.refuses = refuses
        self.leases: list[dict[str, Any]] = []

    def lease(self, consumer: str, unit: str, **options: Any) -> None:
        self.leases.append({"consumer": consumer, "unit": unit, **options})
        if self.refuses:
            raise Conflict("consumer 'run' follows tasks that begin with ''", status=409, field="prefix")


def declared(recorder: LeaseRecorder, **settings: Any) -> Grpo:
    trainer = Grpo(recorder, None, None, Path(), GrpoSettings("run", groups=6, **settings))  # type: ignore[arg-type]
    trainer._declare()
    return trainer


def test_the_pace_is_declared_before_anything_is_submitted() -> None:
    recorder = LeaseRecorder()
    trainer = declared(recorder, max_staleness=3)
    (lease,) = recorder.leases
    assert (lease["max"], lease["max_staleness"], lease["groups_per_update"], lease["prefix"]) == (0, 3, 6, "run/")
    assert trainer._pace == {"groups_per_update": 6, "prefix": "run/"}


@pytest.mark.parametrize("settings", [{"pacing": False}, {"max_staleness": None}])
def test_a_run_without_a_staleness_limit_or_pacing_declares_none(settings: dict[str, Any]) -> None:
    recorder = LeaseRecorder()
    assert declared(recorder, **settings)._pace == {}
    assert recorder.leases == []


def test_a_run_whose_consumer_has_no_pace_continues_without_pacing(caplog: pytest.LogCaptureFixture) -> None:
    trainer = declared(LeaseRecorder(refuses=True))
    assert trainer._pace == {}
    assert "pacing is off" in caplog.text
