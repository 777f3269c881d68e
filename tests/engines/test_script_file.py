"""`--engine scripted --script FILE`: replies from a file, written by the real codec; what is wrong with it says where."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from towline.cli import app
from towline.conversation import Finish, Message, Request, Tool, ToolCall
from towline.engines.base import SampleRequest
from towline.engines.script_file import ScriptFile, ScriptRequest, script_request
from towline.engines.scripted import Say, ScriptedEngine
from towline.errors import ConfigError, EngineError
from towline.tokens.codec import ModelCodec
from towline.tokens.loading import load_codec

BASH = Tool("bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})


@pytest.fixture(scope="module")
def codec(assets: Path) -> ModelCodec:
    return load_codec(assets / "tokenizers" / "qwen3")


def asked(turn: int = 0, **fields: Any) -> SampleRequest:
    called = Message("assistant", "", "Why not.", (ToolCall("c1", "bash", {"command": "ls"}),))
    messages = [Message("user", "Look."), called, Message("tool", "a b", tool_call_id="c1", name="bash")]
    request = Request("chat", "gpt-9", messages, tools=(BASH,))
    values = {"id": f"s-{turn}", "turn": turn, "session": "s", "group": "t", "metadata": {"sample": 2}, "seed": 7}
    return SampleRequest(np.arange(5, dtype=np.int32), 500, request=request, **values | fields)


def test_a_request_is_plain_data_of_the_scripts_own() -> None:
    request = asked(4)
    plain = script_request(request)
    assert plain == ScriptRequest(
        messages=[
            {"role": "user", "text": "Look."},
            {
                "role": "assistant",
                "text": "",
                "reasoning": "Why not.",
                "tool_calls": [{"id": "c1", "name": "bash", "arguments": {"command": "ls"}}],
            },
            {"role": "tool", "text": "a b", "tool_call_id": "c1", "name": "bash"},
        ],
        tools=[{"name": "bash", "description": "Runs a command.", "parameters": BASH.parameters}],
        model="gpt-9",
        turn=4,
        session="s",
        task="t",
        metadata={"sample": 2},
        dialect="chat",
        seed=7,
        temperature=1.0,
        max_tokens=500,
    )
    assert plain.last["text"] == "a b"
    json.dumps(plain.messages)
    plain.messages[1]["tool_calls"][0]["arguments"]["command"] = "rm"
    plain.tools[0]["parameters"]["properties"].clear()
    assert script_request(request).messages[1]["tool_calls"][0]["arguments"] == {"command": "ls"}
    assert BASH.parameters["properties"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("'Hi.'", Say("Hi.")),
        ("''", Say("")),
        ("{'text': 'Hi.', 'reasoning': 'Hm.', 'delay': 0.5}", Say("Hi.", "Hm.", [], delay=0.5)),
        (
            "{'tool_calls': [{'name': 'bash', 'arguments': {'command': request.last['text']}}]}",
            Say("", None, [ToolCall("", "bash", {"command": "a b"})]),
        ),
        ("Say(ids=[1, 2])", Say(ids=[1, 2])),  # type: ignore[arg-type]
    ],
)
async def test_replies_of_a_function(tmp_path: Path, value: str, expected: Say) -> None:
    path = tmp_path / "s.py"
    path.write_text(f"from towline.engines.scripted import Say\ndef script(request):\n    return {value}\n")
    file = ScriptFile(path)
    assert await file.reply(asked()) == expected
    file.close()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise KeyError('colour')", r"s\.py:3: KeyError: 'colour'"),
        ("return helper(request)", r"s\.py:5: ZeroDivisionError"),
        ("exit(3)", r"s\.py:3: SystemExit: 3"),
        ("return None", r"s\.py: the reply of script\(\) to turn 0 is NoneType"),
        ("return {'txt': 'x'}", "unknown field 'txt'"),
        ("return {'text': 3}", "`text` that is int"),
        ("return {}", "is empty"),
        ("return {'tool_calls': {'name': 'bash'}}", "`tool_calls` that are dict"),
        ("return {'tool_calls': [{'arguments': {}}]}", "a tool call without a name"),
        ("return {'tool_calls': [{'name': 'x', 'args': {}}]}", "unknown field 'args'"),
        ("return {'tool_calls': [{'name': 'x', 'arguments': 3}]}", "arguments that are int"),
        ("return {'text': 'x', 'delay': -1}", "`delay` of -1"),
    ],
)
async def test_what_is_wrong_with_a_reply_fails_its_turn(tmp_path: Path, body: str, said: str) -> None:
    path = tmp_path / "s.py"
    path.write_text(f"import sys\ndef script(request):\n    {body}\ndef helper(request):\n    return 1 / 0\n")
    file = ScriptFile(path)
    with pytest.raises(EngineError, match=said):
        await file.reply(asked())
    file.close()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.py", None, r"none\.py: No such file"),
        ("s.txt", "x", r"s\.txt: it must be a \.py or a \.json file"),
        ("s.py", "def script(request:\n", r"s\.py:1: not Python"),
        ("s.py", "import sys\nraise OSError('away')\n", r"s\.py:2: OSError: away"),
        ("s.py", "def reply(request):\n    return ''\n", r"s\.py: it has no function script\(request\)"),
        ("s.json", "[\n  {'text': 1}\n]", r"s\.json:2:4: not JSON"),
        ("s.json", "{}", "a list of at least one reply"),
        ("s.json", "[]", "a list of at least one reply"),
        ("s.json", '["ok", {"txt": "x"}]', "reply 1 has an unknown field 'txt'"),
    ],
)
def test_errors_in_a_file_are_reported_before_anything_runs(
    tmp_path: Path, name: str, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=said):
        ScriptFile(tmp_path / name)


async def test_a_list_goes_by_turns_and_repeats_its_last_reply(tmp_path: Path, codec: ModelCodec) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps([{"tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}, "Done."]))
    engine = ScriptedEngine(codec, file=ScriptFile(path))
    said = []
    for session in ("a", "b"):
        for turn in range(4):
            sample = await engine.sample(asked(turn, session=session, stop_ids=codec.stop_ids, id=f"{session}-{turn}"))
            assert sample.finish is Finish.STOP
            said.append(codec.tokenizer.decode(sample.ids.tolist()))
    assert said[:4] == said[4:]
    assert '"command": "ls"' in said[0]
    assert said[1] == said[2] == said[3] == "Done.<|im_end|>"
    await engine.close()


async def test_a_script_runs_one_call_at_a_time_and_blocks_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "s.py"
    path.write_text(
        "import threading\nbusy = threading.Lock()\nrelease = threading.Event()\ncalls = []\n"
        "def script(request):\n"
        "    assert busy.acquire(blocking=False)\n"
        "    calls.append(request.turn)\n"
        "    assert release.wait(60)\n"
        "    busy.release()\n"
        "    return str(len(calls))\n"
    )
    file = ScriptFile(path)
    work = [asyncio.ensure_future(file.reply(asked(turn))) for turn in range(3)]
    # The loop goes on while the script waits for it.
    await asyncio.sleep(0)
    module = next(one for one in list(sys.modules.values()) if getattr(one, "__file__", None) == str(path))
    module.release.set()
    assert [one.text for one in await asyncio.gather(*work)] == ["1", "2", "3"]
    file.close()


def test_a_script_is_for_the_scripted_engine(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('["Hi."]')
    for arguments in (
        ["gateway", "--script", str(path), "--data", str(tmp_path / "d")],
        ["serve", "--engine", "openai", "--upstream", "http://127.0.0.1:1", "--script", str(path)],
    ):
        done = CliRunner().invoke(app, arguments)
        assert isinstance(done.exception, ConfigError)
        assert "--script is for --engine scripted" in str(done.exception)
