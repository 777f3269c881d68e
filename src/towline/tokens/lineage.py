"""Where a request that continues no turn came from, and the first message in which it differs.

What a request holds decides: replies of ours, verbatim, edited or quoted, name the conversation that it continues. Open
tool calls name the turn that started a sub-agent. Only what neither tells is concluded from order and length, and marked
as inferred.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from towline.conversation import Finish, Message, Request
from towline.schema import POLICY, ForkReason
from towline.tokens import fingerprint
from towline.tokens.graph import Graph, Node
from towline.tokens.settle import bare_id

QUOTED = 12
"""Characters that are no coincidence when they are quoted."""
_RECENT = 64
"""Turns that are searched for quotes and for common beginnings."""
_EXCERPT = 160
_BEFORE = 24
"""Characters of an excerpt in front of the first difference."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a request came from."""

    origin: Node | None = None
    reason: ForkReason | None = None
    inferred: bool = False
    """The origin is a conclusion, not something the harness said."""


def why_new(graph: Graph, request: Request, key: str, hashes: Sequence[bytes], engine: str = POLICY) -> Source:
    """Why a request continues nothing in place, and the turn it came from."""
    if not graph.nodes:
        return Source()
    messages = request.messages
    for covered in range(len(messages), 0, -1):
        others = graph.after_reply.get(hashes[covered])
        if others:
            changed = [node for node in others if node.engine == engine]
            return Source((changed or others)[-1], _changed(bool(changed)), False)
    system = fingerprint.of(messages[0], graph.noise) if messages[0].role == "system" else b""
    source = _held_by(graph, request, key, hashes)
    if source is not None:
        before = _last_of(graph, source)
        if _moved(request, before) or (source.key == key and source.system == system and _shortened(request, before)):
            return Source(before, ForkReason.COMPACTION, not _moved(request, before))
        if source.engine != engine:
            return Source(source, ForkReason.MODEL_CHANGED)
        if source.system != system:
            return Source(source, ForkReason.SYSTEM_CHANGED)
        return Source(source, ForkReason.HISTORY_EDITED if source.key == key else ForkReason.TOOLS_CHANGED)
    return _began(graph, request, key, system, engine)


def started_again(graph: Graph, request: Request, key: str, twin: Node) -> Source | None:
    """Where a sub-agent came from that is asked the very same as `twin`, the first turn of another one: a further open call
    with the same words. None if the request is another sample of the twin's."""
    if twin.parent is not None or request.sampling.n > 1:
        return None
    first = request.messages[0]
    system = fingerprint.of(first, graph.noise) if first.role == "system" else b""
    caller, handed = _caller(graph, request, key, system)
    if caller is None or not handed:
        return None
    asked = "\n".join(message.text for message in request.messages if message.role == "user").strip()
    wanted = sum(bool(_longest(strings(call.arguments), asked)) for call in _calls(caller))
    begun = sum(node.origin is caller and node.request_hash == twin.request_hash for node in graph.nodes)
    return Source(caller, _beside(caller, system, key), True) if begun < wanted else None


def _changed(same_engine: bool) -> ForkReason:
    return ForkReason.TOOLS_CHANGED if same_engine else ForkReason.MODEL_CHANGED


def _held_by(graph: Graph, request: Request, key: str, hashes: Sequence[bytes]) -> Node | None:
    """The turn whose conversation the request holds: by its last reply in it, or by the request that it begins with."""
    node = held(graph, request.messages)
    if node is None:
        node, _ = replied_otherwise(graph, request.messages, key, hashes)
    return node or _begins_with(graph, request.messages) or _quoted(graph, request)


def _began(graph: Graph, request: Request, key: str, system: bytes, engine: str) -> Source:
    """Why there is a conversation that holds nothing of those before it."""
    hints, nodes = request.hints, graph.nodes
    parents = [n for n in nodes if hints.parent_session and n.hints.session == hints.parent_session]
    same = [n for n in nodes if (n.hints.session, n.hints.agent) == (hints.session, hints.agent)]
    caller, handed = _caller(graph, request, key, system)
    if not request.tools and any(node.has_tools for node in nodes) and not (caller and handed):
        return Source((parents or same or nodes)[-1], ForkReason.SIDE, True)
    # What follows compares with turns of the same engine: those of another had other tasks, and other tools at times.
    alike = [node for node in nodes if node.engine == engine]
    before = caller or (parents or [n for n in same if n.engine == engine] or alike or nodes)[-1]
    if not alike:
        return Source(before, ForkReason.MODEL_CHANGED, True)
    if all(node.system != system for node in alike):
        return Source(before, ForkReason.SYSTEM_CHANGED, True)
    if all(node.key != key for node in alike):
        return Source(before, ForkReason.TOOLS_CHANGED, True)
    if parents or not same:
        told = bool(parents or hints.agent)
        return Source(before, ForkReason.SUBAGENT if told or caller else ForkReason.UNMATCHED, not parents)
    # What was compacted spoke under the same system prompt; a title or a commit message in between did not.
    replied = [node for node in same if node.engine == engine and node.system == system and _replied(node)]
    if not (caller and handed):
        for node in reversed(replied):
            if _moved(request, node):
                return Source(node, ForkReason.COMPACTION)
        summary = _summary(graph, request)
        if summary is not None and replied and _shortened(request, replied[-1]):
            return Source(summary, ForkReason.COMPACTION, True)
    if caller is not None and (handed or caller.system != system or caller.key != key):
        return Source(caller, _beside(caller, system, key), True)
    if replied and _shortened(request, replied[-1]) and (caller is None or _repeats_task(request, replied[-1])):
        return Source(replied[-1], ForkReason.COMPACTION, True)
    if caller is not None:
        return Source(caller, ForkReason.SUBAGENT, True)
    return Source(before, ForkReason.UNMATCHED, True)


def _beside(caller: Node, system: bytes, key: str) -> ForkReason:
    """What a sub-agent has other than the conversation that called it."""
    if caller.system != system:
        return ForkReason.SYSTEM_CHANGED
    return ForkReason.TOOLS_CHANGED if caller.key != key else ForkReason.SUBAGENT


# What a request holds of ours


def held(graph: Graph, messages: Sequence[Message]) -> Node | None:
    """The last turn whose reply the messages hold: by its call ids, edited or not, or by its words after the same words."""
    for place in range(len(messages) - 1, -1, -1):
        message = messages[place]
        if message.role != "assistant":
            continue
        for call in reversed(message.tool_calls):
            if (node := graph.by_call.get(bare_id(call.id))) is not None:
                return node
        reply = fingerprint.of(message, graph.noise)
        before = fingerprint.of(messages[place - 1], graph.noise) if place else b""
        for engine in graph.engines:
            for node in reversed(graph.by_reply.get((reply, engine), ())):
                if node.new and fingerprint.of(node.new[-1], graph.noise) == before:
                    return node
    return None


def replied_otherwise(
    graph: Graph, messages: Sequence[Message], key: str, hashes: Sequence[bytes], start: int = 0
) -> tuple[Node | None, int]:
    """The deepest turn whose request, longer than `start`, is a prefix, though another message follows than its reply."""
    for covered in range(len(messages) - 1, start, -1):
        nodes = graph.by_request.get((hashes[covered], key))
        made = [node for node in nodes or () if node.finish is not Finish.ABORT and node.prefill is None]
        if made:
            return max(made, key=lambda node: (node.finish is not None, node.delivered, node.index)), covered
    return None, 0


def _begins_with(graph: Graph, messages: Sequence[Message]) -> Node | None:
    """The turn with the longest request that the messages begin with, whatever the system prompt and the tools."""
    ours = _without_system(graph, messages)
    found: tuple[int, Node | None] = (0, None)
    for node in graph.nodes[-_RECENT:]:
        theirs = _without_system(graph, request_of(node))
        if _replied(node) and found[0] <= len(theirs) < len(ours) and theirs and ours[: len(theirs)] == theirs:
            found = len(theirs), node
    return found[1]


def _without_system(graph: Graph, messages: Sequence[Message]) -> list[bytes]:
    return [fingerprint.of(message, graph.noise) for message in messages if message.role != "system"]


def _quoted(graph: Graph, request: Request) -> Node | None:
    """The last turn that a request quotes as text, beside the user's own words of that conversation."""
    if not request.tools and any(node.has_tools for node in graph.nodes):
        return None
    said = [message for message in request.messages if message.role == "user"]
    known = {fingerprint.of(message, graph.noise) for message in said}
    for node in reversed(graph.nodes[-_RECENT:]):
        asked = [m for m in request_of(node.root) if m.role == "user"]
        if not _replied(node) or not asked or fingerprint.of(asked[0], graph.noise) not in known:
            continue
        if any(quotes(message.text, node) for message in said):
            return node
    return None


def quotes(text: str, node: Node) -> bool:
    """Whether a text quotes the reply of a turn: its words, or the strings of its calls."""
    reply = node.reply
    if reply is None:
        return False
    if reply.tool_calls:
        return all(call.name in text and all(s in text for s in strings(call.arguments)) for call in reply.tool_calls)
    return len(reply.text.strip()) >= QUOTED and reply.text.strip() in text


def _summary(graph: Graph, request: Request) -> Node | None:
    """The turn whose words the user messages of the request carry."""
    said = "\n".join(message.text for message in request.messages if message.role == "user")
    for node in reversed(graph.nodes[-_RECENT:]):
        if node.reply is None or node.reply.tool_calls:
            continue
        # A harness may take a summary out of what stands around it.
        lines = (line.strip() for line in node.reply.text.splitlines())
        if any(len(line) >= QUOTED and line in said for line in lines):
            return node
    return None


def _moved(request: Request, before: Node) -> bool:
    """Whether the harness says that its context window moved on."""
    return bool(request.hints.window and before.hints.window and request.hints.window != before.hints.window)


def _shortened(request: Request, before: Node) -> bool:
    """Whether the history became no longer and carries words that the conversation had not."""
    if len(request.messages) > before.covered:
        return False
    known = {message.fingerprint for message in request_of(before)}
    return any(message.role == "user" and message.fingerprint not in known for message in request.messages)


def _repeats_task(request: Request, before: Node) -> bool:
    """Whether the request holds the first user message of a conversation."""
    first = next((message for message in request_of(before.root) if message.role == "user"), None)
    return first is not None and any(message.fingerprint == first.fingerprint for message in request.messages)


def _last_of(graph: Graph, node: Node) -> Node:
    """The newest turn with a reply in the conversation of `node`, whatever its tools."""
    alike = (n for n in reversed(graph.nodes) if n.line is node.line and n.system == node.system and _replied(n))
    return next(alike, node)


def _replied(node: Node) -> bool:
    return node.reply is not None and node.finish is not Finish.ABORT


# What started it


def _caller(graph: Graph, request: Request, key: str, system: bytes) -> tuple[Node | None, bool]:
    """The turn whose open tool call started a conversation, and whether the call's own words say so.

    Among open calls: the one whose arguments the request repeats; else one that started a sub-agent of the same kind, or
    that started any and has calls left; else the newest.
    """
    hints = request.hints
    waiting = [node for node in graph.nodes if _is_open(node) and not _same_agent(node, request)]
    named = [node for node in waiting if hints.parent_session and node.hints.session == hints.parent_session]
    waiting = named or waiting
    if not waiting:
        return None, False
    asked = "\n".join(message.text for message in request.messages if message.role == "user").strip()
    words = max(((_repeated(node, asked), node.index) for node in waiting), default=(0, 0))
    # A call without tools is handed its task, or it is about something else.
    if words[0] and (request.tools or words[0] * 2 >= len(asked)):
        return next(node for node in waiting if node.index == words[1]), True
    begun = [node for node in graph.nodes if node.parent is None and node.origin_inferred and node.origin is not None]
    kind = [n.origin for n in begun if (n.system, n.key) == (system, key) and n.origin in waiting]
    left = [n for n in waiting if 0 < sum(other.origin is n for other in begun) < len(_calls(n))]
    return (kind or left or waiting)[-1], False


def _same_agent(node: Node, request: Request) -> bool:
    hints = request.hints
    return bool(hints.agent) and (node.hints.session, node.hints.agent) == (hints.session, hints.agent)


def _is_open(node: Node) -> bool:
    """Whether calls of the turn have no results yet."""
    return bool(_calls(node)) and node.finish is not Finish.ABORT and not node.answered


def _calls(node: Node) -> tuple[Any, ...]:
    return node.reply.tool_calls if node.reply is not None else ()


def _repeated(node: Node, text: str) -> int:
    """Length of the longest argument of the turn's calls that the text holds."""
    return _longest((string for call in _calls(node) for string in strings(call.arguments)), text)


def _longest(said: Iterator[str], text: str) -> int:
    """Length of the longest of the strings that the text holds."""
    known = (string for string in said if string == text or (len(string) >= QUOTED and string in text))
    return max((len(string) for string in known), default=0)


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, outer space stripped, without the empty ones."""
    values = [value]
    while values:
        item = values.pop()
        if isinstance(item, str):
            if item.strip():
                yield item.strip()
        elif isinstance(item, dict):
            values += item.values()
        elif isinstance(item, list):
            values += item


# The first difference


def request_of(node: Node) -> list[Message]:
    """All messages of a turn's request, as the harness sent them."""
    parts: list[list[Message]] = []
    turn: Node | None = node
    while turn is not None:
        if turn.reason is ForkReason.SIBLING and turn.parent is None and turn.origin is not None:
            turn = turn.origin
            continue
        parts.append(turn.new)
        if len(turn.new) >= turn.covered:
            break
        before = turn.parent or turn.origin
        if before is not None and before.reply is not None:
            parts.append([before.reply_message()])
        turn = before
    return [message for part in reversed(parts) for message in part]


def difference(graph: Graph, reference: Node, messages: Sequence[Message]) -> dict[str, Any]:
    """The first message in which a request differs from a turn's request and reply, in short; empty if none does."""
    before = request_of(reference)
    if reference.prefill is None and reference.reply is not None:
        before.append(reference.reply_message())
    for place, then in enumerate(before):
        now = messages[place] if place < len(messages) else None
        if now is not None and fingerprint.of(now, graph.noise) == fingerprint.of(then, graph.noise):
            continue
        was, sent = _said(then), _said(now) if now is not None else ""
        start = max(_common(was, sent) - _BEFORE, 0)
        return {
            "turn": reference.index,
            "message": place,
            "role": now.role if now is not None else "",
            "was": was[start : start + _EXCERPT],
            "sent": sent[start : start + _EXCERPT],
        }
    return {}


def nearest(graph: Graph, messages: Sequence[Message]) -> Node | None:
    """The turn whose request begins most like the messages."""
    found: tuple[int, int] = (-1, -1)
    ours = [fingerprint.of(message, graph.noise) for message in messages]
    for node in graph.nodes[-_RECENT:]:
        theirs = [fingerprint.of(message, graph.noise) for message in request_of(node)]
        found = max(found, (_common(theirs, ours), node.index))
    return next((node for node in graph.nodes if node.index == found[1]), None)


def _common(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    count = 0
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            break
        count += 1
    return count


def _said(message: Message) -> str:
    """A message as one line of text: its words, then its calls."""
    calls = (
        f"{call.name}({fingerprint.canonical(call.arguments).decode('utf-8', 'replace')})"
        for call in message.tool_calls
    )
    return "\n".join(filter(None, (message.text.strip(), *calls)))
