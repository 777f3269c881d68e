"""Answers in the format of OpenAI's responses, complete or as its stream of events.

A reply is a list of items: reasoning, a message, one item per call. Both ways have the same items; the stream builds them
up event by event, numbered in order. The id of an item names its answer and its position there, which identifies the items
of a turn when they come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from towline.conversation import Answer, Finish, Request, Tool, ToolCall, Usage
from towline.dialects import wire
from towline.dialects.base import Response
from towline.dialects.chat.replies import error_body, logprob_entries
from towline.dialects.responses.items import item_id
from towline.dialects.responses.tools import NATIVE_TOOLS, namespace_of, native_call_item
from towline.dialects.wire import seal
from towline.errors import ApiError, ErrorKind

PREFIX = "resp_"
_INCOMPLETE = {Finish.LENGTH: "max_output_tokens", Finish.ABORT: "content_filter"}
"""Why an answer is incomplete. A client must neither trust nor continue an aborted one."""
_EMPTY: Mapping[str, dict[str, Any]] = {
    "reasoning": {"summary": []},
    "message": {"content": []},
    "function_call": {"arguments": ""},
    "custom_tool_call": {"input": ""},
}
"""An item at its start in a stream."""
_REPEATED = ("max_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")
"""Fields of the request that the answer repeats."""


def full_response(request: Request, answer: Answer) -> Response:
    """The answer as one `response`."""
    body = _response(request, answer.id, answer.created, answer.model)
    return wire.json_response(_finished(body, request, answer))


class ResponsesStream:
    """The answer as `response.created` … `response.completed`."""

    content_type = wire.CONTENT_TYPE

    def __init__(self, request: Request, id: str, created: int, model: str):
        self._request = request
        self._response = _response(request, id, created, model)
        self._number = 0
        self._after = request.wire.get("after", -1)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        # A client that resumes a stream already has the events before.
        return wire.event({"type": kind, "sequence_number": number, **fields}, kind) if number > self._after else b""

    def start(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self._response) for kind in kinds)

    def ping(self) -> bytes:
        return wire.comment("ping")

    def finish(self, answer: Answer) -> Iterable[bytes]:
        body = _finished(self._response, self._request, answer)
        for index, item in enumerate(body["output"]):
            yield from self._item(index, item)
        yield self._event(f"response.{body['status']}", response=body)

    def error(self, error: ApiError) -> bytes:
        """OpenAI's clients raise what is in `error`; Codex acts on `response.failed`."""
        detail = failure(error)
        if error.kind in (ErrorKind.INTERNAL, ErrorKind.OVERLOADED):
            detail["code"] = "server_error"
        detail["code"] = detail["code"] or "invalid_prompt"
        if error.kind is ErrorKind.RATE_LIMIT and error.retry_after is not None:
            # The headers were already sent; clients parse the text.
            detail["message"] += f" Please try again in {error.retry_after:g}s."
        flat = {name: detail[name] for name in ("code", "message", "param")}
        body = {**self._response, "status": "failed", "error": {"code": detail["code"], "message": detail["message"]}}
        return self._event("error", **flat, error=detail) + self._event("response.failed", response=body)

    def _item(self, index: int, item: dict[str, Any]) -> Iterator[bytes]:
        kind, place = item["type"], {"item_id": item["id"], "output_index": index}
        yield self._event("response.output_item.added", output_index=index, item=_begun(item))
        if kind == "reasoning":
            yield from self._summary(item, place)
        elif kind == "message":
            yield from self._text(item, place)
        elif kind == "function_call":
            for piece in wire.pieces(item["arguments"]):
                yield self._event("response.function_call_arguments.delta", **place, delta=piece)
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **place, **done)
        elif kind == "custom_tool_call":
            for piece in wire.pieces(item["input"]):
                yield self._event("response.custom_tool_call_input.delta", **place, delta=piece)
            yield self._event("response.custom_tool_call_input.done", **place, input=item["input"])
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _summary(self, item: dict[str, Any], place: dict[str, Any]) -> Iterator[bytes]:
        for number, part in enumerate(item["summary"]):
            where = {**place, "summary_index": number}
            yield self._event("response.reasoning_summary_part.added", **where, part={**part, "text": ""})
            for piece in wire.pieces(part["text"]):
                yield self._event("response.reasoning_summary_text.delta", **where, delta=piece)
            yield self._event("response.reasoning_summary_text.done", **where, text=part["text"])
            yield self._event("response.reasoning_summary_part.done", **where, part=part)

    def _text(self, item: dict[str, Any], place: dict[str, Any]) -> Iterator[bytes]:
        for number, part in enumerate(item["content"]):
            where = {**place, "content_index": number}
            yield self._event("response.content_part.added", **where, part={**part, "text": "", "logprobs": []})
            for piece in wire.pieces(part["text"]):
                yield self._event("response.output_text.delta", **where, delta=piece, logprobs=[])
            yield self._event("response.output_text.done", **where, text=part["text"], logprobs=part["logprobs"])
            yield self._event("response.content_part.done", **where, part=part)


def failure(error: ApiError) -> dict[str, Any]:
    """The value of `error`, with `messages` renamed to `input`."""
    detail = error_body(error)
    if error.kind is ErrorKind.CONTEXT_LENGTH and detail["param"] == "messages":
        detail["param"] = "input"
    return detail


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    """An item at its start; an item without events of its own is complete at once."""
    begun = {**item, **_EMPTY.get(item["type"], {})}
    if "status" in begun:
        begun["status"] = "in_progress"
    begun.pop("encrypted_content", None)
    return begun


def _response(request: Request, id: str, created: int, model: str) -> dict[str, Any]:
    """The response before it has any output."""
    wire, sampling = request.wire, request.sampling
    return {
        "id": PREFIX + id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": wire.get("instructions"),
        "max_output_tokens": sampling.max_tokens,
        "metadata": wire.get("metadata", {}),
        "model": model,
        "output": [],
        "parallel_tool_calls": wire.get("parallel", True),
        "previous_response_id": wire.get("previous"),
        "reasoning": {"effort": None, "summary": None, **wire.get("reasoning", {})},
        "service_tier": "default",
        "store": wire.get("store", True),
        "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
        "text": {"format": {"type": "text"}, **wire.get("text", {})},
        "tool_choice": wire.get("tool_choice", "auto"),
        "tools": wire.get("tools", []),
        "top_logprobs": 0,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        **{name: wire.get(name) for name in _REPEATED},
    }


def _finished(body: dict[str, Any], request: Request, answer: Answer) -> dict[str, Any]:
    reason = _INCOMPLETE.get(answer.replies[0].finish)
    ending: dict[str, Any] = {"status": "completed", "completed_at": answer.created}
    if reason is not None:
        ending = {"status": "incomplete", "incomplete_details": {"reason": reason}}
    return {**body, **ending, "output": output(request, answer), "usage": _usage(answer.usage)}


def output(request: Request, answer: Answer) -> list[dict[str, Any]]:
    """The items of a reply; an empty reply has an empty message, for the client to send back."""
    reply = answer.replies[0]
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        item: dict[str, Any] = {"type": "reasoning", "summary": [{"type": "summary_text", "text": reply.reasoning}]}
        if request.wire.get("sealed"):
            item["encrypted_content"] = seal(reply.reasoning)
        items.append({"id": item_id("rs", answer.id, 0), **item})
    if reply.text or not reply.tool_calls:
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": _logprobs(request, answer)}
        status = "incomplete" if reply.finish in _INCOMPLETE else "completed"
        message = {"type": "message", "status": status, "role": "assistant", "content": [part]}
        items.append({"id": item_id("msg", answer.id, len(items)), **message})
    for call in reply.tool_calls:
        prefix, item = _call(call, request)
        items.append({"id": item_id(prefix, answer.id, len(items)), **item, "status": "completed"})
    return items


def _call(call: ToolCall, request: Request) -> tuple[str, dict[str, Any]]:
    """The item of a call, and the prefix of its id."""
    tool = _declared(call.name, request)
    own = NATIVE_TOOLS.get(tool.extra.get("type", "")) if tool is not None else None
    if own is not None and (item := native_call_item(own, call.arguments)) is not None:
        return own.prefix, {**item, "call_id": call.id}
    name, namespace = (call.name, None) if tool is None else namespace_of(tool)
    item = {"call_id": call.id, "name": name, **({"namespace": namespace} if namespace else {})}
    arguments = wire.dump_arguments(call.arguments)
    if call.custom:
        return "ctc", {"type": "custom_tool_call", **item, "input": arguments}
    return "fc", {"type": "function_call", **item, "arguments": arguments}


def _declared(name: str, request: Request) -> Tool | None:
    """The tool of this name: declared, or found by a search."""
    return next((tool for tool in chain(request.tools, request.shown) if tool.name == name), None)


def _logprobs(request: Request, answer: Answer) -> list[dict[str, Any]]:
    if answer.logprobs is None or not request.wire.get("logprobs"):
        return []
    return logprob_entries(answer.logprobs(0))


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.sampled,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.sampled,
    }
