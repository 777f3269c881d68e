"""A chat server that renders every request from scratch, written from the documented fields of vLLM's chat completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from support.gateway.gateway_rig import TOOLS, running_gateway
from towline.conversation import Reply, Request, ToolCall
from towline.dialects.base import DialectCall, ReadCache
from towline.dialects.chat import ChatDialect
from towline.engines.openai import ChatServerEngine
from towline.schema import Trajectory
from towline.tokens.codec import RenderContext
from towline.tokens.server_rendered import ServerRenderedCodec
from towline.tokens.templates.sentinel import SentinelCodec


@dataclass
class Upstream:
    """A chat server that renders every request from scratch."""

    codec: SentinelCodec
    ids: bool = True
    logprobs: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200

    async def answer(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.bodies.append(body)
        if self.status != 200 or (not self.ids and "return_token_ids" in body):
            return web.json_response({"error": {"message": "no"}}, status=max(self.status, 400))
        request, _ = ChatDialect().read(DialectCall("generate", body), ReadCache())
        frame = RenderContext(request.tools, request.template_args)
        prompt = self.codec.prompt(request.messages, frame).ids
        reply = self.reply(request)
        sampled = self.codec.write(reply.text, reply.reasoning, reply.tool_calls, frame)
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            call = {"name": "bash", "arguments": '{"command":"ls"}'}
            message["tool_calls"] = [{"id": "upstream-1", "type": "function", "function": call}]
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        if self.logprobs and body.get("logprobs"):
            texts = [self.codec.tokenizer.decode([id]) for id in sampled]
            choice["logprobs"] = {"content": [{"token": t, "logprob": -0.25, "bytes": None} for t in texts]}
        answer: dict[str, Any] = {"id": "x", "object": "chat.completion", "model": body["model"], "choices": [choice]}
        if self.ids:
            answer["prompt_token_ids"], choice["token_ids"] = prompt, sampled
        return web.json_response(answer)

    def reply(self, request: Request) -> Reply:
        if request.messages[-1].role == "tool":
            return Reply("There are two files.", "Now I know.")
        if not request.tools:
            return Reply("Hello.")
        return Reply("", "I have to look.", (ToolCall("", "bash", {"command": "ls"}),))


@contextlib.asynccontextmanager
async def served(upstream: Upstream) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", upstream.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def captured(
    upstream: Upstream, tmp_path: Path, *, keep_reasoning: bool, tokenizer: bool
) -> tuple[Any, Trajectory]:
    """Two questions with a tool call each, through the gateway over the upstream."""
    codec = upstream.codec
    async with served(upstream) as url:
        engine = ChatServerEngine(url, "big-model", tokenizer=codec.tokenizer if tokenizer else None)
        stand_in = ServerRenderedCodec(codec.tokenizer, codec.stop_ids if tokenizer else frozenset())
        async with running_gateway(stand_in, tmp_path, engine=engine) as rig:
            session = await rig.open()
            history: list[Any] = [{"role": "system", "content": "Be brief."}]
            for question in ("What is there?", "And now?"):
                history.append({"role": "user", "content": question})
                while True:
                    status, answer = await rig.post(session, {"model": "m", "messages": history, "tools": TOOLS})
                    assert status == 200, answer
                    message = answer["choices"][0]["message"]
                    if not keep_reasoning:
                        message.pop("reasoning_content", None)
                    history.append(message)
                    if not message.get("tool_calls"):
                        break
                    history.append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a b"})
            return engine.info, await rig.seal(session)
