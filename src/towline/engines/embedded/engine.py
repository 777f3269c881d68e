"""The embedded engine: a decoder in this process, behind the interface of every other engine.

The asyncio side checks a request, turns it into an `EngineTurn` and waits on a future; the step loop does the rest in its
own thread. Nothing that a caller sends can reach the loop unchecked.

Invariant: the engine owns a copy of its weights. Training the decoder it was created from, or writing to its folder,
changes nothing until `update_weights`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from towline.conversation import Finish
from towline.engines.base import (
    CaptureLevel,
    EngineInfo,
    EngineLoad,
    Ids,
    PauseMode,
    Sample,
    SampleRequest,
)
from towline.engines.embedded.cache import RadixCache
from towline.engines.embedded.config import DecoderConfig
from towline.engines.embedded.loop import EmbeddedStats, StepLoop
from towline.engines.embedded.model import Decoder, load_decoder
from towline.engines.embedded.runner import ModelRunner, RunnerWeights, Sampler
from towline.engines.embedded.scheduler import StepScheduler
from towline.engines.embedded.turn import EngineTurn
from towline.engines.stalls import PauseGate, PauseState
from towline.engines.stop_strings import StopStrings
from towline.engines.validation import check_sample
from towline.errors import ConfigError, EngineError

T = TypeVar("T")
log = logging.getLogger("towline.engines")
MIN_TEMPERATURE = 1e-6
_CLOSE_TIMEOUT = 60.0
"""Seconds that a step may still take when the engine is closed."""


class EmbeddedEngine:
    """Samples from a small decoder with continuous batching and a prefix cache."""

    def __init__(
        self,
        model: Path | Decoder,
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        max_batch: int = 16,
        max_cached_tokens: int = 65536,
        context: int | None = None,
        threads: int | None = None,
        seed: int | None = None,
        version: int = 0,
        prefill_chunk: int = 512,
    ):
        """
        `model`: a folder in Hugging Face layout, or a decoder to copy.
        `decode`: ids to text, called from the engine's thread; needed for stop strings only.
        `max_batch`: how many turns run at once.
        `max_cached_tokens`: slots of the key-value pool, for running turns and cached prefixes together.
        `context`: the longest prompt plus sample; default: what the model and the pool allow.
        `threads`: of torch, in the engine's thread; default: as many as torch uses in the creating thread.
        `seed`: makes turns without a seed of their own reproducible in order of arrival.
        `prefill_chunk`: prompt tokens computed in one step, shared by all turns.
        """
        if max_batch < 1 or max_cached_tokens < 1 or prefill_chunk < 1 or (context is not None and context < 1):
            raise ConfigError("max_batch, max_cached_tokens, prefill_chunk and context must be at least 1")
        self._model = model
        self._config = model.config if isinstance(model, Decoder) else DecoderConfig.from_folder(model)
        self._decode = decode
        self._max_batch = max_batch
        self._slots = max_cached_tokens
        self._context = context or min(self._config.max_position_embeddings, max_cached_tokens)
        self._threads = threads or torch.get_num_threads()
        self._seeds = np.random.default_rng(seed)
        self._first_version = version
        self._prefill_chunk = prefill_chunk
        self._loop: StepLoop | None = None
        self._reading = asyncio.Lock()
        self._gate = PauseGate()
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        config = self._config
        details = {
            "model_type": config.model_type,
            "layers": str(config.num_hidden_layers),
            "hidden_size": str(config.hidden_size),
            "max_batch": str(self._max_batch),
            "max_cached_tokens": str(self._slots),
            "prefix_caching": "on",
            "torch": torch.__version__,
        }
        return EngineInfo("embedded", CaptureLevel.TOKENS, self._context, config.vocab_size, details)

    @property
    def pauses(self) -> PauseState:
        return self._gate.pauses

    @property
    def version(self) -> int:
        return self._first_version if self._loop is None else self._loop.version

    @property
    def stats(self) -> EmbeddedStats:
        """A snapshot of the counters and the load."""
        return EmbeddedStats() if self._loop is None else self._loop.stats()

    async def load(self) -> EngineLoad:
        stats = self.stats
        usage = stats.used_slots / stats.slots if stats.slots else None
        return EngineLoad(stats.running_turns, stats.waiting_turns, usage)

    async def start(self) -> None:
        async with self._reading:
            if self._closed:
                raise EngineError("the embedded engine is closed")
            if self._loop is not None:
                return
            weights = await asyncio.to_thread(_read, self._model)
            try:
                runner = ModelRunner(weights, self._slots, self._context)
            except RuntimeError as error:
                raise EngineError(
                    f"no memory for {self._slots} cached tokens, lower max_cached_tokens: {error}"
                ) from error
            cache = RadixCache(self._slots, self._first_version)
            self._loop = StepLoop(
                runner,
                StepScheduler(cache, self._max_batch, self._context, self._prefill_chunk),
                Sampler(self._max_batch, self._config.vocab_size),
                self._threads,
            )
            self._loop.start()

    async def sample(self, request: SampleRequest) -> Sample:
        loop = self._started_loop()
        answer: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        turn = self._turn(request, _resolver(answer))
        if turn.limit == 0:
            turn.finish = Finish.LENGTH
            return turn.result()
        loop.post(lambda: loop.submit(turn))
        try:
            with request.suspended_while(self.pauses):
                return check_sample(await answer, request, self._config.vocab_size)
        except asyncio.CancelledError:
            with contextlib.suppress(EngineError):  # A closed engine has already ended the turn.
                loop.post(lambda: loop.cancel(turn))
            raise

    async def abort(self, ids: Sequence[str]) -> None:
        loop, names = self._started_loop(), frozenset(ids)
        await self._call(lambda: loop.abort(names))

    async def pause(self, mode: PauseMode = PauseMode.DRAIN, deadline: float | None = None) -> None:
        loop = self._started_loop()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        resolve = _resolver(done)
        self._gate.clear()
        loop.post(lambda: loop.pause(mode, deadline, resolve))
        await done

    async def resume(self, version: int | None = None) -> None:
        loop = self._started_loop()
        await self._call(lambda: loop.resume(version))
        self._gate.set()

    async def ready(self) -> None:
        loop = self._started_loop()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        resolve = _resolver(answer)
        loop.post(lambda: loop.when_ready(resolve))
        await answer

    async def update_weights(self, folder: Path | Decoder, version: int) -> None:
        """Read the new weights while sampling continues, then swap between two steps. A decoder is copied as it is."""
        loop = self._started_loop()
        async with self._reading:
            weights = await asyncio.to_thread(_read, folder)
            if weights.config != self._config:
                raise EngineError(f"the new weights are of another model: {weights.config} instead of {self._config}")
            await self._call(lambda: loop.swap(weights, version))

    async def close(self) -> None:
        async with self._reading:
            self._closed = True
            if self._loop is not None and not await asyncio.to_thread(self._loop.stop, _CLOSE_TIMEOUT):
                log.error("embedded engine did not stop within %g s; its thread is abandoned", _CLOSE_TIMEOUT)

    def _started_loop(self) -> StepLoop:
        if self._closed:
            raise EngineError("the embedded engine is closed")
        if self._loop is None:
            raise EngineError("the embedded engine is not started: call start() first")
        return self._loop

    async def _call(self, action: Callable[[], None]) -> None:
        """Run `action` on the loop's thread and wait for it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        resolve = _resolver(done)

        def message() -> None:
            try:
                action()
            except Exception as error:
                failure = EngineError(f"the embedded engine failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                resolve(failure)
                raise
            resolve(None)

        self._started_loop().post(message)
        await done

    def _turn(self, request: SampleRequest, deliver: Callable[[Sample | EngineError], None]) -> EngineTurn:
        """The checked form of a request."""
        vocabulary = self._config.vocab_size
        prompt = _checked(request.prompt, "prompt", vocabulary)
        request.check(self._context)
        if request.temperature and not MIN_TEMPERATURE <= request.temperature < math.inf:
            raise EngineError(f"temperature must be 0 or at least {MIN_TEMPERATURE}, not {request.temperature}")
        if not 0.0 < request.top_p <= 1.0:
            raise EngineError(f"top_p must be above 0 and at most 1, not {request.top_p}")
        if request.top_k < 0:
            raise EngineError(f"top_k must not be negative, it is {request.top_k}")
        if request.stop_strings and self._decode is None:
            raise EngineError("stop strings need an engine that was created with `decode`")
        limit = min(request.max_tokens, self._context - len(prompt))
        forced: Ids | None = None
        if request.forced is not None:
            forced = _checked(request.forced, "forced", vocabulary)[:limit]
            stops = np.flatnonzero(np.isin(forced, list(request.stop_ids)))
            forced = forced[: stops[0] + 1] if len(stops) else forced
            limit = len(forced)
        if len(prompt) + limit - 1 > self._slots:
            raise EngineError(
                f"{len(prompt)} prompt tokens and {limit} to sample can never fit the {self._slots} tokens of the cache"
            )
        tokens = np.empty(len(prompt) + limit, dtype=np.int32)
        tokens[: len(prompt)] = prompt
        if forced is not None:
            tokens[len(prompt) :] = forced
        draws = request.temperature > 0 and forced is None
        return EngineTurn(
            id=request.id,
            tokens=tokens,
            prompt=len(prompt),
            limit=limit,
            forced=forced is not None,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop_ids=request.stop_ids,
            stops=StopStrings(request.stop_strings, self._decode) if request.stop_strings and self._decode else None,
            random=self._random(request.seed, len(prompt)) if draws else None,
            deliver=deliver,
            on_tokens=None if request.stall_detector is None else request.stall_detector.tokens_arrived,
        )

    def _random(self, seed: int | None, prompt: int) -> np.random.Generator:
        """The generator of one turn. A turn that continues after an abort has a longer prompt and so draws new numbers."""
        entropy = int(self._seeds.integers(1 << 63)) if seed is None else seed % (1 << 64)
        return np.random.Generator(np.random.PCG64((entropy, prompt)))


def _read(source: Path | Decoder) -> RunnerWeights:
    try:
        return RunnerWeights.of(source if isinstance(source, Decoder) else load_decoder(source))
    except ConfigError as error:
        raise EngineError(str(error)) from error


def _checked(ids: Ids, name: str, vocabulary: int) -> Ids:
    array = np.asarray(ids)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise EngineError(f"{name} must be a one-dimensional array of integer ids")
    if len(array) and not 0 <= int(array.min()) <= int(array.max()) < vocabulary:
        raise EngineError(
            f"{name} has ids from {int(array.min())} to {int(array.max())}, the vocabulary has {vocabulary} ids"
        )
    return array.astype(np.int32)


def _resolver(future: asyncio.Future[T]) -> Callable[[T | EngineError], None]:
    """A callback that resolves a future from another thread."""
    loop = future.get_loop()

    def settle(value: T | EngineError) -> None:
        if future.done():
            return
        if isinstance(value, EngineError):
            future.set_exception(value)
        else:
            future.set_result(value)

    def resolve(value: T | EngineError) -> None:
        with contextlib.suppress(RuntimeError):  # The caller's event loop is closed.
            loop.call_soon_threadsafe(settle, value)

    return resolve
