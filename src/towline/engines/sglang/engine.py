"""An SGLang server as the engine, by its native protocol: `/generate` with `input_ids`.

SGLang keeps what it has sampled of an aborted turn and answers with it, so a turn is one plain call, ended early by
`/abort_request`. Only a server that streams increments (`--incremental-streaming-output`) is read as a stream: others would
send all tokens of the turn again with every one of them. Without the stream, what a dying server had sampled is lost with
it, and sampled anew.

Invariant: the server tells the label of its weights with every answer. An answer under another label than the one that
it was given comes from a server that has been started again, and counts as a server that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from towline.engines.base import Capture, EngineGone, EngineInfo, Ids, Load, PauseMode, SampleRequest
from towline.engines.refusals import Refused
from towline.engines.remote import Flight, RemoteEngine, decoded
from towline.engines.sglang import wire
from towline.engines.validation import BadAnswer, logprob, quote, reading, token_id
from towline.engines.vllm.probing import probe_prompt, vocabulary
from towline.engines.vllm.scoring import score
from towline.engines.weight_check import Arithmetic, Probe, Pushed, check
from towline.errors import EngineError

_TEMPERATURE = 0.5
"""Of the probe that shows whether logprobs are those of the sampling distribution."""
_TOLD = 5
_PROBED = 16
"""Tokens that are compared after an update."""
_LANDING = 5.0
"""Seconds that an aborted turn has to come back with what it has."""
_AGAIN = 0.2
"""Seconds between two tries to abort: the server may not know the turn yet."""
_RESERVED = 8
"""Tokens of the context that the server keeps for itself, if it does not say."""


class SglangEngine(RemoteEngine):
    def __init__(
        self, url: str, *, model: str = "", api_key: str = "", timeout: float = 3600.0, patience: float = 60.0
    ):
        """`model`: the path or name that the server must serve; by default any."""
        super().__init__(url, api_key=api_key, timeout=timeout, patience=patience)
        self._model = model
        self._label: str | None = None
        """What the server calls the weights it must have; None if it has no word for them."""
        self._streams = False
        self._seeds = False
        self._exact = False
        self._capacity = 0
        """Tokens that its key-value cache holds."""
        self._names: dict[Flight, str] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._pushed: Pushed | None = None
        self._answer: Probe | None = None

    # What it is

    async def start(self) -> None:
        model = await self._either("/get_model_info", "/model_info")
        server = await self._either("/get_server_info", "/server_info")
        path = str(model.get("model_path") or "")
        if not model.get("is_generation", True):
            raise EngineError(f"{self.url} serves {path}, which does not generate")
        if self._model and self._model not in (path, server.get("served_model_name")):
            raise EngineError(f"{self.url} serves {path}, not {self._model}")
        self._note_label(model.get("weight_version"))
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
            "weight_label": self._label or "not told",
        }
        self._info = EngineInfo("sglang", Capture.TOKENS, context, vocabulary(path), details)
        self._answer = await self._probe()

    async def _either(self, path: str, newer: str) -> dict[str, Any]:
        """The answer of a route that later versions call otherwise."""
        try:
            return decoded(await self._get(path), self.url + path)
        except Refused as error:
            if error.status != 404:
                raise
        return decoded(await self._get(newer), self.url + newer)

    def _note_label(self, told: object) -> None:
        """The server's weights, as it starts: a number is a version, any other word is what they are called for now."""
        self._label = None if told is None else str(told)
        if self._label is not None and self._label.isdigit():
            self._version = int(self._label)
        elif self._label is not None and self._version:
            # It had been given weights from here, and has forgotten them.
            self._version = 0

    async def _context(self, server: Mapping[str, Any]) -> int:
        if server.get("max_req_input_len"):
            return int(server["max_req_input_len"])
        models = (await self._json("/v1/models")).get("data") or [{}]
        length = int(models[0].get("max_model_len") or 0) - _RESERVED
        if length <= 0:
            raise EngineError(f"{self.url} does not tell its context: is it SGLang?")
        return length

    async def _check_logprobs(self, context: int) -> None:
        """Ask the same twice: differences between logprobs grow as the temperature falls, unless it is not in them."""
        one, half = [await self._top(probe_prompt(context), temperature) for temperature in (1.0, _TEMPERATURE)]
        shared = sorted(one.keys() & half.keys(), key=lambda id: -one[id])
        if len(shared) < 2:
            raise EngineError(f"{self.url} does not tell the logprobs of its likeliest tokens")
        apart = np.array([one[id] - one[shared[0]] for id in shared])
        told = np.array([half[id] - half[shared[0]] for id in shared])
        if np.abs(told - apart).max() <= np.abs(told - apart / _TEMPERATURE).max():
            raise EngineError(
                f"{self.url} reports logprobs from before the temperature, not those of what it samples from: start it "
                "without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )

    async def _top(self, prompt: Ids, temperature: float) -> dict[int, float]:
        """The logprobs of the likeliest ids behind a prompt."""
        answer = await self._generate(wire.body(prompt, 1, temperature) | {"top_logprobs_num": _TOLD})
        with reading(f"{self.url}/generate", answer):
            places = answer["meta_info"].get("output_top_logprobs") or [[]]
            return {token_id(id): float(value) for value, id, *_ in places[0]}

    async def load(self) -> Load:
        try:
            told = (await self._json("/v1/loads"))["loads"]
        except Refused as error:
            if error.status != 404:
                raise
            return wire.older_load(orjson.loads(await self._get("/get_load")), self._capacity)
        return wire.load(told)

    # Turns

    async def _read(self, flight: Flight) -> None:
        request, limit = flight.request, self._limit(flight.request)
        if request.forced is not None:
            temperature = request.temperature or 1.0
            await score(flight, limit, lambda prompt, id: self._score(prompt, id, temperature))
            self.stats.decoded_tokens += len(flight.ids)
            return
        name = self._names[flight] = f"{request.id or 'turn'}-{secrets.token_hex(6)}"
        body = wire.body(request.prompt, limit, request.temperature, request) | {"rid": name, "extra_key": self._salt}
        if self._seeds and request.seed is not None:
            body["sampling_params"]["sampling_seed"] = request.seed % 2**31
        try:
            if self._streams:
                async for event in self._events("/generate", body | {"stream": True}):
                    self._note(flight, event)
            else:
                request.blind()
                self._note(flight, await self._generate(body))
        except asyncio.CancelledError:
            self._later(self._abort(name))
            raise
        finally:
            del self._names[flight]

    @property
    def _salt(self) -> str:
        """Part of the key that the server caches under: no key or value crosses versions, whoever replaces the weights."""
        return f"towline-weights-{self._version}"

    async def _generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return decoded(await self._post("/generate", body, long=True), f"{self.url}/generate")

    def _note(self, flight: Flight, event: Mapping[str, Any]) -> None:
        """What an answer tells of the turn."""
        meta = event.get("meta_info")
        if not isinstance(meta, Mapping):
            raise BadAnswer(f"{self.url}/generate answered without meta_info: is it SGLang? It begins: {quote(event)}")
        label = meta.get("weight_version")
        if label is not None and self._label is not None and str(label) != self._label:
            raise EngineGone(f"{self.url} has the weights {label!r} in place of {self._label!r}: it was started again")
        with reading(f"{self.url}/generate", event):
            fresh = wire.read(meta, flight)
        self.stats.decoded_tokens += fresh
        flight.request.beat(fresh)

    async def _score(self, prompt: Ids, id: int, temperature: float) -> tuple[float, dict[str, object]]:
        """The logprob of `id` behind `prompt`."""
        asked = {"token_ids_logprob": [id], "extra_key": self._salt}
        answer = await self._generate(wire.body(prompt, 1, temperature) | asked)
        with reading(f"{self.url}/generate", answer):
            meta = answer["meta_info"]
            ((value, *_),) = meta["output_token_ids_logprobs"][0]
            details = {"cached_tokens": meta.get("cached_tokens") or 0}
            return logprob(value), {"prompt_tokens": meta["prompt_tokens"], "prompt_tokens_details": details}

    # Ending turns

    async def _give_up(self, flights: Iterable[Flight]) -> None:
        """Abort turns and wait for what they have; those that do not come back are cut off."""
        flights = [flight for flight in flights if flight.task is not None]
        loop = asyncio.get_running_loop()
        until = loop.time() + _LANDING
        flying = {flight.task for flight in flights if flight.task is not None}
        while flying and loop.time() < until:
            names = [self._names[flight] for flight in flights if flight in self._names]
            await asyncio.gather(*map(self._abort, names))
            _, flying = await asyncio.wait(flying, timeout=_AGAIN)
        await super()._give_up(flights)

    async def _abort(self, name: str) -> None:
        with contextlib.suppress(EngineError):  # A server that is gone runs nothing.
            await self._post("/abort_request", {"rid": name})

    def _later(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(call)
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        await self._give_up(list(self._flights))
        if self._aborts:
            await asyncio.wait(list(self._aborts))
        await super().close()

    # Weights

    async def resume(self, version: int | None = None) -> None:
        if version is not None and self._label is not None and str(version) != self._label:
            # They came there by another way: from here on their label is this version.
            await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
            self._label = str(version)
        await super().resume(version)

    async def _stop(self, mode: PauseMode, deadline: float | None) -> None:
        await super()._stop(mode, deadline)
        if self._aborts:
            await asyncio.wait(list(self._aborts))

    async def _vet(self, folder: Path) -> None:
        await asyncio.to_thread(Pushed.of, folder)

    async def _push(self, folder: Path, version: int) -> None:
        """Load from a folder that the server sees under the same path, and check what it then says."""
        pushed = await asyncio.to_thread(Pushed.of, folder)
        body = {
            "model_path": str(pushed.folder),
            "weight_version": str(version),
            "abort_all_requests": True,
            "flush_cache": True,
        }
        await self._post("/pause_generation", {"mode": "abort"}, long=True)
        try:
            done = decoded(await self._post("/update_weights_from_disk", body, long=True), self.url)
        finally:
            with contextlib.suppress(EngineError):  # Whatever went wrong before is what is told.
                await self._post("/continue_generation", {})
        if not done.get("success"):
            raise EngineError(f"{self.url} did not take the weights of {folder}: {done.get('message')}")
        label = (await self._either("/get_model_info", "/model_info")).get("weight_version")
        if label is not None and str(label) != str(version):
            raise EngineError(f"{self.url} took the weights of version {version} but calls them {label!r}")
        self._label = None if label is None else str(label)
        after = await self._probe()
        proof = await asyncio.to_thread(
            check,
            self.url,
            pushed,
            self._answer,
            after,
            last=self._pushed,
            arithmetic=Arithmetic(self._exact, cpu=False),
        )
        self._pushed, self._answer = pushed, after
        self.info.details["weights_proven_by"] = proof.value

    async def _probe(self) -> Probe:
        """A greedy answer to a fixed prompt."""
        prompt = probe_prompt(self.info.context, seed=1)
        flight = Flight(SampleRequest(prompt, _PROBED, temperature=0.0), 0)
        self._note(flight, await self._generate(wire.body(prompt, _PROBED, 0.0)))
        ids, logprobs = np.array(flight.ids, np.int32), np.array(flight.logprobs, np.float32)
        return Probe(prompt, ids, logprobs, flight.cached_tokens)

    async def _json(self, path: str) -> dict[str, Any]:
        return decoded(await self._get(path), self.url + path)
