"""Kinds of failed evaluations, by their own words: what tells an agent's doing from a verifier's or the machine's."""

from __future__ import annotations

from towline.evaluators.suspicion import Cheat

_KINDS = {
    "timed out": "hang",
    "printed more": "oversized",
    "cannot be copied": "oversized",
    "memory limit": "oversized",
    "in the way": "in_the_way",
    "could not be run": "unrunnable",
    "contains no number": "no_score",
    "is a JSON object": "no_score",
    "matches nothing": "no_score",
    "neither reward.json": "no_score",
    "no result for": "no_score",
    "is empty": "no_score",
}
"""The kind of a failure whose text contains these words; the first counts."""
CAME_TO_AN_END = ("no_score", "unrunnable")
"""Kinds of failures of a verifier that came to its own end: the machine did its part."""


def failure_kind(error: Exception) -> str:
    """The kind of a failed evaluation, or `other`."""
    # What follows these words quotes output, which may be the agent's.
    text = (str(error) or repr(error)).partition("output:")[0].partition("printed:")[0]
    return next((kind for words, kind in _KINDS.items() if words in text), "other")


def finding_of(error: Exception) -> str:
    """What the suspicion report calls an agent that caused this failure."""
    kind = failure_kind(error)
    return kind if kind in (Cheat.HANG, Cheat.OVERSIZED, Cheat.IN_THE_WAY) else Cheat.BROKEN_EVALUATION
