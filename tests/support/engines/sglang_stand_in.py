"""A stand-in for an SGLang server: its documented native protocol over the embedded engine.

It is no SGLang, which has no build for CPUs. Routes, fields and their meaning are those of SGLang's documents and of the
source of its release 0.5.23: `/generate` with `input_ids`, unknown fields ignored; `meta_info` with logprobs as `[logprob, id,
text]`, a finish reason with what matched, the label of the weights, and with the last tokens the spans that each label sampled
(`srt/utils/weight_versions.py`); aborts that answer with what there is; pauses in the modes `abort`, `in_place` and `retract`,
during which `/health` answers 503 after its time is up while the scheduler answers `/v1/loads` (`entrypoints/http_server.py`); and
weights from disk, or from the trainer's own transport (`push`). It can be told to misbehave in the ways that a real server does.

Run as a program (`python sglang_stand_in.py FOLDER PORT [incremental]`) it serves a model folder until it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web

from towline.conversation import Finish
from towline.engines.base import Sample, SampleRequest
from towline.engines.embedded import EmbeddedEngine, load_decoder

SAMPLING = {
    *("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "n"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "skip_special_tokens"),
    *("spaces_between_special_tokens", "no_stop_trim", "sampling_seed", "custom_params"),
}
GENERATE = {
    *("text", "input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num"),
    *("token_ids_logprob", "return_text_in_logprobs", "stream", "extra_key"),
}
"""The arguments that it knows; others are ignored, as the real one does, and noted in `unknown`."""


@dataclass
class SglangStandIn:
    folder: Path
    context: int = 512
    chunk: int = 4
    """Tokens between two checks for aborts."""
    pace: float = 0.0
    """Seconds per chunk."""
    decode: Callable[[Sequence[int]], str] = lambda ids: "".join(chr(ord("a") + id % 26) for id in ids)
    api_key: str = ""
    incremental: bool = False
    """`--incremental-streaming-output`"""
    radix: bool = True
    original_logprobs: bool = False
    """`SGLANG_RETURN_ORIGINAL_LOGPROB`"""
    older: bool = False
    """Without `/v1/loads`, with the routes that begin with `get_` only."""
    tells_label: bool = True
    tells_spans: bool = True
    """Whether finished turns carry `weight_versions`; older releases do not."""
    unknown: set[str] = field(default_factory=set)
    """Arguments that it was given and does not know."""

    forgets_update: bool = False
    """Reports success without loading the weights."""
    deaf: bool = False
    """Ignores aborts."""
    cut_after: int | None = None
    """The connection is cut after so many tokens, and the server is dead from then on."""
    status: int = 200
    dead: bool = False

    label: str = "default"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    running: dict[str, bool] = field(default_factory=dict)
    """The turns in flight, by name; whether each is aborted."""
    sampled: dict[str, int] = field(default_factory=dict)
    """How many tokens each turn has, by name."""
    keys: set[str | None] = field(default_factory=set)
    """The extra keys that anything is cached under."""

    def __post_init__(self) -> None:
        self.engine = EmbeddedEngine(self.folder, context=self.context, max_batch=64, threads=1)
        self.decoder = load_decoder(self.folder)
        self._go, self._idle = asyncio.Event(), asyncio.Event()
        self._go.set()
        self._idle.set()
        self._computing = 0
        """Chunks that are being computed."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26, middlewares=[self._door])
        prefix = "/get_" if self.older else "/"
        gets = {
            "/health": self._health,
            "/health_generate": self._health,
            f"{prefix}model_info": self._model_info,
            f"{prefix}server_info": self._server_info,
            "/v1/models": self._models,
            "/get_load": self._get_load,
        }
        posts = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._relabel,
            "/flush_cache": self._flush,
        }
        if not self.older:
            gets["/v1/loads"] = self._loads
        for path, handler in gets.items():
            app.router.add_get(path, handler)
        for path, handler in posts.items():
            app.router.add_post(path, handler)
        app.on_startup.append(lambda _: self.engine.start())
        app.on_cleanup.append(lambda _: self.engine.close())
        return app

    @web.middleware
    async def _door(self, request: web.Request, handler: Any) -> Any:
        if self.dead:
            assert request.transport is not None
            request.transport.abort()
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.method == "POST" and request.path != "/generate":
            self.calls.append(request.path.strip("/"))
        return await handler(request)

    # Server information

    async def _health(self, _: web.Request) -> web.Response:
        # The real one samples a token for this answer, which a paused one does not.
        return web.Response(status=200 if self.status == 200 and self._go.is_set() else 503)

    async def _model_info(self, _: web.Request) -> web.Response:
        told = {"model_path": str(self.folder), "tokenizer_path": str(self.folder), "is_generation": True}
        told |= {"preferred_sampling_params": None, "has_image_understanding": False, "has_audio_understanding": False}
        return web.json_response(told | self._labelled())

    def _labelled(self) -> dict[str, str]:
        return {"weight_version": self.label} if self.tells_label else {}

    async def _server_info(self, _: web.Request) -> web.Response:
        told = {"model_path": str(self.folder), "served_model_name": "tiny", "dtype": "float32", "dp_size": 1}
        told |= {"version": "0.5.9", "disable_radix_cache": not self.radix, "max_total_num_tokens": 65_536}
        told |= {"max_req_input_len": self.context, "incremental_streaming_output": self.incremental}
        return web.json_response(told | {"internal_states": [{}]})

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": "tiny", "object": "model", "root": str(self.folder), "max_model_len": self.context + 8}
        return web.json_response({"object": "list", "data": [card]})

    async def _get_load(self, _: web.Request) -> web.Response:
        if self.status != 200:
            return _error("the scheduler is gone", self.status)
        rank = {"dp_rank": 0, "num_reqs": len(self.running), "num_waiting_reqs": 0}
        return web.json_response([rank | {"num_tokens": 1024 * len(self.running)}])

    async def _loads(self, _: web.Request) -> web.Response:
        if self.status != 200:
            return _error("the scheduler is gone", self.status)
        rank = {"dp_rank": 0, "num_running_reqs": len(self.running), "num_waiting_reqs": 0}
        return web.json_response({"loads": [rank | {"token_usage": len(self.running) / 64}]})

    # Turns

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.bodies.append(body)
        params = body.get("sampling_params") or {}
        self.unknown |= (body.keys() - GENERATE) | (params.keys() - SAMPLING)
        ids, rid = body["input_ids"], body.get("rid") or f"unnamed-{len(self.bodies)}"
        if self.status != 200:
            return _error("the scheduler is gone", self.status)
        if rid in self.running:
            return _error(f"Duplicate request ID detected: {rid}")
        if len(ids) + params["max_new_tokens"] > self.context:
            return _error(f"Requested token count exceeds the model's maximum context length of {self.context} tokens.")
        self.running[rid] = False
        try:
            await self._go.wait()
            steps = self._steps(rid, ids, body, params)
            if not body.get("stream"):
                answer: dict[str, Any] = {}
                async for answer in steps:
                    if self._cuts(http, answer):
                        break
                return web.json_response(answer)
            return await self._stream(http, steps)
        finally:
            del self.running[rid]

    def _cuts(self, http: web.Request, answer: dict[str, Any]) -> bool:
        if self.cut_after is None or answer["meta_info"]["completion_tokens"] < self.cut_after:
            return False
        self.dead = True
        assert http.transport is not None
        http.transport.abort()
        return True

    async def _stream(self, http: web.Request, steps: AsyncIterator[dict[str, Any]]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        told = 0
        async for answer in steps:
            meta = answer["meta_info"]
            whole, told = told, meta["completion_tokens"]
            if self.incremental:
                answer["output_ids"] = answer["output_ids"][whole:]
                meta["output_token_logprobs"] = meta["output_token_logprobs"][whole:]
            await response.write(b"data: " + web.json_response(answer).body + b"\n\n")  # type: ignore[operator]
            if self._cuts(http, answer):
                return response
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _steps(
        self, rid: str, prompt: list[int], body: dict[str, Any], params: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        """The turn so far after each chunk; the last has a finish reason."""
        ids: list[int] = []
        logprobs: list[float] = []
        cached: int | None = None
        stops = params.get("stop") or []
        labels: list[str] = []
        finish: dict[str, Any] | None = None
        while finish is None:
            left = params["max_new_tokens"] - len(ids)
            request = SampleRequest(
                np.array([*prompt, *ids], np.int32),
                min(1 if stops else self.chunk, left),
                params["temperature"],
                params["top_p"],
                max(params["top_k"], 0),
                frozenset(params.get("stop_token_ids") or ()),
                id=rid,
            )
            if not self.running[rid]:
                await self._go.wait()
            if self.running[rid]:
                finish = {"type": "abort", "message": "Aborted"}
            else:
                sample = await self._sample(request)
                if cached is None:
                    cached = sample.cached_tokens if body.get("extra_key") in self.keys else 0
                self.keys.add(body.get("extra_key"))
                ids += sample.ids.tolist()
                logprobs += sample.logprobs.tolist()
                labels += [self.label] * len(sample.ids)
                self.sampled[rid] = len(ids)
                await asyncio.sleep(self.pace)
                finish = self._ended(sample.finish, ids, stops, left - len(sample.ids))
            meta: dict[str, Any] = {"id": rid, "finish_reason": finish, "prompt_tokens": len(prompt)}
            meta |= {"completion_tokens": len(ids), "cached_tokens": cached if self.radix and cached else 0}
            meta |= {"weight_version": self.label} if self.tells_label else {}
            if finish is not None and self.tells_label and self.tells_spans:
                spans = _spans(labels) or [{"version": self.label, "start": 0, "end": 0}]
                meta |= {"weight_versions": spans, "weight_version": spans[-1]["version"]}
            if body.get("return_logprob"):
                meta["output_token_logprobs"] = [[lp, id, None] for lp, id in zip(logprobs, ids, strict=True)]
                meta |= self._beside([*prompt, *ids[:-1]], body, params["temperature"])
            yield {"text": self.decode(ids), "output_ids": list(ids), "meta_info": meta}

    async def _sample(self, request: SampleRequest) -> Sample:
        self._computing += 1
        self._idle.clear()
        try:
            return await self.engine.sample(request)
        finally:
            self._computing -= 1
            if not self._computing:
                self._idle.set()

    def _ended(self, finish: Finish, ids: list[int], stops: list[str], left: int) -> dict[str, Any] | None:
        text = self.decode(ids)
        for stop in stops:
            if stop in text:
                return {"type": "stop", "matched": stop}
        if finish is Finish.STOP:
            return {"type": "stop", "matched": ids[-1]}
        return {"type": "length", "length": len(ids)} if left <= 0 else None

    def _beside(self, row: list[int], body: dict[str, Any], temperature: float) -> dict[str, Any]:
        """The logprobs of other ids than the sampled one, at the last position."""
        if not body.get("top_logprobs_num") and not body.get("token_ids_logprob"):
            return {}
        with torch.inference_mode():
            logits = self.decoder(torch.tensor([row]))[0, -1]
        scaled = logits if self.original_logprobs else logits / (temperature or 1.0)
        logprobs = scaled.log_softmax(-1)
        best = logprobs.topk(body.get("top_logprobs_num") or 1).indices.tolist()
        wanted = body.get("token_ids_logprob") or []
        return {
            "output_top_logprobs": [[[float(logprobs[id]), id, None] for id in best]],
            "output_token_ids_logprobs": [[[float(logprobs[id]), id, None] for id in wanted]],
        }

    async def _abort(self, http: web.Request) -> web.Response:
        body = await http.json()
        for rid in self.running:
            if not self.deaf and (body.get("abort_all") or rid == body.get("rid")):
                self.running[rid] = True
        return web.Response()

    # Weights

    async def _pause(self, http: web.Request) -> web.Response:
        self._go.clear()
        for rid in self.running:
            self.running[rid] = self.running[rid] or (await http.json()).get("mode", "abort") == "abort"
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _: web.Request) -> web.Response:
        self._go.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _update(self, http: web.Request) -> web.Response:
        body = await http.json()
        assert not self._go.is_set(), "weights are replaced while nothing runs"
        folder = Path(body["model_path"])
        if not (folder / "model.safetensors").is_file():
            told = f"Failed to get weights iterator: {folder} (repository not found)."
            return web.json_response({"success": False, "message": told, "num_paused_requests": 0}, status=400)
        folder = self.folder if self.forgets_update else folder
        await self.engine.update_weights(folder, self.engine.version + 1)
        self.decoder = load_decoder(folder)
        self.label = body.get("weight_version") or self.label
        told = f"Succeeded to update model weights. Weight version updated to {self.label}."
        return web.json_response({"success": True, "message": told, "num_paused_requests": 0})

    async def push(self, folder: Path, label: str | None, mode: str = "in_place") -> None:
        """What a trainer does by its own means: pause, replace the weights, label them, continue. Turns that are not
        aborted continue on their old keys and values, as with SGLang's mode `in_place`."""
        self._go.clear()
        for rid in self.running:
            self.running[rid] = self.running[rid] or mode == "abort"
        await self._idle.wait()
        await self.engine.update_weights(folder, self.engine.version + 1)
        self.decoder = load_decoder(folder)
        self.label = self.label if label is None else label
        self._go.set()

    async def _relabel(self, http: web.Request) -> web.Response:
        self.label = (await http.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.label})

    async def _flush(self, _: web.Request) -> web.Response:
        return web.Response(status=400 if self.running else 200, text="Cache flushed.\n")


def _spans(labels: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for place, label in enumerate(labels):
        if not spans or spans[-1]["version"] != label:
            spans.append({"version": label, "start": place, "end": place})
        spans[-1]["end"] = place + 1
    return spans


def _error(message: str, status: int = 400) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


@contextlib.asynccontextmanager
async def served(server: SglangStandIn, port: int = 0) -> AsyncIterator[str]:
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _main(folder: Path, port: int, incremental: bool) -> None:
    # A turn takes a while, so that a server that is killed is killed in the middle of some.
    async with served(SglangStandIn(folder, context=2000, chunk=2, pace=0.02, incremental=incremental), port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2]), "incremental" in sys.argv[3:]))
