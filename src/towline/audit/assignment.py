"""Assigns behaviours to targets and dialects.

Coverage first: every behaviour once, then every template, then every behaviour in every dialect, then every behaviour on
every target with its own tokenizer, then further rounds over all other pairs, until the requested number of conversations is
reached. A behaviour rotates through its dialects, starting at a different one than the previous behaviour, so that a short
audit covers all dialects too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from towline.audit.behaviours import Behaviour
from towline.audit.targets import AuditTarget
from towline.errors import ConfigError

_BEHAVIOURS_PER_TEMPLATE = 2
"""Behaviours that every template is guaranteed to get."""
_STRIDE = 7
_SOCKET_EVERY = 4
"""One in this many conversations goes over a socket."""


@dataclass(slots=True)
class AssignedConversation:
    """One conversation to play."""

    id: str
    behaviour: Behaviour
    target: AuditTarget
    dialect: str
    open_reasoning: bool
    """Reasoning is readable, not only sealed, where a dialect supports both."""
    sockets: bool


def assign(
    behaviours: Mapping[str, Behaviour], targets: Sequence[AuditTarget], conversations: int, dialects: Sequence[str]
) -> list[AssignedConversation]:
    """The first `conversations` in the order above."""
    allowed = {name: [one for one in dialects if one in behaviour.dialects] for name, behaviour in behaviours.items()}
    able = [behaviour for name, behaviour in behaviours.items() if allowed[name]]
    counts = {name: len(choice) for name, choice in allowed.items()}
    pairs = list(islice(_ordered_pairs(able, targets, counts), conversations))
    assigned = []
    first = {behaviour.name: index for index, behaviour in enumerate(able)}
    times: dict[str, int] = {}
    rounds: dict[tuple[str, str, str], int] = {}
    for index, (behaviour, target) in enumerate(pairs):
        turn = times[behaviour.name] = times.get(behaviour.name, -1) + 1
        choice = allowed[behaviour.name]
        dialect = choice[(first[behaviour.name] + turn) % len(choice)]
        names = behaviour.name, dialect, target.name
        rounds[names] = rounds.get(names, -1) + 1
        id = f"{behaviour.name}.{dialect}.{target.name}.{rounds[names]}".replace("+", ".")
        # Only the gateways of primary targets listen on a socket.
        sockets = target.primary and index % _SOCKET_EVERY == 0
        open_reasoning = (turn // len(choice) + first[behaviour.name]) % 2 == 0
        assigned.append(AssignedConversation(id, behaviour, target, dialect, open_reasoning, sockets))
    return assigned


def _ordered_pairs(
    behaviours: Sequence[Behaviour], targets: Sequence[AuditTarget], dialects: Mapping[str, int]
) -> Iterator[tuple[Behaviour, AuditTarget]]:
    """The order above; `dialects` is the number of dialects per behaviour."""
    able = {(b.name, t.name) for b in behaviours for t in targets if b.needs <= t.can}
    if not able:
        raise ConfigError("no target supports any of the behaviours")
    primary = [target for target in targets if target.primary]
    others = [target for target in targets if not target.primary]
    given: set[tuple[str, str]] = set()
    times = dict.fromkeys(dialects, 0)

    def fresh(behaviour: Behaviour, target: AuditTarget, *, again: bool = False) -> bool:
        pair = behaviour.name, target.name
        if pair not in able or (pair in given and not again):
            return False
        if behaviour.most is not None and times[behaviour.name] >= behaviour.most:
            return False
        given.add(pair)
        times[behaviour.name] += 1
        return True

    for index, behaviour in enumerate(behaviours):
        turn = index % max(1, len(primary))
        for target in [*primary[turn:], *primary[:turn], *others]:
            if fresh(behaviour, target):
                yield behaviour, target
                break
    for round in range(_BEHAVIOURS_PER_TEMPLATE):
        for index, target in enumerate(others):
            start = (index + round * len(others)) * _STRIDE
            for step in range(len(behaviours)):
                behaviour = behaviours[(start + step) % len(behaviours)]
                # A template is proven by the comparison with the oracle.
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
            for index, target in enumerate([*others, *primary]):
                behaviour = behaviours[(shift + index * _STRIDE) % len(behaviours)]
                if fresh(behaviour, target):
                    yield behaviour, target
        given.clear()


def count_skipped(
    behaviours: Mapping[str, Behaviour], targets: Sequence[AuditTarget], dialects: Sequence[str]
) -> dict[str, int]:
    """Behaviours that cannot be played on some targets, with the number of those targets."""
    skipped = {}
    for name, behaviour in behaviours.items():
        has_dialect = any(dialect in behaviour.dialects for dialect in dialects)
        unable = sum(1 for target in targets if not has_dialect or not behaviour.needs <= target.can)
        if unable:
            skipped[name] = unable
    return skipped
