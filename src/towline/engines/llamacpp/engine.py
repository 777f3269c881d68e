"""llama.cpp through `xllamacpp`: its server in this process, on a loopback port and with a key that only this engine has.

A turn is sampled in short stretches, each a request of its own that goes on where the last one ended: the server keeps
the keys and values of what is before, an abort loses less than a stretch, and every token's id comes back, which the
server's own streams do not promise (they leave out tokens whose text ends inside a character).

Logprobs are those of the distribution that was sampled from: no sampler but temperature, and top-k and top-p where they
are asked for, in that order; the server reports each token's probability behind them. It reports none where a token's
text ends inside a character. There a second request asks for the logits of the whole vocabulary, the logprob is computed
from them here, and the stretch goes on behind that token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from towline.arrays import Ids
from towline.conversation import Finish
from towline.engines import validation
from towline.engines.base import Capture, EngineInfo, Load, SampleRequest
from towline.engines.llamacpp.gguf import Gguf
from towline.engines.llamacpp.slots import Slots
from towline.engines.remote import Flight, RemoteEngine, decoded
from towline.engines.stops import StopStrings
from towline.engines.threads import in_daemon
from towline.errors import ConfigError, EngineError

log = logging.getLogger("towline.engines")
Doubles = npt.NDArray[np.float64]

STRETCH = 16
"""Most tokens a request."""
_SEEN = 8192
"""Likeliest tokens that are looked at first where one is scored by itself."""
_NEGLIGIBLE = 1e-4
CONTEXT = 8192
"""Unless another length is asked for; its cache is allocated for every slot at the start."""
_ROUTE = "/completion"
_FIELDS = ("tokens", "completion_probabilities", "tokens_evaluated", "timings/cache_n")
_NORMAL = 1
_FORCING = 1e9
_ENDING = 60.0
"""Seconds that a server has to end."""


class LlamaCppEngine(RemoteEngine):
    def __init__(
        self,
        model: Path,
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        slots: int = 4,
        context: int | None = None,
        threads: int | None = None,
        exact: bool = True,
        seed: int | None = None,
        version: int = 0,
    ):
        """
        `model`: a GGUF file, or a folder that holds one.
        `decode`: ids to text, for stop strings.
        `slots`: turns at the same time; each has a cache of `context` tokens.
        `threads`: one unless told otherwise.
        `exact`: attention in float32, without llama.cpp's fast attention, and a cache of twice the size. Logprobs are then
        those of a forward pass over the same weights, as long as those are not quantised themselves.
        """
        super().__init__("llama.cpp")
        self._gguf = Gguf.find(model)
        self._decode = decode
        self._count = slots
        self._context = min(context or CONTEXT, self._gguf.context or CONTEXT)
        self._threads = threads or 1
        self._exact = exact
        self._seeds = np.random.default_rng(seed)
        self._version = version
        self._slots = Slots(slots)
        self._server: Any = None
        self._complete = _complete_token(self._gguf)

    async def start(self) -> None:
        if self._server is not None:
            return
        key = secrets.token_urlsafe(32)
        self._headers = {"authorization": f"Bearer {key}"}
        self._key = key
        await self._serve(self._gguf)
        props = decoded(await self._get("/props"), self.url)
        details = {
            "server": f"llama.cpp (xllamacpp {metadata.version('xllamacpp')})",
            "route": _ROUTE,
            "logprobs": "processed",
            "prefix_caching": "on",
            "model": self._gguf.path.name,
            "weights": str(props.get("model_ftype") or "unknown"),
            "slots": str(self._count),
            "threads": str(self._threads),
        }
        self._info = EngineInfo("llamacpp", Capture.TOKENS, self._context, len(self._gguf.tokens), details)

    async def _serve(self, gguf: Gguf) -> None:
        """Load a file and let its server take the place of the one before."""
        try:
            self._server = await in_daemon("llama.cpp loads", lambda: self._load(gguf))
        except RuntimeError as error:
            raise EngineError(
                f"llama.cpp cannot load {gguf.path} ({gguf.architecture or 'of no architecture'}): "
                "another format, or too little memory for its weights and cache"
            ) from error
        self.url = self._server.listening_address

    def _load(self, gguf: Gguf) -> Any:
        try:
            import xllamacpp
        except ImportError as error:
            raise ConfigError("the llama.cpp engine needs xllamacpp: pip install 'towline[llamacpp]'") from error
        chosen = xllamacpp.CommonParams()
        chosen.model.path = str(gguf.path)
        chosen.hostnames = ["127.0.0.1"]
        chosen.port = 0
        chosen.api_keys = [self._key]
        chosen.ui = False
        chosen.endpoint_slots = False
        chosen.verbosity = -1
        chosen.n_threads_http = self._count + 2
        chosen.cpuparams.n_threads = chosen.cpuparams_batch.n_threads = self._threads
        chosen.n_parallel = self._count
        chosen.n_ctx = self._context * self._count
        # A context that does not fit is an error, and nothing is ever shifted out of it.
        chosen.fit_params = chosen.ctx_shift = False
        # Slots are chosen here; what leaves them is not kept elsewhere.
        chosen.cache_ram_mib = 0
        if self._exact:
            chosen.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            chosen.cache_type_k = chosen.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        chosen.warmup = False
        return xllamacpp.Server(chosen)

    async def close(self) -> None:
        await super().close()
        servers, self._server = [self._server], None
        await _ended(servers)

    async def load(self) -> Load:
        return Load(self._slots.running, self._slots.waiting)

    # Sampling

    def _check(self, request: SampleRequest) -> None:
        super()._check(request)
        if request.forced is not None:
            raise EngineError("llama.cpp's server scores no given ids: use the embedded engine to force tokens")
        if request.stop_strings and self._decode is None:
            raise EngineError("stop strings need the engine to be made with `decode`")
        if not 0.0 <= request.temperature < math.inf:
            raise EngineError(f"temperature must not be negative, it is {request.temperature}")

    async def _read(self, flight: Flight) -> None:
        request = flight.request
        limit = self._limit(request)
        stops = StopStrings(request.stop_strings, self._decode) if request.stop_strings and self._decode else None
        entropy = int(self._seeds.integers(1 << 63)) if request.seed is None else request.seed % (1 << 64)
        count = STRETCH
        async with contextlib.AsyncExitStack() as stack:
            with request.waiting():
                slot = await stack.enter_async_context(self._slots.taken(request.prompt))
            while flight.finish is None and len(flight.ids) < limit:
                ids, logprobs = await self._stretch(flight, slot, entropy, min(count, limit - len(flight.ids)))
                self._slots.keep(slot, _joined(request.prompt, [*flight.ids, *ids]))
                self.stats.decoded_tokens += len(ids)
                request.beat(len(ids))
                _take(flight, ids, logprobs, stops)
                # What is behind a token without a logprob is thrown away: where there is one, there are often more.
                count = min(STRETCH, 2 * len(ids))
        if flight.finish is None:
            flight.finish = Finish.LENGTH

    async def _stretch(self, flight: Flight, slot: int, entropy: int, most: int) -> tuple[list[int], list[float]]:
        """At least one and at most `most` further ids with their logprobs."""
        request, ids = flight.request, _joined(flight.request.prompt, flight.ids)
        drawn = int(np.random.SeedSequence((entropy, len(ids))).generate_state(1)[0])
        body = {
            **self._asking(slot, ids, most),
            "seed": min(drawn, 0xFFFFFFFE),  # The one above means: any.
            "temperature": request.temperature,
            "top_k": request.top_k,
            "top_p": request.top_p,
            "samplers": ["temperature", "top_k", "top_p"],
            "n_probs": 1,
            # A greedy turn tells logprobs at temperature 1, which are those in front of the samplers.
            "post_sampling_probs": request.temperature > 0,
        }
        answer = decoded(await self._post(_ROUTE, body, long=True), self.url)
        with validation.reading("llama.cpp", answer):
            if flight.prompt_tokens is None:
                flight.prompt_tokens = validation.count(answer["tokens_evaluated"], "tokens_evaluated")
                flight.cached_tokens = validation.count(answer.get("timings/cache_n", 0), "cache_n")
            sampled = validation.token_ids(answer["tokens"], flight.vocabulary)
            told = [
                (validation.token_id(one["id"]), _logprob(one)) for one in answer.get("completion_probabilities") or ()
            ]
            if not sampled or len(told) > len(sampled):
                raise ValueError(f"it holds {len(sampled)} ids and {len(told)} logprobs")
        if len(told) == len(sampled):
            return sampled, [logprob for _, logprob in told]
        # The first id without a logprob ends inside a character, and so is never equal to the next that has one.
        known = next((at for at, (id, _) in enumerate(told) if id != sampled[at]), len(told))
        logprob = await self._score(slot, _joined(ids, sampled[:known]), sampled[known], request)
        return sampled[: known + 1], [*(logprob for _, logprob in told[:known]), logprob]

    async def _score(self, slot: int, ids: Ids, id: int, request: SampleRequest) -> float:
        """The logprob of one id after `ids`: a token whose text is whole is forced, and the logits looked at.

        Of the likeliest tokens alone, if all others together weigh next to nothing.
        """
        size = len(self._gguf.tokens)
        for seen in (min(_SEEN, size), size):
            body = {
                **self._asking(slot, ids, 1),
                "temperature": 0.0,
                "samplers": ["temperature"],
                "logit_bias": [[self._complete, _FORCING]],
                "n_probs": seen,
                "post_sampling_probs": False,
            }
            answer = decoded(await self._post(_ROUTE, body, long=True), self.url)
            with validation.reading("llama.cpp", answer):
                rows = answer["completion_probabilities"][0]["top_logprobs"]
                logits = np.full(size, -np.inf)
                logits[validation.token_ids([row["id"] for row in rows], size)] = [
                    float(row["logprob"]) for row in rows
                ]
                logprobs = distribution(logits, request)
                unseen = (size - seen) * np.exp(logprobs[int(rows[-1]["id"])])
            if math.isfinite(logprobs[id]) and unseen < _NEGLIGIBLE:
                break
        return float(logprobs[id])

    def _asking(self, slot: int, ids: Ids, count: int) -> dict[str, Any]:
        return {
            "prompt": ids.tolist(),
            "n_predict": count,
            "id_slot": slot,
            "cache_prompt": True,
            "return_tokens": True,
            "response_fields": _FIELDS,
        }

    # Weights

    async def _vet(self, folder: Path) -> None:
        gguf = Gguf.find(folder)
        if gguf.tokens != self._gguf.tokens or gguf.architecture != self._gguf.architecture:
            raise EngineError(f"{gguf.path} is of another model than {self._gguf.path}")

    async def _push(self, folder: Path, version: int) -> None:
        """Another GGUF file of the same vocabulary."""
        gguf = Gguf.find(folder)
        before = [self._server]
        await self._serve(gguf)
        await _ended(before)
        self._gguf = gguf
        self._slots.forget()


def distribution(logits: Doubles, request: SampleRequest) -> Doubles:
    """The log-probabilities that a turn draws from, as the server's samplers make them."""
    logits = logits - logits.max()
    if request.temperature > 0:
        logits = logits / request.temperature
        order = np.argsort(-logits, kind="stable")
        if request.top_k > 0:
            logits[order[request.top_k :]] = -np.inf
        if request.top_p < 1.0:
            reached = np.cumsum(np.exp(_normal(logits)[order])) >= request.top_p
            logits[order[int(np.argmax(reached)) + 1 :]] = -np.inf
    return _normal(logits)


def _normal(logits: Doubles) -> Doubles:
    return np.asarray(logits - np.log(np.exp(logits).sum()), np.float64)


def _take(flight: Flight, ids: Sequence[int], logprobs: Sequence[float], stops: StopStrings | None) -> None:
    """Add a stretch to its turn, up to where the turn ends."""
    for id, logprob in zip(ids, logprobs, strict=True):
        flight.ids.append(id)
        flight.logprobs.append(logprob)
        # llama.cpp ends a stretch at each end that it knows itself; one that is not asked for is gone on from.
        if id in flight.request.stop_ids:
            flight.finish = Finish.STOP
        elif stops is not None and (found := stops.feed(id)) is not None:
            flight.finish, flight.stop_string = Finish.STOP_STRING, found
        if flight.finish is not None:
            return


def _logprob(told: dict[str, Any]) -> float:
    if "logprob" in told:
        return validation.logprob(told["logprob"])
    probability = told["prob"]
    if type(probability) not in (int, float) or not probability >= 0:
        raise ValueError(f"{probability!r} is not a probability")
    return validation.logprob(math.log(max(probability, 1e-45)))


def _joined(prompt: Ids, ids: Sequence[int]) -> Ids:
    return np.concatenate([np.asarray(prompt, np.int32), np.asarray(ids, np.int32)])


def _complete_token(gguf: Gguf) -> int:
    """An ordinary token whose text is whole characters."""
    types = gguf.token_types
    for id, token in enumerate(gguf.tokens):
        if types[id] == _NORMAL and token.isascii() and token.isalnum():
            return id
    raise ConfigError(f"{gguf.path} has no vocabulary")


async def _ended(servers: list[Any]) -> None:
    """A server ends when nothing refers to it, and takes its time about it. One that does not end is left behind."""
    try:
        async with asyncio.timeout(_ENDING):
            await in_daemon("llama.cpp ends", servers.clear)
    except TimeoutError:
        log.error("llama.cpp's server has not ended within %g s, and is left behind with its memory", _ENDING)
