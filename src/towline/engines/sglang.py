"""An SGLang server as the engine, over its native protocol: `/generate` with `input_ids`.

SGLang keeps what it has sampled of an aborted turn and returns it, so a turn is one plain call, ended early by
`/abort_request`. Only a server that streams increments (`--incremental-streaming-output`) is read as a stream: others would
send all tokens of the turn again with every new one. Without the stream, what a dying server had sampled is lost and
sampled again. The server applies stop strings itself.

Invariant: the server reports the label of its weights with every response, newer ones as spans of tokens; they are followed
(`labelled.py`). A trainer may pause the server for its own updates, when `/health` answers 503: only a scheduler that does
not answer is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from towline.common.background import BackgroundTasks
from towline.conversation import Finish
from towline.engines.base import CaptureLevel, EngineInfo, EngineLoad, Ids, PauseMode, SampleRequest
from towline.engines.labelled import LabelledEngine
from towline.engines.remote import ActiveTurn, HttpStatusError, parse_json
from towline.engines.server_checks import (
    ProbeAnswer,
    PushedWeights,
    ServerPrecision,
    check_update,
    probe_prompt,
    score,
    vocabulary,
)
from towline.engines.validation import InvalidResponse, excerpt, logprob, parsing, token_count, token_id
from towline.engines.weight_labels import label_spans
from towline.errors import EngineError

_TEMPERATURE = 0.5
"""Temperature of the second probe, which shows whether logprobs are those of the sampling distribution."""
_TOP_LOGPROBS = 5
_PROBE_TOKENS = 16
"""Tokens that are compared after a weight update."""
_ABORT_TIMEOUT = 5.0
"""Seconds that an aborted turn has to return what it has."""
_ABORT_RETRY = 0.2
"""Seconds between two attempts to abort: the server may not know the turn yet."""
_RESERVED_TOKENS = 8
"""Tokens of the context that the server reserves, if it does not report the rest."""


class SglangEngine(LabelledEngine):
    def __init__(
        self, url: str, *, model: str = "", api_key: str = "", timeout: float = 3600.0, patience: float = 60.0
    ):
        """`model`: the path or name that the server must serve; default: any."""
        super().__init__(url, api_key=api_key, timeout=timeout, patience=patience)
        self._model = model
        self._streams = False
        self._seeds = False
        self._exact = False
        self._capacity = 0
        """Capacity of its key-value cache, in tokens."""
        self._request_ids: dict[ActiveTurn, str] = {}
        self._aborts = BackgroundTasks()
        self._pushed: PushedWeights | None = None

    async def start(self) -> None:
        model = await self._get_either("/get_model_info", "/model_info")
        server = await self._get_either("/get_server_info", "/server_info")
        path = str(model.get("model_path") or "")
        if not model.get("is_generation", True):
            raise EngineError(f"{self.url} serves {path}, which does not generate")
        if self._model and self._model not in (path, server.get("served_model_name")):
            raise EngineError(f"{self.url} serves {path}, not {self._model}")
        label = model.get("weight_version")
        self._note_start(None if label is None else str(label))
        self._streams = bool(server.get("incremental_streaming_output") or server.get("stream_output"))
        self._seeds = bool(server.get("enable_deterministic_inference"))
        self._exact = str(server.get("dtype")) == "float32"
        self._capacity = int(server.get("max_total_num_tokens") or 0) * int(server.get("dp_size") or 1)
        context = await self._context(server)
        await self._check_logprobs(context)
        details = {
            "server": f"sglang {server.get('version', 'unknown')}",
            "url": self.url,
            "model": path,
            "route": "/generate",
            "logprobs": "processed",
            "prefix_caching": "off" if server.get("disable_radix_cache") else "on",
            "streams": "yes" if self._streams else "no",
            "weight_label": self._labels.current or "not reported",
        }
        self._info = EngineInfo("sglang", CaptureLevel.TOKENS, context, vocabulary(path), details)
        self._probe_answer = await self._probe(self._salt)

    async def _get_either(self, path: str, newer: str) -> dict[str, Any]:
        """The response of a route that later versions have renamed."""
        try:
            return parse_json(await self._get(path), self.url + path)
        except HttpStatusError as error:
            if error.status != 404:
                raise
        return parse_json(await self._get(newer), self.url + newer)

    async def _read_label(self) -> str | None:
        label = (await self._get_either("/get_model_info", "/model_info")).get("weight_version")
        return None if label is None else str(label)

    async def _write_label(self, version: int) -> None:
        await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def healthy(self) -> bool:
        """Whether the scheduler answers. `/health` samples a token, which a server that its trainer has paused does not."""
        try:
            await self.load()
        except HttpStatusError:
            return await super().healthy()
        except EngineError:
            return False
        return True

    async def _context(self, server: Mapping[str, Any]) -> int:
        if server.get("max_req_input_len"):
            return int(server["max_req_input_len"])
        models = (await self._json("/v1/models")).get("data") or [{}]
        length = int(models[0].get("max_model_len") or 0) - _RESERVED_TOKENS
        if length <= 0:
            raise EngineError(f"{self.url} does not report its context: is it SGLang?")
        return length

    async def _check_logprobs(self, context: int) -> None:
        """Probe at two temperatures: logprobs spread as the temperature falls, if it is applied to them."""
        one, half = [await self._top(probe_prompt(context), temperature) for temperature in (1.0, _TEMPERATURE)]
        shared = sorted(one.keys() & half.keys(), key=lambda id: -one[id])
        if len(shared) < 2:
            raise EngineError(f"{self.url} does not report the logprobs of its most likely tokens")
        apart = np.array([one[id] - one[shared[0]] for id in shared])
        at_half = np.array([half[id] - half[shared[0]] for id in shared])
        if np.abs(at_half - apart).max() <= np.abs(at_half - apart / _TEMPERATURE).max():
            raise EngineError(
                f"{self.url} reports logprobs from before the temperature, not those of its sampling distribution: start "
                "it without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )

    async def _top(self, prompt: Ids, temperature: float) -> dict[int, float]:
        """The logprobs of the most likely ids after a prompt."""
        answer = await self._generate(generate_body(prompt, 1, temperature) | {"top_logprobs_num": _TOP_LOGPROBS})
        with parsing(f"{self.url}/generate", answer):
            places = answer["meta_info"].get("output_top_logprobs") or [[]]
            return {token_id(id): float(value) for value, id, *_ in places[0]}

    async def load(self) -> EngineLoad:
        try:
            loads = (await self._json("/v1/loads"))["loads"]
        except HttpStatusError as error:
            if error.status != 404:
                raise
            return parse_older_loads(orjson.loads(await self._get("/get_load")), self._capacity)
        return parse_loads(loads)

    # Turns

    async def _read(self, turn: ActiveTurn) -> None:
        request, limit = turn.request, self._token_limit(turn.request)
        if request.forced is not None:
            temperature = request.temperature or 1.0
            await score(turn, limit, lambda prompt, id: self._score(prompt, id, temperature))
            self.stats.decoded_tokens += len(turn.ids)
            return
        rid = self._request_ids[turn] = f"{request.id or 'turn'}-{secrets.token_hex(6)}"
        body = generate_body(request.prompt, limit, request.temperature, request) | {
            "rid": rid,
            "extra_key": self._salt,
        }
        if self._seeds and request.seed is not None:
            body["sampling_params"]["sampling_seed"] = request.seed % 2**31
        try:
            if self._streams:
                async for event in self._stream("/generate", body | {"stream": True}):
                    await self._record(turn, event)
            else:
                request.not_streamed()
                await self._record(turn, await self._generate(body))
        except asyncio.CancelledError:
            self._abort_later(rid)
            raise
        finally:
            del self._request_ids[turn]

    async def _generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return parse_json(await self._post("/generate", body, long=True), f"{self.url}/generate")

    async def _record(self, turn: ActiveTurn, event: Mapping[str, Any]) -> None:
        """Add what a response reports of the turn."""
        meta = event.get("meta_info")
        if not isinstance(meta, Mapping):
            raise InvalidResponse(
                f"{self.url}/generate answered without meta_info: is it SGLang? The response begins: {excerpt(event)}"
            )
        label = meta.get("weight_version")
        with parsing(f"{self.url}/generate", event):
            count = read_meta(meta, turn)
            spans = label_spans(meta.get("weight_versions"))
        with parsing(f"{self.url}/generate", event):
            await self._stamp(turn, count, None if label is None else str(label), spans, streamed=self._streams)
        self.stats.decoded_tokens += count
        turn.request.tokens_arrived(count)

    async def _score(self, prompt: Ids, id: int, temperature: float) -> tuple[float, int, int]:
        """The logprob of `id` after `prompt`, with how many prompt tokens were counted and cached."""
        extra = {"token_ids_logprob": [id], "extra_key": self._salt}
        answer = await self._generate(generate_body(prompt, 1, temperature) | extra)
        with parsing(f"{self.url}/generate", answer):
            meta = answer["meta_info"]
            ((value, *_),) = meta["output_token_ids_logprobs"][0]
            prompt_tokens = token_count(meta["prompt_tokens"], "prompt_tokens")
            return logprob(value), prompt_tokens, token_count(meta.get("cached_tokens") or 0, "cached_tokens")

    # Ending turns

    async def _cancel(self, turns: Iterable[ActiveTurn]) -> None:
        """Abort turns and wait for what they have; those that do not return in time are cut off."""
        turns = [turn for turn in turns if turn.task is not None]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _ABORT_TIMEOUT
        pending = {turn.task for turn in turns if turn.task is not None}
        while pending and loop.time() < deadline:
            rids = [self._request_ids[turn] for turn in turns if turn in self._request_ids]
            await asyncio.gather(*map(self._abort, rids))
            _, pending = await asyncio.wait(pending, timeout=_ABORT_RETRY)
        await super()._cancel(turns)

    async def _abort(self, rid: str) -> None:
        with contextlib.suppress(EngineError):  # A lost server runs nothing.
            await self._post("/abort_request", {"rid": rid})

    def _abort_later(self, rid: str) -> None:
        self._aborts.start(self._abort(rid))

    async def close(self) -> None:
        await self._cancel(list(self._active))
        await self._aborts.finish()
        await super().close()

    # Weights

    async def resume(self, version: int | None = None) -> None:
        if version is not None and self._labels.current not in (None, str(version)):
            # The weights were loaded by other means: from here on their label is this version.
            await self._write_label(version)
            self._labels.note(str(version), version)
        await super().resume(version)

    async def _stop(self, mode: PauseMode, deadline: float | None) -> None:
        await super()._stop(mode, deadline)
        await self._aborts.finish()

    async def _validate_weights(self, folder: Path) -> None:
        await asyncio.to_thread(PushedWeights.of, folder)

    async def _load_weights(self, folder: Path, version: int) -> None:
        """Load from a folder that the server sees under the same path, and check its logprobs."""
        pushed = await asyncio.to_thread(PushedWeights.of, folder)
        body = {
            "model_path": str(pushed.folder),
            "weight_version": str(version),
            "abort_all_requests": True,
            "flush_cache": True,
        }
        await self._post("/pause_generation", {"mode": "abort"}, long=True)
        try:
            done = parse_json(await self._post("/update_weights_from_disk", body, long=True), self.url)
        finally:
            with contextlib.suppress(EngineError):  # The first error is the one to report.
                await self._post("/continue_generation", {})
        if not done.get("success"):
            raise EngineError(f"{self.url} did not load the weights of {folder}: {done.get('message')}")
        label = await self._read_label()
        if label not in (None, str(version)):
            raise EngineError(f"{self.url} loaded the weights of version {version} but labels them {label!r}")
        if label is not None:
            self._labels.note(label, version)
        after = await self._probe(f"towline-weights-{version}")
        proof = await asyncio.to_thread(
            check_update,
            self.url,
            pushed,
            self._probe_answer,
            after,
            last=self._pushed,
            precision=ServerPrecision(self._exact, cpu=False),
        )
        self._pushed, self._probe_answer = pushed, after
        self.info.details["weights_proven_by"] = proof.value

    async def _probe(self, salt: str) -> ProbeAnswer:
        prompt = probe_prompt(self.info.context, seed=1)
        turn = ActiveTurn(SampleRequest(prompt, _PROBE_TOKENS, temperature=0.0), 0)
        answer = await self._generate(generate_body(prompt, _PROBE_TOKENS, 0.0) | {"extra_key": salt})
        with parsing(f"{self.url}/generate", answer):
            read_meta(answer["meta_info"], turn)
        ids, logprobs = np.array(turn.ids, np.int32), np.array(turn.logprobs, np.float32)
        return ProbeAnswer(prompt, ids, logprobs, turn.cached_tokens)


def generate_body(prompt: Ids, limit: int, temperature: float, request: SampleRequest | None = None) -> dict[str, Any]:
    """A `/generate` body. Every parameter that shapes the distribution is sent, whatever the server's defaults."""
    params: dict[str, Any] = {
        "max_new_tokens": limit,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if request is not None:
        params |= {"top_p": request.top_p, "top_k": request.top_k or -1}
        params |= {"stop_token_ids": sorted(request.stop_ids), "stop": list(request.stop_strings)}
    return {"input_ids": [int(id) for id in prompt], "sampling_params": params, "return_logprob": True}


def _finish(reason: object) -> tuple[Finish | None, str | None]:
    """How a turn ended, and the stop string that ended it."""
    if reason is None:
        return None, None
    if not isinstance(reason, Mapping):
        raise ValueError(f"finish reason {reason!r:.60} is not an object")
    kind, matched = reason.get("type"), reason.get("matched")
    if kind == "stop" and isinstance(matched, str):
        return Finish.STOP_STRING, matched
    known = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}
    if kind == "abort" and reason.get("status_code"):
        raise ValueError(f"the turn failed with status {reason['status_code']}: {reason.get('message')}")
    if kind not in known:
        raise ValueError(f"finish reason {kind!r} is not one of {', '.join(known)}")
    return known[kind], None


def read_meta(meta: Mapping[str, Any], turn: ActiveTurn) -> int:
    """Add what a response reports, be it all tokens of the turn or those since the last; returns how many are new."""
    reported = meta.get("output_token_logprobs") or []
    if not isinstance(reported, list):
        raise ValueError(f"output_token_logprobs is not a list: {reported!r:.60}")
    sampled = meta.get("completion_tokens")
    total = len(reported) if sampled is None else token_count(sampled, "completion_tokens")
    new = total - len(turn.ids)
    if new < 0 or len(reported) not in (new, total):
        raise ValueError(f"it counts {sampled} tokens after {len(turn.ids)}, and holds the logprobs of {len(reported)}")
    pairs = [(token_id(id, turn.vocabulary), logprob(value)) for value, id, *_ in reported[len(reported) - new :]]
    turn.ids += [id for id, _ in pairs]
    turn.logprobs += [value for _, value in pairs]
    if meta.get("prompt_tokens") is not None:
        turn.prompt_tokens = token_count(meta["prompt_tokens"], "prompt_tokens")
    turn.cached_tokens = token_count(meta.get("cached_tokens") or 0, "cached_tokens")
    turn.finish, turn.stop_string = _finish(meta.get("finish_reason"))
    return new


def parse_loads(ranks: Sequence[Mapping[str, Any]]) -> EngineLoad:
    """From `/v1/loads`, which reports each data-parallel rank."""
    return EngineLoad(
        sum(rank["num_running_reqs"] for rank in ranks),
        sum(rank["num_waiting_reqs"] for rank in ranks),
        max((float(rank["token_usage"]) for rank in ranks), default=None),
    )


def parse_older_loads(ranks: Sequence[Mapping[str, Any]], capacity: int) -> EngineLoad:
    """From `/get_load` of older servers: the total includes the waiting, and usage is given in tokens."""
    waiting, tokens = sum(rank["num_waiting_reqs"] for rank in ranks), sum(rank["num_tokens"] for rank in ranks)
    usage = min(1.0, tokens / capacity) if capacity else None
    return EngineLoad(sum(rank["num_reqs"] for rank in ranks) - waiting, waiting, usage)
