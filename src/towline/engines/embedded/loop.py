"""The step loop: the one thread that computes.

Everything else reaches it through `post`, a mailbox that is emptied between steps, so turns, cache and weights are only
ever touched by this thread and need no locks. Results leave through the `deliver` of each turn.

Invariants
- A swap of weights happens between steps, after every turn that has begun was ended: no turn sees two versions.
- Whatever fails inside a step fails the turns of that step, with a typed error; the loop goes on.
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
from towline.engines.embedded.runner import Runner, Weights
from towline.engines.embedded.sampler import Sampler, score
from towline.engines.embedded.scheduler import Piece, Plan, Scheduler
from towline.engines.embedded.turn import Turn
from towline.errors import EngineError

SCORED_LOGITS = 1 << 24
"""How many logits are held at once when forced ids are scored."""
_BEGINNING = 60.0
"""Seconds that the thread has to begin."""


@dataclass(slots=True)
class Stats:
    """What the engine has done since it started, and what it holds now."""

    prefilled_tokens: int = 0
    """Prompt tokens computed."""
    cached_tokens: int = 0
    """Prompt tokens taken from the cache instead."""
    decoded_tokens: int = 0
    """Tokens emitted, sampled or forced."""
    steps: int = 0
    preempted_turns: int = 0
    """How often a turn gave up its slots because the pool was full."""
    evicted_tokens: int = 0
    running_turns: int = 0
    waiting_turns: int = 0
    used_slots: int = 0
    """Slots that turns in flight hold or protect; all others are free or can be freed."""
    slots: int = 0


@dataclass(slots=True, eq=False)
class _Drain:
    """Somebody who waits for the turns in flight to end."""

    done: Callable[[None], None]
    deadline: float


class StepLoop:
    """All methods but `start`, `post`, `stop` and `stats` run on the loop's own thread."""

    def __init__(self, runner: Runner, scheduler: Scheduler, sampler: Sampler, threads: int):
        self._runner = runner
        self._scheduler = scheduler
        self._sampler = sampler
        self._threads = threads
        self._totals = Stats()
        self._paused = False
        self._drains: list[_Drain] = []
        self._ready: list[Callable[[EngineError | None], None]] = []
        self._mail: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._began = threading.Event()
        self._stopping = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="towline-embedded", daemon=True)

    def start(self) -> None:
        callers = torch.get_num_threads()
        self._thread.start()
        if not self._began.wait(_BEGINNING):
            raise EngineError(f"the embedded engine's thread has not begun within {_BEGINNING:g} s")
        # Torch gives the number that was set last to every thread that is started later: put the caller's back.
        torch.set_num_threads(callers)

    def post(self, message: Callable[[], None]) -> None:
        """Have `message` run between two steps."""
        with self._wake:
            if self._closed:
                raise EngineError("the embedded engine is closed")
            self._mail.append(message)
            self._wake.notify()

    def stop(self, patience: float) -> bool:
        """End every turn and the thread; whether it is gone within so many seconds. It ends after the step it is at."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(patience)
        return not self._thread.is_alive()

    @property
    def version(self) -> int:
        return self._scheduler.cache.version

    def stats(self) -> Stats:
        scheduler, totals = self._scheduler, self._totals
        return Stats(
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

    def submit(self, turn: Turn) -> None:
        self._scheduler.submit(turn)

    def cancel(self, turn: Turn) -> None:
        """Drop a turn whose caller is gone."""
        self._scheduler.remove(turn)

    def abort(self, names: frozenset[str]) -> None:
        self._abort(turn for turn in [*self._scheduler.running, *self._scheduler.waiting] if turn.id in names)

    def pause(self, mode: PauseMode, deadline: float | None, done: Callable[[None], None]) -> None:
        """Begin no more turns; `done` is called once none is in flight."""
        self._paused = True
        if mode is PauseMode.ABORT:
            self._abort(self._scheduler.begun)
        self._drains.append(_Drain(done, math.inf if deadline is None else time.monotonic() + deadline))

    def resume(self, version: int | None) -> None:
        """Begin turns again. Under another version nothing that was computed before counts."""
        if version is not None and version != self.version:
            self._abort(self._scheduler.begun)
            self._scheduler.cache.invalidate(version)
        self._paused = False
        self._end_drains()
        for notify in self._ready:
            notify(None)
        self._ready.clear()

    def swap(self, weights: Weights, version: int) -> None:
        """Put new weights in place; turns in flight end with what they have."""
        self._abort(self._scheduler.begun)
        self._scheduler.cache.invalidate(version)
        self._runner.weights = weights

    def when_ready(self, notify: Callable[[EngineError | None], None]) -> None:
        if self._paused:
            self._ready.append(notify)
        else:
            notify(None)

    def _run(self) -> None:
        torch.get_num_threads()  # Makes torch take its default in this thread now, so that it does not do so later.
        torch.set_num_threads(self._threads)
        self._began.set()
        with torch.inference_mode():
            try:
                while not self._stopping:
                    self._read_mail()
                    self._check_drains()
                    if not self._step():
                        with self._wake:
                            self._wake.wait_for(lambda: self._mail or self._stopping)
            finally:
                # Also when a defect ends the loop: callers must get an answer rather than wait for ever.
                with self._wake:
                    self._closed = True
                self._read_mail()
                self._abort([*self._scheduler.running, *self._scheduler.waiting])
                self._end_drains()
                for notify in self._ready:
                    notify(EngineError("the embedded engine is closed"))

    def _read_mail(self) -> None:
        while self._mail:
            self._mail.popleft()()

    def _check_drains(self) -> None:
        if not self._drains:
            return
        if any(drain.deadline <= time.monotonic() for drain in self._drains):
            self._abort(self._scheduler.begun)
        if not self._scheduler.begun:
            self._end_drains()

    def _end_drains(self) -> None:
        for drain in self._drains:
            drain.done(None)
        self._drains.clear()

    def _abort(self, turns: Iterable[Turn]) -> None:
        for turn in list(turns):
            if self._scheduler.remove(turn):
                turn.deliver(turn.result())

    def _fail(self, turn: Turn, error: EngineError) -> None:
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
            for piece in plan.pieces:
                failure = EngineError(f"the step failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                self._fail(piece.turn, failure)
        self._totals.steps += 1
        # One thread computes for all: while it steps, those that wait for their turn are not stalled.
        for turn in [*self._scheduler.running, *self._scheduler.waiting]:
            if turn.beat is not None:
                turn.beat(0)
        return True

    def _compute(self, plan: Plan) -> None:
        drawing: list[Turn] = []
        rows: list[int] = []
        scoring: list[tuple[Piece, int]] = []
        for piece in plan.pieces:
            turn = piece.turn
            if turn.forced and piece.stop > turn.first_output:
                scoring.append((piece, max(piece.start, turn.first_output)))
            elif not turn.forced and piece.stop == turn.goal:
                drawing.append(turn)
                rows.append(piece.offset + len(piece) - 1)
            self._count(piece)
        hidden = self._runner.hidden(plan.batch)
        for piece in plan.pieces:
            self._scheduler.advance(piece)
        if drawing:
            logits = self._runner.logits(hidden[rows])
            for turn, token, logprob in zip(drawing, *self._sampler.draw(logits, drawing), strict=True):
                self._take(turn, [token], [logprob])
        for piece, first in scoring:
            self._score(piece, first, hidden)

    def _score(self, piece: Piece, first: int, hidden: Tensor) -> None:
        """Score the forced ids that follow the positions from `first` to the end of the piece."""
        turn = piece.turn
        block = max(1, SCORED_LOGITS // self._runner.weights.config.vocab_size)
        for start in range(first, piece.stop, block):
            stop = min(start + block, piece.stop)
            row = piece.offset + start - piece.start
            given = turn.tokens[start + 1 : stop + 1]
            logits = self._runner.logits(hidden[row : row + stop - start])
            self._take(turn, given.tolist(), score(logits, torch.from_numpy(given).long(), turn))
            if turn.finish is not None:
                return

    def _take(self, turn: Turn, ids: list[int], logprobs: list[float]) -> None:
        """Emit ids to a turn until it ends, and deliver it if it did."""
        before = turn.emitted
        try:
            for token, logprob in zip(ids, logprobs, strict=True):
                if math.isnan(logprob):
                    raise EngineError(f"the weights of version {self.version} give logits that are not numbers")
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
        if turn.beat is not None:
            turn.beat(turn.emitted - before)
        if turn.finish is not None:
            self._scheduler.remove(turn)
            turn.deliver(turn.result())
        elif not turn.forced:
            self._scheduler.settle(turn)

    def _count(self, piece: Piece) -> None:
        turn = piece.turn
        if turn in self._scheduler.prefilling:
            end = min(piece.stop, turn.prompt) if turn.forced else piece.stop
            self._totals.prefilled_tokens += max(0, end - piece.start)
