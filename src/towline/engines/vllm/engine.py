"""A vLLM server as the engine.

What the server can do is found by asking it: the route that ids go in by, whether logprobs are those of the sampling
distribution (it is refused otherwise), whether it has a prefix cache, and whether it lets its weights be replaced, which
it does when it was started with `VLLM_SERVER_DEV_MODE=1`.

Invariant: a request names the weight version in its cache salt, so that no token is computed on keys and values of
another version, and an update counts only once the server's logprobs are those of the pushed weights. A server that was
given a version and names its weights by a word again has been started anew: it counts as gone, and what it sampled so is
not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np

from towline.conversation import Finish, Media
from towline.engines.base import Capture, EngineGone, EngineInfo, Ids, Load, PauseMode, SampleRequest
from towline.engines.refusals import Refused
from towline.engines.remote import Flight, RemoteEngine, decoded
from towline.engines.validation import logprob, reading
from towline.engines.vllm import media as images
from towline.engines.vllm import probing, scoring, wire
from towline.engines.vllm.wire import Route
from towline.engines.weight_check import Arithmetic, Probe, Pushed, check
from towline.errors import BadRequest, EngineError
from towline.images import Placeholder

DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
_PROBED = 16
"""Tokens that are compared after an update."""
_CLEARINGS = 20
_UNPROVEN = "unproven"
"""The label of weights that did not pass the check."""
_ABSENT = frozenset({403, 404, 405})
"""Statuses of routes that a server has not, or has switched off."""


class VllmEngine(RemoteEngine):
    def __init__(
        self, url: str, *, model: str = "", api_key: str = "", timeout: float = 3600.0, patience: float = 60.0
    ):
        """`model`: the name that the server serves it under; by default the first it has."""
        super().__init__(url, api_key=api_key, timeout=timeout, patience=patience)
        self._model = model
        self._route = Route.GENERATE
        self._steerable = False
        """Whether the server can be paused and given weights."""
        self._label = ""
        """What the server calls its weights, as far as is known: a version, or a word of its own."""
        self._sees: bool | None = None
        """Whether its model can be shown images; None until somebody wants to know."""
        self._arithmetic: Arithmetic | None = None
        self._pushed: Pushed | None = None
        self._answer: Probe | None = None
        """To the probe, by the weights in use."""

    async def start(self) -> None:
        version = (await self._json("/version")).get("version", "unknown")
        served = await self._served()
        context = int(served.get("max_model_len") or 0)
        if context <= 0:
            raise EngineError(f"{self.url} does not tell the context of {self._model!r}: is it vLLM?")
        self._sees = self._arithmetic = None
        await self._look_around()
        prompt = probing.probe_prompt(context)
        first = await self._choose_route(prompt)
        hits = await self._cache_hits()
        second = await self._one(prompt, probing.TEMPERATURE, logprobs=probing.ASKED)
        with reading(self.url + self._route, [first, second]):
            probing.check_logprobs(self.url, wire.top(self._route, first), wire.top(self._route, second))
            told = wire.cached(second.get("usage") or {})
        details = {
            "server": f"vllm {version}",
            "url": self.url,
            "model": self._model,
            "route": self._route.value,
            "logprobs": "processed",
            "prefix_caching": await self._prefix_caching(told, hits),
            "cached_tokens": "not told (--enable-prompt-tokens-details)" if told is None else "told",
            "weight_updates": "yes" if self._steerable else f"no ({DEV_MODE})",
        }
        size = probing.vocabulary(str(served.get("root") or ""))
        self._info = EngineInfo("vllm", Capture.TOKENS, context, size, details)
        self._answer = await self._probe(self._salt)

    async def _served(self) -> dict[str, Any]:
        """The entry of the model among those that the server has."""
        models = (await self._json("/v1/models")).get("data") or []
        names = [str(model.get("id")) for model in models]
        if not names or (self._model and self._model not in names):
            raise EngineError(f"{self.url} does not serve {self._model!r}; it has: {', '.join(names) or 'no model'}")
        self._model = self._model or names[0]
        return dict(models[names.index(self._model)])

    async def _look_around(self) -> None:
        """Whether the server can be steered, and the version of its weights: 0 before the first update."""
        self._steerable, self._label = False, ""
        try:
            paused = (await self._json("/is_paused")).get("is_paused")
            label = str((await self._json("/weight_info")).get("weight_version"))
        except Refused as error:
            if error.status not in _ABSENT:
                raise
            return
        if paused:
            raise EngineError(
                f"{self.url} is paused, perhaps by a weight update that did not end: if its weights are right, "
                f"POST {self.url}/resume, else start it again"
            )
        self._steerable = True
        self._label = label
        self._version = int(label) if label.isdigit() else 0

    async def _choose_route(self, prompt: Ids) -> dict[str, Any]:
        """The first answer, by the better route if the server has it."""
        self._route = Route.GENERATE
        try:
            return await self._one(prompt, 1.0, logprobs=probing.ASKED)
        except Refused as error:
            if error.status not in _ABSENT:
                raise
        self._route = Route.COMPLETIONS
        return await self._one(prompt, 1.0, logprobs=probing.ASKED)

    async def _one(self, prompt: Ids, temperature: float, **params: Any) -> dict[str, Any]:
        """One token, with what else is asked for."""
        body = wire.one(self._route, self._model, prompt, wire.distribution(temperature) | params, self._salt)
        return decoded(await self._post(self._route, body, long=True), self.url + self._route)

    @property
    def _salt(self) -> str:
        return f"towline-weights-{self._version}"

    async def _prefix_caching(self, told: int | None, hits: float | None) -> str:
        if told is not None:
            return "on" if told else "off"
        after = await self._cache_hits()
        return "unknown" if hits is None or after is None else "on" if after > hits else "off"

    async def _cache_hits(self) -> float | None:
        try:
            return probing.metric((await self._get("/metrics")).decode(), "vllm:prefix_cache_hits_total")
        except Refused:
            return None

    async def load(self) -> Load:
        return probing.load((await self._get("/metrics")).decode())

    async def _read(self, flight: Flight) -> None:
        request, limit = flight.request, self._limit(flight.request)
        if request.forced is not None:
            await scoring.score(flight, limit, lambda prompt, id: self._score(prompt, id, request.temperature or 1.0))
            self.stats.decoded_tokens += len(flight.ids)
            return
        body = wire.turn(self._route, self._model, request, limit, self._salt)
        unseen = bool(request.media)
        async for event in self._events(self._route, body | images.shown(request) if unseen else body):
            with reading(self.url + self._route, event):
                unseen = unseen and not images.check(event, request)
                self._recognise(event, flight)
                fresh = wire.read(self._route, event, flight)
            self.stats.decoded_tokens += fresh
            request.beat(fresh)
        if unseen and flight.finish is not Finish.ABORT:
            raise EngineError(f"{self.url} does not tell what its model was shown")
        if flight.versions:
            self._version = flight.versions[-1]
            self._label = str(self._version)

    def _recognise(self, event: Mapping[str, Any], flight: Flight) -> None:
        """Refuse a turn of a server that has lost the weights which it was given."""
        words = [label for label in wire.labels(event) if not label.isdigit()]
        if words and self._label.isdigit():
            flight.ids.clear()
            flight.logprobs.clear()
            raise EngineGone(f"{self.url} has the weights {words[0]!r} in place of {self._label}: it was started again")

    async def render_media(self, media: Sequence[Media]) -> Sequence[Placeholder | None]:
        if self._sees is None:
            try:
                self._sees = await self._render(images.PROBE) is not None
            except (BadRequest, Refused):
                self._sees = False
        return await asyncio.gather(*(self._render(one) for one in media)) if self._sees else [None] * len(media)

    async def _render(self, media: Media) -> Placeholder | None:
        if media.kind != "image":
            return None
        try:
            data = await self._post(images.RENDER, images.question(self._model, media), long=True)
        except Refused as error:
            if error.status != 400:
                raise
            raise BadRequest(f"an image cannot be shown to the model: {error}") from error
        answer = decoded(data, self.url + images.RENDER)
        with reading(self.url + images.RENDER, answer):
            return images.placeholder(answer)

    async def _score(self, prompt: Ids, id: int, temperature: float) -> tuple[float, dict[str, Any]]:
        """The logprob of `id` behind `prompt`."""
        # As many are told as were asked for, and the sampled one is first: with two, the first asked for is among them.
        asked = [id, 0 if id else 1]
        answer = await self._one(prompt, temperature, logprobs=2, logprob_token_ids=asked)
        with reading(self.url + self._route, answer):
            found = wire.top(self._route, answer)
            if id not in found:
                raise EngineError(f"{self.url} does not tell the logprob of an id that it did not sample")
            return logprob(found[id]), dict(answer["usage"])

    async def _stop(self, mode: PauseMode, deadline: float | None) -> None:
        await super()._stop(mode, deadline)
        if self._steerable:
            # Nothing of ours is there any more. The cache stays: it is salted by version.
            await self._post("/pause?" + urlencode({"mode": "abort", "clear_cache": "false"}), long=True)

    async def resume(self, version: int | None = None) -> None:
        if self._steerable:
            if version is not None:
                await self._post("/update_weight_version", {"new_version": str(version)})
                self._label = str(version)
            await self._post("/resume")
        await super().resume(version)

    async def _vet(self, folder: Path) -> None:
        if not self._steerable:
            raise EngineError(f"{self.url} does not let its weights be replaced: start it with {DEV_MODE}")
        await asyncio.to_thread(Pushed.of, folder)

    async def _push(self, folder: Path, version: int) -> None:
        """Reload from a folder that the server sees under the same path, clear its cache, and check what it then says."""
        pushed = await asyncio.to_thread(Pushed.of, folder)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(pushed.folder)}}
        await self._post("/collective_rpc", reload, long=True)
        await self._clear_cache()
        await self._post("/update_weight_version", {"new_version": str(version)})
        await self._post("/resume")
        try:
            after = await self._probe(f"towline-weights-{version}")
            proof = await asyncio.to_thread(
                check, self.url, pushed, self._answer, after, last=self._pushed, arithmetic=await self._computes()
            )
        except EngineError:
            await self._post("/pause", long=True)
            await self._post("/update_weight_version", {"new_version": _UNPROVEN})
            self._label = _UNPROVEN
            raise
        self._label = str(version)
        self._pushed, self._answer = pushed, after
        self.info.details["weights_proven_by"] = proof.value
        if self._held:
            await self._post("/pause?" + urlencode({"mode": "abort", "clear_cache": "false"}), long=True)

    async def _computes(self) -> Arithmetic:
        """How the server computes. It is asked late and once: it looks through its whole machine for the answer."""
        if self._arithmetic is None:
            data = await self._get("/server_info?config_format=json", long=True)
            config = decoded(data, self.url).get("vllm_config") or {}
            dtype = str((config.get("model_config") or {}).get("dtype"))
            device = str((config.get("device_config") or {}).get("device"))
            self._arithmetic = Arithmetic(exact="float32" in dtype, cpu=device == "cpu")
        return self._arithmetic

    async def _clear_cache(self) -> None:
        """The cache is cleared once no block is held, which may be a moment after the last turn was aborted."""
        for _ in range(_CLEARINGS):
            if decoded(await self._post("/reset_prefix_cache"), self.url).get("success"):
                return
            await asyncio.sleep(0.1)
        raise EngineError(f"{self.url} does not clear its prefix cache: something still runs on it")

    async def _probe(self, salt: str) -> Probe:
        """A greedy answer to a fixed prompt. The salt is that of a version, as for any turn."""
        prompt = probing.probe_prompt(self.info.context, seed=1)
        request = SampleRequest(prompt, _PROBED, temperature=0.0)
        flight = Flight(request, 0)
        async for event in self._events(
            self._route, wire.turn(self._route, self._model, request, self._limit(request), salt)
        ):
            with reading(self.url + self._route, event):
                wire.read(self._route, event, flight)
        ids, logprobs = np.array(flight.ids, np.int32), np.array(flight.logprobs, np.float32)
        return Probe(prompt, ids, logprobs, flight.cached_tokens)

    async def _json(self, path: str) -> dict[str, Any]:
        return decoded(await self._get(path), self.url + path)
