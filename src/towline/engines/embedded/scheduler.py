"""Which turns run in a step: admission, slots, and the batch they make.

Every step computes one token for each turn that is decoding and shares `prefill_chunk` tokens among those whose prompt
is still being computed, so a long prompt never holds up the others. A turn whose prompt begins like one that is being
computed waits for that prefix instead of computing it again.

Slots are allocated as they are needed. When the pool is full, cached paths are evicted; when that is not enough, the
youngest turn is preempted: it gives up its slots and continues later from the ids it has.

Invariant: the oldest running turn always gets its slots, because a request is only accepted if it fits the pool alone.
So every turn ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from towline.engines.embedded.batch import DecodeCluster, DecodeGroup, Indices, PrefillSpan, StepBatch, cluster_decodes
from towline.engines.embedded.cache import RadixCache, common_prefix
from towline.engines.embedded.turn import EngineTurn

HEADROOM = 8
"""Slots reserved per running turn when another is admitted, so that turns do not preempt each other at once."""

RECLUSTER = 512
"""Number of tokens after which the best clustering is computed again."""


@dataclass(slots=True)
class TokenChunk:
    """Consecutive tokens of one turn that a step computes."""

    turn: EngineTurn
    start: int
    stop: int
    offset: int = 0
    """Their position in the batch."""

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class StepPlan:
    """The chunks of one step, and the batch they make."""

    chunks: list[TokenChunk]
    batch: StepBatch


@dataclass(slots=True)
class StepScheduler:
    """The turns that wait and run, and the slots they hold."""

    cache: RadixCache
    max_batch: int
    context: int
    prefill_chunk: int
    waiting: deque[EngineTurn] = field(default_factory=deque)
    prefilling: list[EngineTurn] = field(default_factory=list)
    decoding: list[EngineTurn] = field(default_factory=list)
    arrivals: int = 0
    reused: int = 0
    """Prompt tokens that were found in the cache."""
    preempted: int = 0
    """How often a turn was preempted."""
    table: Indices = field(init=False)
    """One row per running turn: the slots of its tokens, 0 where there is none."""
    _rows: list[int] = field(init=False)
    _clustered_for: tuple[list[int], int] = ([], 0)
    _clusters: list[DecodeCluster] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table = np.zeros((self.max_batch, self.context), dtype=np.int64)
        self._rows = list(range(self.max_batch))

    @property
    def running(self) -> list[EngineTurn]:
        return [*self.decoding, *self.prefilling]

    @property
    def in_flight(self) -> list[EngineTurn]:
        """Turns that have begun: running, or waiting to continue after they were preempted."""
        return [*self.running, *(turn for turn in self.waiting if turn.version is not None)]

    def submit(self, turn: EngineTurn) -> None:
        self.arrivals += 1
        turn.order = self.arrivals
        self.waiting.append(turn)

    def plan(self, admit: bool) -> StepPlan | None:
        """The next step, or `None` if there is nothing to do. Without `admit`, only turns that have begun continue."""
        self._admit(admit)
        self._reserve()
        chunks = [TokenChunk(turn, turn.computed, turn.computed + 1) for turn in self.decoding]
        chunks += self._chunks()
        return StepPlan(chunks, self._batch(chunks)) if chunks else None

    def advance(self, chunk: TokenChunk) -> None:
        """A chunk has been computed; what belongs to a prompt is shared at once."""
        turn = chunk.turn
        turn.computed = chunk.stop
        if turn in self.prefilling:
            self._share(turn)

    def start_decoding(self, turn: EngineTurn) -> None:
        """From now on decode a turn that is computed up to its goal and has not ended."""
        if turn in self.prefilling:
            self.prefilling.remove(turn)
            self.decoding.append(turn)

    def remove(self, turn: EngineTurn, keep: bool = True) -> bool:
        """Remove a turn, wherever it is; whether it was there. What it computed stays cached if `keep`."""
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

    def _follows(self, turn: EngineTurn) -> bool:
        """Whether the turn's leader is still computing what they share."""
        if turn.leader is not None and turn.leader in self.prefilling and turn.leader.computed < turn.shared:
            return True
        turn.leader = None
        return False

    def _find_leader(self, turn: EngineTurn, matched: int) -> bool:
        """Find a running turn that is about to compute more of this prompt than is cached; whether there is one."""
        for other in self.prefilling:
            shared = common_prefix(turn.tokens[: turn.first_output], other.tokens[: other.goal])
            if shared > max(matched, other.computed):
                turn.leader, turn.shared, matched = other, shared, shared
        return turn.leader is not None

    def _reserve(self) -> None:
        """A slot for the next token of every decoding turn; the youngest turns are preempted if there are not enough."""
        while len(self.decoding) > self.cache.available:
            self._preempt(max(self.running, key=lambda turn: turn.order))
        slots = self.cache.allocate(len(self.decoding))
        assert slots is not None
        for turn, slot in zip(self.decoding, slots.tolist(), strict=True):
            self.table[turn.row, turn.computed] = slot
            turn.allocated = turn.computed + 1

    def _preempt(self, turn: EngineTurn) -> None:
        self.preempted += 1
        self.remove(turn)
        self.waiting.appendleft(turn)

    def _chunks(self) -> list[TokenChunk]:
        """Share the step's budget evenly; what short remainders do not use goes to the longer ones."""
        chunks = []
        budget = self.prefill_chunk
        by_rest = sorted(self.prefilling, key=lambda turn: turn.goal - turn.computed)
        for index, turn in enumerate(by_rest):
            size = min(turn.goal - turn.computed, max(1, budget // (len(by_rest) - index)))
            budget -= size
            chunks.append(TokenChunk(turn, turn.computed, turn.computed + size))
        return chunks

    def _batch(self, chunks: list[TokenChunk]) -> StepBatch:
        """Order the chunks: single tokens first, those that attend together adjacent."""
        singles = [chunk for chunk in chunks if len(chunk) == 1]
        clusters = self._cluster(singles) if singles else []
        chunks[:] = [singles[member] for cluster in clusters for member in cluster.members] + [
            chunk for chunk in chunks if len(chunk) > 1
        ]
        offset = 0
        for chunk in chunks:
            chunk.offset = offset
            offset += len(chunk)
        groups, start = [], 0
        for cluster in clusters:
            stop = start + len(cluster.members)
            groups.append(self._group(chunks[start:stop], start, cluster.shared))
            start = stop
        table = self.table
        return StepBatch(
            ids=np.concatenate([chunk.turn.tokens[chunk.start : chunk.stop] for chunk in chunks]).astype(np.int64),
            positions=np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks]),
            slots=np.concatenate([table[chunk.turn.row, chunk.start : chunk.stop] for chunk in chunks]),
            groups=groups,
            spans=[
                PrefillSpan(chunk.offset, chunk.offset + len(chunk), table[chunk.turn.row, : chunk.start])
                for chunk in chunks[start:]
            ],
        )

    def _cluster(self, singles: list[TokenChunk]) -> list[DecodeCluster]:
        """Clusters of single tokens. They stay valid while the same turns run: slots that turns share do not change."""
        lengths = [chunk.stop for chunk in singles]
        case = ([chunk.turn.order for chunk in singles], max(lengths) // RECLUSTER)
        if case != self._clustered_for:
            rows = [chunk.turn.row for chunk in singles]
            self._clustered_for, self._clusters = case, cluster_decodes(self.table, rows, lengths)
        return self._clusters

    def _group(self, chunks: list[TokenChunk], start: int, shared: int) -> DecodeGroup:
        rows, lengths = [chunk.turn.row for chunk in chunks], [chunk.stop - shared for chunk in chunks]
        return DecodeGroup(
            start=start,
            stop=start + len(chunks),
            prefix=self.table[rows[0], :shared],
            contexts=self.table[rows, shared : shared + max(lengths)],
            lengths=np.array(lengths, dtype=np.int64),
        )

    def _share(self, turn: EngineTurn) -> None:
        """Give the tree what the turn has computed so far."""
        lease = turn.lease
        if lease is None or turn.computed <= lease.length:
            return
        start = lease.length
        run = self.table[turn.row, start : turn.computed]
        run[:] = self.cache.extend(lease, turn.tokens[start : turn.computed], run)

    def _release(self, turn: EngineTurn, keep: bool) -> None:
        if turn.lease is None:
            return
        if keep:
            self._share(turn)
        row = self.table[turn.row]
        self.cache.free_slots(row[turn.lease.length : turn.allocated])
        self.cache.release(turn.lease)
        row[: turn.allocated] = 0
        self._rows.append(turn.row)
        turn.lease, turn.row, turn.computed, turn.allocated = None, -1, 0, 0
