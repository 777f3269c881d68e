"""The llama.cpp engine: llama.cpp's server in this process (`server.py`), sampled over its HTTP API.

A turn is sampled in short chunks, each a request of its own that continues where the last one ended: the server keeps
the keys and values of what came before, an abort loses less than one chunk, and every token's id comes back, which the
server's own streams do not promise (they omit tokens whose text ends inside a character).

Logprobs are those of the distribution that was sampled from: no sampler but temperature, and top-k and top-p where they
are requested, in that order; the server reports each token's probability after them. It reports none where a token's
text ends inside a character. There a second request asks for the logits of the whole vocabulary, the logprob is computed
from them here, and the chunk continues after that token.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from towline.common.arrays import Ids
from towline.conversation import Finish
from towline.engines import validation
from towline.engines.base import CaptureLevel, EngineInfo, EngineLoad, SampleRequest
from towline.engines.llamacpp.gguf import GgufFile
from towline.engines.llamacpp.server import ServerOptions, ServerSlots, end_server, load_server
from towline.engines.remote import ActiveTurn, RemoteEngine, parse_json
from towline.engines.stop_strings import StopStrings
from towline.errors import EngineError

Doubles = npt.NDArray[np.float64]

CHUNK = 16
"""Maximum number of tokens per request."""
CONTEXT = 8192
"""The default context; its cache is allocated for every slot at the start."""
_TOP_LOGITS = 8192
"""Most likely tokens whose logits are requested first when a single token is scored."""
_NEGLIGIBLE = 1e-4
_ROUTE = "/completion"
_FIELDS = ("tokens", "completion_probabilities", "tokens_evaluated", "timings/cache_n")
_FORCING = 1e9
"""A logit bias that no other token can beat."""


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
        `threads`: default 1.
        `exact`: attention in float32, without llama.cpp's flash attention, and a cache of twice the size. Logprobs are
        then those of a forward pass over the same weights, unless those are quantised themselves.
        """
        super().__init__("llama.cpp")
        self._gguf = GgufFile.find(model)
        self._decode = decode
        self._options = ServerOptions(
            key=secrets.token_urlsafe(32),
            slots=slots,
            context=min(context or CONTEXT, self._gguf.context or CONTEXT),
            threads=threads or 1,
            exact=exact,
        )
        self._headers = {"authorization": f"Bearer {self._options.key}"}
        self._seeds = np.random.default_rng(seed)
        self._version = version
        self._slots = ServerSlots(slots)
        self._server: Any = None
        self._plain_token = self._gguf.plain_token()

    async def start(self) -> None:
        if self._server is not None:
            return
        await self._serve(self._gguf)
        props = await self._json("/props")
        options = self._options
        details = {
            "server": f"llama.cpp (xllamacpp {metadata.version('xllamacpp')})",
            "route": _ROUTE,
            "logprobs": "processed",
            "prefix_caching": "on",
            "model": self._gguf.path.name,
            "weights": str(props.get("model_ftype") or "unknown"),
            "slots": str(options.slots),
            "threads": str(options.threads),
        }
        self._info = EngineInfo("llamacpp", CaptureLevel.TOKENS, options.context, len(self._gguf.tokens), details)

    async def _serve(self, gguf: GgufFile) -> None:
        """Load a file into a new server, which replaces the current one."""
        try:
            self._server = await load_server(gguf.path, self._options)
        except RuntimeError as error:
            raise EngineError(
                f"llama.cpp cannot load {gguf.path} (architecture {gguf.architecture or 'unknown'}): "
                "unsupported format, or too little memory for its weights and cache"
            ) from error
        self.url = self._server.listening_address

    async def close(self) -> None:
        await super().close()
        servers, self._server = [self._server], None
        await end_server(servers)

    async def load(self) -> EngineLoad:
        return EngineLoad(self._slots.running, self._slots.waiting)

    # Sampling

    def _check(self, request: SampleRequest) -> None:
        super()._check(request)
        if request.forced is not None:
            raise EngineError("llama.cpp's server cannot score forced ids: use the embedded engine for them")
        if request.stop_strings and self._decode is None:
            raise EngineError("stop strings need an engine that was created with `decode`")
        if not 0.0 <= request.temperature < math.inf:
            raise EngineError(f"temperature must not be negative, it is {request.temperature}")

    async def _read(self, turn: ActiveTurn) -> None:
        request = turn.request
        limit = self._token_limit(request)
        stops = StopStrings(request.stop_strings, self._decode) if request.stop_strings and self._decode else None
        entropy = int(self._seeds.integers(1 << 63)) if request.seed is None else request.seed % (1 << 64)
        count = CHUNK
        async with contextlib.AsyncExitStack() as stack:
            with request.suspended():
                slot = await stack.enter_async_context(self._slots.acquire(request.prompt))
            while turn.finish is None and len(turn.ids) < limit:
                ids, logprobs = await self._sample_chunk(turn, slot, entropy, min(count, limit - len(turn.ids)))
                self._slots.set_cached(slot, _concatenate(request.prompt, [*turn.ids, *ids]))
                self.stats.decoded_tokens += len(ids)
                request.tokens_arrived(len(ids))
                _append(turn, ids, logprobs, stops)
                # What follows a token without a logprob is discarded: where there is one, there are often more.
                count = min(CHUNK, 2 * len(ids))
        if turn.finish is None:
            turn.finish = Finish.LENGTH

    async def _sample_chunk(
        self, turn: ActiveTurn, slot: int, entropy: int, most: int
    ) -> tuple[list[int], list[float]]:
        """At least one and at most `most` further ids with their logprobs."""
        request, ids = turn.request, _concatenate(turn.request.prompt, turn.ids)
        seed = int(np.random.SeedSequence((entropy, len(ids))).generate_state(1)[0])
        body = {
            **self._body(slot, ids, most),
            "seed": min(seed, 0xFFFFFFFE),  # The one above means: random.
            "temperature": request.temperature,
            "top_k": request.top_k,
            "top_p": request.top_p,
            "samplers": ["temperature", "top_k", "top_p"],
            "n_probs": 1,
            # A greedy turn reports logprobs at temperature 1, which are those before the samplers.
            "post_sampling_probs": request.temperature > 0,
        }
        answer = parse_json(await self._post(_ROUTE, body, long=True), self.url)
        with validation.parsing("llama.cpp", answer):
            if turn.prompt_tokens is None:
                turn.prompt_tokens = validation.token_count(answer["tokens_evaluated"], "tokens_evaluated")
                turn.cached_tokens = validation.token_count(answer.get("timings/cache_n", 0), "cache_n")
            sampled = validation.token_ids(answer["tokens"], turn.vocabulary)
            reported = [
                (validation.token_id(one["id"]), _logprob(one)) for one in answer.get("completion_probabilities") or ()
            ]
            if not sampled or len(reported) > len(sampled):
                raise ValueError(f"it holds {len(sampled)} ids and {len(reported)} logprobs")
        if len(reported) == len(sampled):
            return sampled, [logprob for _, logprob in reported]
        # The first id without a logprob ends inside a character, and so never equals the next that has one.
        known = next((at for at, (id, _) in enumerate(reported) if id != sampled[at]), len(reported))
        logprob = await self._score(slot, _concatenate(ids, sampled[:known]), sampled[known], request)
        return sampled[: known + 1], [*(logprob for _, logprob in reported[:known]), logprob]

    async def _score(self, slot: int, ids: Ids, id: int, request: SampleRequest) -> float:
        """The logprob of one id after `ids`: a token whose text is whole is forced, and the logits are read.

        The most likely tokens suffice if all others together weigh next to nothing.
        """
        size = len(self._gguf.tokens)
        for top in (min(_TOP_LOGITS, size), size):
            body = {
                **self._body(slot, ids, 1),
                "temperature": 0.0,
                "samplers": ["temperature"],
                "logit_bias": [[self._plain_token, _FORCING]],
                "n_probs": top,
                "post_sampling_probs": False,
            }
            answer = parse_json(await self._post(_ROUTE, body, long=True), self.url)
            with validation.parsing("llama.cpp", answer):
                rows = answer["completion_probabilities"][0]["top_logprobs"]
                logits = np.full(size, -np.inf)
                logits[validation.token_ids([row["id"] for row in rows], size)] = [
                    float(row["logprob"]) for row in rows
                ]
                logprobs = distribution(logits, request)
                unseen = (size - top) * np.exp(logprobs[int(rows[-1]["id"])])
            if math.isfinite(logprobs[id]) and unseen < _NEGLIGIBLE:
                break
        return float(logprobs[id])

    def _body(self, slot: int, ids: Ids, count: int) -> dict[str, Any]:
        return {
            "prompt": ids.tolist(),
            "n_predict": count,
            "id_slot": slot,
            "cache_prompt": True,
            "return_tokens": True,
            "response_fields": _FIELDS,
        }

    # Weights

    async def _validate_weights(self, folder: Path) -> None:
        gguf = GgufFile.find(folder)
        if gguf.tokens != self._gguf.tokens or gguf.architecture != self._gguf.architecture:
            raise EngineError(f"{gguf.path} is of another model than {self._gguf.path}")
        self._validated = gguf

    async def _load_weights(self, folder: Path, version: int) -> None:
        """Another GGUF file with the same vocabulary."""
        before = [self._server]
        await self._serve(self._validated)
        await end_server(before)
        self._gguf = self._validated
        self._slots.clear()


def distribution(logits: Doubles, request: SampleRequest) -> Doubles:
    """The log-probabilities that a turn draws from, as the server's samplers make them."""
    logits = logits - logits.max()
    if request.temperature > 0:
        logits = logits / request.temperature
        order = np.argsort(-logits, kind="stable")
        if request.top_k > 0:
            logits[order[request.top_k :]] = -np.inf
        if request.top_p < 1.0:
            reached = np.cumsum(np.exp(_normalize(logits)[order])) >= request.top_p
            logits[order[int(np.argmax(reached)) + 1 :]] = -np.inf
    return _normalize(logits)


def _normalize(logits: Doubles) -> Doubles:
    return np.asarray(logits - np.log(np.exp(logits).sum()), np.float64)


def _append(turn: ActiveTurn, ids: Sequence[int], logprobs: Sequence[float], stops: StopStrings | None) -> None:
    """Add a chunk to its turn, up to where the turn ends."""
    for id, logprob in zip(ids, logprobs, strict=True):
        turn.ids.append(id)
        turn.logprobs.append(logprob)
        # llama.cpp ends a chunk at every end token that it knows; one that is no stop id of the request is continued.
        if id in turn.request.stop_ids:
            turn.finish = Finish.STOP
        elif stops is not None and (found := stops.feed(id)) is not None:
            turn.finish, turn.stop_string = Finish.STOP_STRING, found
        if turn.finish is not None:
            return


def _logprob(entry: dict[str, Any]) -> float:
    if "logprob" in entry:
        return validation.logprob(entry["logprob"])
    probability = entry["prob"]
    if type(probability) not in (int, float) or not probability >= 0:
        raise ValueError(f"{probability!r} is not a probability")
    return validation.logprob(math.log(max(probability, 1e-45)))


def _concatenate(prompt: Ids, ids: Sequence[int]) -> Ids:
    return np.concatenate([np.asarray(prompt, np.int32), np.asarray(ids, np.int32)])
