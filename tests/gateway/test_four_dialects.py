"""What the gateway does for one dialect and not for another, over HTTP: stored answers, references, errors that clients
recognise in one place only, tools that only messages show, images before a model that sees none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.gateway.gateway_rig import Body, Opened, Rig, Start, assert_one_chain, chat, running_gateway, system, user
from towline.conversation import Request, ToolCall
from towline.dialects.base import DialectCall
from towline.dialects.registry import all_dialects
from towline.engines.scripted import Say
from towline.schema import Trajectory
from towline.tokens.codec import ModelCodec
from towline.tokens.loading import load_codec

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
LONG = "word " * 6000
TOOL = {"type": "object", "properties": {"command": {"type": "string"}}}
HEADERS = {
    "chat": {},
    "responses": {},
    "messages": {"anthropic-version": "2023-06-01"},
    "google": {"x-goog-api-client": "x"},
}


@pytest.fixture(scope="module")
def strict(assets: Path) -> ModelCodec:
    """A template with calls in XML, whose types are in the schema alone, and with no place for a late system message."""
    return load_codec(assets / "tokenizers" / "qwen3", template=assets / "templates" / "qwen3_5_think.jinja")


def agent(request: Request) -> Say:
    """Two calls at once, then an answer."""
    if request.messages[-1].role == "tool":
        return Say("Done.", "It worked.")
    calls = [ToolCall("", "bash", {"command": f"ls {n}"}) for n in range(2)] if request.tools else []
    return Say("Looking." if calls else "Nothing to do.", "I should look.", calls)


async def post(rig: Rig, session: Opened, path: str, body: Body, **headers: str) -> tuple[int, bytes]:
    named = {**session.headers, **headers}
    async with rig.web.post(session.root + path, json=body, headers=named) as response:
        return response.status, await response.read()


async def get(rig: Rig, session: Opened, path: str) -> tuple[int, str, bytes]:
    async with rig.web.get(session.root + path, headers=session.headers) as response:
        return response.status, response.headers["content-type"], await response.read()


def events(data: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]


def told(dialect: str, text: str, *, stream: bool = False) -> tuple[str, Body]:
    """The same question in each dialect."""
    if dialect == "chat":
        return "/v1/chat/completions", {"model": "m", "messages": [user(text)], "stream": stream}
    if dialect == "responses":
        return "/v1/responses", {"model": "m", "input": text, "stream": stream}
    if dialect == "messages":
        return "/v1/messages", {"model": "m", "max_tokens": 50, "messages": [user(text)], "stream": stream}
    method = "streamGenerateContent?alt=sse" if stream else "generateContent"
    return f"/v1beta/models/m:{method}", {"contents": [{"role": "user", "parts": [{"text": text}]}]}


@pytest.mark.parametrize("dialect", HEADERS)
async def test_a_prompt_that_is_too_long(start: Start, dialect: str) -> None:
    """Codex compacts its history on `response.failed` in a stream, and on nothing else; the others on a status."""
    wording = {
        "chat": "maximum context length is 4096 tokens",
        "responses": "maximum context length is 4096 tokens",
        "messages": "prompt is too long: ",
        "google": "exceeds the maximum number of tokens allowed",
    }[dialect]
    async with start(agent) as rig:
        session = await rig.open(settings={"limits": {"context": 4096}})
        for stream in (False, True):
            status, data = await post(rig, session, *told(dialect, LONG, stream=stream))
            assert wording in data.decode()
            assert status == (200 if dialect == "responses" and stream else 400)
            if status == 200:
                created, *_, failed = events(data)
                assert [created["type"], failed["type"]] == ["response.created", "response.failed"]
                assert failed["response"]["error"]["code"] == "context_length_exceeded"
                assert failed["response"]["id"] == created["response"]["id"]
        assert (await rig.seal(session)).turns == []


async def test_items_that_are_named_and_answers_that_are_asked_for_again(start: Start) -> None:
    tools = [{"type": "function", "name": "bash", "parameters": TOOL}]
    async with start(agent) as rig:
        session = await rig.open()
        body: Body = {"model": "m", "instructions": "Be brief.", "tools": tools, "input": [user("List.")]}
        first = json.loads((await post(rig, session, "/v1/responses", body))[1])
        named = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call", "function_call"]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "a b"}
            for item in first["output"]
            if item["type"] == "function_call"
        ]
        body["input"] += [*named, *results]
        status, data = await post(rig, session, "/v1/responses", {**body, "stream": True})
        assert status == 200
        second = events(data)[-1]["response"]

        # The stream of a stored answer is the stream that it was, or the rest of it.
        status, kind, again = await get(rig, session, f"/v1/responses/{second['id']}?stream=true")
        assert (status, kind) == (200, "text/event-stream; charset=utf-8")
        assert [event["type"] for event in events(again)] == [event["type"] for event in events(data)]
        assert events(again)[-1]["response"]["output"] == second["output"]
        rest = events((await get(rig, session, f"/v1/responses/{second['id']}?stream=true&starting_after=3"))[2])
        assert rest == events(again)[4:]
        status, _, data = await get(rig, session, f"/v1/responses/{second['id']}?stream=true&starting_after=x")
        assert (status, json.loads(data)["error"]["param"]) == (400, "starting_after")
        whole = json.loads((await get(rig, session, f"/v1/responses/{second['id']}"))[2])
        assert whole["output"] == second["output"]

        # Responses that are not stored, unknown or of another session cannot be referenced.
        hidden = json.loads((await post(rig, session, "/v1/responses", {**body, "store": False}))[1])
        other = await rig.open()
        for asking, id in ((session, hidden["output"][0]["id"]), (session, "msg_12x0"), (other, named[0]["id"])):
            reference = {"type": "item_reference", "id": id}
            status, data = await post(rig, asking, "/v1/responses", {**body, "input": [user("List."), reference]})
            assert status == 400
            assert f"item '{id}' is not stored" in json.loads(data)["error"]["message"]
        trajectory = await rig.seal(session)
        assert [turn.parent for turn in trajectory.turns[:2]] == [None, trajectory.turns[0].id]
        assert [turn.reason for turn in trajectory.turns] == [None, None, "sibling"]


async def test_errors_have_the_shape_of_whoever_asks(start: Start) -> None:
    """Also where no dialect names the path, or none of them that method."""
    async with start(agent) as rig:
        session = await rig.open()
        for headers, check in (
            ({}, lambda error: error["error"]["type"] == "invalid_request_error" and "type" not in error),
            (HEADERS["messages"], lambda error: error["type"] == "error"),
            (HEADERS["google"], lambda error: error["error"]["status"] == "NOT_FOUND"),
        ):
            status, data = await post(rig, session, "/v9/nowhere", {}, **headers)
            assert status == 404
            assert check(json.loads(data)), data
        for path, check in (
            ("/v1/chat/completions", lambda error: "param" in error["error"]),
            ("/v1/messages", lambda error: error["type"] == "error"),
            ("/m:generateContent", lambda error: error["error"]["status"] == "INVALID_ARGUMENT"),
        ):
            status, _, data = await get(rig, session, path)
            assert status == 405
            assert check(json.loads(data)), data


async def test_what_is_not_followed_is_recorded(start: Start) -> None:
    async with start(agent) as rig:
        session = await rig.open()
        for choice in ("none", "auto", "required"):
            assert (await rig.post(session, chat(user(f"Now {choice}."), tool_choice=choice)))[0] == 200
        assert (await rig.post(session, {"model": "m", "messages": [user("Bare.")], "tool_choice": "none"}))[0] == 200
        turns = (await rig.seal(session)).turns
        assert [turn.overridden for turn in turns] == [["tool_choice"], [], ["tool_choice"], []]


async def test_tools_that_only_messages_show(strict: ModelCodec, tmp_path: Path) -> None:
    """Their schemas tell the types of arguments that the model wrote as bare text."""

    values = "".join(f"<parameter={name}>\n7\n</parameter>\n" for name in ("page", "count"))
    written = f"Now.\n</think>\n\n<tool_call>\n<function=fetch>\n{values}</function>\n</tool_call><|im_end|>"

    def say(request: Request) -> Say:
        return Say(ids=np.asarray(strict.tokenizer.encode(written)))

    schema = {"type": "object", "properties": {"page": {"type": "string"}, "count": {"type": "integer"}}}
    search = {"name": "search", "description": "Searches.", "input_schema": TOOL}
    fetch = {"name": "fetch", "description": "Fetches.", "input_schema": schema, "defer_loading": True}
    called = {"type": "tool_use", "id": "c1", "name": "search", "input": {"command": "fetch"}}
    found = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "tool_reference", "tool_name": "fetch"}]}
    history = [user("Look."), {"role": "assistant", "content": [called]}, {"role": "user", "content": [found]}]
    body = {"model": "m", "max_tokens": 200, "messages": history, "tools": [search, fetch]}
    tools = [{"type": "tool_search", "execution": "client", "parameters": TOOL}]
    items = [
        user("Look."),
        {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"command": "fetch"}},
        {
            "type": "tool_search_output",
            "call_id": "c1",
            "execution": "client",
            "tools": [{"type": "function", "name": "fetch", "parameters": schema}],
        },
    ]
    async with running_gateway(strict, tmp_path, say) as rig:
        session = await rig.open()
        status, data = await post(rig, session, "/v1/messages", body)
        assert status == 200, data
        assert json.loads(data)["content"][-1]["input"] == {"page": "7", "count": 7}
        status, data = await post(rig, session, "/v1/responses", {"model": "m", "input": items, "tools": tools})
        assert status == 200, data
        assert json.loads(json.loads(data)["output"][-1]["arguments"]) == {"page": "7", "count": 7}


async def test_a_late_system_message_that_the_template_refuses(strict: ModelCodec, tmp_path: Path) -> None:
    """Claude Code acts on these very words; without such a message they are not said."""
    late = [user("Hi."), {"role": "assistant", "content": "Hi."}, system("Mind the tests."), user("Go on.")]
    async with running_gateway(strict, tmp_path, agent) as rig:
        session = await rig.open()
        body: Body = {"model": "m", "max_tokens": 50, "system": "Be brief."}
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            status, data = await post(rig, session, path, {**body, "messages": late})
            assert (status, json.loads(data)["error"]["message"]) == (400, "capability_rejected: mid_conv_system")
        status, answer = await rig.post(session, {"model": "m", "messages": [system("Be brief."), *late]})
        assert status == 400
        assert "the model's chat template refuses these messages" in answer["error"]["message"]
        # Without any user message it is refused for another reason.
        status, data = await post(rig, session, "/v1/messages", {**body, "messages": [system("a"), system("b")]})
        assert status == 400
        assert "capability_rejected" not in data.decode()


async def test_a_system_prompt_that_is_another_on_every_call(start: Start) -> None:
    """Only what is new counts as new: neither is the history read again nor its length looked at again."""
    dialect = next(one for one in all_dialects() if one.name == "messages")
    async with start(agent) as rig:
        opened = await rig.open(settings={"noise": ["cch=[0-9]+;"]})
        session = rig.gateway.get(opened.id)
        history: list[Body] = [user("List, please.")]
        tools = [{"name": "bash", "input_schema": TOOL}]
        for number in range(4):
            body = {"model": "m", "max_tokens": 99, "system": f"cch={number};Be brief.", "messages": history}
            request, thread = session.read(dialect, DialectCall("generate", {**body, "tools": tools}))
            assert thread.fresh[0].text == f"cch={number};Be brief."
            assert any(message is request.messages[1] for message in thread.fresh) == (number == 0)
            assert len(thread.fresh) <= 5
            assert len(thread.hashes) == len(request.messages) + 1
            status, data = await post(rig, opened, "/v1/messages", {**body, "tools": tools})
            assert status == 200
            content = json.loads(data)["content"]
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "x"}
                for block in content
                if block["type"] == "tool_use"
            ]
            answered = [{"role": "assistant", "content": content}, {"role": "user", "content": [*results]}]
            history = [*history, *answered] if results else [*history, answered[0], user("Once more.")]
        assert_one_chain(await rig.seal(opened), 4)


@pytest.mark.parametrize(
    "cuts", [(6,), (4, 6), (22,), (5, 20)], ids=["in the reasoning", "twice there", "in the text", "in both"]
)
async def test_a_reply_that_is_written_on(start: Start, codec: ModelCodec, cuts: tuple[int, ...]) -> None:
    """What was open before the cut is open after it: reasoning continues as reasoning."""
    reasoning, text = "First I look at every file, then I think about them.", "It is done, and everything works fine."
    ids = np.asarray([*codec.tokenizer.encode(f"<think>\n{reasoning}\n</think>\n\n{text}"), min(codec.stop_ids)])
    place = 0

    def say(request: Request) -> Say:
        return Say(ids=ids[place:]) if request.messages[-1].text != "And now?" else Say("Now this.")

    async with start(say) as rig:
        session = await rig.open()
        asked, begun = [user("Do it.")], {"role": "assistant", "content": "", "reasoning_content": ""}
        for cut in (*cuts, None):
            limits = {} if cut is None else {"max_tokens": cut}
            written = [begun] if place else []
            status, answer = await rig.post(session, {"model": "m", "messages": [*asked, *written], **limits})
            assert status == 200
            choice = answer["choices"][0]
            assert choice["finish_reason"] == ("stop" if cut is None else "length")
            for name in ("content", "reasoning_content"):
                begun = {**begun, name: begun[name] + (choice["message"].get(name) or "")}
            place += cut or 0
        assert begun == {"role": "assistant", "content": text, "reasoning_content": reasoning}
        assert (await rig.post(session, {"model": "m", "messages": [*asked, begun, user("And now?")]}))[0] == 200
        assert_one_chain(await rig.seal(session), len(cuts) + 2)


async def test_images_before_a_model_that_sees_none(start: Start, codec: ModelCodec) -> None:
    """The model reads that there was one; the turn says so; another image is another message."""
    parts: list[Body] = [
        {"type": "text", "text": "Compare "},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
        {"type": "text", "text": "with this."},
    ]
    async with start(agent) as rig:
        session = await rig.open()
        body = chat({"role": "user", "content": parts})
        status, answer = await rig.post(session, body)
        assert status == 200
        message = answer["choices"][0]["message"]
        results = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": [{"type": "text", "text": "shot"}, parts[1]] if place else "no shot",
            }
            for place, call in enumerate(message["tool_calls"])
        ]
        history = [*body["messages"], message, *results]
        status, answer = await rig.post(session, chat(*history))
        assert status == 200
        history += [answer["choices"][0]["message"], user("Thanks.")]
        assert (await rig.post(session, chat(*history)))[0] == 200
        other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,b3RoZXI="}}
        edited = {"role": "user", "content": [parts[0], other, parts[2]]}
        assert (await rig.post(session, chat(edited, *history[1:], user("Please."))))[0] == 200
        trajectory = await rig.seal(session)
        shown = [codec.tokenizer.decode(trajectory.prompt(turn.id).tolist()) for turn in trajectory.turns]
        assert "user\nCompare [image]\nwith this.<|im_end|>" in shown[0]
        assert "no shot\n</tool_response>" in shown[1]
        assert "shot\n[image]\n</tool_response>" in shown[1]
        flags = [[flag for flag in turn.flags if flag.endswith("_not_shown")] for turn in trajectory.turns]
        assert flags == [["image_not_shown"], ["image_not_shown"], [], ["image_not_shown"]]
        assert _reasons(trajectory) == [None, None, None, "history_edited"]


def _reasons(trajectory: Trajectory) -> list[str | None]:
    return [None if turn.reason is None else str(turn.reason) for turn in trajectory.turns]


OWN_IDS = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}: {% endif %}{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}
{{- '<|tool_call_argument_begin|>' + (c.function.arguments|tojson) }}<|tool_call_end|>{% endfor -%}
<|tool_calls_section_end|>{% endif %}<|im_end|>
{% endfor -%}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


async def test_call_ids_that_the_model_samples(assets: Path, tmp_path: Path) -> None:
    """A plain server would show them to it as well: they are no difference from what it would render."""
    folder = assets / "tokenizers" / "qwen3"
    template = tmp_path / "own.jinja"
    template.write_text(OWN_IDS)
    codec = load_codec(folder, template=template, renderer="sentinel")

    def say(request: Request) -> Say:
        if request.messages[-1].role == "tool":
            return Say("Done.")
        return Say("", None, [ToolCall("functions.bash:0", "bash", {"command": "ls"})])

    async with running_gateway(codec, tmp_path / "data", say) as rig:
        session = await rig.open()
        status, answer = await rig.post(session, chat(user("List.")))
        assert status == 200
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert call["id"] != "functions.bash:0"
        result = {"role": "tool", "tool_call_id": call["id"], "content": "a b"}
        assert (await rig.post(session, chat(user("List."), message, result)))[0] == 200
        trajectory = await rig.seal(session)
        assert_one_chain(trajectory, 2)
        shown = codec.tokenizer.decode(trajectory.prompt(trajectory.turns[1].id).tolist())
        assert shown.count("functions.bash:0") == 2
        assert trajectory.report.plain_difference == 0
