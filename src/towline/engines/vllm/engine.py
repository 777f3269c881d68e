"""A vLLM server as the engine.

What the server can do is found by asking it: the route that takes ids, whether logprobs are those of the sampling
distribution (it is refused otherwise), whether it has a prefix cache, and whether its weights can be replaced, which needs
`VLLM_SERVER_DEV_MODE=1`.

Invariant: a request carries the policy version in its cache salt, so that no token is computed from keys and values of
another version, and an update from here counts only once the server's logprobs are those of the pushed weights. Weights that
a trainer pushes are followed by their labels (`labelled.py`), and what a trainer has paused is not resumed from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np

from towline.common.images import ImagePlaceholder
from towline.conversation import Finish, Media
from towline.engines import server_checks
from towline.engines.base import CaptureLevel, EngineInfo, EngineLoad, EngineUnreachable, Ids, PauseMode, SampleRequest
from towline.engines.labelled import LabelledEngine
from towline.engines.remote import ActiveTurn, HttpStatusError, parse_json
from towline.engines.server_checks import ProbeAnswer, PushedWeights, ServerPrecision, check_update
from towline.engines.validation import logprob, parsing, token_count
from towline.engines.vllm import wire
from towline.engines.vllm.wire import VllmRoute
from towline.errors import BadRequest, EngineError

DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
_PROBE_TOKENS = 16
"""Tokens that are compared after a weight update."""
_CACHE_RESETS = 20
_UNPROVEN = "unproven"
"""The label of weights that did not pass the check."""
_ABSENT = frozenset({403, 404, 405})
"""Statuses of routes that a server lacks or has disabled."""
_BY_TRAINER = "paused by its trainer"


class VllmEngine(LabelledEngine):
    def __init__(
        self, url: str, *, model: str = "", api_key: str = "", timeout: float = 3600.0, patience: float = 60.0
    ):
        """`model`: the served model name; default: the first one the server lists."""
        super().__init__(url, api_key=api_key, timeout=timeout, patience=patience)
        self._model = model
        self._route = VllmRoute.GENERATE
        self._dev_mode = False
        """Whether the server can be paused and given weights."""
        self._server_paused = False
        """Whether it was paused from here, and not resumed since."""
        self._vision: bool | None = None
        """Whether its model accepts images; None until first needed."""
        self._precision: ServerPrecision | None = None
        self._pushed: PushedWeights | None = None

    async def start(self) -> None:
        version = (await self._json("/version")).get("version", "unknown")
        served = await self._served()
        context = int(served.get("max_model_len") or 0)
        if context <= 0:
            raise EngineError(f"{self.url} does not report the context of {self._model!r}: is it vLLM?")
        self._vision = self._precision = None
        await self._read_weight_label()
        prompt = server_checks.probe_prompt(context)
        first = await self._choose_route(prompt)
        hits = await self._cache_hits()
        second = await self._one(prompt, server_checks.TEMPERATURE, logprobs=server_checks.TOP_LOGPROBS)
        with parsing(self.url + self._route, [first, second]):
            server_checks.check_logprobs(
                self.url, wire.top_logprobs(self._route, first), wire.top_logprobs(self._route, second)
            )
            cached = wire.cached_tokens(second.get("usage") or {})
        details = {
            "server": f"vllm {version}",
            "url": self.url,
            "model": self._model,
            "route": self._route.value,
            "logprobs": "processed",
            "prefix_caching": await self._prefix_caching(cached, hits),
            "cached_tokens": "not reported (--enable-prompt-tokens-details)" if cached is None else "reported",
            "weight_updates": "yes" if self._dev_mode else f"no ({DEV_MODE})",
            "weight_label": self._labels.current if self._dev_mode and self._labels.current else "not reported",
        }
        size = server_checks.vocabulary(str(served.get("root") or ""))
        self._info = EngineInfo("vllm", CaptureLevel.TOKENS, context, size, details)
        self._probe_answer = await self._probe(self._salt)

    async def _served(self) -> dict[str, Any]:
        """The entry of the model in the server's list."""
        models = (await self._json("/v1/models")).get("data") or []
        names = [str(model.get("id")) for model in models]
        if not names or (self._model and self._model not in names):
            raise EngineError(f"{self.url} does not serve {self._model!r}; it has: {', '.join(names) or 'no model'}")
        self._model = self._model or names[0]
        return dict(models[names.index(self._model)])

    async def _read_weight_label(self) -> None:
        """Find out whether the server is in dev mode, and the version of its weights: 0 before the first update."""
        self._dev_mode = False
        label = None
        try:
            paused = await self._is_paused()
            label = await self._weight_info()
        except HttpStatusError as error:
            if error.status not in _ABSENT:
                raise
            return
        self._dev_mode = True
        if paused:
            raise EngineUnreachable(
                f"{self.url} is paused, by its trainer or an interrupted weight update: it is used once it is resumed; if "
                f"nothing else resumes it and its weights are right, POST {self.url}/resume, else restart it"
            )
        self._note_start(label)

    async def _is_paused(self) -> bool:
        return bool((await self._json("/is_paused")).get("is_paused"))

    async def _weight_info(self) -> str:
        return str((await self._json("/weight_info")).get("weight_version"))

    async def _read_label(self) -> str | None:
        return await self._weight_info() if self._dev_mode else None

    async def _write_label(self, version: int) -> None:
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def healthy(self) -> bool:
        """Whether `/health` answers. While its trainer has it paused, turns on it do not count as stalled."""
        if not await super().healthy():
            return False
        if self._dev_mode:
            try:
                paused = await self._is_paused()
            except EngineError:
                return False
            (self.pauses.add if paused and not self._server_paused else self.pauses.remove)(_BY_TRAINER)
        return True

    async def _choose_route(self, prompt: Ids) -> dict[str, Any]:
        """The first response, from the better route if the server has it."""
        self._route = VllmRoute.GENERATE
        try:
            return await self._one(prompt, 1.0, logprobs=server_checks.TOP_LOGPROBS)
        except HttpStatusError as error:
            if error.status not in _ABSENT:
                raise
        self._route = VllmRoute.COMPLETIONS
        return await self._one(prompt, 1.0, logprobs=server_checks.TOP_LOGPROBS)

    async def _one(self, prompt: Ids, temperature: float, **params: Any) -> dict[str, Any]:
        """One token, with the given parameters."""
        body = wire.single_token_body(
            self._route, self._model, prompt, wire.sampling_params(temperature) | params, self._salt
        )
        return parse_json(await self._post(self._route, body, long=True), self.url + self._route)

    async def _prefix_caching(self, cached: int | None, hits: float | None) -> str:
        if cached is not None:
            return "on" if cached else "off"
        after = await self._cache_hits()
        return "unknown" if hits is None or after is None else "on" if after > hits else "off"

    async def _cache_hits(self) -> float | None:
        try:
            return wire.sum_metric((await self._get("/metrics")).decode(), "vllm:prefix_cache_hits_total")
        except HttpStatusError:
            return None

    async def load(self) -> EngineLoad:
        return wire.parse_load((await self._get("/metrics")).decode())

    async def _read(self, turn: ActiveTurn) -> None:
        request, limit = turn.request, self._token_limit(turn.request)
        if request.forced is not None:
            await server_checks.score(
                turn, limit, lambda prompt, id: self._score(prompt, id, request.temperature or 1.0)
            )
            self.stats.decoded_tokens += len(turn.ids)
            return
        body = wire.turn_body(self._route, self._model, request, limit, self._salt)
        unchecked = bool(request.media)
        async for event in self._stream(self._route, body | wire.image_fields(request) if unchecked else body):
            with parsing(self.url + self._route, event):
                unchecked = unchecked and not wire.check_rendered_prompt(event, request)
                fresh = wire.read_event(self._route, event, turn)
                await self._stamp(turn, fresh, None, wire.weight_spans(event), streamed=True)
            self.stats.decoded_tokens += fresh
            request.tokens_arrived(fresh)
        if unchecked and turn.finish is not Finish.ABORT:
            raise EngineError(f"{self.url} does not report the prompt that its model saw")

    async def render_media(self, media: Sequence[Media]) -> Sequence[ImagePlaceholder | None]:
        if self._vision is None:
            try:
                self._vision = await self._render(wire.PROBE_IMAGE) is not None
            except (BadRequest, HttpStatusError):
                self._vision = False
        return await asyncio.gather(*(self._render(one) for one in media)) if self._vision else [None] * len(media)

    async def _render(self, media: Media) -> ImagePlaceholder | None:
        if media.kind != "image":
            return None
        try:
            data = await self._post(wire.RENDER, wire.image_render_body(self._model, media), long=True)
        except HttpStatusError as error:
            if error.status != 400:
                raise
            raise BadRequest(f"an image cannot be shown to the model: {error}") from error
        answer = parse_json(data, self.url + wire.RENDER)
        with parsing(self.url + wire.RENDER, answer):
            return wire.image_placeholder(answer)

    async def _score(self, prompt: Ids, id: int, temperature: float) -> tuple[float, int, int]:
        """The logprob of `id` after `prompt`, with how many prompt tokens were counted and cached."""
        # As many are returned as requested, the sampled one first: with two, the first requested one is among them.
        wanted = [id, 0 if id else 1]
        answer = await self._one(prompt, temperature, logprobs=2, logprob_token_ids=wanted)
        with parsing(self.url + self._route, answer):
            found = wire.top_logprobs(self._route, answer)
            if id not in found:
                raise EngineError(f"{self.url} does not report the logprob of an id that it did not sample")
            usage = answer["usage"]
            count = token_count(usage["prompt_tokens"], "prompt_tokens")
            return logprob(found[id]), count, wire.cached_tokens(usage) or 0

    async def _stop(self, mode: PauseMode, deadline: float | None) -> None:
        await super()._stop(mode, deadline)
        if self._dev_mode:
            # None of our turns is left there. The cache stays: it is salted by version.
            await self._pause_server()

    async def _pause_server(self) -> None:
        await self._post("/pause?" + urlencode({"mode": "abort", "clear_cache": "false"}), long=True)
        self._server_paused = True

    async def _resume_server(self) -> None:
        """Undo our own pause; one of the trainer's is left alone."""
        if self._server_paused:
            await self._post("/resume")
            self._server_paused = False

    async def resume(self, version: int | None = None) -> None:
        if self._dev_mode:
            if version is not None:
                await self._write_label(version)
                self._labels.note(str(version), version)
            await self._resume_server()
        await super().resume(version)

    async def _validate_weights(self, folder: Path) -> None:
        if not self._dev_mode:
            raise EngineError(f"{self.url} does not allow weight updates: start it with {DEV_MODE}")
        await asyncio.to_thread(PushedWeights.of, folder)

    async def _load_weights(self, folder: Path, version: int) -> None:
        """Reload from a folder that the server sees under the same path, clear its cache, and check its logprobs."""
        pushed = await asyncio.to_thread(PushedWeights.of, folder)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(pushed.folder)}}
        await self._post("/collective_rpc", reload, long=True)
        await self._clear_cache()
        await self._write_label(version)
        await self._resume_server()
        try:
            after = await self._probe(f"towline-weights-{version}")
            proof = await asyncio.to_thread(
                check_update,
                self.url,
                pushed,
                self._probe_answer,
                after,
                last=self._pushed,
                precision=await self._server_precision(),
            )
        except EngineError:
            await self._pause_server()
            await self._post("/update_weight_version", {"new_version": _UNPROVEN})
            self._foreign.add(_UNPROVEN)
            raise
        self._labels.note(str(version), version)
        self._pushed, self._probe_answer = pushed, after
        self.info.details["weights_proven_by"] = proof.value
        if self._paused_by_caller:
            await self._pause_server()

    async def _server_precision(self) -> ServerPrecision:
        """How the server computes. Asked late and once: the server inspects its whole machine for the answer."""
        if self._precision is None:
            data = await self._get("/server_info?config_format=json", long=True)
            config = parse_json(data, self.url).get("vllm_config") or {}
            dtype = str((config.get("model_config") or {}).get("dtype"))
            device = str((config.get("device_config") or {}).get("device"))
            self._precision = ServerPrecision(exact="float32" in dtype, cpu=device == "cpu")
        return self._precision

    async def _clear_cache(self) -> None:
        """The cache can be cleared once no block is in use, which may be a moment after the last turn was aborted."""
        for _ in range(_CACHE_RESETS):
            if parse_json(await self._post("/reset_prefix_cache"), self.url).get("success"):
                return
            await asyncio.sleep(0.1)
        raise EngineError(f"{self.url} does not clear its prefix cache: other requests still run on it")

    async def _probe(self, salt: str) -> ProbeAnswer:
        prompt = server_checks.probe_prompt(self.info.context, seed=1)
        request = SampleRequest(prompt, _PROBE_TOKENS, temperature=0.0)
        turn = ActiveTurn(request, 0)
        async for event in self._stream(
            self._route, wire.turn_body(self._route, self._model, request, self._token_limit(request), salt)
        ):
            with parsing(self.url + self._route, event):
                wire.read_event(self._route, event, turn)
        ids, logprobs = np.array(turn.ids, np.int32), np.array(turn.logprobs, np.float32)
        return ProbeAnswer(prompt, ids, logprobs, turn.cached_tokens)
