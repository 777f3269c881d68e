"""Where a request that continues no turn came from, and the first message in which it differs.

The content of a request decides: replies of ours in it, verbatim, edited or quoted, identify the conversation that it
continues. Open tool calls identify the turn that started a sub-agent. Where neither applies, the origin is concluded from
order and length, and marked as inferred.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from towline.conversation import Finish, Message, Request
from towline.schema import POLICY, ForkReason
from towline.tokens.graph import fingerprint
from towline.tokens.graph.graph import Graph, GraphNode
from towline.tokens.graph.tool_results import bare_id

MIN_QUOTE = 12
"""Characters a text must share with another to count as a quote of it."""
_RECENT = 64
"""Latest turns that are searched for quotes and common prefixes."""
_EXCERPT = 160
_BEFORE = 24
"""Characters of an excerpt before the first difference."""


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """Where a request came from."""

    origin: GraphNode | None = None
    reason: ForkReason | None = None
    inferred: bool = False
    """The origin is concluded from order and length, not proven by content or headers."""


def find_origin(
    graph: Graph, request: Request, key: str, hashes: Sequence[bytes], engine: str = POLICY
) -> RequestOrigin:
    """Why a request does not continue a turn in place, and the turn it came from."""
    if not graph.nodes:
        return RequestOrigin()
    messages = request.messages
    for covered in range(len(messages), 0, -1):
        others = graph.after_reply.get(hashes[covered])
        if others:
            changed = [node for node in others if node.engine == engine]
            return RequestOrigin((changed or others)[-1], _changed_reason(bool(changed)), False)
    system = fingerprint.of(messages[0], graph.noise) if messages[0].role == "system" else b""
    source = _contained_turn(graph, request, key, hashes)
    if source is not None:
        before = _last_turn_of(graph, source)
        if _window_moved(request, before) or (
            source.key == key and source.system == system and _shortened(request, before)
        ):
            return RequestOrigin(before, ForkReason.COMPACTION, not _window_moved(request, before))
        if source.engine != engine:
            return RequestOrigin(source, ForkReason.MODEL_CHANGED)
        if source.system != system:
            return RequestOrigin(source, ForkReason.SYSTEM_CHANGED)
        return RequestOrigin(source, ForkReason.HISTORY_EDITED if source.key == key else ForkReason.TOOLS_CHANGED)
    return _origin_of_new_root(graph, request, key, system, engine)


def find_repeated_subagent(graph: Graph, request: Request, key: str, twin: GraphNode) -> RequestOrigin | None:
    """The origin of a sub-agent that is asked exactly what `twin`, the first turn of another one, was asked: a further
    open call with the same words. `None` if the request is another sample of `twin`."""
    if twin.parent is not None or request.sampling.n > 1:
        return None
    first = request.messages[0]
    system = fingerprint.of(first, graph.noise) if first.role == "system" else b""
    caller, handed = _caller(graph, request, key, system)
    if caller is None or not handed:
        return None
    asked = "\n".join(message.text for message in request.messages if message.role == "user").strip()
    wanted = sum(bool(_longest(strings_in(call.arguments), asked)) for call in _calls(caller))
    begun = sum(node.origin is caller and node.request_hash == twin.request_hash for node in graph.nodes)
    return RequestOrigin(caller, _difference_from_caller(caller, system, key), True) if begun < wanted else None


def _changed_reason(same_engine: bool) -> ForkReason:
    return ForkReason.TOOLS_CHANGED if same_engine else ForkReason.MODEL_CHANGED


def _contained_turn(graph: Graph, request: Request, key: str, hashes: Sequence[bytes]) -> GraphNode | None:
    """The turn whose conversation the request contains: by its last reply in it, or by the request it begins with."""
    node = last_reply_in(graph, request.messages)
    if node is None:
        node, _ = find_diverged_turn(graph, request.messages, key, hashes)
    return node or _begins_with(graph, request.messages) or _sent_back(graph, request, key) or _quoted(graph, request)


def _origin_of_new_root(graph: Graph, request: Request, key: str, system: bytes, engine: str) -> RequestOrigin:
    """Why a conversation began that contains nothing of the earlier ones."""
    hints, nodes = request.hints, graph.nodes
    parents = [n for n in nodes if hints.parent_session and n.hints.session == hints.parent_session]
    same = [n for n in nodes if (n.hints.session, n.hints.agent) == (hints.session, hints.agent)]
    caller, handed = _caller(graph, request, key, system)
    if not request.tools and any(node.has_tools for node in nodes) and not (caller and handed):
        return RequestOrigin((parents or same or nodes)[-1], ForkReason.SIDE, True)
    # Compare with turns of the same engine only: those of another may have had other tasks and tools.
    alike = [node for node in nodes if node.engine == engine]
    before = caller or (parents or [n for n in same if n.engine == engine] or alike or nodes)[-1]
    if not alike:
        return RequestOrigin(before, ForkReason.MODEL_CHANGED, True)
    if all(node.system != system for node in alike):
        return RequestOrigin(before, ForkReason.SYSTEM_CHANGED, True)
    if all(node.key != key for node in alike):
        return RequestOrigin(before, ForkReason.TOOLS_CHANGED, True)
    if parents or not same:
        named = bool(parents or hints.agent)
        return RequestOrigin(before, ForkReason.SUBAGENT if named or caller else ForkReason.UNMATCHED, not parents)
    # A compacted conversation had the same system prompt; a title or commit message in between did not.
    replied = [node for node in same if node.engine == engine and node.system == system and _replied(node)]
    if not (caller and handed):
        for node in reversed(replied):
            if _window_moved(request, node):
                return RequestOrigin(node, ForkReason.COMPACTION)
        summary = _summary(graph, request)
        if summary is not None and replied and _shortened(request, replied[-1]):
            return RequestOrigin(summary, ForkReason.COMPACTION, True)
    if caller is not None and (handed or caller.system != system or caller.key != key):
        return RequestOrigin(caller, _difference_from_caller(caller, system, key), True)
    if replied and _shortened(request, replied[-1]) and (caller is None or _repeats_task(request, replied[-1])):
        return RequestOrigin(replied[-1], ForkReason.COMPACTION, True)
    if caller is not None:
        return RequestOrigin(caller, ForkReason.SUBAGENT, True)
    return RequestOrigin(before, ForkReason.UNMATCHED, True)


def _difference_from_caller(caller: GraphNode, system: bytes, key: str) -> ForkReason:
    """In what a sub-agent differs from the conversation that called it."""
    if caller.system != system:
        return ForkReason.SYSTEM_CHANGED
    return ForkReason.TOOLS_CHANGED if caller.key != key else ForkReason.SUBAGENT


# What a request contains of our turns


def last_reply_in(graph: Graph, messages: Sequence[Message]) -> GraphNode | None:
    """The last turn whose reply is among the messages: by its call ids, edited or not, or by equal content after an equal
    message."""
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


def find_diverged_turn(
    graph: Graph, messages: Sequence[Message], key: str, hashes: Sequence[bytes], start: int = 0
) -> tuple[GraphNode | None, int]:
    """The deepest turn whose request, longer than `start`, is a prefix, although its reply is not what follows."""
    for covered in range(len(messages) - 1, start, -1):
        nodes = graph.by_request.get((hashes[covered], key))
        made = [node for node in nodes or () if node.finish is not Finish.ABORT and node.prefill is None]
        if made:
            return max(made, key=lambda node: (node.finish is not None, node.delivered, node.index)), covered
    return None, 0


def _begins_with(graph: Graph, messages: Sequence[Message]) -> GraphNode | None:
    """The turn with the longest request that the messages begin with, ignoring system prompt and tools."""
    ours = _without_system(graph, messages)
    found: tuple[int, GraphNode | None] = (0, None)
    for node in graph.nodes[-_RECENT:]:
        theirs = _without_system(graph, request_messages(node))
        if _replied(node) and found[0] <= len(theirs) < len(ours) and theirs and ours[: len(theirs)] == theirs:
            found = len(theirs), node
    return found[1]


def _without_system(graph: Graph, messages: Sequence[Message]) -> list[bytes]:
    return [fingerprint.of(message, graph.noise) for message in messages if message.role != "system"]


def _sent_back(graph: Graph, request: Request, key: str) -> GraphNode | None:
    """The last turn under the same system prompt and tools whose text reply is in the request, after other messages."""
    first = request.messages[0]
    system = fingerprint.of(first, graph.noise) if first.role == "system" else b""
    for message in reversed(request.messages):
        if message.role != "assistant" or message.tool_calls or len(message.text.strip()) < MIN_QUOTE:
            continue
        reply = fingerprint.of(message, graph.noise)
        for engine in graph.engines:
            for node in reversed(graph.by_reply.get((reply, engine), ())):
                if (node.system, node.key) == (system, key):
                    return node
    return None


def _quoted(graph: Graph, request: Request) -> GraphNode | None:
    """The last turn that a request quotes as text, along with the user's own words of that conversation."""
    if not request.tools and any(node.has_tools for node in graph.nodes):
        return None
    users = [message for message in request.messages if message.role == "user"]
    known = {fingerprint.of(message, graph.noise) for message in users}
    for node in reversed(graph.nodes[-_RECENT:]):
        asked = [m for m in request_messages(node.root) if m.role == "user"]
        if not _replied(node) or not asked or fingerprint.of(asked[0], graph.noise) not in known:
            continue
        if any(quotes(message.text, node) for message in users):
            return node
    return None


def quotes(text: str, node: GraphNode) -> bool:
    """Whether a text quotes the reply of a turn: its text, or the strings of its calls."""
    reply = node.reply
    if reply is None:
        return False
    if reply.tool_calls:
        return all(
            call.name in text and all(s in text for s in strings_in(call.arguments)) for call in reply.tool_calls
        )
    return len(reply.text.strip()) >= MIN_QUOTE and reply.text.strip() in text


def _summary(graph: Graph, request: Request) -> GraphNode | None:
    """The turn whose reply (a summary) the user messages of the request contain."""
    user_text = "\n".join(message.text for message in request.messages if message.role == "user")
    for node in reversed(graph.nodes[-_RECENT:]):
        if node.reply is None or node.reply.tool_calls:
            continue
        # A harness may extract the summary from the text around it.
        lines = (line.strip() for line in node.reply.text.splitlines())
        if any(len(line) >= MIN_QUOTE and line in user_text for line in lines):
            return node
    return None


def _window_moved(request: Request, before: GraphNode) -> bool:
    """Whether the harness reports another context window."""
    return bool(request.hints.window and before.hints.window and request.hints.window != before.hints.window)


def _shortened(request: Request, before: GraphNode) -> bool:
    """Whether the history did not grow and contains user text that the conversation did not have."""
    if len(request.messages) > before.message_count:
        return False
    known = {message.fingerprint for message in request_messages(before)}
    return any(message.role == "user" and message.fingerprint not in known for message in request.messages)


def _repeats_task(request: Request, before: GraphNode) -> bool:
    """Whether the request contains the first user message of a conversation."""
    first = next((message for message in request_messages(before.root) if message.role == "user"), None)
    return first is not None and any(message.fingerprint == first.fingerprint for message in request.messages)


def _last_turn_of(graph: Graph, node: GraphNode) -> GraphNode:
    """The newest turn with a reply in the conversation of `node`, under any tools."""
    alike = (
        n for n in reversed(graph.nodes) if n.line_root is node.line_root and n.system == node.system and _replied(n)
    )
    return next(alike, node)


def _replied(node: GraphNode) -> bool:
    return node.reply is not None and node.finish is not Finish.ABORT


# Which open call started a conversation


def _caller(graph: Graph, request: Request, key: str, system: bytes) -> tuple[GraphNode | None, bool]:
    """The turn whose open tool call started a conversation, and whether the arguments of the call prove it.

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
    # A request without tools must consist mostly of the task it was handed; otherwise it is about something else.
    if words[0] and (request.tools or words[0] * 2 >= len(asked)):
        return next(node for node in waiting if node.index == words[1]), True
    begun = [node for node in graph.nodes if node.parent is None and node.origin_inferred and node.origin is not None]
    kind = [n.origin for n in begun if (n.system, n.key) == (system, key) and n.origin in waiting]
    left = [n for n in waiting if 0 < sum(other.origin is n for other in begun) < len(_calls(n))]
    return (kind or left or waiting)[-1], False


def _same_agent(node: GraphNode, request: Request) -> bool:
    hints = request.hints
    return bool(hints.agent) and (node.hints.session, node.hints.agent) == (hints.session, hints.agent)


def _is_open(node: GraphNode) -> bool:
    """Whether the turn has calls without results."""
    return bool(_calls(node)) and node.finish is not Finish.ABORT and not node.answered


def _calls(node: GraphNode) -> tuple[Any, ...]:
    return node.reply.tool_calls if node.reply is not None else ()


def _repeated(node: GraphNode, text: str) -> int:
    """Length of the longest argument of the turn's calls that the text contains."""
    return _longest((string for call in _calls(node) for string in strings_in(call.arguments)), text)


def _longest(strings: Iterator[str], text: str) -> int:
    """Length of the longest of the strings that the text contains."""
    found = (string for string in strings if string == text or (len(string) >= MIN_QUOTE and string in text))
    return max((len(string) for string in found), default=0)


def strings_in(value: Any) -> Iterator[str]:
    """Every non-empty string in a JSON value, stripped."""
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


def request_messages(node: GraphNode) -> list[Message]:
    """All messages of a turn's request as the harness sent them."""
    parts: list[list[Message]] = []
    turn: GraphNode | None = node
    while turn is not None:
        if turn.reason is ForkReason.SIBLING and turn.parent is None and turn.origin is not None:
            turn = turn.origin
            continue
        parts.append(turn.new)
        if len(turn.new) >= turn.message_count:
            break
        before = turn.parent or turn.origin
        if before is not None and before.reply is not None:
            parts.append([before.reply_message()])
        turn = before
    return [message for part in reversed(parts) for message in part]


def first_difference(graph: Graph, reference: GraphNode, messages: Sequence[Message]) -> dict[str, Any]:
    """An excerpt of the first message in which a request differs from a turn's request and reply; empty if none."""
    before = request_messages(reference)
    if reference.prefill is None and reference.reply is not None:
        before.append(reference.reply_message())
    for place, then in enumerate(before):
        now = messages[place] if place < len(messages) else None
        if now is not None and fingerprint.of(now, graph.noise) == fingerprint.of(then, graph.noise):
            continue
        was, sent = _as_text(then), _as_text(now) if now is not None else ""
        start = max(_common_prefix(was, sent) - _BEFORE, 0)
        return {
            "turn": reference.index,
            "message": place,
            "role": now.role if now is not None else "",
            "was": was[start : start + _EXCERPT],
            "sent": sent[start : start + _EXCERPT],
        }
    return {}


def most_similar_turn(graph: Graph, messages: Sequence[Message]) -> GraphNode | None:
    """The turn whose request shares the longest prefix with the messages."""
    found: tuple[int, int] = (-1, -1)
    ours = [fingerprint.of(message, graph.noise) for message in messages]
    for node in graph.nodes[-_RECENT:]:
        theirs = [fingerprint.of(message, graph.noise) for message in request_messages(node)]
        found = max(found, (_common_prefix(theirs, ours), node.index))
    return next((node for node in graph.nodes if node.index == found[1]), None)


def _common_prefix(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    count = 0
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            break
        count += 1
    return count


def _as_text(message: Message) -> str:
    """A message as text: its content, then its calls."""
    calls = (
        f"{call.name}({fingerprint.canonical(call.arguments).decode('utf-8', 'replace')})"
        for call in message.tool_calls
    )
    return "\n".join(filter(None, (message.text.strip(), *calls)))
