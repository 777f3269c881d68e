"""The frame of the attacks catches an attack that succeeds, and one that proves nothing."""

from __future__ import annotations

import pytest

from support.security import attack as frame
from support.security.attack import attack, without


async def test_an_attack_that_succeeds_is_caught() -> None:
    @attack("frame", guard=without((f"{frame.__name__}._judge", frame._judge)))
    def succeeds() -> str:
        return "everything"

    with pytest.raises(AssertionError, match="the attack succeeded: everything"):
        succeeds(unguarded=False)
    succeeds(unguarded=True)


async def test_an_attack_that_cannot_succeed_is_caught() -> None:
    @attack("frame", guard=without((f"{frame.__name__}._judge", frame._judge)))
    async def cannot(unguarded: bool) -> None:
        return None

    await cannot(unguarded=False)
    with pytest.raises(AssertionError, match="proves nothing"):
        await cannot(unguarded=True)
