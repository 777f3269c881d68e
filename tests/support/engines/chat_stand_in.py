"""A stand-in for an OpenAI-compatible chat server that reports ids and logprobs, as vLLM's chat route does."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from aiohttp import web


@dataclass
class ChatStandIn:
    tokenizer: tokenizers.Tokenizer
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    async def answer(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        words = self.chance.choices(["yes", "no", "red", "blue", "lamp", "coin"], k=min(4, body["max_tokens"]))
        text = " ".join(words)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        prompt = self.tokenizer.encode(json.dumps(body["messages"]), add_special_tokens=False).ids
        told = [{"token": self.tokenizer.decode([id]), "logprob": -0.5, "bytes": None, "token_id": id} for id in ids]
        logprobs = {"content": told}
        fields: dict[str, Any] = {"id": "x", "object": "chat.completion", "model": body["model"]}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        if not body.get("stream"):
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": logprobs, "token_ids": ids}
            return web.json_response({**fields, "choices": [choice], "prompt_token_ids": prompt, "usage": usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        fields["object"] = "chat.completion.chunk"
        for place, (id, one) in enumerate(zip(ids, told, strict=True)):
            choice = {"index": 0, "delta": {"content": one["token"]}, "logprobs": {"content": [one]}, "token_ids": [id]}
            choice["finish_reason"] = "stop" if place == len(ids) - 1 else None
            first = {"prompt_token_ids": prompt} if place == 0 else {}
            await response.write(f"data: {json.dumps({**fields, 'choices': [choice], **first})}\n\n".encode())
        await response.write(f"data: {json.dumps({**fields, 'choices': [], 'usage': usage})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@contextlib.asynccontextmanager
async def served(server: ChatStandIn) -> AsyncIterator[str]:
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
