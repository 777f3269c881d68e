"""Whether what the gateway made of a conversation is what the specification says; each difference is one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from towline.audit.comparison import Tally
from towline.audit.engine import Call
from towline.audit.measure import Measured, drifted
from towline.audit.play import Expected
from towline.schema import BuilderName, Trajectory, TurnRole

BOUND = 1e-4
"""The largest difference of a logprob from the recorded one that float32 arithmetic explains."""


@dataclass(slots=True)
class Found:
    """What a trajectory says of itself."""

    turns: int = 0
    chains: int = 0
    forks: dict[str, int] = field(default_factory=dict)
    forced_closes: int = 0
    roles: dict[str, int] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    versions: int = 0
    torn: bool = False
    plain_difference: float | None = None

    @classmethod
    def of(cls, trajectory: Trajectory) -> Found:
        turns, report = trajectory.turns, trajectory.report
        continued = {turn.parent for turn in turns}
        leaves = [turn for turn in turns if turn.id not in continued and turn.role is not TurnRole.DISCARDED]
        versions = [np.unique(turn.versions) for turn in turns]
        return cls(
            turns=len(turns),
            chains=len(leaves),
            forks=dict(report.forks),
            forced_closes=report.forced_closes,
            roles=dict(Counter(turn.role.value for turn in turns)),
            flags=sorted({flag for turn in turns for flag in turn.flags}),
            versions=len(np.unique(np.concatenate(versions))) if versions else 0,
            torn=any(len(found) > 1 for found in versions),
            plain_difference=report.plain_difference,
        )


@dataclass(slots=True)
class Played:
    """One conversation under one way of capturing it."""

    conversation: str
    behaviour: str
    target: str
    dialect: str
    wire: str
    expected: Expected = field(default_factory=Expected)
    unclosed: int = 0
    found: dict[BuilderName, Found] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """What was wrong while it was played."""
    broken: bool = False
    """It was not played to its end."""
    oracle: Tally | None = None
    """The comparison of its prompts with the oracle, where there was one."""

    def as_json(self) -> dict[str, Any]:
        return {
            "conversation": self.conversation,
            "behaviour": self.behaviour,
            "target": self.target,
            "dialect": self.dialect,
            "wire": self.wire,
            "expected": {"chains": self.expected.chains, "forks": dict(self.expected.forks)},
            "found": {
                builder.value: {"turns": found.turns, "chains": found.chains, "forks": found.forks}
                for builder, found in self.found.items()
            },
        }


def violations(played: Played, measured: Mapping[BuilderName, Measured]) -> Iterator[str]:
    """Everything that is not as it should be, for the builders that this conversation was built with."""
    yield from played.problems
    if played.broken:
        return
    for builder, found in played.found.items():
        figures = measured.get(builder)
        if figures is None:
            yield f"{builder}: no rows"
            continue
        if builder is BuilderName.EXACT:
            yield from _as_the_table_says(played, found)
        yield from (f"{builder}: {problem}" for problem in _as_measured(played.expected, builder, figures))


def _as_the_table_says(played: Played, found: Found) -> Iterator[str]:
    expected = played.expected
    if found.chains != expected.chains:
        yield f"{found.chains} chains, expected {expected.chains}"
    if found.forks != dict(expected.forks):
        yield f"forks {found.forks}, expected {dict(expected.forks)}"
    closes = played.unclosed if expected.forced_closes is None else expected.forced_closes
    if found.forced_closes != closes:
        yield f"{found.forced_closes} forced closes, expected {closes}"
    for role, turns in expected.roles.items():
        if found.roles.get(role, 0) != turns:
            yield f"{found.roles.get(role, 0)} turns of the role {role}, expected {turns}"
    for flag in expected.flags:
        if flag not in found.flags:
            yield f"no turn has the flag {flag}"
    if found.versions < expected.versions:
        yield f"{found.versions} policy versions, expected at least {expected.versions}"
    if expected.torn and not found.torn:
        yield "no turn holds tokens of two versions"


def _as_measured(expected: Expected, builder: BuilderName, measured: Measured) -> Iterator[str]:
    figures = measured.figures
    if measured.trained_twice:
        yield f"{measured.trained_twice} turns are trained twice"
    if measured.untrained != expected.untrained:
        yield f"{measured.untrained} turns are not trained, expected {expected.untrained}"
    unended = expected.unended if builder is BuilderName.EXACT else 0
    if measured.unended != unended:
        yield f"{measured.unended} turns are trained without their end, expected {unended}"
    if builder is BuilderName.MERGED and expected.plain == "always":
        if not figures.drifted_tokens or figures.max_abs_dlogp <= BOUND:
            yield "the control does not drift"
    elif builder is not BuilderName.MERGED or expected.plain == "never":
        if figures.drifted_tokens:
            yield f"{figures.drifted_tokens} trained tokens stand in a context that they were not sampled in"
        if figures.max_abs_dlogp >= BOUND:
            yield f"a logprob is {figures.max_abs_dlogp:.2g} from the one that was recorded"


def unmeasured(trajectory: Trajectory, calls: Sequence[Call]) -> Iterator[str]:
    """What is wrong with rows whose logprobs are not computed again: their tokens against the engine's log."""
    log: dict[tuple[str, int], list[Call]] = {}
    for call in calls:
        log.setdefault((call.session, call.turn), []).append(call)
    wrong = sum(drifted(trace, log) for trace in trajectory.traces)
    if wrong:
        yield f"as_sent: {wrong} trained tokens stand in a context that they were not sampled in"


def lineage(
    expected: Expected,
    follows: Mapping[int, int],
    temperatures: Mapping[int, float],
    trajectory: Trajectory,
    calls: Sequence[Call],
) -> Iterator[str]:
    """Whether every turn goes on from the very reply that the harness had, and comes from where it should.

    `follows` names the last reply in the history of each request, `temperatures` what each asked for.
    """
    by_number: dict[int, list[Call]] = {}
    for call in calls:
        by_number.setdefault(call.number, []).append(call)
    if set(expected.forks) <= _CONTINUES:
        for number, last in follows.items():
            if not _goes_on(by_number.get(number, ()), by_number.get(last, ())):
                yield f"turn {_turn(by_number, number)} does not go on from the tokens of turn {_turn(by_number, last)}"
    turns = {turn.index: turn for turn in trajectory.turns}
    for number, source in expected.origins.items():
        turn, wanted = turns[_turn(by_number, number)], turns[_turn(by_number, source)]
        if turn.origin != wanted.id:
            found = next((other.index for other in turns.values() if other.id == turn.origin), None)
            yield f"the origin of turn {turn.index} is turn {found}, expected {wanted.index}"
    if expected.temperatures:
        for number, wished in temperatures.items():
            if number in by_number and turns[_turn(by_number, number)].temperature != wished:
                turn = turns[_turn(by_number, number)]
                yield f"turn {turn.index} was sampled at {turn.temperature:g}, its request asked for {wished:g}"


_CONTINUES = {"sibling"}
"""Forks after which every history still goes on from its own last reply."""


def _turn(by_number: Mapping[int, Sequence[Call]], number: int) -> int:
    return by_number[number][0].turn


def _goes_on(calls: Sequence[Call], before: Sequence[Call]) -> bool:
    if not calls or not before:
        return False
    kept = np.concatenate([before[0].prompt, *(call.sampled for call in before)])
    return np.array_equal(calls[0].prompt[: len(kept)], kept)
