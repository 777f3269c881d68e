"""Neutral answers in the shape of OpenAI's responses, whole or as its stream of events.

A reply is a list of items: reasoning, a message, one item a call. Both ways carry the same items; the stream builds them
up event by event, numbered in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from towline.conversation import Answer, Finish, Reply, Request, ToolCall, Usage
from towline.dialects import sse
from towline.dialects.base import Response
from towline.dialects.openai_errors import JSON_HEADERS, error_body
from towline.dialects.sealed import seal
from towline.errors import ApiError

PREFIX = "resp_"
_EMPTY: dict[str, dict[str, Any]] = {
    "reasoning": {"summary": []},
    "message": {"content": []},
    "function_call": {"arguments": ""},
}
"""How an item begins in a stream; any other kind has an `input`."""


def whole(request: Request, answer: Answer) -> Response:
    body = _response(request, answer.id, answer.created, answer.model, answer.replies[0], answer.usage)
    body["output"] = _items(request, answer)
    return Response(200, sse.dump(body), dict(JSON_HEADERS))


class ResponsesStream:
    """The answer as `response.created` … `response.completed`."""

    def __init__(self, request: Request, id: str, created: int, model: str):
        self._request = request
        self._id = id
        self._created = created
        self._model = model
        self._number = 0

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = sse.event({"type": kind, "sequence_number": self._number, **fields}, kind)
        self._number += 1
        return data

    def start(self) -> bytes:
        response = _response(self._request, self._id, self._created, self._model, None, None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def ping(self) -> bytes:
        return sse.comment("ping")

    def finish(self, answer: Answer) -> Iterable[bytes]:
        items = _items(self._request, answer)
        for index, item in enumerate(items):
            yield from self._item(index, item)
        body = _response(self._request, self._id, self._created, self._model, answer.replies[0], answer.usage)
        body["output"] = items
        yield self._event(f"response.{body['status']}", response=body)

    def error(self, error: ApiError) -> bytes:
        body = _response(self._request, self._id, self._created, self._model, None, None)
        detail = error_body(error)
        body["status"] = "failed"
        body["error"] = {"code": detail["code"] or "server_error", "message": detail["message"]}
        return self._event("response.failed", response=body)

    def _item(self, index: int, item: dict[str, Any]) -> Iterator[bytes]:
        kind, place = item["type"], {"item_id": item["id"], "output_index": index}
        yield self._event("response.output_item.added", output_index=index, item=_begun(item))
        if kind == "reasoning":
            yield from self._summary(item, place)
        elif kind == "message":
            yield from self._text(item, place)
        elif kind == "function_call":
            for piece in sse.pieces(item["arguments"]):
                yield self._event("response.function_call_arguments.delta", **place, delta=piece)
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **place, **done)
        else:
            for piece in sse.pieces(item["input"]):
                yield self._event("response.custom_tool_call_input.delta", **place, delta=piece)
            yield self._event("response.custom_tool_call_input.done", **place, input=item["input"])
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _summary(self, item: dict[str, Any], place: dict[str, Any]) -> Iterator[bytes]:
        for number, part in enumerate(item["summary"]):
            where = {**place, "summary_index": number}
            empty = {**part, "text": ""}
            yield self._event("response.reasoning_summary_part.added", **where, part=empty)
            for piece in sse.pieces(part["text"]):
                yield self._event("response.reasoning_summary_text.delta", **where, delta=piece)
            yield self._event("response.reasoning_summary_text.done", **where, text=part["text"])
            yield self._event("response.reasoning_summary_part.done", **where, part=part)

    def _text(self, item: dict[str, Any], place: dict[str, Any]) -> Iterator[bytes]:
        for number, part in enumerate(item["content"]):
            where = {**place, "content_index": number}
            yield self._event("response.content_part.added", **where, part={**part, "text": "", "logprobs": []})
            for piece in sse.pieces(part["text"]):
                yield self._event("response.output_text.delta", **where, delta=piece, logprobs=[])
            yield self._event("response.output_text.done", **where, text=part["text"], logprobs=part["logprobs"])
            yield self._event("response.content_part.done", **where, part=part)


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is when it has just begun."""
    begun = {**item, **_EMPTY.get(item["type"], {"input": ""})}
    if "status" in begun:
        begun["status"] = "in_progress"
    begun.pop("encrypted_content", None)
    return begun


def _response(
    request: Request, id: str, created: int, model: str, reply: Reply | None, usage: Usage | None
) -> dict[str, Any]:
    wire = request.wire
    cut = reply is not None and reply.finish in (Finish.LENGTH, Finish.ABORT)
    reason = "max_output_tokens" if reply is not None and reply.finish is Finish.LENGTH else "content_filter"
    previous = wire.get("previous")
    return {
        "id": PREFIX + id,
        "object": "response",
        "created_at": created,
        "status": "in_progress" if reply is None else "incomplete" if cut else "completed",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": reason} if cut else None,
        "instructions": wire.get("instructions"),
        "max_output_tokens": request.sampling.max_tokens,
        "metadata": wire.get("metadata", {}),
        "model": model,
        "output": [],
        "parallel_tool_calls": wire.get("parallel", True),
        "previous_response_id": previous,
        "reasoning": {"effort": request.template_args.get("reasoning_effort"), "summary": None},
        "service_tier": "default",
        "store": wire.get("store", True),
        "temperature": 1.0 if request.sampling.temperature is None else request.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": wire.get("tool_choice", "auto"),
        "tools": wire.get("tools", []),
        "top_p": 1.0 if request.sampling.top_p is None else request.sampling.top_p,
        "truncation": "disabled",
        "usage": None if usage is None else _usage(usage),
        "user": None,
    }


def _items(request: Request, answer: Answer) -> list[dict[str, Any]]:
    """The items of a reply; a reply of nothing at all is an empty message."""
    reply, id = answer.replies[0], answer.id
    status = "incomplete" if reply.finish in (Finish.LENGTH, Finish.ABORT) else "completed"
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        item = {"id": f"rs_{id}", "type": "reasoning", "summary": [{"type": "summary_text", "text": reply.reasoning}]}
        items.append({**item, "encrypted_content": seal(reply.reasoning)} if request.wire.get("sealed") else item)
    if reply.text or not reply.tool_calls:
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": _logprobs(request, answer)}
        message = {"id": f"msg_{id}", "type": "message", "status": status, "role": "assistant", "content": [part]}
        items.append(message)
    items += [_call(call, request, f"{id}{index}") for index, call in enumerate(reply.tool_calls)]
    return items


def _call(call: ToolCall, request: Request, id: str) -> dict[str, Any]:
    name, namespace = call.name, None
    if "." in name and any(_is_namespace(tool, name) for tool in request.wire.get("tools", ())):
        namespace, name = name.split(".", 1)
    item: dict[str, Any] = {"call_id": call.id, "name": name, "status": "completed"}
    if call.custom:
        item |= {"id": f"ctc_{id}", "type": "custom_tool_call", "input": sse.dump_arguments(call.arguments)}
    else:
        item |= {"id": f"fc_{id}", "type": "function_call", "arguments": sse.dump_arguments(call.arguments)}
    return {**item, "namespace": namespace} if namespace else item


def _is_namespace(tool: Any, name: str) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "namespace" and name.startswith(f"{tool.get('name')}.")


def _logprobs(request: Request, answer: Answer) -> list[dict[str, Any]]:
    if answer.logprobs is None or not request.wire.get("logprobs"):
        return []
    return [
        {"token": t.text, "logprob": t.logprob, "bytes": list(t.data), "top_logprobs": []} for t in answer.logprobs(0)
    ]


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.sampled,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.sampled,
    }
