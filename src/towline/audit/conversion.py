"""Converts wire requests to messages for Hugging Face chat templates: one small reader per dialect.

These readers share no code with `towline.dialects` and support only what the simulated harnesses send. References in a
request (sealed reasoning, item and response ids, call ids) are resolved from the replies that the harness received, which
the audit keeps itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from towline.audit.oracle import HfMessage

_SYSTEM = ("system", "developer")
_THINK = re.compile(r"^\s*<think>.*?</think>", re.DOTALL)
_FREE_NAMES = ("args", "response", "parametersJsonSchema")
"""Fields of Google's dialect whose subfields are named by the harness."""


@dataclass(slots=True)
class SeenReplies:
    """The replies that a harness has received in a session, by the ids it may refer to."""

    sealed: dict[str, str] = field(default_factory=dict)
    """Reasoning by the signature that seals it."""
    ids: dict[str, str] = field(default_factory=dict)
    """The id that the model wrote, by the alphanumeric part of the id that the harness received."""
    written: list[HfMessage] = field(default_factory=list)
    """Every reply, with the ids that the model wrote."""
    items: dict[str, HfMessage] = field(default_factory=dict)
    """Parts of replies by item id."""
    answers: dict[str, list[HfMessage]] = field(default_factory=dict)
    """The messages of a request and its reply, by response id."""


@dataclass(slots=True)
class ConvertedRequest:
    """One request, converted."""

    messages: list[HfMessage]
    tools: list[dict[str, Any]]

    @property
    def prefilled(self) -> bool:
        """Whether the last message is an assistant message that the model continues."""
        return bool(self.messages[-1]["role"] == "assistant")


def convert(dialect: str, body: bytes, known: SeenReplies) -> ConvertedRequest:
    """The messages and tools of a request body."""
    request = json.loads(body)
    if dialect == "google":
        request = _camel(request)
    messages = list(_READERS[dialect](request, known))
    # In the other dialects a reply is several items or blocks; consecutive ones are one message.
    read = messages if dialect == "chat" else merge_assistant_messages(messages)
    return ConvertedRequest(_normalise(read, known), _tools(dialect, request))


def merge_assistant_messages(messages: Iterable[HfMessage]) -> list[HfMessage]:
    """The messages, with consecutive assistant messages merged."""
    merged: list[HfMessage] = []
    for message in messages:
        last = merged[-1] if merged else None
        if message["role"] == "assistant" and last is not None and last["role"] == "assistant":
            merged[-1] = _join(last, message)
        else:
            merged.append(message)
    return merged


def _normalise(messages: Iterable[HfMessage], known: SeenReplies) -> list[HfMessage]:
    """Tool results in the order of their calls, and ids as the model wrote them."""
    settled: list[HfMessage] = []
    for message in messages:
        if message.get("tool_calls"):
            message = {**message, "tool_calls": _as_written(message, known)}
        if message["role"] == "tool":
            id = message["tool_call_id"]
            message = {**message, "tool_call_id": known.ids.get(_alphanumeric(id), id)}
        settled.append(message)
    return list(_ordered(settled))


def _as_written(message: HfMessage, known: SeenReplies) -> list[dict[str, Any]]:
    """The calls of a message with the ids that the model wrote; if the harness sent none, those of the matching reply."""
    calls = [{**call, "id": known.ids.get(_alphanumeric(call["id"]), call["id"])} for call in message["tool_calls"]]
    if all(call["id"] for call in calls):
        return calls
    for reply in reversed(known.written):
        if same_reply(reply, message):
            return list(reply["tool_calls"])
    return calls


def same_reply(one: HfMessage, other: HfMessage) -> bool:
    """Whether two messages of an assistant say and call the same; reasoning and ids do not count."""
    said = [_THINK.sub("", message["content"]).strip() for message in (one, other)]
    called = [[(call["name"], call["arguments"]) for call in message.get("tool_calls", ())] for message in (one, other)]
    return said[0] == said[1] and called[0] == called[1]


def _ordered(messages: list[HfMessage]) -> Iterable[HfMessage]:
    calls: list[dict[str, Any]] = []
    results: list[HfMessage] = []
    for message in [*messages, {"role": ""}]:
        if message["role"] == "tool":
            results.append(message)
            continue
        yield from _results_in_call_order(results, calls)
        results, calls = [], message.get("tool_calls", [])
        if message["role"]:
            yield message


def _results_in_call_order(results: list[HfMessage], calls: list[dict[str, Any]]) -> Iterable[HfMessage]:
    """The results in the order of the calls, each once and with its function's name."""
    left = list(results)
    for call in calls:
        mine = [one for one in left if call["id"] and _alphanumeric(one["tool_call_id"]) == _alphanumeric(call["id"])]
        if not mine:
            # Without ids, take the first unmatched result of the same function.
            mine = [one for one in left if not one["tool_call_id"] and one["name"] == call["name"]][:1]
        if mine:
            yield {**mine[0], "name": call["name"], "tool_call_id": call["id"]}
            left = [one for one in left if one not in mine]
    yield from left


def _join(first: HfMessage, second: HfMessage) -> HfMessage:
    joined = {**first, **{name: value for name, value in second.items() if name != "content"}}
    joined["content"] = first["content"] + second["content"]
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined


def _alphanumeric(id: str) -> str:
    return "".join(filter(str.isalnum, id))


def _text(content: Any, between: str = "") -> str:
    if isinstance(content, list):
        return between.join(part["text"] for part in content)
    return content or ""


def _assistant(text: str, reasoning: str | None, calls: list[dict[str, Any]]) -> HfMessage:
    message: HfMessage = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "name": name, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}


def _result(id: str, text: str, name: str = "") -> HfMessage:
    return {"role": "tool", "content": text, "tool_call_id": id, "name": name}


def _tools(dialect: str, request: Mapping[str, Any]) -> list[dict[str, Any]]:
    declared = request.get("tools") or []
    if dialect == "chat":
        return list(declared)
    if dialect == "google":
        declared = [function for tool in declared for function in tool["functionDeclarations"]]
    schema = {"responses": "parameters", "messages": "input_schema", "google": "parametersJsonSchema"}[dialect]
    return [
        {
            "type": "function",
            "function": {"name": one["name"], "description": one["description"], "parameters": one[schema]},
        }
        for one in declared
    ]


# chat


def _chat(request: Mapping[str, Any], known: SeenReplies) -> Iterable[HfMessage]:
    for message in request["messages"]:
        role, text = message["role"], _text(message.get("content"))
        if role == "tool":
            yield _result(message["tool_call_id"], text)
        elif role == "assistant":
            calls = [_call(c["id"], **c["function"]) for c in message.get("tool_calls") or ()]
            yield _assistant(text, message.get("reasoning_content") or message.get("reasoning"), calls)
        else:
            yield {"role": "system" if role in _SYSTEM else role, "content": text}


# responses


def _responses(request: Mapping[str, Any], known: SeenReplies) -> Iterable[HfMessage]:
    if request.get("previous_response_id"):
        yield from known.answers[request["previous_response_id"]]
    elif request.get("instructions"):
        yield {"role": "system", "content": request["instructions"]}
    for item in request["input"]:
        kind = item["type"]
        if kind == "item_reference":
            yield known.items[item["id"]]
        elif kind == "function_call_output":
            yield _result(item["call_id"], _text(item["output"]))
        elif kind == "function_call":
            yield _assistant("", None, [_call(item["call_id"], item["name"], item["arguments"])])
        elif kind == "reasoning":
            summary = _text(item.get("summary"))
            yield _assistant("", known.sealed.get(item.get("encrypted_content") or "", summary), [])
        elif item["role"] == "assistant":
            yield _assistant(_text(item["content"]), None, [])
        else:
            role = "system" if item["role"] in _SYSTEM else item["role"]
            yield {"role": role, "content": _text(item["content"])}


# messages


def _messages(request: Mapping[str, Any], known: SeenReplies) -> Iterable[HfMessage]:
    if request.get("system"):
        yield {"role": "system", "content": _text(request["system"], "\n")}
    for message in request["messages"]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        said = "".join(block["text"] for block in blocks if block["type"] == "text")
        if message["role"] == "assistant":
            thought = "".join(
                block["thinking"] or known.sealed.get(block["signature"], "")
                for block in blocks
                if block["type"] == "thinking"
            )
            calls = [_call(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
            yield _assistant(said, thought, calls)
            continue
        for block in blocks:
            if block["type"] == "tool_result":
                yield _result(block["tool_use_id"], _text(block["content"]))
        if any(block["type"] == "text" for block in blocks):
            yield {"role": "user", "content": said}


# google


def _google(request: Mapping[str, Any], known: SeenReplies) -> Iterable[HfMessage]:
    if request.get("systemInstruction"):
        yield {"role": "system", "content": _text(request["systemInstruction"]["parts"])}
    seen: list[Any] = []
    for content in request["contents"]:
        parts = content["parts"]
        said = [part["text"] for part in parts if "text" in part and not part.get("thought")]
        if content["role"] == "model":
            open_thought = "".join(part["text"] for part in parts if part.get("thought"))
            signed = [known.sealed[s] for part in parts if (s := part.get("thoughtSignature")) in known.sealed]
            calls = [
                _call(made.get("id", ""), made["name"], made["args"])
                for part in parts
                if (made := part.get("functionCall")) is not None
            ]
            yield _assistant("".join(said), (signed or [open_thought])[0], calls)
            seen = []
            continue
        for response in (part["functionResponse"] for part in parts if "functionResponse" in part):
            # A resumed harness sends the same response to the same call twice.
            if response.get("id") and response in seen:
                continue
            seen.append(response)
            yield _result(response.get("id", ""), response["response"]["output"], response["name"])
        if said:
            yield {"role": "user", "content": "".join(said)}


def _camel(value: Any, inside: str = "") -> Any:
    """The value with its fields in camel case, except where the harness chose the names."""
    if isinstance(value, list):
        return [_camel(item, inside) for item in value]
    if not isinstance(value, dict) or inside in _FREE_NAMES:
        return value
    named = {re.sub(r"_([a-z])", lambda match: match[1].upper(), name): item for name, item in value.items()}
    return {name: _camel(item, name) for name, item in named.items()}


_READERS = {"chat": _chat, "responses": _responses, "messages": _messages, "google": _google}
