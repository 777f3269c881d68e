"""`AsyncGRPOTrainer(rollout_worker=)`: a thread that keeps tasks in flight and puts their sessions' rows into TRL's buffer.

Every trace of a session is a row with the session's advantage, computed here over the group. A row's `model_version` is the
oldest version among its trained tokens, in TRL's numbering, so TRL's `max_staleness` drops rows by their true age. Groups
that carry no gradient (incomplete, too small, equal rewards) and sessions without a score give no rows; the trainer's log
counts them as `towline/…_total`.

A result is acknowledged once its rows are in the buffer; with `groups_per_update`, once TRL has taken them, before the next
weights are pushed. TRL does not record what it took, so a killed trainer loses its buffer, and a restarted run starts its
tasks from the beginning.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from towline.client import Client, ClientError, Delivered
from towline.errors import TowlineError
from towline.schema import Stale, Start, Task, Unit
from towline.trainers.advantages import Scale, group_advantages
from towline.trainers.packing import SplitRow, check_temperature, split_rows
from towline.trainers.trl.weights import TowlineWeights

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

_POLL = 1.0
"""Seconds between checks of the stop flag."""
_STOP = 30.0


class WorkerError(TowlineError):
    """The worker failed or hangs."""


class TowlineWorker:
    """A `rollout_worker`; its `weights` attribute is the matching `weight_transfer`.

    `tasks` returns the n-th task of an endless sequence; its `num_samples` is the group size. `ahead` groups are kept in
    flight. `model` is the folder that the trainer's model was loaded from, `weights` a folder that the service can read. At
    most `buffered` rows wait for the trainer. Sessions must be sampled at the trainer's `temperature`.

    With `groups_per_update` (groups that TRL trains on between two weight transfers) and `max_staleness` (TRL's own value),
    the service starts sessions at the trainer's pace, so that TRL has no stale rows to drop.
    """

    def __init__(
        self,
        client: Client,
        tasks: Callable[[int], Task],
        *,
        model: Path,
        weights: Path,
        ahead: int = 8,
        buffered: int = 1024,
        scale: Scale = "std",
        temperature: float = 1.0,
        lease: float = 600.0,
        run: str | None = None,
        groups_per_update: int | None = None,
        max_staleness: int | None = None,
    ):
        self.client = client
        self.tasks = tasks
        self.weights = TowlineWeights(client, weights, model)
        self.ahead = ahead
        self.scale: Scale = scale
        self.temperature = temperature
        self.lease = lease
        self.run = run or f"trl-{uuid.uuid4().hex[:12]}"
        self.pace: dict[str, Any] = {}
        """The pacing fields of the worker's lease requests."""
        if groups_per_update is not None:
            self.pace = {
                "groups_per_update": groups_per_update,
                "max_staleness": max_staleness,
                "stale": Stale.FLAG,  # TRL itself drops stale rows
                "prefix": f"{self.run}/",
            }
            self.weights.before_push = self._ack_taken
        self._handed: deque[tuple[str, int]] = deque()
        """Unacknowledged results, each with the number of rows put into the buffer up to its last one."""
        self._rows = 0
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(buffered)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._in_flight: dict[str, tuple[int, Task]] = {}
        """Unfinished tasks with their numbers, by task id."""
        self._submitted = 0
        self._offset = 0
        """The service's version minus the trainer's."""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._alive_at = time.monotonic()

    # Called by the trainer

    def start(self) -> None:
        self._alive_at = time.monotonic()
        self._stopping.clear()
        # A new consumer that starts now, so that it gets no results of earlier runs.
        self.client.lease(self.run, Unit.GROUP, max=0, wait=0.0, start=Start.NOW, **self.pace)
        self._thread = threading.Thread(target=self._work, name="towline-rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and cancel the unfinished tasks."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP)
        for task_id in list(self._in_flight):
            with contextlib.suppress(ClientError):
                self.client.cancel(task_id)
        self._in_flight.clear()

    def update_model_version(self, model_version: int) -> None:
        """Note that the weights just sent are the trainer's `model_version`, whatever version the service gave them."""
        self._offset = self.client.policy().version - model_version

    def check_health(self, stale_after_s: float) -> None:
        if self._error is not None:
            raise WorkerError(f"the rollout worker failed: {self._error}") from self._error
        silent = time.monotonic() - self._alive_at
        if silent > stale_after_s:
            raise WorkerError(
                f"the rollout worker has made no progress for {silent:.0f} seconds: check that {self.client.url} is up"
            )

    # The thread

    def _work(self) -> None:
        try:
            while not self._stopping.is_set():
                self._alive_at = time.monotonic()
                self._submit()
                for delivered in self._finished():
                    rows = self._hand_over(delivered)
                    if self._stopping.is_set():
                        return
                    if self.pace and rows:
                        self._handed.append((delivered.result_id, self._rows))
                    else:
                        self.client.ack(self.run, [delivered.result_id], unusable=[] if rows else [delivered.result_id])
                    self._submit()
        except BaseException as error:
            self._error = error

    def _submit(self) -> None:
        """Keep `ahead` groups in flight. A full buffer blocks this, so that no rows grow stale in it."""
        numbers = range(self._submitted, self._submitted + self.ahead - len(self._in_flight))
        named = {f"{self.run}/{number:06d}": (number, self.tasks(number)) for number in numbers}
        if named:
            self.client.submit([task.model_copy(update={"task_id": name}) for name, (_, task) in named.items()])
            self._in_flight |= named
            self._submitted += len(named)

    def _ack_taken(self) -> None:
        """Acknowledge the groups whose rows TRL has taken from the buffer: the next weights include them."""
        taken = self._rows - self.rollout_buffer.qsize()
        done = []
        while self._handed and self._handed[0][1] <= taken:
            done.append(self._handed.popleft()[0])
        if done:
            self.client.ack(self.run, done)

    def _finished(self) -> Iterator[Delivered]:
        stream = self.client.results(self.run, Unit.GROUP, idle=_POLL, limit=self.ahead, lease=self.lease, **self.pace)
        for delivered in stream:
            if delivered.task_id in self._in_flight:
                yield delivered
            else:
                # A result of another trainer: every consumer sees every result.
                self.client.ack(self.run, [delivered.result_id])

    def _hand_over(self, delivered: Delivered) -> int:
        """Put the group's rows into the buffer and return their number."""
        before = self._rows
        number, task = self._in_flight.pop(delivered.task_id)
        # TRL has one advantage per row, so per-turn rewards are not used.
        group = group_advantages({delivered.task_id: delivered.trajectories}, scale=self.scale, turn_weight=0.0)
        spread = float(np.std(list(group.rewards.values()))) if group.rewards else 0.0
        for trajectory in delivered.trajectories:
            advantage = group.sessions.get(trajectory.session_id)
            if advantage is not None:
                metrics = {"reward": group.rewards[trajectory.session_id], "reward_std": spread}
                for row in split_rows(trajectory):
                    check_temperature(row, self.temperature)
                    self._put(self._sample(row, advantage, number, task.instruction, metrics))
        counts = {"unscored_sessions": group.unscored, "small_groups": group.small, "equal_groups": group.equal}
        self.metrics_queue.put({f"towline/{name}_total": float(count) for name, count in counts.items()})
        return self._rows - before

    def _put(self, sample: RolloutSample) -> None:
        while not self._stopping.is_set():
            self._alive_at = time.monotonic()
            with contextlib.suppress(queue.Full):
                self.rollout_buffer.put(sample, timeout=_POLL)
                self._rows += 1
                return

    def _sample(
        self, row: SplitRow, advantage: float, number: int, instruction: str, metrics: dict[str, float]
    ) -> RolloutSample:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        trace, last = row.trace, row.trajectory.turns[-1]
        assert trace.lowest_version is not None
        return RolloutSample(
            prompt=[{"role": "user", "content": instruction}],
            completion=[{"role": "assistant", "content": str(last.reply.get("text", ""))}],
            input_ids=trace.token_ids.astype(np.int64),
            completion_mask=trace.loss_mask.astype(np.int64),
            old_log_probs=trace.logprobs.astype(np.float32),
            advantage=advantage,
            model_version=trace.lowest_version - self._offset,
            group_id=number,
            metrics=metrics,
            enqueued_at=time.time(),
        )
