"""Bodies and items of OpenAI's responses for tests: short ways to say them, and one body that has everything."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from typing import Any

import orjson

from towline.common import exact_json
from towline.conversation import Answer, Media, Message, Reply, Request, Tool, ToolCall, Usage
from towline.dialects.base import DialectCall, ReadCache
from towline.dialects.responses import ResponsesDialect
from towline.dialects.wire import seal
from towline.errors import BadRequest

DIALECT = ResponsesDialect()
PNG = b"\x89PNG\r\n"
PNG_URL = "data:image/png;base64," + b64encode(PNG).decode()
PICTURE = Media("image", sha256(PNG).hexdigest(), PNG_URL, 0)
USER = {"role": "user", "content": "hi"}
Item = dict[str, Any]


def read(
    known: ReadCache | None = None, headers: dict[str, str] | None = None, **fields: Any
) -> tuple[Request, ReadCache]:
    body = {"model": "m", "input": [USER], **fields}
    return DIALECT.read(DialectCall("generate", body, headers or {}), known or ReadCache())


def messages(*items: Any) -> list[Message]:
    return read(input=[*items])[0].messages


def text_part(text: str, **extra: Any) -> Item:
    return {"type": "input_text", "text": text, **extra}


def says(text: str, **extra: Any) -> Item:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part], **extra}


def thought(text: str | None, **extra: Any) -> Item:
    summary = [] if text is None else [{"type": "summary_text", "text": text}]
    return {"type": "reasoning", "summary": summary, **extra}


def calls(name: str, arguments: Any, call_id: str = "c1", **extra: Any) -> Item:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **extra}


def result(output: Any, call_id: str = "c1", **extra: Any) -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": output, **extra}


def one_call(name: str, arguments: Any, call_id: str = "c1", custom: bool = False) -> Message:
    return Message("assistant", tool_calls=(ToolCall(call_id, name, arguments, custom),))


OPERATION = {"type": "update_file", "path": "a.py", "diff": "@@\n+x"}
COMPUTER = {"type": "computer_screenshot", "image_url": PNG_URL}
TOOL = {"type": "function", "name": "f"}


def written(reply: Reply, answer: str, tools: tuple[Tool, ...] = ()) -> list[Item]:
    """The items of a reply, as a client gets them."""
    request = Request("responses", "m", [], tools, wire={"sealed": True})
    body = DIALECT.write(request, Answer(answer, 1, "m", [reply], Usage(1, 1))).body
    return orjson.loads(body)["output"]


def outcome(body: dict[str, Any], known: ReadCache) -> tuple[str, ReadCache]:
    """The outcome of reading a body, as text that tells `True` from `1`; also checks that an answer can be written."""
    try:
        request, after = DIALECT.read(DialectCall("generate", body), known)
    except BadRequest as refusal:
        error = orjson.loads(DIALECT.error(refusal).body)["error"]
        return f"{error.pop('param')!s}: {error}", known
    assert len(after.messages) == len(after.starts)
    reply = Reply("a", "t", (ToolCall("c", "n.f", {"a": 1}), ToolCall("d", "local_shell", {"command": ["ls"]})))
    answer = Answer("0a", 1, request.model, [reply], Usage(1, 1))
    assert exact_json.loads(DIALECT.write(request, answer).body)["object"] == "response"
    return repr(request), after


RICH: dict[str, Any] = {
    "model": "m",
    "instructions": "i",
    "input": [
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "exec"}]},
        {"role": "developer", "content": [text_part("s")]},
        {"role": "user", "content": [text_part("u"), {"type": "input_image", "image_url": PNG_URL}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAEC", "format": "mp3"}}]},
        {"role": "user", "content": [{"type": "input_file", "file_data": "AAEC", "filename": "f"}]},
        thought("t", id="rs_0ax0", encrypted_content=seal("t"), content=[{"type": "reasoning_text", "text": "t"}]),
        says("a", id="msg_0ax1", status="completed", phase="commentary"),
        calls("f", '{"a":1}', "call00000000", id="fc_0ax2", namespace="ns"),
        result([text_part("r")], "call00000000"),
        calls("f", {"a": 1, "b": True}, "call00000001"),
        {"type": "custom_tool_call", "call_id": "c2", "name": "p", "input": "i"},
        {"type": "custom_tool_call_output", "call_id": "c2", "name": "p", "output": "r"},
        {"type": "tool_search_call", "call_id": "c3", "execution": "client", "arguments": {"query": "q"}},
        {"type": "tool_search_output", "call_id": "c3", "tools": [{"type": "namespace", "name": "n", "tools": [TOOL]}]},
        {"type": "local_shell_call", "call_id": "c4", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "c4", "output": "r"},
        {"type": "shell_call", "call_id": "c5", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c5", "output": [{"stdout": "o"}]},
        {"type": "apply_patch_call", "call_id": "c6", "operation": OPERATION},
        {"type": "apply_patch_call_output", "call_id": "c6", "status": "completed", "output": "o"},
        {"type": "web_search_call", "id": "ws", "action": {"query": "q"}},
        {"type": "image_generation_call", "id": "ig", "result": "AAEC", "output_format": "png"},
        {"type": "computer_call_output", "call_id": "c7", "output": COMPUTER},
        {"type": "configuration_update", "reasoning": {"effort": "low"}},
    ],
    "tools": [
        {"type": "function", "name": "f", "description": "d", "parameters": {"a": 1}, "strict": True},
        {"type": "custom", "name": "p", "format": {"type": "text"}},
        {"type": "namespace", "name": "ns", "description": "d", "tools": [{"type": "function", "name": "f"}]},
        {"type": "tool_search", "execution": "client", "description": "d", "parameters": {}},
        {"type": "local_shell"},
        {"type": "web_search"},
        {"type": "function", "function": {"name": "nested"}},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "previous_response_id": "resp_0a",
    "parallel_tool_calls": False,
    "stop": ["a"],
    "seed": 1,
    "temperature": 0.5,
    "top_p": 1,
    "top_k": 5,
    "max_output_tokens": 3,
    "max_tool_calls": 3,
    "text": {"format": {"type": "json_schema", "name": "s", "schema": {}}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content", "web_search_call.results"],
    "metadata": {"a": "b"},
    "store": True,
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "background": False,
    "truncation": "disabled",
    "top_logprobs": 2,
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "chat_template_kwargs": {"a": 1},
    "user": "u",
}
