"""Request bodies to fuzz with: put together from pieces that each dialect allows, then wounded or not.

`body_of` draws a request for an endpoint from the dialect's own vocabulary: kinds of items that belong together, and values
for its parameters. `wounded` breaks such a body in a few places, with values that are hard to take and with names that the
dialect knows. `written` and `broken` make bytes of it.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
URL = f"data:image/png;base64,{PIXEL}"
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
NASTY: list[Any] = [
    *(None, True, False, 0, 1, -1, 1.5, -0.0, 1e308, 2**31, 2**53 + 1, 2**63, 2**64 - 1, 10**30),
    *("", " ", "x", "\x00", "\u2028\u2029\x85", "😀👩‍👩‍👧", "\ud800", "\udfff\ud800", "\ufeff", "\ue0f5", "\x7f"),
    *("é\r\n", "0" * 3000, "<|im_end|>", "<|im_start|>system\n", "<tool_call>", "</think>", "{{ 7*7 }}", "{% raw %}"),
    *("NaN", "null", "../..", "%00", [], {}, [[]], [None], [{}], {"": None}, {"a": {"b": [1, {"c": None}]}}, ["text"]),
    *({"type": "text"}, {"type": "text", "text": "t"}, {"type": "function"}, {"role": "user"}, {"text": "t"}),
    *({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"role": "user", "content": "x"}),
    *("@deep60@", "@deep140@", "@deep260@", "@deep900@", "@deep30000@"),
]
"""Values that are hard to take. `@deepN@` is a list in a list, `N` times."""


@dataclass(frozen=True)
class Vocabulary:
    """What one dialect's requests are made of."""

    generate: tuple[str, ...]
    """Paths; those of streams last."""
    count: str
    items: str
    """The field that holds the history."""
    base: Body
    groups: list[list[Body]]
    """Items of history that belong together."""
    fields: dict[str, list[Any]]
    """Parameters with values that are allowed."""
    names: list[str]
    """Names of fields inside items."""


def _function(name: str) -> Body:
    return {"type": "function", "function": {"name": name, "description": "Runs.", "parameters": SCHEMA}}


_CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
CHAT = Vocabulary(
    generate=("/v1/chat/completions", "/chat/completions"),
    count="",
    items="messages",
    base={"model": "m"},
    groups=[
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}],
        [{"role": "developer", "content": [{"type": "text", "text": "d"}]}, {"role": "user", "content": "hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "bob"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL, "detail": "low"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]}],
        [{"role": "assistant", "content": "a", "reasoning_content": "r"}, {"role": "user", "content": "go"}],
        [
            {"role": "assistant", "content": None, "tool_calls": [_CALL], "refusal": None},
            {"role": "tool", "tool_call_id": "c1", "content": "out"},
        ],
        [
            {"role": "assistant", "content": "b", "tool_calls": [_CALL, {**_CALL, "id": "c2"}]},
            {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "two"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
        ],
        [
            {"role": "assistant", "content": "", "function_call": {"name": "bash", "arguments": "{}"}},
            {"role": "function", "name": "bash", "content": "out"},
        ],
        [{"role": "assistant", "content": "An open"}],
    ],
    fields={
        "tools": [[_function("bash"), _function("edit")], [{"type": "custom", "custom": {"name": "patch"}}], []],
        "functions": [[_function("bash")["function"]]],
        "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "bash"}}],
        "stream": [True, False],
        "stream_options": [{"include_usage": True}, None],
        "n": [1, 2, 3],
        "stop": ["END", ["a", "b"], None],
        "max_tokens": [1, 20, None],
        "max_completion_tokens": [7],
        "temperature": [0, 0.5, 2],
        "top_p": [0, 1],
        "seed": [1, -5],
        "logprobs": [True, False],
        "top_logprobs": [2],
        "response_format": [{"type": "json_object"}, {"type": "text"}],
        "chat_template_kwargs": [{"enable_thinking": False}],
        "reasoning_effort": ["low", "high"],
        "parallel_tool_calls": [False],
        "logit_bias": [{"5": 1}],
        "presence_penalty": [0.5],
        "metadata": [{"a": "b"}],
        "user": ["u"],
        "store": [True],
    },
    names=[
        *("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "reasoning_content", "thinking"),
        *("id", "type", "function", "arguments", "text", "image_url", "custom", "input", "cache_control", "url"),
    ],
)
RESPONSES = Vocabulary(
    generate=("/v1/responses", "/responses"),
    count="/v1/responses/input_tokens",
    items="input",
    base={"model": "m"},
    groups=[
        [{"role": "user", "content": "hi"}],
        [{"type": "message", "role": "developer", "content": "d"}, {"role": "user", "content": "hi"}],
        [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "hi"}, {"type": "input_image", "image_url": URL}],
            }
        ],
        [{"role": "user", "content": [{"type": "input_file", "file_data": URL, "filename": "a.png"}]}],
        [
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"role": "user", "content": "go"},
        ],
        [
            {"type": "reasoning", "summary": [], "encrypted_content": "AAAA"},
            {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"command": "ls"}'},
            {"type": "function_call", "call_id": "c2", "name": "bash", "arguments": "{}", "namespace": "n"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
        ],
        [
            {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c3", "output": "ok"},
        ],
        [
            {"type": "local_shell_call", "call_id": "c4", "action": {"type": "exec", "command": ["ls"], "env": {}}},
            {"type": "local_shell_call_output", "call_id": "c4", "output": "ok"},
        ],
        [
            {"type": "tool_search_call", "call_id": "c5", "execution": "client", "arguments": {"query": "x"}},
            {
                "type": "tool_search_output",
                "call_id": "c5",
                "tools": [{"type": "function", "name": "found", "parameters": SCHEMA}],
            },
        ],
        [{"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}],
        [{"type": "additional_tools", "tools": [{"type": "function", "name": "more", "parameters": SCHEMA}]}],
        [{"type": "item_reference", "id": "msg_0a0x0"}],
        [{"type": "image_generation_call", "id": "ig_1", "result": PIXEL}],
        [{"type": "compaction", "encrypted_content": "AAAA"}],
    ],
    fields={
        "instructions": ["be brief", None],
        "tools": [
            [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": None}, {"type": "web_search"}],
            [{"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}],
            [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "bash", "parameters": SCHEMA}]}],
            [{"type": "local_shell"}, {"type": "tool_search", "execution": "client"}, {"type": "apply_patch"}],
        ],
        "tool_choice": ["auto", "none", "required", {"type": "function", "name": "bash"}],
        "stream": [True, False],
        "store": [True, False],
        "include": [["reasoning.encrypted_content"], ["message.output_text.logprobs", "other"], []],
        "max_output_tokens": [1, 30],
        "temperature": [0, 1],
        "top_p": [1],
        "seed": [1],
        "stop": ["END"],
        "reasoning": [{"effort": "low", "summary": "auto"}, {"effort": "none"}],
        "text": [{"verbosity": "low"}, {"format": {"type": "json_object"}}],
        "truncation": ["auto", "disabled"],
        "metadata": [{"a": "b"}],
        "parallel_tool_calls": [False],
        "previous_response_id": ["resp_00"],
        "background": [True],
        "prompt": [{"id": "p"}],
        "conversation": ["c"],
        "client_metadata": [{"x": 1}],
    },
    names=[
        *("type", "role", "content", "id", "status", "summary", "encrypted_content", "call_id", "name", "namespace"),
        *("arguments", "output", "input", "action", "tools", "text", "image_url", "execution", "phase", "result"),
    ],
)
MESSAGES = Vocabulary(
    generate=("/v1/messages", "/v1/messages?beta=true", "/messages"),
    count="/v1/messages/count_tokens",
    items="messages",
    base={"model": "m", "max_tokens": 50},
    groups=[
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}],
        [
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
                    {
                        "type": "document",
                        "title": "t",
                        "source": {"type": "text", "data": "d", "media_type": "text/plain"},
                    },
                ],
            }
        ],
        [{"role": "assistant", "content": "a"}, {"role": "user", "content": "go"}],
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "c1", "name": "bash", "input": {"command": "ls"}},
                    {"type": "tool_use", "id": "c2", "name": "bash", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "two"}]},
                    {"type": "tool_result", "tool_use_id": "c1", "content": "one", "is_error": True},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "server_tool_use", "id": "c3", "name": "web_search", "input": {"query": "x"}},
                    {"type": "web_search_tool_result", "tool_use_id": "c3", "content": []},
                    {"type": "redacted_thinking", "data": "AAAA"},
                ],
            },
            {"role": "user", "content": "go"},
        ],
        [{"role": "system", "content": "late"}, {"role": "user", "content": "go"}],
        [
            {
                "role": "user",
                "content": [
                    {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "x"}]}
                ],
            }
        ],
        [{"role": "assistant", "content": "An open"}],
    ],
    fields={
        "system": ["s", [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]],
        "tools": [
            [{"name": "bash", "description": "Runs.", "input_schema": SCHEMA}],
            [{"type": "bash_20250124", "name": "bash"}, {"type": "web_search_20250305", "name": "web_search"}],
            [{"name": "late", "input_schema": SCHEMA, "defer_loading": True}],
        ],
        "tool_choice": [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "bash"}, {"type": "none"}],
        "stream": [True, False],
        "stop_sequences": [["END"], []],
        "temperature": [0, 1],
        "top_p": [1],
        "top_k": [5],
        "thinking": [{"type": "adaptive", "display": "omitted"}, {"type": "enabled", "budget_tokens": 1024}],
        "output_config": [{"effort": "low"}],
        "context_management": [{"edits": []}],
        "metadata": [{"user_id": "u"}],
        "service_tier": ["auto"],
    },
    names=[
        *("role", "content", "type", "text", "thinking", "signature", "id", "name", "input", "tool_use_id", "is_error"),
        *("source", "data", "media_type", "cache_control", "citations", "title", "context"),
    ],
)
GOOGLE = Vocabulary(
    generate=("/v1beta/models/m:generateContent", "/v1beta/models/m:streamGenerateContent?alt=sse",
              "/v1/models/m:streamGenerateContent"),
    count="/v1beta/models/m:countTokens",
    items="contents",
    base={},
    groups=[
        [{"role": "user", "parts": [{"text": "hi"}]}],
        [{"parts": [{"text": "a"}, {"text": "b"}]}],
        [{"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": PIXEL}}, {"text": "see"}]}],
        [{"role": "user", "parts": [{"file_data": {"file_uri": "data:image/png;base64,AAAA", "mime_type": "image/png"}}]}],
        [
            {"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "a", "thoughtSignature": "AAAA"}]},
            {"role": "user", "parts": [{"text": "go"}]},
        ],
        [
            {"role": "model", "parts": [{"functionCall": {"name": "bash", "args": {"command": "ls"}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "bash", "response": {"out": 1}}}]},
        ],
        [
            {
                "role": "model",
                "parts": [
                    {"function_call": {"id": "c1", "name": "bash", "args": {"command": "ls"}}},
                    {"functionCall": {"id": "c2", "name": "bash", "args": {}}},
                ],
            },
            {
                "role": "function",
                "parts": [
                    {"functionResponse": {"id": "c2", "name": "bash", "response": {"output": "two"}}},
                    {"functionResponse": {"id": "c1", "name": "bash", "response": {"error": "one"}}},
                    {"functionResponse": {"id": "c1", "name": "bash", "response": {"error": "one"}}},
                ],
            },
        ],
        [{"role": "model", "parts": [{"executableCode": {"code": "1", "language": "PYTHON"}}]}],
        [{"role": "model", "parts": [{"text": "An open"}]}],
    ],
    fields={
        "systemInstruction": [{"parts": [{"text": "s"}]}, "s"],
        "tools": [
            [{"functionDeclarations": [{"name": "bash", "parameters": {"type": "OBJECT", "properties": {}}}]}],
            [{"function_declarations": [{"name": "bash", "parametersJsonSchema": SCHEMA}]}, {"googleSearch": {}}],
        ],
        "toolConfig": [{"functionCallingConfig": {"mode": "AUTO"}}, {"functionCallingConfig": {"mode": "NONE"}}],
        "generationConfig": [
            {"temperature": 1, "maxOutputTokens": 50, "thinkingConfig": {"includeThoughts": True}},
            {"candidateCount": 2, "seed": 1, "topK": 5, "topP": 0.9, "stopSequences": ["END"]},
            {"thinking_config": {"thinking_budget": 0}, "responseMimeType": "application/json"},
            {"responseLogprobs": True, "presencePenalty": 0.5},
        ],
        "safetySettings": [[{"category": "x", "threshold": "y"}]],
        "labels": [{"a": "b"}],
    },
    names=[
        *("role", "parts", "text", "thought", "thoughtSignature", "functionCall", "functionResponse", "inlineData"),
        *("fileData", "name", "args", "response", "id", "mimeType", "data", "function_call", "partialArgs"),
    ],
)  # fmt: skip
VOCABULARIES = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES, "google": GOOGLE}


def body_of(chance: random.Random, words: Vocabulary, mark: str) -> Body:
    """A request that the dialect allows, or nearly: groups may stand where they make no sense. `mark` is in its text."""
    history = copy.deepcopy([item for _ in range(chance.randint(1, 4)) for item in chance.choice(words.groups)])
    asked = {"parts": [{"text": mark}]} if words is GOOGLE else {"content": mark}
    history.insert(chance.choice([0, len(history)]), {"role": "user", **asked})
    body = {**words.base, words.items: history}
    for name in chance.sample(sorted(words.fields), chance.randint(0, 6)):
        body[name] = copy.deepcopy(chance.choice(words.fields[name]))
    return body


def wounded(chance: random.Random, body: Body, words: Vocabulary) -> Body:
    """The body with a few wounds."""
    for _ in range(chance.choice([0, 0, 1, 1, 1, 2, 3, 6])):
        place, key = chance.choice(list(_places(body)))
        action = chance.random()
        if action < 0.5:
            place[key] = copy.deepcopy(chance.choice(NASTY))
        elif action < 0.65:
            del place[key]
        elif action < 0.8 and isinstance(place, dict):
            names = [*words.fields, "", "\x00", "__class__"] if place is body else words.names
            place[chance.choice(names)] = copy.deepcopy(chance.choice(NASTY))
        elif isinstance(place, list):
            place.insert(key, copy.deepcopy(chance.choice([*NASTY, *place])))
        else:
            place[key] = [copy.deepcopy(place[key])] * chance.randint(0, 3)
        if not body:
            break
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])


def written(body: Any) -> bytes:
    """JSON, with nesting that no encoder writes."""
    text = json.dumps(body)
    for depth in (60, 140, 260, 900, 30000):
        text = text.replace(f'"@deep{depth}@"', "[" * depth + "]" * depth)
    return text.encode()


def broken(chance: random.Random, body: Body) -> bytes:
    """No JSON object at all, or JSON with bytes changed."""
    kind = chance.randrange(5)
    data = bytearray(written(body))
    if kind == 0:
        return bytes(data[: chance.randrange(len(data))])
    if kind == 1:
        for _ in range(chance.randint(1, 5)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        return bytes(data)
    if kind == 2:
        return chance.randbytes(chance.randrange(200))
    if kind == 3:
        return written(chance.choice(NASTY))
    return b"\xef\xbb\xbf" + bytes(data) if chance.random() < 0.5 else bytes(data) + b" trailing"
