"""Killable workers: a named pure function runs on hostile input in a process of its own, with limits of time and memory.

The promise: whatever the text, the process that asked keeps its event loop, its memory and its descriptors. A call that
exceeds a limit raises `LimitExceeded`, which the caller attributes to the author of the input, never to the infrastructure.

A worker is reused; one that exceeds a limit is killed by its pid and replaced. It starts with a bare environment, no
descriptor but its two pipes, a lower priority, and cannot write files. Only functions of this package can be named,
arguments and results are plain data (`worker_child.encode`), and nothing is unpickled. An error of the function that is a
`TowlineError` is raised here as itself; any other as `WorkerFailed`.

Keep functions for workers in modules that import little: a worker loads them at their first call.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from towline.common.untrusted import worker_child
from towline.errors import TowlineError

P = ParamSpec("P")
T = TypeVar("T")

MAX_WORKERS = 8
"""Most calls at the same time; further ones wait."""
IDLE_WORKERS = 2
"""Workers that are kept for the next call."""
MAX_CALLS = 500
"""A worker is replaced after this many calls: what a call leaves in memory does not add up."""
_PATIENCE = 8.0
"""How many times its CPU seconds a call may take by the clock, on a busy machine."""
_NICE = 5


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one call may cost."""

    seconds: float = 5.0
    """CPU seconds. The deadline by the clock is several times as long."""
    memory: int = 512 * 1024 * 1024
    """Bytes above what the worker has at its start, arguments and result included."""
    result: int = 64 * 1024 * 1024
    """Largest result, in bytes."""


DEFAULT_LIMITS = WorkerLimits()


class LimitExceeded(TowlineError):
    """Hostile input: the function exceeded its limit of time, memory, depth or size."""

    failure = "evaluator"


class WorkerFailed(TowlineError):
    """The function raised an error that is not Towline's, or its worker could not be started."""

    failure = "evaluator"


def run(function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """The result of a function in a worker, within the default limits. Blocks; in async code use `run_async`."""
    return _pool.call(DEFAULT_LIMITS, function, arguments, keywords)  # type: ignore[no-any-return]


def run_within(limits: WorkerLimits, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """`run`, with limits of its own."""
    return _pool.call(limits, function, arguments, keywords)  # type: ignore[no-any-return]


async def run_async(limits: WorkerLimits, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """`run_within` without blocking the event loop, nor a thread that other work needs."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_pool.threads, lambda: run_within(limits, function, *arguments, **keywords))


async def in_thread(function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """A function that calls `run` several times, in a thread of its own."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_pool.threads, lambda: function(*arguments, **keywords))


class _Worker:
    """One process and its two pipes."""

    def __init__(self) -> None:
        package = Path(__file__).parents[3]
        self.calls = 0
        self.process = subprocess.Popen(
            [sys.executable, "-I", worker_child.__file__, str(package), str(_NICE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=_environment(),
            close_fds=True,
            start_new_session=True,
        )
        try:
            self._read(WorkerLimits(seconds=60.0))
        except LimitExceeded as error:
            raise WorkerFailed(f"a worker for hostile text cannot be started: {error}") from error

    def call(self, limits: WorkerLimits, message: dict[str, Any]) -> dict[str, Any]:
        """The reply to a call. After an error the worker is dead."""
        self.calls += 1
        assert self.process.stdin is not None
        with self._deadline(limits) as late:
            try:
                bounds = {"memory": limits.memory, "seconds": limits.seconds}
                worker_child.write_message(self.process.stdin, bounds)
                worker_child.write_message(self.process.stdin, message)
            except (OSError, ValueError) as error:
                raise self._died(limits, late) from error
            return self._read(limits, late)

    def _read(self, limits: WorkerLimits, late: threading.Event | None = None) -> dict[str, Any]:
        assert self.process.stdout is not None
        with self._deadline(limits) if late is None else contextlib.nullcontext(late) as expired:
            try:
                reply = worker_child.read_message(self.process.stdout, limits.result)
            except EOFError as error:
                raise self._died(limits, expired) from error
            except ValueError as error:
                self.kill()
                raise LimitExceeded(f"the result is too large: {error}") from error
        assert isinstance(reply, dict)
        return reply

    @contextlib.contextmanager
    def _deadline(self, limits: WorkerLimits) -> Any:
        """Kill the worker when the deadline has passed."""
        late = threading.Event()

        def expire() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(limits.seconds * _PATIENCE, expire)
        timer.daemon = True
        timer.start()
        try:
            yield late
        finally:
            timer.cancel()

    def _died(self, limits: WorkerLimits, late: threading.Event) -> LimitExceeded:
        self.kill()
        code = self.process.returncode
        if late.is_set() or code in (-24, -9):  # SIGXCPU, SIGKILL
            return LimitExceeded(f"the input took more than {limits.seconds:g} CPU seconds")
        return LimitExceeded(f"the input ended its worker (exit code {code})")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


@dataclass(slots=True)
class _Pool:
    """Idle workers, and the right to start one."""

    idle: list[_Worker] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    slots: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(MAX_WORKERS))
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="towline-worker")
    )
    owner: int = field(default_factory=os.getpid)

    def call(
        self, limits: WorkerLimits, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        name = f"{function.__module__}:{function.__qualname__}"
        message = {"function": name, "arguments": list(arguments), "keywords": keywords}
        with self.slots:
            worker = self._take()
            try:
                reply = worker.call(limits, message)
            except BaseException:
                worker.kill()
                raise
            self._give_back(worker)
        if "limit" in reply:
            raise LimitExceeded(f"the input exceeds the limit of {reply['limit']}")
        if "error" in reply:
            raise _error(*reply["error"])
        return reply["value"]

    def _take(self) -> _Worker:
        with self.lock:
            if self.owner != os.getpid():  # after a fork the workers belong to the parent
                self.idle, self.owner = [], os.getpid()
            while self.idle:
                worker = self.idle.pop()
                if worker.process.poll() is None:
                    return worker
                worker.kill()
        return _Worker()

    def _give_back(self, worker: _Worker) -> None:
        with self.lock:
            if worker.calls < MAX_CALLS and len(self.idle) < IDLE_WORKERS:
                self.idle.append(worker)
                return
        worker.kill()

    def close(self) -> None:
        with self.lock:
            idle, self.idle = self.idle, []
        if self.owner == os.getpid():
            for worker in idle:
                worker.kill()


def _error(kind: str, message: str) -> TowlineError:
    """The error of a function; only classes that this process has loaded, and only Towline's."""
    module, _, name = kind.partition(":")
    found = getattr(sys.modules.get(module), name, None) if module.startswith(worker_child.PACKAGE) else None
    if isinstance(found, type) and issubclass(found, TowlineError):
        return found(message)
    return WorkerFailed(f"{name}: {message}")


def _environment() -> dict[str, str]:
    """What the loader and Python need, and nothing else: no keys, no proxies."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "LANG") if name in os.environ}


_pool = _Pool()
atexit.register(_pool.close)
