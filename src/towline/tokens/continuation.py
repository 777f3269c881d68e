"""Where a request continues: the decision at the heart of `exact`.

Given a session's graph and a request, `Planner.plan` finds the deepest turn of ours that the request provably goes on
from, and makes the prompt: that turn's tokens as they are, then the freshly rendered suffix. What cannot be proven to
continue starts a branch or a new root, with the reason. After a fork, replies of ours that are unchanged are taken from
the graph as they were sampled, unless the context policy wants what the template would show. Pure: no engine, no clock,
no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from towline.arrays import Ids
from towline.conversation import Finish, Message, Request
from towline.schema import POLICY, ContextPolicy, ForkReason
from towline.tokens import appending, call_ids, finding, fingerprint, lineage, media
from towline.tokens.codec import Codec, Frame, Unbridgeable
from towline.tokens.graph import Graph, Node
from towline.tokens.plan import (
    CALLS_AS_TEXT,
    DIFFERS,
    FLAGS,
    NOISE,
    TAIL,
    VANISHED_KEPT,
    Capture,
    Plan,
    PromptIds,
    Vanishing,
    asked,
    compared,
    made_of,
    tail_of,
    untold,
)

_NONE: Ids = np.empty(0, np.int32)


class Planner:
    """Plans the requests of one session to one engine."""

    def __init__(
        self,
        codec: Codec,
        *,
        policy: ContextPolicy = ContextPolicy.RETAIN,
        vanishing: Vanishing = Vanishing.FORK,
        capture: Capture = Capture.EXACT,
        noise: Sequence[re.Pattern[str]] = (),
        engine: str = POLICY,
    ):
        self.codec = codec
        self.engine = engine
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
        plan = self._decide(graph, request, key, frame, hashes)
        plan.flags += media.not_shown(plan.new, lambda message: self.codec.sees(message, frame))
        if frame.tools and self.codec.calls_as_text:
            plan.flags.append(CALLS_AS_TEXT)
        if plan.reason in DIFFERS:
            reference = compared(plan) or lineage.nearest(graph, request.messages)
            plan.difference = lineage.difference(graph, reference, request.messages) if reference is not None else {}
        return plan

    def _unreported(self, messages: Sequence[Message], frame: Frame) -> bool:
        """Whether the engine shows an image without telling what stands for it."""
        if not any(placeholder.ids is None for placeholder in frame.images.values()):
            return False
        seen = (item.digest for message in messages for item in self.codec.sees(message, frame))
        return any(frame.images[digest].ids is None for digest in seen if digest in frame.images)

    def _decide(self, graph: Graph, request: Request, key: str, frame: Frame, hashes: list[bytes]) -> Plan:
        messages = request.messages
        prefill = messages[-1] if messages[-1].role == "assistant" else None
        plan = Plan(None, np.empty(0, np.int32), hashes[-1], hashes, prefill=prefill, new=messages)
        if len(messages) > 1 and messages[-1].role == "user" and messages[-2].role in ("user", "tool"):
            plan.shortened_hash = hashes[-2]

        found, covered, vanished = finding.match(graph, messages, key, hashes)
        twin = finding.twin(graph, messages, key, hashes, found)
        unreported = self._unreported(messages, frame)
        if twin is not None and not unreported:
            return self._sibling(plan, twin, lineage.started_again(graph, request, key, twin))
        resumes = covered == len(messages) and self.capture is Capture.EXACT
        if prefill is not None and prefill.tool_calls and not resumes:
            # Calls are closed by the template: nothing can be written behind them in the same message.
            plan.prefill = None
        if self.capture is Capture.PLAIN or unreported:
            self._plain(plan, graph, found, covered, vanished, request, key, frame)
            return untold(plan, found, twin, messages) if unreported else plan
        written_on = self._written_on(plan, graph, covered, messages, key, frame)
        if written_on is not None:
            return written_on
        if found is not None:
            return self._continue(plan, graph, found, covered, vanished, request, key, frame)
        self._trace_back(plan, graph, request, key)
        near = finding.named(graph, messages, self.engine) or plan.origin
        return self._compose(plan, graph, near, messages, frame)

    def _trace_back(self, plan: Plan, graph: Graph, request: Request, key: str) -> None:
        """Say where a request that continues no turn came from."""
        source = lineage.why_new(graph, request, key, plan.hashes, self.engine)
        plan.origin, plan.reason, plan.inferred = source.origin, source.reason, source.inferred

    def _sibling(self, plan: Plan, twin: Node, source: lineage.Source | None) -> Plan:
        """The same request once more: the same prompt, token for token.

        Another sample of it is a sibling; after a turn that came to nothing it takes that one's place. With `source`, it
        begins another conversation that was handed the same task.
        """
        plan.parent, plan.suffix, plan.new = twin.parent, twin.suffix, twin.new
        plan.forced, plan.special_text, plan.prefill = twin.forced, twin.special_text, twin.prefill
        plan.images, plan.shares, plan.kept = twin.images, twin.shares, twin.kept
        plan.flags = [flag for flag in twin.flags if flag in FLAGS]
        if twin.finish is Finish.ABORT:
            plan.origin, plan.reason, plan.inferred = twin.origin, twin.reason, twin.origin_inferred
        elif source is not None:
            plan.origin, plan.reason, plan.inferred = source.origin, source.reason, source.inferred
        else:
            plan.origin, plan.reason = twin, ForkReason.SIBLING
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
        messages = call_ids.of_ours(graph, request.messages, found, self.codec, self.engine)
        plan.parent, plan.new = found, list(messages[covered:])
        if self.noise and finding.noisy(found, messages):
            plan.flags.append(NOISE)
        if vanished and self.vanishing is Vanishing.FORK:
            return self._branch(plan, graph, found, key, messages, frame)
        if vanished:
            plan.flags.append(VANISHED_KEPT)
        reason = self._shown_otherwise(graph, found, covered, messages, frame)
        if reason is not None:
            plan.reason, plan.origin = reason, found
            return self._anew(plan, graph, found, messages, frame)
        if covered == len(messages):
            return self._resume_reply(plan, found)
        # Replies of another conversation came by a hand-off and back; nothing was edited.
        ours = self._ours(graph, messages, found, covered)
        later = [node for _, node in ours if node.index > found.index and node.root is found.root]
        if later:
            plan.reason, plan.origin = ForkReason.HISTORY_EDITED, later[-1]
        elif any(child.delivered or child.finish is None for child in found.children):
            plan.reason, plan.origin = ForkReason.HISTORY_EDITED, found
        try:
            made = self._extend(PromptIds(), plan, graph, found, found.sampled, covered, messages, frame)
            if made.spliced and not self._shown_alike(graph, found, found.tokens(), made.ids, messages, frame):
                return self._anew(plan, graph, found, messages, frame)
            return made_of(plan, made)
        except Unbridgeable as problem:
            plan.reason, plan.origin = problem.reason, found
        if plan.reason is ForkReason.STOP_MISMATCH:
            return self._without_end(plan, graph, found, covered, messages, frame)
        return self._compose(plan, graph, found, messages, frame)

    def _resume_reply(self, plan: Plan, found: Node) -> Plan:
        """The request ends with our own reply: the model is to go on writing it."""
        if len(found.sampled) and int(found.sampled[-1]) in self.codec.stop_ids:
            self._instead_of(plan, found, found.sampled[:-1])
            plan.origin, plan.reason = found, ForkReason.PREFILL
            plan.new = [*asked(found), *([] if plan.prefill is None else [plan.prefill])]
        return plan

    def _without_end(
        self, plan: Plan, graph: Graph, found: Node, covered: int, messages: Sequence[Message], frame: Frame
    ) -> Plan:
        """All but the end of the turn stays as it was sampled; the message that follows opens itself."""
        cut = found.sampled[:-1]
        try:
            made = self._extend(PromptIds(), plan, graph, found, cut, covered, messages, frame)
        except Unbridgeable:
            return self._compose(plan, graph, found, messages, frame)
        made.forced = 0
        made_of(plan, made)
        plan.images = tuple(image.moved(len(cut)) for image in plan.images)
        self._instead_of(plan, found, np.concatenate([cut, plan.suffix]))
        plan.special_text = found.special_text + made.special_text
        plan.new = [*asked(found), *messages[covered - 1 :]]
        return plan

    def _instead_of(self, plan: Plan, found: Node, ids: Ids) -> None:
        """Prompt `found` once more, with `ids` for what it sampled."""
        plan.parent, plan.suffix = found.parent, np.concatenate([found.suffix, ids])
        plan.images = (*found.images, *(image.moved(len(found.suffix)) for image in plan.images))
        plan.forced, plan.special_text = found.forced, found.special_text
        plan.flags += [flag for flag in found.flags if flag in FLAGS and flag not in plan.flags]

    def _extend(
        self,
        made: PromptIds,
        plan: Plan,
        graph: Graph,
        near: Node,
        sampled: Ids,
        covered: int,
        messages: Sequence[Message],
        frame: Frame,
    ) -> PromptIds:
        """Add everything behind the reply `messages[covered - 1]`, with later replies of ours as they were sampled.

        `sampled` are the ids of that reply: the turn `near` itself if nothing is made yet, else the end of what is.
        """
        tail = np.asarray(made.ids[: -len(sampled)][-TAIL:], np.int32) if made.ids else tail_of(near)
        splicing = True
        while True:
            splice, node = self._next_own(graph, near, covered, messages) if splicing else (len(messages), None)
            try:
                encoded = self.codec.extend(
                    graph.native(messages[: covered - 1]),
                    graph.native(messages[covered - 1 : covered])[0],
                    tail,
                    sampled,
                    graph.native(messages[covered:splice]),
                    frame,
                    prefill=plan.prefill is not None and node is None,
                )
            except Unbridgeable as problem:
                if problem.reason is not ForkReason.STOP_MISMATCH or not made.ids:
                    raise
                made.ids.pop()
                sampled = sampled[:-1]
                continue
            if node is not None and encoded.ids[-1:] != [int(node.suffix[-1])]:
                splicing = False
                continue
            made.add(encoded)
            if node is None:
                return made
            tail, sampled, covered = np.asarray(made.ids[-TAIL:], np.int32), node.sampled, splice + 1
            made.splice(node)

    def _next_own(self, graph: Graph, near: Node, covered: int, messages: Sequence[Message]) -> tuple[int, Node | None]:
        """The next reply of ours in the rest of the request that can be put in as sampled."""
        for index in range(covered + 1, len(messages) - 1):
            message = messages[index]
            if message.role == "assistant" and messages[index + 1].role != "assistant":
                node = finding.own(graph, message, near, index, self.engine)
                # A reply behind a prefill was sampled without its beginning.
                if node is not None and node.prefill is None and self._stays(node, message):
                    return index, node
        return len(messages), None

    def _ours(
        self, graph: Graph, messages: Sequence[Message], near: Node | None, start: int = 0
    ) -> list[tuple[int, Node]]:
        """Which of the messages from `start` on are replies of ours, in order."""
        places = range(start, len(messages))
        found = [finding.own(graph, messages[place], near, place, self.engine) for place in places]
        return [(place, node) for place, node in zip(places, found, strict=True) if node is not None]

    def _stays(self, node: Node, message: Message) -> bool:
        """Whether a reply stays in context as it was sampled, whatever the harness made of its reasoning."""
        return self.policy is not ContextPolicy.AS_SENT or finding.kept(node, message)

    def _branch(
        self, plan: Plan, graph: Graph, origin: Node, key: str, messages: Sequence[Message], frame: Frame
    ) -> Plan:
        """A message vanished: branch at the last intact turn, or start anew if there is none."""
        plan.reason, plan.origin = ForkReason.VANISHED_MESSAGE, origin
        node, covered = finding.intact(graph, messages, key, plan.hashes)
        if node is not None and self._shown_otherwise(graph, node, covered, messages, frame) is None:
            plan.parent, plan.new = node, list(messages[covered:])
            try:
                made = self._extend(PromptIds(), plan, graph, node, node.sampled, covered, messages, frame)
                if not made.spliced or self._shown_alike(graph, node, node.tokens(), made.ids, messages, frame):
                    return made_of(plan, made)
            except Unbridgeable:
                pass
        return self._compose(plan, graph, origin, messages, frame)

    def _written_on(
        self, plan: Plan, graph: Graph, start: int, messages: Sequence[Message], key: str, frame: Frame
    ) -> Plan | None:
        """A reply that the harness wrote on behind: its ids stay as they were sampled, up to what was added.

        The prompt is that of the turn once more, so no tokens of unchanged messages are made anew.
        """
        node, place = lineage.replied_otherwise(graph, messages, key, plan.hashes, max(start, 1) - 1)
        if node is None or place + 1 >= len(messages) or messages[place + 1].role == "assistant":
            return None
        kept, added = appending.appended(node, messages[place], self.codec)
        if not kept:
            return None
        ended = int(node.sampled[-1]) in self.codec.stop_ids
        said = [*node.sampled[:kept].tolist(), *self.codec.tokenizer.encode(added)]
        said += [int(node.sampled[-1])] if ended else []
        head = node.prompt()[-TAIL:].tolist()
        try:
            ids = np.asarray(said, np.int32)
            made = self._extend(PromptIds([*head, *said]), plan, graph, node, ids, place + 1, messages, frame)
        except Unbridgeable:
            return None
        suffix = np.concatenate([node.suffix, np.asarray(made.ids[len(head) :], np.int32)])
        before = node.parent.tokens() if node.parent is not None else _NONE
        if not self._shown_alike(graph, node, before, suffix.tolist(), messages, frame):
            return None
        images = tuple(image.moved(len(node.suffix) - len(head)) for image in made.images)
        special = made.special_text
        made_of(plan, made)
        self._instead_of(plan, node, np.empty(0, np.int32))
        plan.suffix, plan.images, plan.special_text = suffix, (*node.images, *images), node.special_text + special
        plan.new = [*asked(node), *messages[place:]]
        plan.reason, plan.origin = ForkReason.HISTORY_EDITED, node
        plan.shares, plan.kept = node, kept
        return plan

    def _shown_alike(
        self,
        graph: Graph,
        near: Node,
        before: Ids,
        ids: Sequence[int],
        messages: Sequence[Message],
        frame: Frame,
    ) -> bool:
        """Whether the policy allows a prompt of sampled ids: `retain` does, the others if a plain server shows the same."""
        if self.policy is ContextPolicy.RETAIN:
            return True
        prompt = self.codec.tokenizer.decode([*before.tolist(), *ids])
        return self._plain_text(graph, near, messages, frame) == prompt

    def _plain_text(self, graph: Graph, near: Node, messages: Sequence[Message], frame: Frame) -> str:
        """What a plain server would show; a last message of an assistant is one to write on."""
        shown = self._thought(messages, self._ours(graph, messages, near))
        prefill = messages[-1].role == "assistant" and not messages[-1].tool_calls
        return self.codec.tokenizer.decode(self.codec.prompt(graph.native(shown), frame, prefill=prefill).ids)

    # What a plain server would show

    def _shown_otherwise(
        self, graph: Graph, found: Node, covered: int, messages: Sequence[Message], frame: Frame
    ) -> ForkReason | None:
        """Why a plain server would not show the model what it sampled, under `as_sent` and `template`."""
        if self.policy is ContextPolicy.RETAIN:
            return None
        ours = list(finding.replies(graph, found, covered, messages))
        if not all(self._stays(node, messages[index]) for index, node in ours):
            return ForkReason.REASONING_DROPPED
        if covered < len(messages) and self._rewrites(graph, ours, covered, messages, frame):
            return ForkReason.TEMPLATE_REWRITE
        if covered == len(messages) or any(node.prefill is not None for _, node in ours):
            # A message that is being written is opened in its own way: the prompt stands only if that is still shown.
            opened = self.codec.tokenizer.decode(found.prompt().tolist())
            if not self._plain_text(graph, found, messages, frame).startswith(opened):
                return ForkReason.TEMPLATE_REWRITE
        return None

    def _rewrites(
        self,
        graph: Graph,
        ours: Sequence[tuple[int, Node]],
        covered: int,
        messages: Sequence[Message],
        frame: Frame,
    ) -> bool:
        """Whether the template shows the first `covered` messages otherwise than the model saw them."""
        shown = graph.native(self._thought(messages, ours))
        return self.codec.rewrites(shown[: covered - 1], shown[covered - 1], shown[covered:], frame)

    def _thought(self, messages: Sequence[Message], ours: Sequence[tuple[int, Node]]) -> list[Message]:
        """The messages; under `template` with the reasoning of our replies that the harness dropped."""
        shown = list(messages)
        if self.policy is ContextPolicy.TEMPLATE:
            for index, node in ours:
                if node.reply is not None and not finding.kept(node, shown[index]):
                    shown[index] = replace(shown[index], reasoning=node.reply.reasoning)
        return shown

    # From the beginning

    def _anew(self, plan: Plan, graph: Graph, near: Node | None, messages: Sequence[Message], frame: Frame) -> Plan:
        """Everything rendered as a plain server would."""
        plan.parent, plan.new = None, list(messages)
        shown = self._thought(messages, self._ours(graph, messages, near))
        made = PromptIds()
        made.add(self.codec.prompt(graph.native(shown), frame, prefill=plan.prefill is not None))
        return made_of(plan, made)

    def _compose(self, plan: Plan, graph: Graph, near: Node | None, messages: Sequence[Message], frame: Frame) -> Plan:
        """A prompt from its beginning, with unchanged replies of ours as they were sampled."""
        messages = call_ids.of_ours(graph, messages, near, self.codec, self.engine)
        plan.parent, plan.new = None, list(messages)
        splice, node = self._next_own(graph, near, 0, messages) if near is not None else (0, None)
        if near is None or node is None or self._rewritten(graph, near, messages, frame):
            return self._anew(plan, graph, near, messages, frame)
        made = PromptIds()
        made.add(self.codec.prompt(graph.native(messages[:splice]), frame))
        if not made.opens(node):
            return self._anew(plan, graph, near, messages, frame)
        made.splice(node)
        try:
            made = self._extend(made, plan, graph, near, node.sampled, splice + 1, messages, frame)
        except Unbridgeable:
            return self._anew(plan, graph, near, messages, frame)
        if not self._shown_alike(graph, near, _NONE, made.ids, messages, frame):
            return self._anew(plan, graph, near, messages, frame)
        return made_of(plan, made)

    def _rewritten(self, graph: Graph, near: Node, messages: Sequence[Message], frame: Frame) -> bool:
        """Whether the policy wants what the template shows of our replies, and that is not what was sampled."""
        ours = [] if self.policy is ContextPolicy.RETAIN else self._ours(graph, messages, near)
        covered = ours[-1][0] + 1 if ours else len(messages)
        return covered < len(messages) and self._rewrites(graph, ours, covered, messages, frame)

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
            self._trace_back(plan, graph, request, key)
        else:
            plan.origin, plan.new = found, request.messages[covered:]
            taken = any(node.origin is found and node.reason is None for node in graph.nodes)
            if vanished:
                plan.reason = ForkReason.VANISHED_MESSAGE
            else:
                ours = self._ours(graph, request.messages, found, covered)
                if taken or any(node.index > found.index and node.root is found.root for _, node in ours):
                    plan.reason = ForkReason.HISTORY_EDITED
        made = PromptIds()
        made.add(self.codec.prompt(graph.native(request.messages), frame, prefill=plan.prefill is not None))
        return made_of(plan, made)
