"""llama.cpp's server in this process: how it is started and ended, and which of its slots a turn gets.

The server is a C++ object of `xllamacpp`, on a loopback port and with a key that only its engine has. Loading and ending
one are calls into C that may never return, so they run in daemon threads: a caller that is cancelled or times out
continues without them. (The threads of `asyncio.to_thread` are joined when the event loop closes, and again when the
interpreter ends.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from towline.common.arrays import Ids
from towline.errors import ConfigError

T = TypeVar("T")
log = logging.getLogger("towline.engines")
_NONE: Ids = np.empty(0, np.int32)
_END_TIMEOUT = 60.0
"""Seconds that a server has to end."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a server is started."""

    key: str
    slots: int
    context: int
    """Tokens per slot."""
    threads: int
    exact: bool
    """Attention and cache in float32."""


async def load_server(model: Path, options: ServerOptions) -> Any:
    """A server that has loaded `model`; raises `RuntimeError` if llama.cpp cannot load it."""
    return await run_in_daemon("llama.cpp load", lambda: _load(model, options))


def _load(model: Path, options: ServerOptions) -> Any:
    try:
        import xllamacpp
    except ImportError as error:
        raise ConfigError("the llama.cpp engine needs xllamacpp: pip install 'towline[llamacpp]'") from error
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [options.key]
    params.ui = False
    params.endpoint_slots = False
    params.verbosity = -1
    params.n_threads_http = options.slots + 2
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.n_parallel = options.slots
    params.n_ctx = options.context * options.slots
    # A context that does not fit is an error, and nothing is ever shifted out of it.
    params.fit_params = params.ctx_shift = False
    # Slots are assigned here; what leaves them is not cached elsewhere.
    params.cache_ram_mib = 0
    if options.exact:
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.warmup = False
    return xllamacpp.Server(params)


async def end_server(servers: list[Any]) -> None:
    """Drop the only references to servers, which ends them; one that does not end in time is abandoned."""
    try:
        async with asyncio.timeout(_END_TIMEOUT):
            await run_in_daemon("llama.cpp end", servers.clear)
    except TimeoutError:
        log.error("llama.cpp server did not stop within %g s; its thread and memory are abandoned", _END_TIMEOUT)


async def run_in_daemon(name: str, work: Callable[[], T]) -> T:
    """The outcome of `work`, which runs in a daemon thread of its own."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # The event loop is closed: there is no waiter any more.
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await outcome


class ServerSlots:
    """Assigns turns to slots.

    A slot takes one turn at a time and has a key-value cache of its own that stays when the turn is over. A turn goes to
    the free slot that shares the longest prefix with it; among equals, to the least recently used, so that an unfinished
    conversation stays cached as long as possible. Turns that find no free slot wait in order of arrival.
    """

    def __init__(self, count: int):
        self._room = asyncio.Semaphore(count)
        self._free: deque[int] = deque(range(count))
        """Least recently used first."""
        self._cached: list[Ids] = [_NONE] * count
        """What each slot's cache holds, as far as is known here."""
        self.waiting = 0

    @property
    def running(self) -> int:
        return len(self._cached) - len(self._free)

    def set_cached(self, slot: int, ids: Ids) -> None:
        self._cached[slot] = ids

    def clear(self) -> None:
        """Forget the caches: the weights have changed."""
        self._cached = [_NONE] * len(self._cached)

    @contextlib.asynccontextmanager
    async def acquire(self, prompt: Ids) -> AsyncIterator[int]:
        """A slot for one turn."""
        self.waiting += 1
        try:
            await self._room.acquire()
        finally:
            self.waiting -= 1
        slot = max(self._free, key=lambda free: _common_prefix(self._cached[free], prompt))
        self._free.remove(slot)
        try:
            yield slot
        finally:
            self._free.append(slot)
            self._room.release()


def _common_prefix(left: Ids, right: Ids) -> int:
    """How many leading ids are the same."""
    length = min(len(left), len(right))
    differ = np.flatnonzero(left[:length] != right[:length])
    return int(differ[0]) if len(differ) else length
