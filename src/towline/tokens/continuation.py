"""Where a request continues: the decision at the heart of `exact`.

Given a session's graph and a request, `Planner.plan` finds the deepest turn of ours that the request provably goes on
from, and makes the prompt: that turn's tokens as they are, then the freshly rendered suffix. What cannot be proven to
continue starts a branch or a new root, with the reason. After a fork, replies of ours that are unchanged are taken from
the graph as they were sampled. Pure: no engine, no clock, no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from towline.arrays import Ids
from towline.conversation import Message, Request
from towline.schema import ContextPolicy, ForkReason
from towline.tokens import fingerprint
from towline.tokens.codec import Codec, Encoded, Frame, Unbridgeable
from towline.tokens.graph import Graph, Node

_TAIL = 64
"""Prompt ids before a turn that a family's bridge may look at: enough to see whether reasoning was opened."""


class Vanishing(StrEnum):
    """What to do about a last message that is gone from the next request."""

    FORK = "fork"
    KEEP = "keep"


class Capture(StrEnum):
    """How prompts are made."""

    EXACT = "exact"
    PLAIN = "plain"
    """Render and encode every request anew, as a plain chat server does: the baseline for `merged` and `per_turn`."""


@dataclass(slots=True)
class Plan:
    """How a request is answered: the tokens of `parent`, then `suffix`."""

    parent: Node | None
    suffix: Ids
    request_hash: bytes
    hashes: list[bytes]
    """Rolling hash before each message and after the last."""
    shortened_hash: bytes | None = None
    origin: Node | None = None
    inferred: bool = False
    reason: ForkReason | None = None
    new: list[Message] = field(default_factory=list)
    prefill: Message | None = None
    forced: int = 0
    special_text: int = 0
    flags: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Ids:
    """Suffix ids being put together."""

    ids: list[int] = field(default_factory=list)
    forced: int = 0
    special_text: int = 0
    spliced: int = 0

    def add(self, encoded: Encoded) -> None:
        self.ids += encoded.ids
        self.forced += encoded.forced
        self.special_text += encoded.special_text


class Planner:
    """Plans the requests of one session."""

    def __init__(
        self,
        codec: Codec,
        *,
        policy: ContextPolicy = ContextPolicy.RETAIN,
        vanishing: Vanishing = Vanishing.FORK,
        capture: Capture = Capture.EXACT,
        noise: Sequence[re.Pattern[str]] = (),
    ):
        self.codec = codec
        self.policy = policy
        self.vanishing = vanishing
        self.capture = capture
        self.noise = tuple(noise)

    def hashes(self, messages: Sequence[Message], known: Sequence[bytes] = (), shared: int = 0) -> list[bytes]:
        """Rolling hashes of every prefix; the first `shared` messages are those that gave `known`."""
        hashes = list(known[: shared + 1]) or [fingerprint.EMPTY]
        current = hashes[-1]
        for message in messages[len(hashes) - 1 :]:
            current = fingerprint.roll(current, fingerprint.of(message, self.noise))
            hashes.append(current)
        return hashes

    def plan(self, graph: Graph, request: Request, key: str, frame: Frame, hashes: list[bytes]) -> Plan:
        """Decide and make the prompt. Raises `TemplateError` if the template refuses the messages outright."""
        messages = request.messages
        prefill = messages[-1] if messages[-1].role == "assistant" else None
        plan = Plan(None, np.empty(0, np.int32), hashes[-1], hashes, prefill=prefill, new=messages)
        if len(messages) > 2 and messages[-1].role == "user":
            plan.shortened_hash = hashes[-2]

        twin = next((n for n in reversed(graph.by_request.get((hashes[-1], key), []))), None)
        if twin is not None:
            return self._sibling(plan, twin)
        found, covered, vanished = self._match(graph, messages, key, hashes)
        if self.capture is Capture.PLAIN:
            return self._plain(plan, graph, found, covered, vanished, request, key, frame)
        if found is not None:
            return self._continue(plan, graph, found, covered, vanished, request, key, frame)
        return self._root(plan, graph, request, key, frame)

    # Finding

    def _match(
        self, graph: Graph, messages: Sequence[Message], key: str, hashes: Sequence[bytes]
    ) -> tuple[Node | None, int, bool]:
        """The deepest turn whose request and reply are a prefix, how many messages it covers, and whether a message of
        its prompt vanished."""
        for covered in range(len(messages), 0, -1):
            last = messages[covered - 1]
            if last.role != "assistant":
                continue
            node = _pick(graph.after_reply.get(hashes[covered]), key, last)
            if node is not None:
                return node, covered, False
            if covered >= 2 and messages[covered - 2].role == "assistant":
                node = self._match_split(graph, messages, covered, key, hashes)
                if node is not None:
                    return node, covered, False
            node = _pick(graph.after_vanished.get(hashes[covered]), key, last)
            if node is not None:
                return node, covered, True
        return None, 0, False

    def _match_split(
        self, graph: Graph, messages: Sequence[Message], covered: int, key: str, hashes: Sequence[bytes]
    ) -> Node | None:
        """A reply that the harness sends back as several assistant messages in a row."""
        start = covered - 1
        while start > 0 and messages[start - 1].role == "assistant":
            start -= 1
            run = messages[start:covered]
            merged = Message(
                "assistant",
                "\n".join(m.text for m in run if m.text.strip()),
                next((m.reasoning for m in run if m.reasoning), None),
                tuple(call for m in run for call in m.tool_calls),
            )
            after = fingerprint.roll(hashes[start], fingerprint.of(merged, self.noise))
            node = _pick(graph.after_reply.get(after), key, merged)
            if node is not None:
                return node
        return None

    # Planning

    def _sibling(self, plan: Plan, twin: Node) -> Plan:
        """The same request once more, wanted as another sample: the same prompt, token for token."""
        plan.parent, plan.suffix, plan.new = twin.parent, twin.suffix, twin.new
        plan.origin, plan.reason = twin, ForkReason.SIBLING
        plan.forced, plan.special_text, plan.prefill = twin.forced, twin.special_text, twin.prefill
        return plan

    def _continue(
        self,
        plan: Plan,
        graph: Graph,
        found: Node,
        covered: int,
        vanished: bool,
        request: Request,
        key: str,
        frame: Frame,
    ) -> Plan:
        messages = request.messages
        plan.parent, plan.new = found, messages[covered:]
        if vanished:
            if self.vanishing is Vanishing.KEEP:
                plan.flags.append("vanished_kept")
            else:
                return self._branch(plan, graph, found, ForkReason.VANISHED_MESSAGE, request, key, frame)
        if covered == len(messages):
            return self._resume_reply(plan, found)
        if self.policy is not ContextPolicy.RETAIN:
            reason = self._shown_otherwise(found, covered, messages, frame)
            if reason is not None:
                return self._anew(plan, found, reason, request, frame)
        own = [index for index in range(covered, len(messages)) if _own(graph, messages[index], found)]
        if own:
            plan.reason, plan.origin = ForkReason.HISTORY_EDITED, _own(graph, messages[own[-1]], found)
        elif any(child.delivered or child.finish is None for child in found.children):
            plan.reason, plan.origin = ForkReason.HISTORY_EDITED, found
        try:
            made = self._extend(
                graph, found, _tail(found), found.sampled, covered, messages, frame, plan.prefill is not None
            )
        except Unbridgeable as problem:
            return self._unbridged(plan, graph, found, covered, problem, request, frame)
        return _made(plan, made)

    def _resume_reply(self, plan: Plan, found: Node) -> Plan:
        """The request ends with our own reply: the model is to go on writing it."""
        if len(found.sampled) and int(found.sampled[-1]) in self.codec.stop_ids:
            plan.parent, plan.origin, plan.reason = found.parent, found, ForkReason.PREFILL
            plan.suffix = np.concatenate([found.suffix, found.sampled[:-1]])
            plan.new = [*found.new, plan.new[-1]] if plan.new else found.new
        return plan

    def _extend(
        self,
        graph: Graph,
        near: Node,
        tail: Ids,
        sampled: Ids,
        covered: int,
        messages: Sequence[Message],
        frame: Frame,
        prefill: bool,
    ) -> _Ids:
        """Everything behind the reply `messages[covered - 1]`, with later replies of ours as they were sampled.

        `tail` and `sampled` are the ids before and of that reply; `near` is a turn of the conversation.
        """
        made = _Ids()
        while True:
            splice, node = self._next_own(graph, near, covered, messages)
            upto = len(messages) if node is None else splice
            made.add(
                self.codec.extend(
                    messages[: covered - 1],
                    messages[covered - 1],
                    tail,
                    sampled,
                    messages[covered:upto],
                    frame,
                    prefill=prefill and node is None,
                )
            )
            if node is None:
                return made
            tail, sampled, covered = np.asarray(made.ids[-_TAIL:], np.int32), node.sampled, splice + 1
            made.ids += node.sampled.tolist()
            made.spliced += 1

    def _next_own(self, graph: Graph, near: Node, covered: int, messages: Sequence[Message]) -> tuple[int, Node | None]:
        """The next reply of ours in the rest of the request that can be put in as sampled."""
        for index in range(covered + 1, len(messages) - 1):
            if messages[index].role == "assistant" and messages[index + 1].role != "assistant":
                node = _own(graph, messages[index], near)
                if node is not None and (self.policy is ContextPolicy.RETAIN or _kept(node, messages[index])):
                    return index, node
        return len(messages), None

    def _branch(
        self, plan: Plan, graph: Graph, origin: Node, reason: ForkReason, request: Request, key: str, frame: Frame
    ) -> Plan:
        """Branch at the last intact turn, or start anew if there is none."""
        plan.reason, plan.origin = reason, origin
        messages = request.messages
        for covered in range(len(messages) - 1, 0, -1):
            if messages[covered - 1].role != "assistant":
                continue
            node = _pick(graph.after_reply.get(plan.hashes[covered]), key, messages[covered - 1])
            if node is None:
                continue
            plan.parent, plan.new = node, messages[covered:]
            try:
                made = self._extend(
                    graph, node, _tail(node), node.sampled, covered, messages, frame, plan.prefill is not None
                )
                return _made(plan, made)
            except Unbridgeable:
                break
        return self._compose(plan, graph, origin, messages, frame)

    def _unbridged(
        self,
        plan: Plan,
        graph: Graph,
        found: Node,
        covered: int,
        problem: Unbridgeable,
        request: Request,
        frame: Frame,
    ) -> Plan:
        plan.reason, plan.origin = problem.reason, found
        if problem.reason is ForkReason.STOP_MISMATCH:
            # All but the end of the turn stays as it was sampled; the message that follows opens itself.
            messages, cut = request.messages, found.sampled[:-1]
            made = self.codec.extend(
                messages[: covered - 1],
                messages[covered - 1],
                _tail(found),
                cut,
                messages[covered:],
                frame,
                prefill=plan.prefill is not None,
            )
            plan.parent, plan.new = found.parent, [*found.new, *messages[covered - 1 :]]
            plan.suffix = np.concatenate([found.suffix, cut, np.asarray(made.ids, np.int32)])
            plan.special_text = made.special_text
            return plan
        return self._compose(plan, graph, found, request.messages, frame)

    def _shown_otherwise(
        self, found: Node, covered: int, messages: Sequence[Message], frame: Frame
    ) -> ForkReason | None:
        """Why a plain server would not show the model what it sampled, under `as_sent` and `template`."""
        shown = list(messages)
        node: Node | None = found
        while node is not None and node.covered < len(shown) and shown[node.covered].role == "assistant":
            if self.policy is ContextPolicy.AS_SENT and not _kept(node, shown[node.covered]):
                return ForkReason.REASONING_DROPPED
            shown[node.covered] = node.reply_message()
            node = node.parent
        if self.codec.rewrites(shown[: covered - 1], shown[covered - 1], shown[covered:], frame):
            return ForkReason.TEMPLATE_REWRITE
        return None

    def _anew(self, plan: Plan, found: Node, reason: ForkReason, request: Request, frame: Frame) -> Plan:
        """Everything rendered as a plain server would; under `template` with the reasoning that the harness dropped."""
        plan.parent, plan.origin, plan.reason, plan.new = None, found, reason, request.messages
        messages = list(request.messages)
        if self.policy is ContextPolicy.TEMPLATE:
            node: Node | None = found
            while node is not None and node.covered < len(messages):
                messages[node.covered] = node.reply_message()
                node = node.parent or node.continued
        made = _Ids()
        made.add(self.codec.prompt(messages, frame, prefill=plan.prefill is not None))
        return _made(plan, made)

    def _compose(self, plan: Plan, graph: Graph, near: Node | None, messages: Sequence[Message], frame: Frame) -> Plan:
        """A prompt from its beginning, with unchanged replies of ours as they were sampled."""
        plan.parent, plan.new = None, list(messages)
        made = _Ids()
        splice, node = self._next_own(graph, near, 0, messages) if near is not None else (0, None)
        prefill = plan.prefill is not None
        if node is None or near is None:
            made.add(self.codec.prompt(messages, frame, prefill=prefill))
            return _made(plan, made)
        made.add(self.codec.prompt(messages[:splice], frame))
        tail = np.asarray(made.ids[-_TAIL:], np.int32)
        made.ids += node.sampled.tolist()
        made.spliced += 1
        try:
            rest = self._extend(graph, near, tail, node.sampled, splice + 1, messages, frame, prefill)
        except Unbridgeable:
            made = _Ids()
            made.add(self.codec.prompt(messages, frame, prefill=prefill))
            return _made(plan, made)
        made.ids += rest.ids
        made.special_text += rest.special_text
        made.spliced += rest.spliced
        return _made(plan, made)

    def _root(self, plan: Plan, graph: Graph, request: Request, key: str, frame: Frame) -> Plan:
        plan.origin, plan.reason, plan.inferred = self._why_new(graph, request, key, plan.hashes)
        near = plan.origin if plan.reason in (ForkReason.HISTORY_EDITED, ForkReason.TOOLS_CHANGED) else None
        return self._compose(plan, graph, near, request.messages, frame)

    def _plain(
        self,
        plan: Plan,
        graph: Graph,
        found: Node | None,
        covered: int,
        vanished: bool,
        request: Request,
        key: str,
        frame: Frame,
    ) -> Plan:
        if found is None:
            plan.origin, plan.reason, plan.inferred = self._why_new(graph, request, key, plan.hashes)
        else:
            plan.origin, plan.new = found, request.messages[covered:]
            own = any(_own(graph, message, found) for message in plan.new)
            taken = any(node.origin is found and node.reason is None for node in graph.nodes)
            if vanished:
                plan.reason = ForkReason.VANISHED_MESSAGE
            elif own or taken:
                plan.reason = ForkReason.HISTORY_EDITED
        made = _Ids()
        made.add(self.codec.prompt(request.messages, frame, prefill=plan.prefill is not None))
        return _made(plan, made)

    def _why_new(
        self, graph: Graph, request: Request, key: str, hashes: Sequence[bytes]
    ) -> tuple[Node | None, ForkReason | None, bool]:
        """Why a request continues nothing: the turn it came from, the reason, and whether that turn is a guess."""
        if not graph.nodes:
            return None, None, False
        messages = request.messages
        for covered in range(len(messages), 0, -1):
            others = graph.after_reply.get(hashes[covered])
            if others:
                return others[-1], ForkReason.TOOLS_CHANGED, False
        hints = request.hints
        by_header = [n for n in graph.nodes if hints.parent_session and n.hints.session == hints.parent_session]
        same = [n for n in graph.nodes if (n.hints.session, n.hints.agent) == (hints.session, hints.agent)]
        before = (by_header or same or graph.nodes)[-1]
        has_tools = bool(request.tools)
        leads = messages[0].role == "system"
        system = fingerprint.of(messages[0], self.noise) if leads else b""
        if not has_tools and any(node.has_tools for node in graph.nodes):
            return before, ForkReason.SIDE, True
        if all(node.system != system for node in graph.nodes):
            return before, ForkReason.SYSTEM_CHANGED, True
        if all(node.key != key for node in graph.nodes):
            return before, ForkReason.TOOLS_CHANGED, True
        if by_header or not same:
            return before, ForkReason.UNMATCHED, not by_header
        if len(messages) < before.covered + 1:
            moved = bool(hints.window) and hints.window != before.hints.window
            return before, ForkReason.COMPACTION, not moved
        own = next((node for message in reversed(messages) if (node := _own(graph, message, before))), None)
        if own is not None:
            return own, ForkReason.HISTORY_EDITED, False
        return before, ForkReason.UNMATCHED, True


def _made(plan: Plan, made: _Ids) -> Plan:
    plan.suffix = np.asarray(made.ids, np.int32)
    plan.forced, plan.special_text = made.forced, made.special_text
    if made.forced:
        plan.flags.append("forced_close")
    if made.spliced:
        plan.flags.append("spliced_replies")
    return plan


def _tail(node: Node) -> Ids:
    """The last ids of a turn's prompt."""
    return node.suffix[-_TAIL:] if len(node.suffix) >= _TAIL else node.prompt()[-_TAIL:]


def _pick(nodes: Sequence[Node] | None, key: str, message: Message) -> Node | None:
    """Among twins, the one whose tool-call ids the harness sent back; else the newest that was delivered."""
    candidates = [node for node in nodes or () if node.key == key]
    if len(candidates) <= 1:
        return candidates[0] if candidates else None
    return _by_call_id(candidates, message) or next(
        (node for node in reversed(candidates) if node.delivered), candidates[-1]
    )


def _by_call_id(nodes: Sequence[Node], message: Message) -> Node | None:
    ids = {_bare(call.id) for call in message.tool_calls}
    for node in reversed(nodes):
        if node.reply is not None and any(_bare(call.id) in ids for call in node.reply.tool_calls):
            return node
    return None


def _bare(id: str) -> str:
    return "".join(filter(str.isalnum, id))


def _own(graph: Graph, message: Message, near: Node | None) -> Node | None:
    """The turn that sampled this message: by its minted call ids, or in the same conversation by its content."""
    if message.role != "assistant":
        return None
    nodes = graph.by_reply.get(fingerprint.of(message))
    if not nodes:
        return None
    node = _by_call_id(nodes, message)
    if node is not None or near is None:
        return node
    root = near.root
    return next((node for node in reversed(nodes) if node.root is root), None)


def _kept(node: Node, message: Message) -> bool:
    """Whether the harness sent the reply's reasoning back."""
    sent = (node.reply.reasoning or "").strip() if node.reply is not None else ""
    back = (message.reasoning or "").strip()
    return not sent or back == sent or (not back and sent in message.text)
