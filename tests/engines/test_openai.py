"""A chat server as the engine: what is captured at each level, how rows are stitched, and how far they drift.

The upstream is a stand-in written from the documented fields of vLLM's chat completions (`return_token_ids`,
`prompt_token_ids`, `token_ids`, `logprobs`), over the real qwen3 tokenizer and template; it can be told to keep ids or
logprobs to itself, as other servers do.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from gateway_rig import TOOLS, running_gateway

from towline.conversation import Reply, Request, ToolCall
from towline.dialects.base import Call, Known
from towline.dialects.chat import ChatDialect
from towline.engines.base import Capture, PauseMode, SampleRequest
from towline.engines.openai import ChatServerEngine
from towline.errors import EngineError
from towline.schema import BuilderName, Trajectory
from towline.tokens.codec import Frame
from towline.tokens.elsewhere import ElsewhereCodec
from towline.tokens.loading import load_codec
from towline.tokens.template import SentinelCodec


@pytest.fixture(scope="module")
def codec(assets: Path) -> SentinelCodec:
    return load_codec(assets / "tokenizers" / "qwen3")


@dataclass
class Upstream:
    """A chat server that renders every request anew."""

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
        request, _ = ChatDialect().read(Call("generate", body), Known())
        frame = Frame(request.tools, request.template_args)
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
        stand_in = ElsewhereCodec(codec.tokenizer, codec.stop_ids if tokenizer else frozenset())
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


async def test_ids_and_logprobs_give_stitched_rows_and_the_drift_is_told(codec: SentinelCodec, tmp_path: Path) -> None:
    upstream = Upstream(codec)
    info, kept = await captured(upstream, tmp_path / "kept", keep_reasoning=True, tokenizer=True)
    assert info.capture is Capture.TOKENS
    assert kept.builder is BuilderName.MERGED
    assert kept.error is None
    (row,) = kept.traces
    assert len(kept.turns) == 4
    assert row.loss_mask.sum() == sum(len(turn.sampled) for turn in kept.turns)
    assert np.all(row.logprobs[row.loss_mask == 1] == -0.25)
    _, dropped = await captured(upstream, tmp_path / "dropped", keep_reasoning=False, tokenizer=True)
    assert len(dropped.traces) == 1
    # Qwen3's template itself drops reasoning at a new question; a harness that drops it drifts within a question too.
    assert kept.report.plain_difference is not None
    assert dropped.report.plain_difference is not None
    assert 0 < kept.report.plain_difference < dropped.report.plain_difference
    calls = [m["tool_calls"][0]["id"] for m in upstream.bodies[-1]["messages"] if m.get("tool_calls")]
    results = [m["tool_call_id"] for m in upstream.bodies[-1]["messages"] if m["role"] == "tool"]
    assert calls == results


async def test_without_a_tokenizer_the_ends_of_messages_are_learned(codec: SentinelCodec, tmp_path: Path) -> None:
    _, trajectory = await captured(Upstream(codec), tmp_path, keep_reasoning=True, tokenizer=False)
    assert len(trajectory.traces) == 1
    assert trajectory.error is None


@pytest.mark.parametrize(("tokenizer", "trained"), [(True, True), (False, False)])
async def test_logprobs_alone_need_the_tokenizer(
    codec: SentinelCodec, tmp_path: Path, tokenizer: bool, trained: bool
) -> None:
    upstream = Upstream(codec, ids=False)
    info, trajectory = await captured(upstream, tmp_path, keep_reasoning=True, tokenizer=tokenizer)
    assert info.capture is Capture.LOGPROBS
    assert bool(trajectory.traces) is trained
    assert (trajectory.error is None) is trained
    assert [turn.reply["text"] for turn in trajectory.turns] == ["", "There are two files."] * 2


async def test_text_alone_keeps_the_messages_and_says_that_nothing_can_be_trained(
    codec: SentinelCodec, tmp_path: Path
) -> None:
    upstream = Upstream(codec, ids=False, logprobs=False)
    info, trajectory = await captured(upstream, tmp_path, keep_reasoning=True, tokenizer=True)
    assert info.capture is Capture.TEXT
    assert trajectory.traces == []
    assert trajectory.error == "no token of a trained role was sampled"
    assert len(trajectory.turns) == 4
    assert all(turn.messages and turn.reply for turn in trajectory.turns)


async def test_a_server_that_refuses_is_said_so_and_one_that_fails_later_is_overloaded(
    codec: SentinelCodec, tmp_path: Path
) -> None:
    upstream = Upstream(codec, status=500)
    async with served(upstream) as url:
        engine = ChatServerEngine(url, "big-model")
        with pytest.raises(EngineError, match="does not answer chat completions"):
            await engine.start()
        await engine.close()
        upstream.status = 200
        working = ChatServerEngine(url, "big-model", tokenizer=codec.tokenizer)
        async with running_gateway(ElsewhereCodec(codec.tokenizer, codec.stop_ids), tmp_path, engine=working) as rig:
            session = await rig.open()
            upstream.status = 503
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
            status, _ = await rig.post(session, body)
            assert status == 503
            upstream.status = 200
            status, _ = await rig.post(session, body)
            assert status == 200


async def test_pause_gives_up_what_is_in_flight_and_resume_stamps_the_version(codec: SentinelCodec) -> None:
    async with served(Upstream(codec)) as url:
        engine = ChatServerEngine(url, "big-model", tokenizer=codec.tokenizer)
        await engine.start()
        request, _ = ChatDialect().read(
            Call("generate", {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}), Known()
        )
        asked = SampleRequest(np.empty(0, np.int32), 10, id="one", request=request)
        await engine.pause(PauseMode.ABORT)
        await engine.resume(7)
        sample = await engine.sample(asked)
        assert set(sample.versions.tolist()) == {7}
        with pytest.raises(EngineError, match="cannot be replaced"):
            await engine.update_weights(Path("."), 8)
        await engine.close()


async def test_a_dead_server_is_an_engine_error() -> None:
    engine = ChatServerEngine("http://127.0.0.1:9/v1", "m")
    with pytest.raises(EngineError):
        await engine.start()
    await engine.close()
