"""Which behaviour is played on which target.

Coverage first: every behaviour once, then every template, then every behaviour on every target with a tokenizer of its
own, then round after round of whatever else fits, until there are as many conversations as were asked for.
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
    sockets: bool


def cast(behaviours: Mapping[str, Behaviour], targets: Sequence[Target], conversations: int) -> list[Part]:
    """The first `conversations` of the order above; at least every behaviour that some target is able to."""
    pairs = list(islice(_pairs(list(behaviours.values()), targets), conversations))
    parts = []
    rounds: dict[tuple[str, str], int] = {}
    for index, (behaviour, target) in enumerate(pairs):
        names = behaviour.name, target.name
        rounds[names] = rounds.get(names, -1) + 1
        # The gateways of targets that are not primary have no socket.
        sockets = target.primary and index % _SOCKETS == 0
        parts.append(
            Part(f"{behaviour.name}.{target.name}.{rounds[names]}".replace("+", "."), behaviour, target, sockets)
        )
    return parts


def _pairs(behaviours: Sequence[Behaviour], targets: Sequence[Target]) -> Iterator[tuple[Behaviour, Target]]:
    able = {(b.name, t.name) for b in behaviours for t in targets if b.needs <= t.can}
    if not able:
        raise ConfigError("no target is able to any of the behaviours")
    primary = [target for target in targets if target.primary]
    others = [target for target in targets if not target.primary]
    given: set[tuple[str, str]] = set()

    def fresh(behaviour: Behaviour, target: Target) -> bool:
        pair = behaviour.name, target.name
        if pair not in able or pair in given:
            return False
        given.add(pair)
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
                if fresh(behaviour, target):
                    yield behaviour, target
                    break
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
