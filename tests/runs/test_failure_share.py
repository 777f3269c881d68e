"""The share of infrastructure failures that a run accepts, and recipes that may be resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from towline.runs.ledger import Ledger, LedgerError
from towline.schema import FailureReason, FailureTally


def test_failure_share_and_reasons() -> None:
    tally = FailureTally()
    assert not tally.exceeds(0.0)
    tally.add_ended(3)
    assert not tally.exceeds(0.0)
    tally.add_failed(FailureReason.ENGINE, "the engine answered 500:\n  died")
    assert tally.exceeds(0.0)
    assert tally.exceeds(0.24)
    assert not tally.exceeds(0.25)
    tally.add_failed(None, None)
    tally.add_failed(FailureReason.ENGINE, "the engine answered 429")
    assert tally.as_json() == {"engine": 2, "internal": 1}
    message = tally.message(0.25)
    assert "3 of 6 sessions (50%)" in message
    assert "engine 2, internal 1" in message
    assert message.endswith("the engine answered 429")


def test_a_recipe_without_a_newer_setting_is_resumed(tmp_path: Path) -> None:
    recipe = {"model": "m", "session": {"policy": "retain", "sampling": {"temperature": 1.0}}}
    Ledger(tmp_path, recipe).close()
    newer = json.loads(json.dumps(recipe))
    newer["session"] |= {"roles": []}
    newer["session"]["sampling"]["min_p"] = 0.0
    Ledger(tmp_path, newer).close()
    newer["session"]["sampling"]["temperature"] = 0.5
    with pytest.raises(LedgerError, match="session was"):
        Ledger(tmp_path, newer)
