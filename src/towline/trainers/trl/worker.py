"""`AsyncGRPOTrainer(rollout_worker=)`: a thread that keeps tasks under way and hands over their sessions as rows.

Every trace of a session is a row with the session's advantage, computed here over the sessions of the group. A row's
`model_version` is the oldest version among its trained tokens, in TRL's counting, so TRL's `max_staleness` drops what is
truly that old. Groups that carry no gradient (dropped whole, too small, equal rewards) and sessions without a score are not
handed over; the trainer's log has them as `towline/…_total`.

A result is acknowledged when its rows are in the buffer; with `groups_per_update` when TRL has taken them from there, before
the next weights are pushed. TRL keeps no record of what it took, so a trainer that is killed loses what lay in the buffer,
and a run that is started again begins its tasks anew.
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
"""Seconds that the thread waits for anything before it looks whether it is to stop."""
_STOP = 30.0


class WorkerError(TowlineError):
    """The worker broke, or hangs."""


class TowlineWorker:
    """A `rollout_worker`; its `weights` is the `weight_transfer` that goes with it.

    `tasks` gives the n-th task of the run, without end; its `num_samples` is the size of the group. `ahead` groups are under
    way at any time. `model` is the folder that the trainer's model was loaded from, `weights` a folder that the service sees
    too. At most `buffered` rows wait for the trainer. `temperature` is the trainer's, and sessions must be sampled at it.

    With `groups_per_update`, the groups that TRL trains on between two weight transfers, and `max_staleness`, which should
    be TRL's own, the service starts sessions at the trainer's pace, so that TRL has no stale rows to drop.
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
        """What the worker declares as a consumer."""
        if groups_per_update is not None:
            self.pace = {
                "groups_per_update": groups_per_update,
                "max_staleness": max_staleness,
                "stale": Stale.FLAG,  # TRL drops what is too old all the same
                "prefix": f"{self.run}/",
            }
            self.weights.before_push = self._ack_taken
        self._handed: deque[tuple[str, int]] = deque()
        """Results that are not acknowledged, and how many rows had been put when theirs were."""
        self._rows = 0
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(buffered)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._under_way: dict[str, tuple[int, Task]] = {}
        """Every task that is not back yet with its number, by id."""
        self._submitted = 0
        self._offset = 0
        """How far the service's versions are ahead of the trainer's."""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._alive_at = time.monotonic()

    # What the trainer calls

    def start(self) -> None:
        self._alive_at = time.monotonic()
        self._stopping.clear()
        # A consumer of its own that begins here: results of earlier runs are not for it.
        self.client.lease(self.run, Unit.GROUP, max=0, wait=0.0, start=Start.NOW, **self.pace)
        self._thread = threading.Thread(target=self._work, name="towline-rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and the sessions that nobody waits for any more."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP)
        for task_id in list(self._under_way):
            with contextlib.suppress(ClientError):
                self.client.cancel(task_id)
        self._under_way.clear()

    def update_model_version(self, model_version: int) -> None:
        """The weights that were just sent are the trainer's `model_version`, whatever the service counts them as."""
        self._offset = self.client.policy().version - model_version

    def check_health(self, stale_after_s: float) -> None:
        if self._error is not None:
            raise WorkerError(f"the rollout worker broke: {self._error}") from self._error
        silent = time.monotonic() - self._alive_at
        if silent > stale_after_s:
            raise WorkerError(f"the rollout worker has not moved for {silent:.0f} seconds: is {self.client.url} there?")

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
        """Keep `ahead` groups under way; rows that wait in the buffer hold this up, so that none grow old there."""
        numbers = range(self._submitted, self._submitted + self.ahead - len(self._under_way))
        named = {f"{self.run}/{number:06d}": (number, self.tasks(number)) for number in numbers}
        if named:
            self.client.submit([task.model_copy(update={"task_id": name}) for name, (_, task) in named.items()])
            self._under_way |= named
            self._submitted += len(named)

    def _ack_taken(self) -> None:
        """Acknowledge the groups whose rows TRL has taken from the buffer: the weights to come have learned from them."""
        taken = self._rows - self.rollout_buffer.qsize()
        done = []
        while self._handed and self._handed[0][1] <= taken:
            done.append(self._handed.popleft()[0])
        if done:
            self.client.ack(self.run, done)

    def _finished(self) -> Iterator[Delivered]:
        stream = self.client.results(self.run, Unit.GROUP, idle=_POLL, limit=self.ahead, lease=self.lease, **self.pace)
        for delivered in stream:
            if delivered.task_id in self._under_way:
                yield delivered
            else:
                # Of another trainer: every consumer sees every result.
                self.client.ack(self.run, [delivered.result_id])

    def _hand_over(self, delivered: Delivered) -> int:
        """Put the group's rows into the buffer; how many."""
        before = self._rows
        number, task = self._under_way.pop(delivered.task_id)
        # TRL has one advantage a row: rewards of single turns have no place in it.
        found = group_advantages({delivered.task_id: delivered.trajectories}, scale=self.scale, turn_weight=0.0)
        spread = float(np.std(list(found.rewards.values()))) if found.rewards else 0.0
        for trajectory in delivered.trajectories:
            advantage = found.sessions.get(trajectory.session_id)
            if advantage is not None:
                figures = {"reward": found.rewards[trajectory.session_id], "reward_std": spread}
                for row in split_rows(trajectory):
                    check_temperature(row, self.temperature)
                    self._put(self._sample(row, advantage, number, task.instruction, figures))
        counted = {"unscored_sessions": found.unscored, "small_groups": found.small, "equal_groups": found.equal}
        self.metrics_queue.put({f"towline/{name}_total": float(count) for name, count in counted.items()})
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
