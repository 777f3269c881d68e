"""Checks what the gateway made of a conversation against the specification; each difference is one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from towline.audit.comparison import ComparisonTally
from towline.audit.engine import EngineCall
from towline.audit.evidence import MeasuredConversation, calls_by_turn, drifted
from towline.audit.simulation import Expected
from towline.schema import BuilderName, Trajectory, TurnRole

LOGPROB_BOUND = 1e-4
"""Largest difference between a logprob and the recorded one that float32 arithmetic explains."""


@dataclass(slots=True)
class ObservedTrajectory:
    """The facts of a trajectory that are checked."""

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
    def of(cls, trajectory: Trajectory) -> ObservedTrajectory:
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
class PlayedConversation:
    """One conversation under one capture."""

    conversation: str
    behaviour: str
    target: str
    dialect: str
    wire: str
    expected: Expected = field(default_factory=Expected)
    unclosed: int = 0
    found: dict[BuilderName, ObservedTrajectory] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Problems found while it was played."""
    broken: bool = False
    """Whether it failed before its end."""
    oracle: ComparisonTally | None = None
    """The comparison of its prompts with the oracle, if there was one."""

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


def violations(played: PlayedConversation, measured: Mapping[BuilderName, MeasuredConversation]) -> Iterator[str]:
    """All violations, for the builders that this conversation was built with."""
    yield from played.problems
    if played.broken:
        return
    for builder, found in played.found.items():
        figures = measured.get(builder)
        if figures is None:
            yield f"{builder}: no rows"
            continue
        if builder is BuilderName.EXACT:
            yield from _graph_violations(played, found)
        yield from (f"{builder}: {problem}" for problem in _figure_violations(played.expected, builder, figures))


def _graph_violations(played: PlayedConversation, found: ObservedTrajectory) -> Iterator[str]:
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
            yield f"{found.roles.get(role, 0)} turns have the role {role}, expected {turns}"
    for flag in expected.flags:
        if flag not in found.flags:
            yield f"no turn has the flag {flag}"
    if found.versions < expected.versions:
        yield f"{found.versions} policy versions, expected at least {expected.versions}"
    if expected.torn and not found.torn:
        yield "no turn holds tokens of two versions"


def _figure_violations(expected: Expected, builder: BuilderName, measured: MeasuredConversation) -> Iterator[str]:
    figures = measured.figures
    if measured.trained_twice:
        yield f"{measured.trained_twice} turns are trained more than once"
    if measured.untrained != expected.untrained:
        yield f"{measured.untrained} turns are not trained, expected {expected.untrained}"
    unended = expected.unended if builder is BuilderName.EXACT else 0
    if measured.unended != unended:
        yield f"{measured.unended} turns are trained without their end, expected {unended}"
    if builder is BuilderName.MERGED and expected.plain == "always":
        if not figures.drifted_tokens or figures.max_abs_dlogp <= LOGPROB_BOUND:
            yield "the control does not drift"
    elif builder is not BuilderName.MERGED or expected.plain == "never":
        if figures.drifted_tokens:
            yield f"{figures.drifted_tokens} trained tokens are in a context that they were not sampled in"
        if figures.max_abs_dlogp >= LOGPROB_BOUND:
            yield f"a logprob differs from the recorded one by {figures.max_abs_dlogp:.2g}"


def drift_violations(trajectory: Trajectory, calls: Sequence[EngineCall]) -> Iterator[str]:
    """Violations in rows whose logprobs are not recomputed: their tokens are compared with the engine's log."""
    log = calls_by_turn(calls)
    wrong = sum(drifted(trace, log) for trace in trajectory.traces)
    if wrong:
        yield f"as_sent: {wrong} trained tokens are in a context that they were not sampled in"


def lineage_violations(
    expected: Expected,
    follows: Mapping[int, int],
    temperatures: Mapping[int, float],
    trajectory: Trajectory,
    calls: Sequence[EngineCall],
) -> Iterator[str]:
    """Turns that do not continue the reply in the harness's history, or have a wrong origin or temperature.

    `follows` is the last reply in each request's history, `temperatures` what each request asked for.
    """
    by_number: dict[int, list[EngineCall]] = {}
    for call in calls:
        by_number.setdefault(call.number, []).append(call)
    if set(expected.forks) <= _CONTINUING_FORKS:
        for number, last in follows.items():
            if not _continues(by_number.get(number, ()), by_number.get(last, ())):
                yield f"turn {_turn(by_number, number)} does not continue the tokens of turn {_turn(by_number, last)}"
    turns = {turn.index: turn for turn in trajectory.turns}
    for number, source in expected.origins.items():
        turn, wanted = turns[_turn(by_number, number)], turns[_turn(by_number, source)]
        if turn.origin != wanted.id:
            found = next((other.index for other in turns.values() if other.id == turn.origin), None)
            yield f"the origin of turn {turn.index} is turn {found}, expected {wanted.index}"
    if expected.temperatures:
        for number, requested in temperatures.items():
            if number in by_number and turns[_turn(by_number, number)].temperature != requested:
                turn = turns[_turn(by_number, number)]
                yield f"turn {turn.index} was sampled at {turn.temperature:g}, but its request asked for {requested:g}"


_CONTINUING_FORKS = {"sibling"}
"""Forks after which every history still continues its own last reply."""


def _turn(by_number: Mapping[int, Sequence[EngineCall]], number: int) -> int:
    return by_number[number][0].turn


def _continues(calls: Sequence[EngineCall], before: Sequence[EngineCall]) -> bool:
    if not calls or not before:
        return False
    kept = np.concatenate([before[0].prompt, *(call.sampled for call in before)])
    return np.array_equal(calls[0].prompt[: len(kept)], kept)
