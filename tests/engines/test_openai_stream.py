"""A chat server that streams: the same turns as whole answers give, and a stall that shows.

The stand-in sends what `Upstream` answers, token by token, in the documented form of OpenAI's and vLLM's streams.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from support.engines.chat_upstream import Upstream, captured, served
from support.gateway.gateway_rig import running_gateway
from support.node.node_rig import until
from towline.conversation import Message, Request
from towline.engines.base import CaptureLevel, ContextExceeded, EngineUnreachable, PauseMode, Sample, SampleRequest
from towline.engines.openai import ChatServerEngine
from towline.engines.stalls import EngineStalled, StallDetector
from towline.errors import EngineError
from towline.tokens.codec import RenderContext
from towline.tokens.loading import load_codec
from towline.tokens.server_rendered import ServerRenderedCodec
from towline.tokens.templates.sentinel import SentinelCodec


@pytest.fixture(scope="module")
def codec(assets: Path) -> SentinelCodec:
    return load_codec(assets / "tokenizers" / "qwen3")


@dataclass
class Streaming(Upstream):
    fault: str = ""
    hides: bool = False
    """Streams tell no ids."""
    refuses: str = ""
    context: int = 0

    async def answer(self, http: web.Request) -> Any:
        body = await http.json()
        if self.refuses and body["max_tokens"] > self.context:
            return web.json_response({"error": {"message": self.refuses, "code": 400}}, status=400)
        whole = await super().answer(http)
        if not body.get("stream") or whole.status != 200:
            return whole
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        count = 0
        async for event in self.events(json.loads(whole.body or b"")):
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            count += 1
            if self.fault == "stall" and count == 3:
                for _ in range(600):
                    await response.write(b": keep-alive\n\n")
                    await asyncio.sleep(0.1)
            if self.fault == "cut" and count == 3:
                assert http.transport is not None
                http.transport.close()
                return response
            if self.fault == "error" and count == 3:
                await response.write(b'data: {"error": {"message": "CUDA out of memory", "code": 500}}\n\n')
                return response
            if self.fault.startswith("{"):
                await response.write(f"data: {self.fault}\n\n".encode())
                return response
            if self.fault == "slow":
                await asyncio.sleep(0.1)
                if http.transport is None or http.transport.is_closing():
                    return response
        await response.write(b"data: [DONE]\n\n")
        return response

    async def events(self, whole: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        choice = whole["choices"][0]
        message = choice["message"]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        for name in ("reasoning_content", "content"):
            deltas += [{name: letter} for letter in message.get(name) or ""]
        for call in message.get("tool_calls") or ():
            function = call["function"]
            deltas.append(
                {"tool_calls": [{**call, "index": 0, "function": {"name": function["name"], "arguments": ""}}]}
            )
            deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": c}}]} for c in function["arguments"]]
        ids, told = choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("content") or []
        most = max(len(deltas), len(ids), len(told))
        for n in range(most):
            part: dict[str, Any] = {"index": 0, "delta": deltas[n] if n < len(deltas) else {}, "finish_reason": None}
            if told[n : n + 1]:
                part["logprobs"] = {"content": told[n : n + 1]}
            if ids[n : n + 1] and not self.hides:
                part["token_ids"] = ids[n : n + 1]
            event = {"id": "x", "object": "chat.completion.chunk", "model": "m", "choices": [part]}
            if n == 0 and not self.hides and "prompt_token_ids" in whole:
                event["prompt_token_ids"] = whole["prompt_token_ids"]
            yield event
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
        yield {"choices": [], "usage": {"completion_tokens": len(ids or told), "prompt_tokens": 1}}


@pytest.mark.parametrize(("ids", "logprobs"), [(True, True), (False, True), (False, False)])
async def test_streamed_turns_are_those_of_whole_answers(
    ids: bool, logprobs: bool, codec: SentinelCodec, tmp_path: Path
) -> None:
    _, whole = await captured(
        Upstream(codec, ids=ids, logprobs=logprobs), tmp_path / "whole", keep_reasoning=True, tokenizer=True
    )
    upstream = Streaming(codec, ids=ids, logprobs=logprobs)
    info, streamed = await captured(upstream, tmp_path / "streamed", keep_reasoning=True, tokenizer=True)
    assert info.details["streams"] == "yes"
    assert all(body.get("stream") for body in upstream.bodies[-4:])
    for one, other in zip(whole.turns, streamed.turns, strict=True):
        assert one.reply == other.reply
        assert one.sampled.tolist() == other.sampled.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()
        assert one.prompt_length == other.prompt_length
    assert [trace.token_ids.tolist() for trace in whole.traces] == [t.token_ids.tolist() for t in streamed.traces]


async def asked(
    upstream: Upstream, pulse: StallDetector | None = None, most: int = 20
) -> tuple[ChatServerEngine, Sample]:
    message = Message("user", "Hi")
    async with served(upstream) as url:
        engine = ChatServerEngine(url, "big-model", tokenizer=upstream.codec.tokenizer)
        fault, refuses = getattr(upstream, "fault", ""), getattr(upstream, "refuses", "")
        for name in ("fault", "refuses"):
            if hasattr(upstream, name):
                setattr(upstream, name, "")
        await engine.start()
        for name, value in (("fault", fault), ("refuses", refuses)):
            if hasattr(upstream, name):
                setattr(upstream, name, value)
        pulse = pulse or StallDetector(30.0)
        request = SampleRequest(np.empty(0, np.int32), most, request=Request("", "m", [message]), stall_detector=pulse)
        try:
            return engine, await pulse.guard(engine.sample(request))
        finally:
            await engine.close()


async def test_a_stream_that_stalls_is_noticed_though_it_is_kept_alive(codec: SentinelCodec) -> None:
    with pytest.raises(EngineStalled, match=r"no token for 1 s \([123] before that\)"):
        await asked(Streaming(codec, fault="stall"), StallDetector(1.0))


async def test_a_slow_stream_is_no_stall(codec: SentinelCodec) -> None:
    pulse = StallDetector(2.0)
    _, sample = await asked(Streaming(codec, fault="slow"), pulse)
    assert pulse.tokens >= len(sample.ids) > 0


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [("cut", EngineUnreachable, "chat/completions"), ("error", EngineError, "CUDA out of memory")],
)
async def test_a_stream_that_breaks_is_an_engine_error(
    fault: str, kind: type[EngineError], said: str, codec: SentinelCodec
) -> None:
    with pytest.raises(kind, match=said):
        await asked(Streaming(codec, fault=fault))


async def test_a_server_whose_streams_report_less_is_not_streamed(codec: SentinelCodec) -> None:
    pulse = StallDetector(30.0)
    engine, sample = await asked(Streaming(codec, hides=True), pulse)
    assert engine.info.details["streams"] == "no"
    assert engine.info.capture is CaptureLevel.TOKENS
    assert not pulse.streamed
    assert len(sample.ids)
    assert (await asked(Upstream(codec)))[0].info.details["streams"] == "no"


REFUSALS = {
    "vllm": "This model's maximum context length is 40 tokens. However, you requested 52 tokens (32 in the messages, 20 in "
    "the completion). Please reduce the length of the messages or completion.",
    "vllm_new": "'max_tokens' or 'max_completion_tokens' is too large: 20. This model's maximum context length is 40 tokens "
    "and your request has 32 input tokens (20 > 40 - 32).",
    "silent": "Input is too long for this model.",
}


async def test_a_refused_max_tokens_is_retried_with_the_room_there_is(codec: SentinelCodec) -> None:
    for name in ("vllm", "vllm_new"):
        upstream = Streaming(codec, refuses=REFUSALS[name], context=8)
        await asked(upstream)
        assert upstream.bodies[-1]["max_tokens"] == 8


async def test_a_prompt_that_does_not_fit_is_the_policys_and_a_setting_that_does_not_fit_is_not(
    codec: SentinelCodec,
) -> None:
    too_long = "This model's maximum context length is 40 tokens. However, your messages resulted in 52 tokens."
    for text in (too_long, REFUSALS["silent"]):
        with pytest.raises(ContextExceeded):
            await asked(Streaming(codec, refuses=text, context=0))
    with pytest.raises(EngineError, match=r"lower session\.sampling\.max_tokens") as found:
        await asked(Streaming(codec, refuses=REFUSALS["silent"], context=8))
    assert not isinstance(found.value, ContextExceeded)


@pytest.mark.parametrize("code", [400, "400", "context_length_exceeded"])
async def test_a_prompt_that_is_refused_inside_the_stream_is_the_policys_too(
    code: int | str, codec: SentinelCodec
) -> None:
    """SGLang and proxies begin the stream before they refuse."""
    message = "This model's maximum context length is 40 tokens. However, your messages resulted in 52 tokens."
    refusal = {"error": {"message": message, "type": "BadRequestError", "code": code}}
    with pytest.raises(ContextExceeded):
        await asked(Streaming(codec, fault=json.dumps(refusal)))


async def test_a_turn_that_a_pause_interrupts_keeps_the_prompt_that_the_model_saw(
    codec: SentinelCodec, tmp_path: Path
) -> None:
    """The turn is sampled again from scratch: its row must not begin with the tokens of the reply."""
    upstream = Streaming(codec)
    async with served(upstream) as url:
        engine = ChatServerEngine(url, "big-model", tokenizer=codec.tokenizer)
        stand_in = ServerRenderedCodec(codec.tokenizer, codec.stop_ids)
        async with running_gateway(stand_in, tmp_path, engine=engine) as rig:
            session = await rig.open()
            upstream.fault, before = "slow", len(upstream.bodies)
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
            work = asyncio.ensure_future(rig.post(session, body))
            await until(lambda: len(upstream.bodies) > before)
            await engine.pause(PauseMode.ABORT)
            await engine.resume(3)
            status, _ = await work
            assert status == 200
            trajectory = await rig.seal(session)
    prompt = codec.prompt([Message("user", "Hi")], RenderContext()).ids
    (turn,) = trajectory.turns
    assert "resumed" in turn.flags
    assert turn.prompt_length == len(prompt)
    (trace,) = trajectory.traces
    assert trace.token_ids[: len(prompt)].tolist() == list(prompt)
    assert not trace.loss_mask[: len(prompt)].any()
