"""Which behaviour is played on which target, in which dialect.

Coverage first: every behaviour once, then every template, then every behaviour in every dialect, then every behaviour on
every target with a tokenizer of its own, then round after round of whatever else fits, until there are as many
conversations as were asked for. Each time a behaviour comes up it is told in the next of the dialects that it can be told
in; the first is another for each behaviour, so that a short audit has all of them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from towline.audit.behaviours import Behaviour
from towline.audit.targets import Target
from towline.errors import ConfigError

_ON_TEMPLATES = 2
"""How many behaviours a template is sure to have."""
_STRIDE = 7
_SOCKETS = 4
"""Every so many conversations one goes over a socket."""


@dataclass(slots=True)
class Part:
    """One conversation to be played."""

    id: str
    behaviour: Behaviour
    target: Target
    dialect: str
    open_reasoning: bool
    """Reasoning is shown, and not only sealed, where a dialect can do both."""
    sockets: bool


def cast(
    behaviours: Mapping[str, Behaviour], targets: Sequence[Target], conversations: int, dialects: Sequence[str]
) -> list[Part]:
    """The first `conversations` of the order above."""
    told = {name: [one for one in dialects if one in behaviour.dialects] for name, behaviour in behaviours.items()}
    able = [behaviour for name, behaviour in behaviours.items() if told[name]]
    pairs = list(islice(_pairs(able, targets, {name: len(choice) for name, choice in told.items()}), conversations))
    parts = []
    first = {behaviour.name: place for place, behaviour in enumerate(able)}
    times: dict[str, int] = {}
    rounds: dict[tuple[str, str, str], int] = {}
    for index, (behaviour, target) in enumerate(pairs):
        turn = times[behaviour.name] = times.get(behaviour.name, -1) + 1
        choice = told[behaviour.name]
        dialect = choice[(first[behaviour.name] + turn) % len(choice)]
        names = behaviour.name, dialect, target.name
        rounds[names] = rounds.get(names, -1) + 1
        id = f"{behaviour.name}.{dialect}.{target.name}.{rounds[names]}".replace("+", ".")
        # The gateways of targets that are not primary have no socket.
        sockets = target.primary and index % _SOCKETS == 0
        parts.append(
            Part(id, behaviour, target, dialect, (turn // len(choice) + first[behaviour.name]) % 2 == 0, sockets)
        )
    return parts


def _pairs(
    behaviours: Sequence[Behaviour], targets: Sequence[Target], dialects: Mapping[str, int]
) -> Iterator[tuple[Behaviour, Target]]:
    """The order above; `dialects` is how many each behaviour can be told in."""
    able = {(b.name, t.name) for b in behaviours for t in targets if b.needs <= t.can}
    if not able:
        raise ConfigError("no target is able to any of the behaviours")
    primary = [target for target in targets if target.primary]
    others = [target for target in targets if not target.primary]
    given: set[tuple[str, str]] = set()
    times = dict.fromkeys(dialects, 0)

    def fresh(behaviour: Behaviour, target: Target, *, again: bool = False) -> bool:
        pair = behaviour.name, target.name
        if pair not in able or (pair in given and not again):
            return False
        if behaviour.most is not None and times[behaviour.name] >= behaviour.most:
            return False
        given.add(pair)
        times[behaviour.name] += 1
        return True

    for place, behaviour in enumerate(behaviours):
        turn = place % max(1, len(primary))
        for target in [*primary[turn:], *primary[:turn], *others]:
            if fresh(behaviour, target):
                yield behaviour, target
                break
    for round in range(_ON_TEMPLATES):
        for place, target in enumerate(others):
            start = (place + round * len(others)) * _STRIDE
            for step in range(len(behaviours)):
                behaviour = behaviours[(start + step) % len(behaviours)]
                # What proves a template is the comparison with the oracle.
                if "as_sent" in behaviour.captures and fresh(behaviour, target):
                    yield behaviour, target
                    break
    for again in (False, True):
        for behaviour in behaviours:
            for target in [*primary, *others] * dialects[behaviour.name]:
                if times[behaviour.name] < dialects[behaviour.name] and fresh(behaviour, target, again=again):
                    yield behaviour, target
    for behaviour in behaviours:
        for target in primary:
            if fresh(behaviour, target):
                yield behaviour, target
    while True:
        for shift in range(len(behaviours)):
            for place, target in enumerate([*others, *primary]):
                behaviour = behaviours[(shift + place * _STRIDE) % len(behaviours)]
                if fresh(behaviour, target):
                    yield behaviour, target
        given.clear()


def skipped(behaviours: Mapping[str, Behaviour], targets: Sequence[Target], dialects: Sequence[str]) -> dict[str, int]:
    """On how many targets each behaviour cannot be played, for those with any; all of them where no dialect can tell it."""
    found = {}
    for name, behaviour in behaviours.items():
        told = any(dialect in behaviour.dialects for dialect in dialects)
        unable = sum(1 for target in targets if not told or not behaviour.needs <= target.can)
        if unable:
            found[name] = unable
    return found
