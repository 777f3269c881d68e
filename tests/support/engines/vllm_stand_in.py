"""A stand-in for a vLLM server: the protocol of version 0.32.0 as observed, over a tiny decoder in this process.

It is no vLLM. It computes real logprobs, one sequence at a time, and can be told to misbehave in the ways that a real
server does. `tests/e2e/engines` runs the same engine against the real program, and compares the answers' fields with these.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web

from towline.engines.embedded import load_decoder

BLOCK = 16
PAD, WIDTH = 90, 4
_SAMPLING = ("/v1/completions", "/inference/v1/generate", "/v1/chat/completions/render")


@dataclass
class VllmStandIn:
    """One server. The switches are the command line and the environment of the real one, and its defects."""

    folder: Path
    scale_out: bool = True
    dev_mode: bool = True
    logprobs_mode: str = "processed_logprobs"
    prompt_details: bool = True
    prefix_caching: bool = True
    context: int = 256
    dtype: str = "torch.float32"
    device: str = "cpu"
    metrics: bool = True
    sees: bool = False
    """The model takes images: each `PAD` of a prompt becomes `WIDTH` of them."""

    stale: str = ""
    """What a reload leaves as it was: `head`, or `all`."""
    deaf: bool = False
    """The prefix cache cannot be cleared."""
    cut_after: int | None = None
    """The connection is cut after so many tokens of a stream, and the server is dead from then on."""
    broken: bool = False
    """Every turn fails with status 500."""
    dead: bool = False
    gate: asyncio.Event | None = None
    """Streams wait here after their third token."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    left: int = 0
    """Streams whose client disconnected."""
    running: int = 0
    paused: bool = False
    label: str = "default"
    calls: list[str] = field(default_factory=list)
    """The control routes, in the order they were called."""
    hits: int = 0
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)
    _aborts: asyncio.Event = field(default_factory=asyncio.Event)
    _seen: dict[str, list[list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.decoder = load_decoder(self.folder)
        self.head = self.decoder.head.detach().clone()
        self._resumed.set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26, middlewares=[self._alive])
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/chat/completions/render", self._render)
        if self.metrics:
            app.router.add_get("/metrics", self._metrics)
        if self.dev_mode:
            app.router.add_get("/is_paused", self._is_paused)
            app.router.add_get("/weight_info", self._weight_info)
            app.router.add_get("/server_info", self._server_info)
            for path, handler in {
                "/pause": self._pause,
                "/resume": self._resume,
                "/collective_rpc": self._rpc,
                "/reset_prefix_cache": self._reset,
                "/update_weight_version": self._relabel,
            }.items():
                app.router.add_post(path, handler)
        return app

    @web.middleware
    async def _alive(self, request: web.Request, handler: Any) -> Any:
        if self.dead and request.transport is not None:
            request.transport.abort()
        if request.method == "POST" and request.path not in _SAMPLING:
            self.calls.append(request.path.strip("/"))
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.broken else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": "0.32.0"})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return _json({"is_paused": self.paused})

    async def _weight_info(self, _: web.Request) -> web.Response:
        return _json({"weight_version": self.label})

    async def _models(self, _: web.Request) -> web.Response:
        entry = {"id": "tiny", "object": "model", "root": str(self.folder), "max_model_len": self.context}
        return _json({"object": "list", "data": [entry]})

    async def _server_info(self, _: web.Request) -> web.Response:
        config = {"model_config": {"dtype": self.dtype}, "device_config": {"device": self.device}}
        return _json({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    async def _metrics(self, _: web.Request) -> web.Response:
        labels = '{engine="0",model_name="tiny"}'
        lines = [
            f"vllm:num_requests_running{labels} {float(self.running)}",
            f"vllm:num_requests_waiting{labels} 0.0",
            'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 0.0',
            f"vllm:kv_cache_usage_perc{labels} {0.25 * self.running}",
            f"vllm:prefix_cache_hits_total{labels} {float(self.hits)}",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _pause(self, _: web.Request) -> web.Response:
        self.paused = True
        self._resumed.clear()
        self._aborts.set()
        self._aborts = asyncio.Event()
        return _json({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self.paused = False
        self._resumed.set()
        return _json({"status": "resumed"})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["method"] == "reload_weights", body
        assert self.paused, "weights are replaced while nothing runs"
        folder = Path(body["kwargs"]["weights_path"])
        if self.stale != "all":
            self.decoder = load_decoder(folder)
            if self.stale != "head":
                self.head = self.decoder.head.detach().clone()
        return _json({"results": [None]})

    async def _reset(self, _: web.Request) -> web.Response:
        if not self.deaf:
            self._seen.clear()
        return _json({"success": not self.deaf})

    async def _relabel(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return _json({"success": True, "new_version": self.label})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not self.scale_out:
            return _error(403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out.")
        body = await request.json()
        ids = _expanded(body["token_ids"]) if body.get("content_parts") else body["token_ids"]
        return await self._answer(request, body, ids, body["sampling_params"], generate=True)

    async def _render(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        url = body["messages"][0]["content"][0]["image_url"]["url"]
        if not self.sees:
            return _error(400, "tiny is not a multimodal model")
        if not url.startswith("data:image/png;base64,iVBOR"):
            return _error(400, "cannot identify image file")
        ids = _expanded([1, PAD, 2])
        features = {"mm_hashes": {"image": [f"hash of {url[-8:]}"]}, "mm_placeholders": {"image": _places(ids)}}
        return _json({"token_ids": ids, "features": features})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(request, body, body["prompt"], body, generate=False)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], ids: list[int], params: dict[str, Any], *, generate: bool
    ) -> web.StreamResponse:
        self.bodies.append(body)
        if self.broken:
            return _error(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
        if body.get("model") != "tiny":
            return _error(404, f"The model `{body.get('model')}` does not exist. Valid aliases: tiny.")
        if any(id >= self.decoder.config.vocab_size for id in ids):
            return _error(400, f"Token id {max(ids)} is out of vocabulary")
        await self._resumed.wait()
        cached = self._cached(ids, body.get("cache_salt") or "")
        usage: dict[str, Any] = {"prompt_tokens": len(ids), "total_tokens": len(ids), "completion_tokens": 0}
        if self.prompt_details:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        self.running += 1
        try:
            steps = self._steps(ids, params)
            if not body.get("stream"):
                (step,) = [step async for step in steps]
                return _json({"choices": [self._choice(step, params, generate)], "usage": usage})
            told = (
                {"prompt_token_ids": ids, "mm_placeholders": {"image": _places(ids)}} if "content_parts" in body else {}
            )
            return await self._stream(request, steps, params, usage, generate, told)
        finally:
            self.running -= 1

    async def _stream(
        self,
        request: web.Request,
        steps: AsyncIterator[Step],
        params: dict[str, Any],
        usage: Any,
        generate: bool,
        told: Any,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            count = 0
            async for step in steps:
                if self.cut_after is not None and count >= self.cut_after:
                    self.dead = True
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                count += len(step.ids)
                await _send(response, {"usage": None, "choices": [self._choice(step, params, generate)], **told})
                told = {}
            usage |= {"completion_tokens": count, "total_tokens": usage["prompt_tokens"] + count}
            await _send(response, {"choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.left += 1
            raise
        return response

    async def _steps(self, ids: list[int], params: dict[str, Any]) -> AsyncIterator[Step]:
        """Token by token; each with the logprobs of all ids."""
        row, random = list(ids), np.random.default_rng(params.get("seed"))
        aborts, text, limit = self._aborts, "", min(params["max_tokens"], self.context - len(ids))
        for place in range(limit):
            if self.gate is not None and place == 3:
                waits = [asyncio.ensure_future(event.wait()) for event in (self.gate, aborts)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)
            if aborts.is_set():
                yield Step([], [], "abort", None, [(self.label, 0, place)])
                return
            sampled, told = self._draw(row, params, random)
            row.append(sampled)
            text += chr(ord("a") + sampled % 26)
            finish, reason = ("length", None) if place == limit - 1 else (None, None)
            if sampled in (params.get("stop_token_ids") or ()):
                finish, reason = "stop", sampled
            for stop in params.get("stop") or ():
                if stop in text:
                    finish, reason = "stop", stop
            yield Step([sampled], [told], finish, reason, [(self.label, 0, place + 1)] if finish else None)
            if finish:
                return

    def _draw(self, row: list[int], params: dict[str, Any], random: np.random.Generator) -> tuple[int, Any]:
        with torch.inference_mode():
            hidden = self.decoder.hidden(torch.tensor([row]))[0, -1]
            logits = (self.head @ hidden).double().numpy()
        temperature = params["temperature"]
        scaled = logits / (temperature or 1.0)
        processed = scaled - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()
        chances = np.exp(processed)
        sampled = int(random.choice(len(chances), p=chances / chances.sum())) if temperature else int(np.argmax(scaled))
        if self.logprobs_mode == "processed_logprobs":
            return sampled, processed
        if self.logprobs_mode == "raw_logprobs":
            return sampled, logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        return sampled, scaled

    def _choice(self, step: Step, params: dict[str, Any], generate: bool) -> dict[str, Any]:
        told = []
        for id, logprobs in zip(step.ids, step.told, strict=True):
            asked = params.get("logprob_token_ids") or np.argsort(-logprobs)[: params.get("logprobs") or 0].tolist()
            # The sampled one first, then those requested; as many are returned as requested, but at least one.
            listed = list(dict.fromkeys([id, *asked]))[: max(len(asked), 1) if generate else None]
            told.append((id, [(one, float(logprobs[one])) for one in listed], float(logprobs[id])))
        choice: dict[str, Any] = {"index": 0, "finish_reason": step.finish, "stop_reason": step.reason}
        choice["token_ids"] = step.ids
        if generate:
            spans = None if step.spans is None else [{"version": v, "start": s, "end": e} for v, s, e in step.spans]
            content = [
                {
                    "token_id": id,
                    "logprob": logprob,
                    "rank": 1,
                    "top_logprobs": [{"token_id": one, "logprob": value, "rank": 1} for one, value in listed],
                }
                for id, listed, logprob in told
            ]
            return choice | {
                "routed_experts": None,
                "sampling_mask": None,
                "weight_versions": spans,
                "logprobs": {"content": content},
            }
        logprobs = {
            "text_offset": [0] * len(told),
            "token_logprobs": [logprob for _, _, logprob in told],
            "tokens": [f"token_id:{id}" for id, _, _ in told],
            "top_logprobs": [{f"token_id:{one}": value for one, value in listed} for _, listed, _ in told],
        }
        return choice | {"text": "…", "logprobs": logprobs, "prompt_token_ids": None}

    def _cached(self, ids: list[int], salt: str) -> int:
        if not self.prefix_caching:
            return 0
        prompts = self._seen.setdefault(salt, [])
        shared = 0
        for other in prompts:
            size = min(len(ids) - 1, len(other))
            same = np.array(ids[:size]) == np.array(other[:size])
            shared = max(shared, (size if same.all() else int(np.argmin(same))) // BLOCK * BLOCK)
        prompts.append(ids)
        self.hits += shared
        return shared


@dataclass
class Step:
    """What one step of the engine adds."""

    ids: list[int]
    told: list[Any]
    """The logprobs of every id at this position."""
    finish: str | None
    reason: int | str | None
    spans: list[tuple[str, int, int]] | None


def _expanded(ids: list[int]) -> list[int]:
    return [one for id in ids for one in [id] * (WIDTH if id == PAD else 1)]


def _places(ids: list[int]) -> list[dict[str, int]]:
    """Where images stand among expanded ids."""
    starts = [n for n, id in enumerate(ids) if id == PAD and (n == 0 or ids[n - 1] != PAD)]
    return [{"offset": start, "length": WIDTH} for start in starts]


def _json(value: Any) -> web.Response:
    return web.json_response(value)


def _error(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "Error", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@contextlib.asynccontextmanager
async def served(server: VllmStandIn, host: str = "127.0.0.1") -> AsyncIterator[str]:
    # The handlers of disconnected clients are cancelled, as Starlette does.
    runner = web.AppRunner(server.app(), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    try:
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
