"""The official SDKs, Python and TypeScript, in all four dialects: what they parse is what was sampled, what they send back
continues the chain, and what goes wrong is the error of their own that it is."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from support.dialects import sdk_clients
from support.gateway.gateway_rig import Rig, running_gateway
from towline.conversation import Request, ToolCall
from towline.engines.scripted import Say
from towline.schema import Trajectory
from towline.tokens.codec import ModelCodec
from towline.tokens.loading import load_codec

TOO_LONG = {
    "chat": "maximum context length is 1024 tokens",
    "responses": "maximum context length is 1024 tokens",
    "messages": "prompt is too long",
    "google": "exceeds the maximum number of tokens allowed",
}
"""What agents recognise, and compact their history on."""
SHORT = {"settings": {"limits": {"context": 1024}}}
NODE = Path(__file__).parent / "node"
DIALECTS = ("chat", "responses", "messages", "google")
MODELS = {"chat": "gpt-9", "responses": "gpt-9-codex", "messages": "claude-opus-9", "google": "gemini-9-pro"}
"""Names that clients insist on; the session's policy serves them all."""


@pytest.fixture(scope="module")
def codec(assets: Path) -> ModelCodec:
    return load_codec(assets / "tokenizers" / "qwen3")


def agent(request: Request) -> Say:
    """Text and one call, then two calls at once, then an answer; each with reasoning."""
    step = 0
    for message in reversed(request.messages):
        if message.role == "user":
            break
        step += message.role == "assistant"
    if step == 2:
        return Say("All done: «é», 日本, <b>.", "Nothing is left to do.")
    calls = [ToolCall("", "bash", {"command": f"ls -{step}{n} \"a b\" > 'x'\n"}) for n in range(step + 1)]
    return Say("Let me look." if step == 0 else "", f"Step {step}: I should look.", calls)


def check(turns: Sequence[dict[str, Any]], trajectory: Trajectory, dialect: str) -> None:
    assert len(turns) == len(trajectory.turns) == 6
    for parsed, turn in zip(turns, trajectory.turns, strict=True):
        calls = [{k: call[k] for k in ("id", "name", "arguments")} for call in turn.reply.get("tool_calls", [])]
        assert parsed["text"] == turn.reply["text"]
        assert parsed["reasoning"] == turn.reply.get("reasoning")
        assert parsed["calls"] == calls
        assert turn.dialect == dialect
        assert turn.model == MODELS[dialect]
        assert turn.delivered
        # Every question comes with a picture, which the model is told of and cannot see.
        assert ("image_not_shown" in turn.flags) == (turn.index in (0, 3))
    assert trajectory.report.chains == 1
    assert trajectory.report.forks == {}
    trained = sum(len(turn.sampled) for turn in trajectory.turns)
    assert trajectory.report.trained_tokens == trained


def check_failures(found: dict[str, dict[str, Any]], dialect: str, stream: bool) -> None:
    """The status and, for what clients act on, the wording; the classes are those of the SDK itself."""
    statuses = {kind: error["status"] for kind, error in found.items()}
    # OpenAI's clients are told of it inside the stream, where there is no status any more.
    too_long = None if dialect == "responses" and stream else 400
    assert statuses == {"unauthorised": 401, "too_long": too_long, "wrong": 400, "missing": 404}, found
    assert all(error["name"].endswith("Error") for error in found.values()), found
    assert TOO_LONG[dialect] in found["too_long"]["message"]
    assert "nobody" in found["wrong"]["message"]


async def opened(rig: Rig) -> tuple[str, str, Any]:
    session = await rig.open()
    return session.root, session.key, session


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_python_sdk(dialect: str, stream: bool, codec: ModelCodec, tmp_path: Path) -> None:
    async with running_gateway(codec, tmp_path, agent) as rig:
        root, key, session = await opened(rig)
        client = getattr(sdk_clients, dialect)(root, key, MODELS[dialect], stream)
        turns = await asyncio.to_thread(sdk_clients.converse, client.ask)
        check([asdict(turn) for turn in turns], await rig.seal(session), dialect)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_python_sdk_raises_its_own_errors(dialect: str, stream: bool, codec: ModelCodec, tmp_path: Path) -> None:
    async with running_gateway(codec, tmp_path, agent) as rig:
        short = await rig.open(**SHORT)
        client, stranger = (
            getattr(sdk_clients, dialect)(short.root, key, MODELS[dialect], stream) for key in (short.key, "nobody's")
        )
        acts = {
            "unauthorised": lambda: stranger.ask("Hi.", []),
            "too_long": lambda: client.ask("word " * 3000, []),
            "wrong": client.wrong,
            "missing": client.missing,
        }
        found = {kind: await asyncio.to_thread(sdk_clients.failure, act) for kind, act in acts.items()}
        check_failures(found, dialect, stream)
        assert (await rig.seal(short)).turns == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_going_on_from_an_answers_id(stream: bool, codec: ModelCodec, tmp_path: Path) -> None:
    async with running_gateway(codec, tmp_path, agent) as rig:
        root, key, session = await opened(rig)
        client = sdk_clients.responses(root, key, MODELS["responses"], stream, by_id=True)
        turns = await asyncio.to_thread(sdk_clients.converse, client.ask)
        check([asdict(turn) for turn in turns], await rig.seal(session), "responses")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_typescript_sdk(dialect: str, stream: bool, codec: ModelCodec, tmp_path: Path) -> None:
    assert (NODE / "node_modules").is_dir(), "the TypeScript SDKs are not installed; run: make node"
    async with running_gateway(codec, tmp_path, agent) as rig:
        root, key, session = await opened(rig)
        short = await rig.open(**SHORT)
        told = {"SDK": dialect, "BASE_URL": root, "KEY": key, "SHORT_KEY": short.key}
        told |= {"MODEL": MODELS[dialect], "STREAM": str(int(stream))}
        node = Path(sys.executable).with_name("node")
        process = await asyncio.create_subprocess_exec(
            node, "loop.mjs", cwd=NODE, env={**os.environ, **told}, stdout=-1, stderr=-1
        )
        try:
            out, errors = await asyncio.wait_for(process.communicate(), 120)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, errors.decode()
        result = json.loads(out)
        check_failures(result["failures"], dialect, stream)
        check(result["turns"], await rig.seal(session), dialect)


async def test_four_dialects_give_the_same_rows(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_gateway(codec, tmp_path, agent) as rig:
        rows = []
        for dialect in DIALECTS:
            root, key, session = await opened(rig)
            client = getattr(sdk_clients, dialect)(root, key, MODELS[dialect], False)
            await asyncio.to_thread(sdk_clients.converse, client.ask)
            (trace,) = (await rig.seal(session)).traces
            rows.append((trace.token_ids.tolist(), trace.loss_mask.tolist(), trace.logprobs.tolist()))
        assert all(row == rows[0] for row in rows)
