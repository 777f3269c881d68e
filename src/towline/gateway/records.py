"""Journal records: a session, its tools, its turns. They suffice to resume the session after a crash.

A turn's record contains its parent's id, its suffix and what was sampled; the prompt before that is in the records of its
ancestors. A session's key is recorded only as a hash.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from towline.common.images import PlacedImage
from towline.conversation import Finish, Hints, Media, Message, Reply, ToolCall
from towline.gateway.journal import Record, RecordError, encode
from towline.schema import POLICY, ForkReason, Untrained
from towline.tokens.codec import RenderContext
from towline.tokens.graph.graph import Graph, GraphNode
from towline.tokens.traces.trajectory import message_json, reply_json

SESSION, TOOLS, TURN, DELIVERED, SEALED = "session", "tools", "turn", "delivered", "sealed"


_HINTS = tuple(field.name for field in fields(Hints))


def turn_record(session: str, node: GraphNode) -> bytes:
    fields: dict[str, Any] = {
        "session": session,
        "id": node.id,
        "index": node.index,
        "key": node.key,
        "parent": node.parent.id if node.parent else None,
        "origin": node.origin.id if node.origin else None,
        "origin_inferred": node.origin_inferred,
        "reason": node.reason,
        "prompt_length": node.prompt_length,
        "request_hash": node.request_hash.hex(),
        "reply_base": node.reply_base.hex(),
        "shortened_hash": node.shortened_hash.hex() if node.shortened_hash else None,
        "covered": node.message_count,
        "new": [_message_fields(message) for message in node.new],
        "prefill": _message_fields(node.prefill) if node.prefill else None,
        "hints": {name: getattr(node.hints, name) for name in _HINTS},
        "system": node.system.hex(),
        "has_tools": node.has_tools,
        "model": node.model,
        "forced": node.forced,
        "flags": node.flags,
        "special_text": node.special_text,
        "engine": node.engine,
        "untrained": node.untrained,
        "difference": node.difference,
        "ruled": node.role_override,
        "shares": node.appended_turn.id if node.appended_turn else None,
        "kept": node.kept_ids,
        "images": [[i.media.digest, i.start, i.length, i.key, i.written, i.reported] for i in node.images],
        "meta": node.meta,
        "finish": node.finish,
        "reply": reply_json(node.reply) if node.reply else None,
        "stop_string": node.reply.stop_string if node.reply else None,
    }
    arrays = {
        "suffix": node.suffix,
        "sampled": node.sampled,
        "logprobs": node.logprobs,
        "versions": node.versions,
    }
    return _record(TURN, session, fields, arrays)


def tools_record(session: str, key: str, frame: RenderContext) -> bytes:
    """What the turns under one root key share; written once, before the first of them."""
    tools = [asdict(tool) for tool in frame.tools]
    return _record(
        TOOLS, session, {"session": session, "key": key, "tools": tools, "arguments": dict(frame.arguments)}, {}
    )


def _record(kind: str, session: str, fields: dict[str, Any], arrays: dict[str, Any]) -> bytes:
    try:
        return encode(kind, fields, arrays)
    except RecordError:
        # Models sample, and harnesses send, values that the journal's JSON cannot hold: integers past 64 bits, broken
        # surrogates, hundreds of levels. As ASCII text it can.
        return encode(kind, {"session": session, "text": json.dumps(fields)}, arrays)


def fields_of(record: Record) -> dict[str, Any]:
    """The recorded fields, in either encoding."""
    fields: dict[str, Any] = record.fields
    return json.loads(fields["text"]) if "text" in fields else fields


def delivered_record(session: str, turn: str) -> bytes:
    return encode(DELIVERED, {"session": session, "id": turn}, {})


def restore_turn(graph: Graph, record: Record) -> GraphNode | None:
    """Put a recorded turn back into its graph; a duplicate record is ignored."""
    fields, arrays = fields_of(record), record.arrays
    if fields["id"] in graph.by_id:
        return None
    shortened = fields["shortened_hash"]
    reply = fields["reply"]
    untrained = fields.get("untrained")
    parent = graph.by_id[fields["parent"]] if fields["parent"] else None
    # A turn that was in flight at the crash has no record; turns that forked from it keep only the reason.
    origin = graph.by_id.get(fields["origin"] or "")
    new = [_message(item) for item in fields["new"]]
    node = GraphNode(
        id=fields["id"],
        index=fields["index"],
        key=fields["key"],
        parent=parent,
        suffix=arrays["suffix"],
        prompt_length=fields["prompt_length"],
        request_hash=bytes.fromhex(fields["request_hash"]),
        reply_base=bytes.fromhex(fields["reply_base"]),
        shortened_hash=bytes.fromhex(shortened) if shortened else None,
        message_count=fields["covered"],
        origin=origin,
        origin_inferred=fields["origin_inferred"],
        reason=ForkReason(fields["reason"]) if fields["reason"] else None,
        new=new,
        prefill=_message(fields["prefill"]) if fields["prefill"] else None,
        hints=Hints(**fields["hints"]),
        system=bytes.fromhex(fields["system"]),
        has_tools=fields["has_tools"],
        model=fields["model"],
        forced=fields["forced"],
        flags=fields["flags"],
        special_text=fields["special_text"],
        engine=fields.get("engine", POLICY),
        untrained=Untrained(untrained) if untrained else None,
        images=tuple(_placed(image, new, parent or origin) for image in fields.get("images", ())),
        meta=fields["meta"],
        difference=fields.get("difference", {}),
        role_override=fields.get("ruled", ""),
        appended_turn=graph.by_id.get(fields.get("shares") or ""),
        kept_ids=fields.get("kept", 0),
        sampled=arrays["sampled"],
        logprobs=arrays["logprobs"],
        versions=arrays["versions"],
        finish=Finish(fields["finish"]) if fields["finish"] else None,
        reply=_reply(reply, fields["stop_string"]) if reply else None,
    )
    graph.add(node)
    graph.finish(node)
    return node


def _message_fields(message: Message) -> dict[str, Any]:
    fields = message_json(message)
    if message.media:
        fields["media"] = [asdict(media) for media in message.media]
    return fields


def _message(fields: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in fields.get("tool_calls", ()))
    media = tuple(Media(**item) for item in fields.get("media", ()))
    reasoning, id, name = fields.get("reasoning"), fields.get("tool_call_id", ""), fields.get("name", "")
    return Message(fields["role"], fields["text"], reasoning, calls, id, name, media)


def _placed(fields: list[Any], new: list[Message], before: GraphNode | None) -> PlacedImage:
    """An image of a prompt. Its URL, which may contain the whole image, is in the record of the turn that introduced it."""
    digest, start, length, key, written, reported = fields
    while (media := next((m for message in new for m in message.media if m.digest == digest), None)) is None:
        if before is None:
            raise RecordError(f"no turn of the session contains the image {digest}")
        new, before = before.new, before.parent or before.origin
    return PlacedImage(media, start, length, key, tuple(written), reported)


def _reply(fields: dict[str, Any], stop_string: str | None) -> Reply:
    message = _message(fields)
    malformed = tuple(fields.get("malformed", ()))
    return Reply(message.text, message.reasoning, message.tool_calls, Finish(fields["finish"]), stop_string, malformed)
