"""A chat server as the engine: what is captured at each level, how rows are stitched, and how far they drift.

The upstream is a stand-in written from the documented fields of vLLM's chat completions (`return_token_ids`,
`prompt_token_ids`, `token_ids`, `logprobs`), over the real qwen3 tokenizer and template; it can be told to keep ids or
logprobs to itself, as other servers do.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from aiohttp import web

from support.engines.chat_upstream import Upstream, captured, served
from support.gateway.gateway_rig import running_gateway
from towline.conversation import Message, Request
from towline.dialects.base import DialectCall, ReadCache
from towline.dialects.chat import ChatDialect
from towline.engines.base import TRUNCATED, UNPROVEN_LOGPROBS, CaptureLevel, PauseMode, SampleRequest
from towline.engines.openai import NOT_SENT, ChatServerEngine
from towline.errors import EngineError
from towline.schema import BuilderName
from towline.tokens.loading import load_codec
from towline.tokens.server_rendered import ServerRenderedCodec
from towline.tokens.templates.sentinel import SentinelCodec


@pytest.fixture(scope="module")
def codec(assets: Path) -> SentinelCodec:
    return load_codec(assets / "tokenizers" / "qwen3")


async def test_ids_and_logprobs_give_stitched_rows_and_the_drift_is_reported(
    codec: SentinelCodec, tmp_path: Path
) -> None:
    upstream = Upstream(codec)
    info, kept = await captured(upstream, tmp_path / "kept", keep_reasoning=True, tokenizer=True)
    assert info.capture is CaptureLevel.TOKENS
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
    assert info.capture is CaptureLevel.LOGPROBS
    assert bool(trajectory.traces) is trained
    assert (trajectory.error is None) is trained
    assert [turn.reply["text"] for turn in trajectory.turns] == ["", "There are two files."] * 2


async def test_text_alone_keeps_the_messages_and_says_that_nothing_can_be_trained(
    codec: SentinelCodec, tmp_path: Path
) -> None:
    upstream = Upstream(codec, ids=False, logprobs=False)
    info, trajectory = await captured(upstream, tmp_path, keep_reasoning=True, tokenizer=True)
    assert info.capture is CaptureLevel.TEXT
    assert trajectory.traces == []
    assert trajectory.error == "no token of a trained role was sampled"
    assert len(trajectory.turns) == 4
    assert all(turn.messages and turn.reply for turn in trajectory.turns)


async def test_a_refusing_server_is_reported_and_one_that_fails_later_is_overloaded(
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
        async with running_gateway(
            ServerRenderedCodec(codec.tokenizer, codec.stop_ids), tmp_path, engine=working
        ) as rig:
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
            DialectCall("generate", {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}), ReadCache()
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


class TopLogprobs:
    """A chat server that reports its most likely tokens, with logprobs from before or after the temperature."""

    LOGITS: ClassVar = {"yes": 2.0, "no": 1.0, "maybe": -1.0, "never": -2.0}

    def __init__(self, *, processed: bool, refuses: tuple[str, ...] = ()):
        self.processed, self.refuses = processed, refuses
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.bodies.append(body)
        if unknown := body.keys() & set(self.refuses):
            return web.json_response({"error": {"message": f"unknown {sorted(unknown)}"}}, status=400)
        if body.get("stream"):
            return web.json_response({"error": {"message": "no streams"}}, status=400)
        scaled = {word: value / (body.get("temperature") or 1.0) for word, value in self.LOGITS.items()}
        chosen = scaled if self.processed else self.LOGITS
        norm = math.log(sum(map(math.exp, chosen.values())))
        tops = [{"token": word, "logprob": value - norm} for word, value in chosen.items()]
        content = [{**tops[0], "token_id": 5, "top_logprobs": tops[: body.get("top_logprobs") or 0]}]
        choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
        choice |= {"logprobs": {"content": content}, "token_ids": [5]}
        return web.json_response({"id": "x", "choices": [choice], "prompt_token_ids": [1, 2], "usage": {}})

    @contextlib.asynccontextmanager
    async def engine(self) -> AsyncIterator[ChatServerEngine]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine = ChatServerEngine(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "m")
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()
            await runner.cleanup()


def chat_turn(**options: Any) -> SampleRequest:
    request = Request("chat", model="m", messages=[Message(role="user", text="Hi")])
    return SampleRequest(np.array([1], np.int32), 4, request=request, **options)


async def test_logprobs_from_before_the_temperature_are_not_trained() -> None:
    server = TopLogprobs(processed=False)
    async with server.engine() as engine:
        assert "processed_logprobs" in engine.info.details["logprobs"]
        assert UNPROVEN_LOGPROBS in (await engine.sample(chat_turn(temperature=0.5))).flags
        assert UNPROVEN_LOGPROBS in (await engine.sample(chat_turn(top_p=0.9))).flags
        # At temperature 1 both are the same, and a greedy turn has the logprobs of temperature 1.
        for temperature in (1.0, 0.0):
            assert UNPROVEN_LOGPROBS not in (await engine.sample(chat_turn(temperature=temperature))).flags


async def test_proven_logprobs_are_trained_and_every_parameter_is_sent() -> None:
    server = TopLogprobs(processed=True)
    async with server.engine() as engine:
        assert engine.info.details["logprobs"] == "processed"
        sample = await engine.sample(chat_turn(temperature=0.5, top_k=3))
        assert UNPROVEN_LOGPROBS not in sample.flags
        assert TRUNCATED in sample.flags
        sent = {name: server.bodies[-1][name] for name in ("top_k", "min_p", "repetition_penalty", "presence_penalty")}
        assert sent == {"top_k": 3, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
        await engine.sample(chat_turn())
        assert server.bodies[-1]["top_k"] == -1


async def test_a_server_that_refuses_parameters_is_flagged() -> None:
    async with TopLogprobs(processed=True, refuses=("top_k", "min_p", "repetition_penalty")).engine() as engine:
        assert engine.info.capture is CaptureLevel.TOKENS
        assert engine.info.details["top_k"] == "not accepted"
        sample = await engine.sample(chat_turn(top_k=3))
        assert NOT_SENT in sample.flags
        assert TRUNCATED not in sample.flags


async def test_a_server_that_lists_no_alternatives_proves_nothing() -> None:
    async with TopLogprobs(processed=True, refuses=("top_logprobs",)).engine() as engine:
        assert engine.info.details["logprobs"].startswith("unproven")
        assert UNPROVEN_LOGPROBS in (await engine.sample(chat_turn(temperature=0.7))).flags
        assert UNPROVEN_LOGPROBS not in (await engine.sample(chat_turn())).flags
