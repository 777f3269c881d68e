"""The step loop: the one thread that computes.

Everything else reaches it through `post`, a mailbox that is emptied between steps, so turns, cache and weights are only
ever touched by this thread and need no locks. Results leave through the `deliver` callback of each turn.

Invariants
- Weights are swapped between steps, after every turn in flight was ended: no turn sees two versions.
- Whatever fails inside a step fails the turns of that step, with a typed error; the loop continues.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from towline.engines.base import PauseMode
from towline.engines.embedded.runner import ModelRunner, RunnerWeights, Sampler, score
from towline.engines.embedded.scheduler import StepPlan, StepScheduler, TokenChunk
from towline.engines.embedded.turn import EngineTurn
from towline.errors import EngineError

SCORED_LOGITS = 1 << 24
"""Maximum number of logits in memory at once when forced ids are scored."""
_START_TIMEOUT = 60.0
"""Seconds that the thread has to start."""


@dataclass(slots=True)
class EmbeddedStats:
    """Counters since the engine started, and its current load."""

    prefilled_tokens: int = 0
    """Prompt tokens computed."""
    cached_tokens: int = 0
    """Prompt tokens taken from the cache instead."""
    decoded_tokens: int = 0
    """Tokens emitted, sampled or forced."""
    steps: int = 0
    preempted_turns: int = 0
    """How often a turn was preempted because the pool was full."""
    evicted_tokens: int = 0
    running_turns: int = 0
    waiting_turns: int = 0
    used_slots: int = 0
    """Slots that turns in flight use or lease; all others are free or can be evicted."""
    slots: int = 0


@dataclass(slots=True, eq=False)
class _Drain:
    """A caller that waits for the turns in flight to end."""

    done: Callable[[None], None]
    deadline: float


class StepLoop:
    """All methods but `start`, `post`, `stop` and `stats` run on the loop's own thread."""

    def __init__(self, runner: ModelRunner, scheduler: StepScheduler, sampler: Sampler, threads: int):
        self._runner = runner
        self._scheduler = scheduler
        self._sampler = sampler
        self._threads = threads
        self._totals = EmbeddedStats()
        self._paused = False
        self._drains: list[_Drain] = []
        self._ready: list[Callable[[EngineError | None], None]] = []
        self._mailbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._started = threading.Event()
        self._stopping = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="towline-embedded", daemon=True)

    def start(self) -> None:
        callers = torch.get_num_threads()
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT):
            raise EngineError(f"the embedded engine's thread has not started within {_START_TIMEOUT:g} s")
        # Torch gives the number that was set last to every thread started later: restore the caller's.
        torch.set_num_threads(callers)

    def post(self, message: Callable[[], None]) -> None:
        """Run `message` between two steps."""
        with self._wake:
            if self._closed:
                raise EngineError("the embedded engine is closed")
            self._mailbox.append(message)
            self._wake.notify()

    def stop(self, patience: float) -> bool:
        """End every turn and the thread, after the current step; whether it ended within `patience` seconds."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(patience)
        return not self._thread.is_alive()

    @property
    def version(self) -> int:
        return self._scheduler.cache.version

    def stats(self) -> EmbeddedStats:
        scheduler, totals = self._scheduler, self._totals
        return EmbeddedStats(
            prefilled_tokens=totals.prefilled_tokens,
            cached_tokens=scheduler.reused,
            decoded_tokens=totals.decoded_tokens,
            steps=totals.steps,
            preempted_turns=scheduler.preempted,
            evicted_tokens=scheduler.cache.evicted,
            running_turns=len(scheduler.decoding) + len(scheduler.prefilling),
            waiting_turns=len(scheduler.waiting),
            used_slots=scheduler.cache.capacity - scheduler.cache.available,
            slots=scheduler.cache.capacity,
        )

    def submit(self, turn: EngineTurn) -> None:
        self._scheduler.submit(turn)

    def cancel(self, turn: EngineTurn) -> None:
        """Drop a turn whose caller was cancelled."""
        self._scheduler.remove(turn)

    def abort(self, names: frozenset[str]) -> None:
        self._abort(turn for turn in [*self._scheduler.running, *self._scheduler.waiting] if turn.id in names)

    def pause(self, mode: PauseMode, deadline: float | None, done: Callable[[None], None]) -> None:
        """Start no more turns; `done` is called once none is in flight."""
        self._paused = True
        if mode is PauseMode.ABORT:
            self._abort(self._scheduler.in_flight)
        self._drains.append(_Drain(done, math.inf if deadline is None else time.monotonic() + deadline))

    def resume(self, version: int | None) -> None:
        """Start turns again. Under another version nothing that was computed before is reused."""
        if version is not None and version != self.version:
            self._abort(self._scheduler.in_flight)
            self._scheduler.cache.invalidate(version)
        self._paused = False
        self._end_drains()
        for notify in self._ready:
            notify(None)
        self._ready.clear()

    def swap(self, weights: RunnerWeights, version: int) -> None:
        """Replace the weights; turns in flight end with what they have."""
        self._abort(self._scheduler.in_flight)
        self._scheduler.cache.invalidate(version)
        self._runner.weights = weights

    def when_ready(self, notify: Callable[[EngineError | None], None]) -> None:
        if self._paused:
            self._ready.append(notify)
        else:
            notify(None)

    def _run(self) -> None:
        torch.get_num_threads()  # Torch applies its default to a thread on first use: do that first.
        torch.set_num_threads(self._threads)
        self._started.set()
        with torch.inference_mode():
            try:
                while not self._stopping:
                    self._run_mailbox()
                    self._check_drains()
                    if not self._step():
                        with self._wake:
                            self._wake.wait_for(lambda: self._mailbox or self._stopping)
            finally:
                # Also when a defect ends the loop: callers must get a result rather than wait for ever.
                with self._wake:
                    self._closed = True
                self._run_mailbox()
                self._abort([*self._scheduler.running, *self._scheduler.waiting])
                self._end_drains()
                for notify in self._ready:
                    notify(EngineError("the embedded engine is closed"))

    def _run_mailbox(self) -> None:
        while self._mailbox:
            self._mailbox.popleft()()

    def _check_drains(self) -> None:
        if not self._drains:
            return
        if any(drain.deadline <= time.monotonic() for drain in self._drains):
            self._abort(self._scheduler.in_flight)
        if not self._scheduler.in_flight:
            self._end_drains()

    def _end_drains(self) -> None:
        for drain in self._drains:
            drain.done(None)
        self._drains.clear()

    def _abort(self, turns: Iterable[EngineTurn]) -> None:
        for turn in list(turns):
            if self._scheduler.remove(turn):
                turn.deliver(turn.result())

    def _fail(self, turn: EngineTurn, error: EngineError) -> None:
        if self._scheduler.remove(turn, keep=False):
            turn.deliver(error)

    def _step(self) -> bool:
        """Compute one step; false if there is nothing to compute."""
        plan = self._scheduler.plan(admit=not self._paused)
        if plan is None:
            return False
        try:
            self._compute(plan)
        except Exception as error:
            for chunk in plan.chunks:
                failure = EngineError(f"the step failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                self._fail(chunk.turn, failure)
        self._totals.steps += 1
        # One thread computes for all: while it steps, waiting turns are not stalled.
        for turn in [*self._scheduler.running, *self._scheduler.waiting]:
            if turn.on_tokens is not None:
                turn.on_tokens(0)
        return True

    def _compute(self, plan: StepPlan) -> None:
        drawing: list[EngineTurn] = []
        rows: list[int] = []
        scoring: list[tuple[TokenChunk, int]] = []
        for chunk in plan.chunks:
            turn = chunk.turn
            if turn.forced and chunk.stop > turn.first_output:
                scoring.append((chunk, max(chunk.start, turn.first_output)))
            elif not turn.forced and chunk.stop == turn.goal:
                drawing.append(turn)
                rows.append(chunk.offset + len(chunk) - 1)
            self._count(chunk)
        hidden = self._runner.hidden(plan.batch)
        for chunk in plan.chunks:
            self._scheduler.advance(chunk)
        if drawing:
            logits = self._runner.logits(hidden[rows])
            for turn, token, logprob in zip(drawing, *self._sampler.draw(logits, drawing), strict=True):
                self._emit(turn, [token], [logprob])
        for chunk, first in scoring:
            self._score(chunk, first, hidden)

    def _score(self, chunk: TokenChunk, first: int, hidden: Tensor) -> None:
        """Score the forced ids after the positions from `first` to the end of the chunk."""
        turn = chunk.turn
        block = max(1, SCORED_LOGITS // self._runner.weights.config.vocab_size)
        for start in range(first, chunk.stop, block):
            stop = min(start + block, chunk.stop)
            row = chunk.offset + start - chunk.start
            given = turn.tokens[start + 1 : stop + 1]
            logits = self._runner.logits(hidden[row : row + stop - start])
            self._emit(turn, given.tolist(), score(logits, torch.from_numpy(given).long(), turn))
            if turn.finish is not None:
                return

    def _emit(self, turn: EngineTurn, ids: list[int], logprobs: list[float]) -> None:
        """Add ids to a turn until it ends, and deliver it if it did."""
        before = turn.emitted
        try:
            for token, logprob in zip(ids, logprobs, strict=True):
                if math.isnan(logprob):
                    raise EngineError(f"the weights of version {self.version} give logits that are NaN")
                turn.emit(token, logprob)
                if turn.finish is not None:
                    break
        except EngineError as error:
            self._fail(turn, error)
            return
        except Exception as error:
            failure = EngineError(f"decoding for stop strings failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(turn, failure)
            return
        self._totals.decoded_tokens += turn.emitted - before
        if turn.on_tokens is not None:
            turn.on_tokens(turn.emitted - before)
        if turn.finish is not None:
            self._scheduler.remove(turn)
            turn.deliver(turn.result())
        elif not turn.forced:
            self._scheduler.start_decoding(turn)

    def _count(self, chunk: TokenChunk) -> None:
        turn = chunk.turn
        if turn in self._scheduler.prefilling:
            end = min(chunk.stop, turn.prompt) if turn.forced else chunk.stop
            self._totals.prefilled_tokens += max(0, end - chunk.start)
