"""The same neutral conversation told in each of the four dialects, as an agent that echoes faithfully would tell it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from towline.conversation import Message, Tool
from towline.dialects.base import DialectCall
from towline.dialects.wire import seal

Body = dict[str, Any]


def calls_of(dialect: str, messages: Sequence[Message], tools: Sequence[Tool]) -> DialectCall:
    return globals()[dialect](messages, tools)


def _pieces(message: Message) -> list[tuple[str, str]]:
    """Text and the URLs of images, in order: (text, "") or ("", URL)."""
    pieces, place = [], 0
    for item in message.media:
        pieces += [(message.text[place : item.offset], ""), ("", item.url)]
        place = item.offset
    pieces.append((message.text[place:], ""))
    return [piece for piece in pieces if any(piece)] or [("", "")]


def _data(url: str) -> str:
    return url.partition(",")[2]


def chat(messages: Sequence[Message], tools: Sequence[Tool]) -> DialectCall:
    told: list[Body] = []
    for message in messages:
        item: Body = {"role": message.role, "content": message.text}
        if message.media:
            item["content"] = [
                {"type": "image_url", "image_url": {"url": url}} if url else {"type": "text", "text": text}
                for text, url in _pieces(message)
            ]
        if message.role == "tool":
            item["tool_call_id"] = message.tool_call_id
        if message.reasoning:
            item["reasoning_content"] = message.reasoning
        if message.tool_calls:
            item["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
                for c in message.tool_calls
            ]
        told.append(item)
    return DialectCall("generate", {"model": "m", "messages": told, "tools": [tool.as_function() for tool in tools]})


def responses(messages: Sequence[Message], tools: Sequence[Tool]) -> DialectCall:
    told: list[Body] = []
    body: Body = {"model": "m", "input": told}
    for place, message in enumerate(messages):
        if message.role == "tool":
            output = _input(message) if message.media else message.text
            told.append({"type": "function_call_output", "call_id": message.tool_call_id, "output": output})
        elif message.role == "system" and place == 0:
            body["instructions"] = message.text
        elif message.role == "assistant":
            told += _items(message, place)
        else:
            told.append({"type": "message", "role": "user", "content": _input(message)})
    body["tools"] = [
        {"type": "function", "name": t.name, "description": t.description, "parameters": t.parameters} for t in tools
    ]
    return DialectCall("generate", body)


def _input(message: Message) -> list[Body]:
    return [
        {"type": "input_image", "image_url": url} if url else {"type": "input_text", "text": text}
        for text, url in _pieces(message)
    ]


def _items(message: Message, place: int) -> list[Body]:
    items: list[Body] = []
    if message.reasoning:
        sealed = {"summary": [], "encrypted_content": seal(message.reasoning)}
        items.append({"type": "reasoning", "id": f"rs_{place}", **sealed})
    if message.text or not message.tool_calls:
        content = [{"type": "output_text", "text": message.text, "annotations": []}]
        items.append({"type": "message", "role": "assistant", "id": f"msg_{place}", "content": content})
    for call in message.tool_calls:
        made = {"call_id": call.id, "name": call.name, "arguments": json.dumps(call.arguments)}
        items.append({"type": "function_call", **made})
    return items


def messages(messages: Sequence[Message], tools: Sequence[Tool]) -> DialectCall:
    told: list[Body] = []
    body: Body = {"model": "m", "max_tokens": 100, "messages": told}
    for place, message in enumerate(messages):
        if message.role == "system" and place == 0:
            body["system"] = [{"type": "text", "text": message.text}]
            continue
        if message.role == "assistant":
            content: list[Body] = []
            if message.reasoning:
                content.append({"type": "thinking", "thinking": message.reasoning, "signature": "s"})
            if message.text:
                content.append({"type": "text", "text": message.text})
            content += [
                {"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in message.tool_calls
            ]
            told.append({"role": "assistant", "content": content or [{"type": "text", "text": ""}]})
            continue
        blocks = [_block(text, url) for text, url in _pieces(message)]
        if message.role == "tool":
            inner: Any = blocks if message.media else message.text
            blocks = [{"type": "tool_result", "tool_use_id": message.tool_call_id, "content": inner}]
        if told and told[-1]["role"] == "user":
            told[-1]["content"] += blocks
        else:
            told.append({"role": "user", "content": blocks})
    body["tools"] = [{"name": t.name, "description": t.description, "input_schema": t.parameters} for t in tools]
    return DialectCall("generate", body)


def _block(text: str, url: str) -> Body:
    if not url:
        return {"type": "text", "text": text}
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _data(url)}}


def google(messages: Sequence[Message], tools: Sequence[Tool]) -> DialectCall:
    told: list[Body] = []
    body: Body = {"contents": told}
    for place, message in enumerate(messages):
        if message.role == "system" and place == 0:
            body["systemInstruction"] = {"parts": [{"text": message.text}]}
            continue
        if message.role == "assistant":
            parts: list[Body] = []
            if message.reasoning:
                parts.append({"text": message.reasoning, "thought": True})
            if message.text or not message.tool_calls:
                parts.append({"text": message.text})
            parts += [{"functionCall": {"id": c.id, "name": c.name, "args": c.arguments}} for c in message.tool_calls]
            told.append({"role": "model", "parts": parts})
            continue
        said = [_part(text, url) for text, url in _pieces(message)]
        if message.role == "tool":
            response: Body = {"id": message.tool_call_id, "name": message.name, "response": {"output": message.text}}
            if message.media:
                response["parts"] = [_part("", item.url) for item in message.media]
            said = [{"functionResponse": response}]
        if told and told[-1]["role"] == "user":
            told[-1]["parts"] += said
        else:
            told.append({"role": "user", "parts": said})
    declared = [{"name": t.name, "description": t.description, "parametersJsonSchema": t.parameters} for t in tools]
    if declared:
        body["tools"] = [{"functionDeclarations": declared}]
    return DialectCall("generate", body, path={"model": "m"})


def _part(text: str, url: str) -> Body:
    return {"inlineData": {"mimeType": "image/png", "data": _data(url)}} if url else {"text": text}
