"""Placement against a naive model that scans all nodes with exact fractions, and its cost from 10 to 1,000 nodes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from towline.cluster import placement as module
from towline.cluster.placement import AFFINITY, NodeOffer, Placement

NAMES = st.sampled_from([f"node-{number}" for number in range(6)])
SESSIONS = st.sampled_from([f"session-{number}" for number in range(24)])
REASONS = st.sampled_from(["breaker", "disconnected"])
LABELS = st.dictionaries(st.sampled_from(["zone", "gpu"]), st.sampled_from(["a", "b"]), max_size=2)


@dataclass
class ModelNode:
    offer: NodeOffer
    sessions: set[str] = field(default_factory=set)
    starting: set[str] = field(default_factory=set)
    drained: bool = False
    holds: set[str] = field(default_factory=set)

    @property
    def room(self) -> int:
        if self.drained or self.holds:
            return 0
        limit = self.offer.starting - len(self.starting) if self.offer.starting else sys.maxsize
        return max(0, min(self.offer.capacity - len(self.sessions), limit))

    @property
    def load(self) -> Fraction:
        return Fraction(len(self.sessions) + 1, self.offer.capacity)


class Model:
    """The policy as its description reads, without any index."""

    def __init__(self) -> None:
        self.nodes: dict[str, ModelNode] = {}

    def choose(self, prefer: str, labels: Mapping[str, str]) -> str | None:
        fits = {
            name: node.load
            for name, node in self.nodes.items()
            if node.room and all(node.offer.labels.get(key) == value for key, value in labels.items())
        }
        if not fits:
            return None
        least = min(fits.values())
        if prefer in fits and fits[prefer] - least <= Fraction(AFFINITY) and fits[prefer] <= Fraction(2, 5):
            return prefer
        return min(name for name, load in fits.items() if load == least)

    def node_of(self, session_id: str) -> str | None:
        return next((name for name, node in self.nodes.items() if session_id in node.sessions), None)


class PlacementRules(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.placement, self.model = Placement(), Model()

    @rule(name=NAMES, capacity=st.integers(0, 6), starting=st.integers(0, 3), labels=LABELS)
    def update(self, name: str, capacity: int, starting: int, labels: dict[str, str]) -> None:
        offer = NodeOffer(name, capacity, starting, labels)
        self.placement.update(offer)
        self.model.nodes.setdefault(name, ModelNode(offer)).offer = offer

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        gone = self.model.nodes.pop(name, None)
        assert self.placement.remove(name) == (gone.sessions if gone else set())

    @rule(name=NAMES, drained=st.booleans())
    def drain(self, name: str, drained: bool) -> None:
        (self.placement.drain if drained else self.placement.undrain)(name)
        if name in self.model.nodes:
            self.model.nodes[name].drained = drained

    @rule(name=NAMES, reason=REASONS)
    def hold(self, name: str, reason: str) -> None:
        self.placement.hold(name, reason)
        if name in self.model.nodes:
            self.model.nodes[name].holds.add(reason)

    @rule(name=NAMES, reason=REASONS | st.none())
    def release(self, name: str, reason: str | None) -> None:
        self.placement.release_hold(name, reason)
        if name in self.model.nodes:
            self.model.nodes[name].holds -= {"breaker", "disconnected"} if reason is None else {reason}

    @rule(session_id=SESSIONS, prefer=NAMES | st.just(""), labels=LABELS)
    def place(self, session_id: str, prefer: str, labels: dict[str, str]) -> None:
        before = self.model.node_of(session_id)
        chosen = self.placement.place(session_id, prefer=prefer, labels=labels)
        assert chosen == (before or self.model.choose(prefer, labels))
        if chosen is not None and before is None:
            self.model.nodes[chosen].sessions.add(session_id)
            self.model.nodes[chosen].starting.add(session_id)

    @rule(session_id=SESSIONS)
    def started(self, session_id: str) -> None:
        self.placement.started(session_id)
        for node in self.model.nodes.values():
            node.starting.discard(session_id)

    @rule(session_id=SESSIONS)
    def ended(self, session_id: str) -> None:
        self.placement.ended(session_id)
        for node in self.model.nodes.values():
            node.sessions.discard(session_id)
            node.starting.discard(session_id)

    @invariant()
    def agrees(self) -> None:
        nodes = self.model.nodes
        assert self.placement.room == sum(node.room for node in nodes.values())
        usable = [node for node in nodes.values() if not node.drained and not node.holds]
        assert self.placement.capacity == sum(node.offer.capacity for node in usable)
        assert self.placement.names == sorted(nodes)
        for name, node in nodes.items():
            assert self.placement.sessions_of(name) == node.sessions
            assert bool(self.placement.unusable(name)) == (node not in usable)
            assert all(self.placement.node_of(session_id) == name for session_id in node.sessions)


TestPlacementRules = PlacementRules.TestCase
TestPlacementRules.settings = settings(stateful_step_count=60)


def test_fills_every_node_to_its_capacity_in_proportion() -> None:
    placement = Placement()
    placement.update(NodeOffer("large", 30))
    placement.update(NodeOffer("small", 10))
    for number in range(20):
        assert placement.place(f"s{number}") is not None
    assert (len(placement.sessions_of("large")), len(placement.sessions_of("small"))) == (15, 5)
    for number in range(20, 40):
        assert placement.place(f"s{number}") is not None
    assert placement.place("one too many") is None
    assert placement.room == 0


def test_affinity_yields_to_load() -> None:
    placement = Placement(affinity=0.25)
    for name in ("a", "b"):
        placement.update(NodeOffer(name, 8))
    chosen = [placement.place(f"s{number}", prefer="b") for number in range(8)]
    # b may be two of eight sessions ahead of a, until it is crowded.
    assert chosen == ["b", "b", "b", "a", "a", "a", "a", "b"]


def test_samples_of_one_task_fill_all_nodes_alike() -> None:
    """Nodes of 8 run slots accept 18 sessions: none waits for a slot on one node while another has a free one."""
    placement = Placement()
    for name in "abcd":
        placement.update(NodeOffer(name, 18))
    latest = ""
    for number in range(64):
        latest = placement.place(f"s{number}", prefer=latest) or ""
    assert {len(placement.sessions_of(name)) for name in "abcd"} == {16}


def test_the_starting_limit_frees_with_started() -> None:
    placement = Placement()
    placement.update(NodeOffer("a", 10, starting=2))
    assert placement.room == 2
    assert [placement.place(name) for name in ("x", "y", "z")] == ["a", "a", None]
    placement.started("x")
    assert placement.room == 1
    assert placement.place("z") == "a"


def test_a_node_is_usable_when_its_last_hold_is_released() -> None:
    placement = Placement()
    placement.update(NodeOffer("a", 4))
    placement.hold("a", "the breaker sandbox:bubblewrap is open")
    placement.hold("a", "disconnected")
    assert placement.unusable("a") == "the breaker sandbox:bubblewrap is open, disconnected"
    placement.release_hold("a", "disconnected")
    assert (placement.place("x"), placement.room) == (None, 0)
    placement.release_hold("a")
    assert (placement.unusable("a"), placement.place("x")) == ("", "a")


def test_many_label_requirements_keep_a_bounded_number_of_heaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POOLS", 3)
    placement = Placement()
    for number in range(8):
        placement.update(NodeOffer(f"n{number}", 2, labels={"host": str(number)}))
    for _ in range(2):
        for number in range(8):
            session_id = f"{_}-{number}"
            assert placement.place(session_id, labels={"host": str(number)}) == f"n{number}"
    assert placement.room == 0
    assert len(placement._pools) == 3
    assert all(len(node.pools) <= 4 for node in placement._nodes.values())


def test_the_work_per_decision_does_not_grow_with_the_nodes() -> None:
    """Counts executed lines, so that the machine's load does not matter; `towline bench simulation` measures time."""
    work = {nodes: lines_per_decision(nodes) for nodes in (10, 100, 1000)}
    assert work[1000] <= 1.5 * work[10], work


def lines_per_decision(nodes: int) -> float:
    placement, slots = Placement(), 8
    for number in range(nodes):
        placement.update(NodeOffer(f"node-{number:04}", slots, starting=4))
    placed: list[str] = []

    def churn(first: int, count: int) -> None:
        """Keep the cluster nearly full: the oldest session ends for each new one."""
        for number in range(first, first + count):
            session_id = f"s{number}"
            if placement.place(session_id, prefer=f"node-{number % nodes:04}") is not None:
                placement.started(session_id)
                placed.append(session_id)
            if placement.room < nodes:
                placement.ended(placed.pop(0))

    lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line" and frame.f_code.co_filename == module.__file__
        return count

    churn(0, 10 * nodes)
    before, decisions = sys.gettrace(), 2000
    sys.settrace(count)
    try:
        churn(10 * nodes, decisions)
    finally:
        sys.settrace(before)
    return lines / decisions
