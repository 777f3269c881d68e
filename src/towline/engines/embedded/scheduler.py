"""Who runs in a step: admission, slots, and the batch they make.

Every step computes one token for each turn that is decoding and shares `prefill_chunk` tokens among those whose prompt
is still being computed, so a long prompt never holds up the others. A turn whose prompt begins like one that is being
computed waits for that prefix instead of computing it again.

Slots are allocated as they are needed. When the pool is full, cached paths are evicted; when that is not enough, the
youngest turn gives up its slots and goes on later from the ids it has.

Invariant: the oldest running turn always gets its slots, because a request is only accepted if it fits the pool alone.
So every turn ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from towline.engines.embedded.batch import Batch, Group, Indices, Span
from towline.engines.embedded.cache import RadixCache, common_prefix
from towline.engines.embedded.grouping import Cluster, arrange
from towline.engines.embedded.turn import Turn

HEADROOM = 8
"""Slots kept for each running turn when another is admitted, so that turns do not push each other out at once."""

REARRANGE = 512
"""After so many more tokens, what is the best way to attend together may be another."""


@dataclass(slots=True)
class Piece:
    """Consecutive tokens of one turn that a step computes."""

    turn: Turn
    start: int
    stop: int
    offset: int = 0
    """Where they stand in the batch."""

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class Plan:
    """One step."""

    pieces: list[Piece]
    batch: Batch


@dataclass(slots=True)
class Scheduler:
    """The turns that wait and run, and the slots they hold."""

    cache: RadixCache
    max_batch: int
    context: int
    prefill_chunk: int
    waiting: deque[Turn] = field(default_factory=deque)
    prefilling: list[Turn] = field(default_factory=list)
    decoding: list[Turn] = field(default_factory=list)
    arrivals: int = 0
    reused: int = 0
    """Prompt tokens that were found in the cache."""
    preempted: int = 0
    """How often a turn had to give up its slots."""
    table: Indices = field(init=False)
    """A row for each running turn: the slots of its tokens, 0 where there is none."""
    _rows: list[int] = field(init=False)
    _arranged_for: tuple[list[int], int] = ([], 0)
    _arranged: list[Cluster] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table = np.zeros((self.max_batch, self.context), dtype=np.int64)
        self._rows = list(range(self.max_batch))

    @property
    def running(self) -> list[Turn]:
        return [*self.decoding, *self.prefilling]

    @property
    def begun(self) -> list[Turn]:
        """Turns in flight: running, or waiting to go on after they gave up their slots."""
        return [*self.running, *(turn for turn in self.waiting if turn.version is not None)]

    def submit(self, turn: Turn) -> None:
        self.arrivals += 1
        turn.order = self.arrivals
        self.waiting.append(turn)

    def plan(self, admit: bool) -> Plan | None:
        """The next step, or `None` if there is nothing to do. Without `admit`, only turns that have begun go on."""
        self._admit(admit)
        self._reserve()
        pieces = [Piece(turn, turn.computed, turn.computed + 1) for turn in self.decoding]
        pieces += self._chunks()
        return Plan(pieces, self._batch(pieces)) if pieces else None

    def advance(self, piece: Piece) -> None:
        """A piece has been computed; what belongs to a prompt is shared at once."""
        turn = piece.turn
        turn.computed = piece.stop
        if turn in self.prefilling:
            self._share(turn)

    def settle(self, turn: Turn) -> None:
        """A turn that is computed up to its goal and has not ended decodes from now on."""
        if turn in self.prefilling:
            self.prefilling.remove(turn)
            self.decoding.append(turn)

    def remove(self, turn: Turn, keep: bool = True) -> bool:
        """Take a turn out, wherever it is. What it computed stays cached, unless it must not be kept."""
        for queue in (self.waiting, self.prefilling, self.decoding):
            if turn in queue:
                queue.remove(turn)
                self._release(turn, keep)
                return True
        return False

    def _admit(self, admit: bool) -> None:
        for turn in list(self.waiting):
            active = len(self.prefilling) + len(self.decoding)
            if active == self.max_batch:
                break
            if (not admit and turn.version is None) or self._follows(turn):
                continue
            lease, slots = self.cache.acquire(turn.tokens[: turn.first_output])
            if self._find_leader(turn, lease.length):
                self.cache.release(lease)
                continue
            needed = turn.goal - lease.length
            fits = self.cache.available >= needed + HEADROOM * active
            own = self.cache.allocate(needed) if fits else None
            if own is None:
                self.cache.release(lease)
                break
            self.waiting.remove(turn)
            self.prefilling.append(turn)
            turn.row = self._rows.pop()
            turn.lease, turn.computed, turn.allocated = lease, lease.length, turn.goal
            self.table[turn.row, : lease.length] = slots
            self.table[turn.row, lease.length : turn.goal] = own
            turn.version = self.cache.version
            if turn.cached is None:
                turn.cached = lease.length
                self.reused += lease.length

    def _follows(self, turn: Turn) -> bool:
        """Whether the turn's leader is still computing what they share."""
        if turn.leader is not None and turn.leader in self.prefilling and turn.leader.computed < turn.shared:
            return True
        turn.leader = None
        return False

    def _find_leader(self, turn: Turn, matched: int) -> bool:
        """Look for a running turn that is about to compute more of this prompt than is cached."""
        for other in self.prefilling:
            shared = common_prefix(turn.tokens[: turn.first_output], other.tokens[: other.goal])
            if shared > max(matched, other.computed):
                turn.leader, turn.shared, matched = other, shared, shared
        return turn.leader is not None

    def _reserve(self) -> None:
        """A slot for the next token of every decoding turn; the youngest turns give way if there are not enough."""
        while len(self.decoding) > self.cache.available:
            self._preempt(max(self.running, key=lambda turn: turn.order))
        slots = self.cache.allocate(len(self.decoding))
        assert slots is not None
        for turn, slot in zip(self.decoding, slots.tolist(), strict=True):
            self.table[turn.row, turn.computed] = slot
            turn.allocated = turn.computed + 1

    def _preempt(self, turn: Turn) -> None:
        self.preempted += 1
        self.remove(turn)
        self.waiting.appendleft(turn)

    def _chunks(self) -> list[Piece]:
        """Share the step's budget evenly; what a short rest does not use goes to the longer ones."""
        pieces = []
        budget = self.prefill_chunk
        by_rest = sorted(self.prefilling, key=lambda turn: turn.goal - turn.computed)
        for index, turn in enumerate(by_rest):
            size = min(turn.goal - turn.computed, max(1, budget // (len(by_rest) - index)))
            budget -= size
            pieces.append(Piece(turn, turn.computed, turn.computed + size))
        return pieces

    def _batch(self, pieces: list[Piece]) -> Batch:
        """Lay the pieces out: single tokens first, those that attend together side by side."""
        singles = [piece for piece in pieces if len(piece) == 1]
        clusters = self._arrange(singles) if singles else []
        pieces[:] = [singles[member] for cluster in clusters for member in cluster.members] + [
            piece for piece in pieces if len(piece) > 1
        ]
        offset = 0
        for piece in pieces:
            piece.offset = offset
            offset += len(piece)
        groups, start = [], 0
        for cluster in clusters:
            stop = start + len(cluster.members)
            groups.append(self._group(pieces[start:stop], start, cluster.shared))
            start = stop
        table = self.table
        return Batch(
            ids=np.concatenate([piece.turn.tokens[piece.start : piece.stop] for piece in pieces]).astype(np.int64),
            positions=np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces]),
            slots=np.concatenate([table[piece.turn.row, piece.start : piece.stop] for piece in pieces]),
            groups=groups,
            spans=[
                Span(piece.offset, piece.offset + len(piece), table[piece.turn.row, : piece.start])
                for piece in pieces[start:]
            ],
        )

    def _arrange(self, singles: list[Piece]) -> list[Cluster]:
        """Clusters of single tokens. They hold while the same turns go on: slots that turns share do not change."""
        lengths = [piece.stop for piece in singles]
        case = ([piece.turn.order for piece in singles], max(lengths) // REARRANGE)
        if case != self._arranged_for:
            rows = [piece.turn.row for piece in singles]
            self._arranged_for, self._arranged = case, arrange(self.table, rows, lengths)
        return self._arranged

    def _group(self, pieces: list[Piece], start: int, shared: int) -> Group:
        rows, lengths = [piece.turn.row for piece in pieces], [piece.stop - shared for piece in pieces]
        return Group(
            start=start,
            stop=start + len(pieces),
            prefix=self.table[rows[0], :shared],
            contexts=self.table[rows, shared : shared + max(lengths)],
            lengths=np.array(lengths, dtype=np.int64),
        )

    def _share(self, turn: Turn) -> None:
        """Give the tree what the turn has computed so far."""
        lease = turn.lease
        if lease is None or turn.computed <= lease.length:
            return
        start = lease.length
        run = self.table[turn.row, start : turn.computed]
        run[:] = self.cache.extend(lease, turn.tokens[start : turn.computed], run)

    def _release(self, turn: Turn, keep: bool) -> None:
        if turn.lease is None:
            return
        if keep:
            self._share(turn)
        row = self.table[turn.row]
        self.cache.give_back(row[turn.lease.length : turn.allocated])
        self.cache.release(turn.lease)
        row[: turn.allocated] = 0
        self._rows.append(turn.row)
        turn.lease, turn.row, turn.computed, turn.allocated = None, -1, 0, 0
