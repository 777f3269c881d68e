"""Integers of any length go from the model to the harness and back as they are, in every dialect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.gateway.gateway_rig import Body, Rig, assert_one_chain, running_gateway, user
from towline.conversation import Request, ToolCall
from towline.engines.scripted import Say
from towline.schema import Trajectory
from towline.tokens.codec import ModelCodec
from towline.tokens.loading import load_codec

ARGUMENTS: dict[str, Any] = {
    "id": 123456789012345678901234567890,
    "low": -(10**25) - 7,
    "edge": [2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1],
    "huge": 10**400,
    "float": 1.5e300,
}
SCHEMA = {"type": "object", "properties": {"id": {"type": "integer", "maximum": 10**30}}}


@pytest.fixture(scope="module")
def codec(assets: Path) -> ModelCodec:
    return load_codec(assets / "tokenizers" / "qwen3")


def agent(request: Request) -> Say:
    if sum(message.role == "assistant" for message in request.messages) == 2:
        return Say("Done.")
    return Say("", calls=[ToolCall("", "look", ARGUMENTS)])


async def ask(rig: Rig, headers: dict[str, str], url: str, body: Body) -> Any:
    """The answer, read as exactly as Python reads JSON."""
    async with rig.web.post(url, data=json.dumps(body), headers=headers) as response:
        data = await response.read()
        assert response.status == 200, data
        return json.loads(data)


async def chat(rig: Rig, headers: dict[str, str], root: str) -> list[Any]:
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    messages, seen = [user("Go.")], []
    for _ in range(3):
        body = {"model": "m", "messages": messages, "tools": [tool]}
        message = (await ask(rig, headers, f"{root}/v1/chat/completions", body))["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        seen += [json.loads(call["function"]["arguments"]) for call in calls]
        messages += [message, *({"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls)]
    return seen


async def responses(rig: Rig, headers: dict[str, str], root: str) -> list[Any]:
    tool = {"type": "function", "name": "look", "parameters": SCHEMA}
    items: list[Any] = [user("Go.")]
    seen = []
    for _ in range(3):
        body = {"model": "m", "input": items, "tools": [tool]}
        output = (await ask(rig, headers, f"{root}/v1/responses", body))["output"]
        calls = [item for item in output if item["type"] == "function_call"]
        seen += [json.loads(call["arguments"]) for call in calls]
        results = [{"type": "function_call_output", "call_id": c["call_id"], "output": "ok"} for c in calls]
        items += [*output, *results]
    return seen


async def messages(rig: Rig, headers: dict[str, str], root: str) -> list[Any]:
    tool = {"name": "look", "input_schema": SCHEMA}
    said: list[Any] = [user("Go.")]
    seen = []
    for _ in range(3):
        body = {"model": "m", "max_tokens": 2000, "messages": said, "tools": [tool]}
        content = (await ask(rig, headers, f"{root}/v1/messages", body))["content"]
        calls = [block for block in content if block["type"] == "tool_use"]
        seen += [call["input"] for call in calls]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "ok"} for call in calls]
        said += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    return seen


async def google(rig: Rig, headers: dict[str, str], root: str) -> list[Any]:
    tool = {"functionDeclarations": [{"name": "look", "parametersJsonSchema": SCHEMA}]}
    contents: list[Any] = [{"role": "user", "parts": [{"text": "Go."}]}]
    seen = []
    for _ in range(3):
        body = {"contents": contents, "tools": [tool]}
        answer = await ask(rig, headers, f"{root}/v1beta/models/m:generateContent", body)
        content = answer["candidates"][0]["content"]
        calls = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
        seen += [call["args"] for call in calls]
        results = [{"functionResponse": {"name": "look", "response": {"output": "ok"}}} for _ in calls]
        contents += [content, {"role": "user", "parts": results}]
    return seen


@pytest.mark.parametrize("speak", [chat, responses, messages, google])
async def test_a_call_with_long_integers(codec: ModelCodec, tmp_path: Path, speak: Any) -> None:
    async with running_gateway(codec, tmp_path, agent) as rig:
        session = await rig.open()
        assert await speak(rig, session.headers, session.root) == [ARGUMENTS, ARGUMENTS]
        before = await rig.trajectory(session)
    # What the journal holds is the same after a restart.
    async with running_gateway(codec, tmp_path, agent) as rig:
        trajectory = await rig.seal(session)
    for made in (before, trajectory):
        assert_one_chain(made, 3)
        assert made.report.malformed_calls == 0
        assert [turn.reply["tool_calls"][0]["arguments"] for turn in made.turns[:2]] == [ARGUMENTS, ARGUMENTS]
    for path in (tmp_path / "t.json", tmp_path / "t.arrow"):
        trajectory.write(path)
        assert Trajectory.read(path).turns[0].reply["tool_calls"][0]["arguments"] == ARGUMENTS
