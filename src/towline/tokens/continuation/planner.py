"""Where a request continues: the decision at the heart of `exact`.

Given a session's graph and a request, `Planner.plan` finds the deepest turn of ours that the request provably continues,
and makes the prompt: that turn's tokens as they are, then the freshly rendered suffix. A request that cannot be proven to
continue a turn starts a branch or a new root, with the reason. After a fork, unchanged replies of ours are taken from the
graph as sampled, unless the context policy wants what the template would show. Pure: no engine, no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from towline.common.arrays import Ids
from towline.common.untrusted.patterns import TextPattern
from towline.conversation import Finish, Message, Request
from towline.schema import POLICY, ContextPolicy, ForkReason
from towline.tokens.codec import CannotContinue, ModelCodec, RenderContext
from towline.tokens.continuation.echoed_replies import appended_text, with_minted_ids
from towline.tokens.continuation.plain_view import PlainView
from towline.tokens.continuation.plan import (
    CALLS_AS_TEXT,
    INHERITED_FLAGS,
    NOISE_IGNORED,
    REASONS_WITH_DIFFERENCE,
    TAIL_LENGTH,
    VANISHED_KEPT,
    PromptBuilder,
    PromptMode,
    PromptPlan,
    VanishingPolicy,
    messages_asked,
    prompt_tail,
)
from towline.tokens.graph import fingerprint, lineage, matching
from towline.tokens.graph.graph import Graph, GraphNode
from towline.tokens.templates.media import hidden_media_flags

_NO_IDS: Ids = np.empty(0, np.int32)


class Planner:
    """Plans the requests of one session to one engine."""

    def __init__(
        self,
        codec: ModelCodec,
        *,
        policy: ContextPolicy = ContextPolicy.RETAIN,
        vanishing: VanishingPolicy = VanishingPolicy.FORK,
        capture: PromptMode = PromptMode.EXACT,
        noise: Sequence[TextPattern] = (),
        engine: str = POLICY,
    ):
        self.codec = codec
        self.engine = engine
        self.policy = policy
        self.vanishing = vanishing
        self.capture = capture
        self.noise = tuple(noise)

    def hashes(self, messages: Sequence[Message], known: Sequence[bytes] = (), shared: int = 0) -> list[bytes]:
        """Rolling hashes of every prefix; `known` are those of a request with the same first `shared` messages."""
        hashes = list(known[: shared + 1]) or [fingerprint.EMPTY_HISTORY]
        current = hashes[-1]
        for message in messages[len(hashes) - 1 :]:
            current = fingerprint.roll(current, fingerprint.of(message, self.noise))
            hashes.append(current)
        return hashes

    def plan(self, graph: Graph, request: Request, key: str, context: RenderContext, hashes: list[bytes]) -> PromptPlan:
        """Decide and make the prompt. Raises `TemplateError` if the template refuses the messages outright."""
        return _RequestPlanner(self, graph, request, key, context, hashes).run()


class _RequestPlanner:
    """Plans one request. Its attributes are what all steps of the decision share."""

    def __init__(
        self, settings: Planner, graph: Graph, request: Request, key: str, context: RenderContext, hashes: list[bytes]
    ):
        self.settings = settings
        self.codec = settings.codec
        self.graph = graph
        self.request = request
        self.key = key
        self.context = context
        self.messages: Sequence[Message] = request.messages
        """The request's messages; as soon as a turn to continue is known, with the call ids that we minted."""
        self.view = PlainView(settings.codec, settings.policy, settings.engine, graph, context)
        last = request.messages[-1]
        self.plan = PromptPlan(
            None, _NO_IDS, hashes[-1], hashes, prefill=last if last.role == "assistant" else None, new=request.messages
        )

    def run(self) -> PromptPlan:
        self._decide()
        plan, messages = self.plan, self.request.messages
        plan.flags += hidden_media_flags(plan.new, lambda message: self.codec.sees(message, self.context))
        if self.context.tools and self.codec.calls_as_text:
            plan.flags.append(CALLS_AS_TEXT)
        if plan.reason in REASONS_WITH_DIFFERENCE:
            reference = plan.compared_turn() or lineage.most_similar_turn(self.graph, messages)
            if reference is not None:
                plan.difference = lineage.first_difference(self.graph, reference, messages)
        return plan

    def _decide(self) -> None:
        plan, messages = self.plan, self.messages
        if len(messages) > 1 and messages[-1].role == "user" and messages[-2].role in ("user", "tool"):
            plan.shortened_hash = plan.hashes[-2]

        found, covered, vanished = matching.match(self.graph, messages, self.key, plan.hashes)
        same = matching.find_same_request(self.graph, messages, self.key, plan.hashes, found)
        unreported = self._shows_unreported_image()
        if same is not None and not unreported:
            self._sample_again(same)
            return
        exact = self.settings.capture is PromptMode.EXACT
        if plan.prefill is not None and plan.prefill.tool_calls and not (exact and covered == len(messages)):
            # The template closes calls: nothing can be written after them in the same message.
            plan.prefill = None
        if not exact or unreported:
            self._render_plain(found, covered, vanished)
            if unreported:
                plan.mark_image_unreported(found, same, messages)
        elif self._continue_appended(covered):
            return
        elif found is not None:
            self._continue(found, covered, vanished)
        else:
            self._find_origin()
            near = matching.last_named_turn(self.graph, messages, self.settings.engine) or plan.origin
            self._compose(near)

    def _shows_unreported_image(self) -> bool:
        """Whether the engine shows an image without reporting its placeholder ids."""
        images = self.context.images
        if not any(placeholder.ids is None for placeholder in images.values()):
            return False
        seen = (item.digest for message in self.messages for item in self.codec.sees(message, self.context))
        return any(images[digest].ids is None for digest in seen if digest in images)

    def _find_origin(self) -> None:
        """Record where a request that continues no turn came from."""
        plan = self.plan
        source = lineage.find_origin(self.graph, self.request, self.key, plan.hashes, self.settings.engine)
        plan.origin, plan.reason, plan.inferred = source.origin, source.reason, source.inferred

    def _sample_again(self, same: GraphNode) -> None:
        """The same request once more: the same prompt, token for token.

        Another sample of it is a sibling; after an aborted turn it takes that turn's place. It may also start another
        sub-agent that was handed the same task.
        """
        plan = self.plan
        plan.parent, plan.suffix, plan.new = same.parent, same.suffix, same.new
        plan.forced, plan.special_text, plan.prefill = same.forced, same.special_text, same.prefill
        plan.images, plan.appended_turn, plan.kept_ids = same.images, same.appended_turn, same.kept_ids
        plan.flags = [flag for flag in same.flags if flag in INHERITED_FLAGS]
        source = lineage.find_repeated_subagent(self.graph, self.request, self.key, same)
        if same.finish is Finish.ABORT:
            plan.origin, plan.reason, plan.inferred = same.origin, same.reason, same.origin_inferred
        elif source is not None:
            plan.origin, plan.reason, plan.inferred = source.origin, source.reason, source.inferred
        else:
            plan.origin, plan.reason = same, ForkReason.SIBLING

    # Continuing a turn

    def _continue(self, found: GraphNode, covered: int, vanished: bool) -> None:
        plan, settings = self.plan, self.settings
        messages = self._mint_ids(found)
        plan.parent, plan.new = found, list(messages[covered:])
        if settings.noise and matching.noise_differs(found, messages):
            plan.flags.append(NOISE_IGNORED)
        if vanished and settings.vanishing is VanishingPolicy.FORK:
            self._branch_at_intact(found)
            return
        if vanished:
            plan.flags.append(VANISHED_KEPT)
        reason = self.view.fork_reason(found, covered, messages)
        if reason is not None:
            plan.reason, plan.origin = reason, found
            self._render_all(found)
            return
        if covered == len(messages):
            self._resume_reply(found)
            return
        # Replies of another conversation came by a hand-off and back; nothing was edited.
        own = self.view.own_replies(messages, found, covered)
        later = [node for _, node in own if node.index > found.index and node.root is found.root]
        if later:
            plan.reason, plan.origin = ForkReason.HISTORY_EDITED, later[-1]
        elif any(child.delivered or child.finish is None for child in found.children):
            plan.reason, plan.origin = ForkReason.HISTORY_EDITED, found
        try:
            made = self._extend(PromptBuilder(), found, found.sampled, covered)
            if made.spliced and not self.view.allows(found, found.tokens(), made.ids, messages):
                self._render_all(found)
            else:
                plan.apply(made)
            return
        except CannotContinue as problem:
            plan.reason, plan.origin = problem.reason, found
        if plan.reason is ForkReason.STOP_MISMATCH:
            self._continue_without_end(found, covered)
        else:
            self._compose(found)

    def _mint_ids(self, near: GraphNode | None) -> Sequence[Message]:
        """The messages with the call ids that we minted, also for the steps that follow."""
        self.messages = with_minted_ids(self.graph, self.messages, near, self.codec, self.settings.engine)
        return self.messages

    def _resume_reply(self, found: GraphNode) -> None:
        """The request ends with our own reply: the model is to continue writing it."""
        plan = self.plan
        if len(found.sampled) and int(found.sampled[-1]) in self.codec.stop_ids:
            self._prompt_again(found, found.sampled[:-1])
            plan.origin, plan.reason = found, ForkReason.PREFILL
            plan.new = [*messages_asked(found), *([] if plan.prefill is None else [plan.prefill])]

    def _continue_without_end(self, found: GraphNode, covered: int) -> None:
        """All but the end of the turn stays as sampled; the message that follows opens itself."""
        plan, cut = self.plan, found.sampled[:-1]
        try:
            made = self._extend(PromptBuilder(), found, cut, covered)
        except CannotContinue:
            self._compose(found)
            return
        made.forced = 0
        plan.apply(made)
        plan.images = tuple(image.moved(len(cut)) for image in plan.images)
        self._prompt_again(found, np.concatenate([cut, plan.suffix]))
        plan.special_text = found.special_text + made.special_text
        plan.new = [*messages_asked(found), *self.messages[covered - 1 :]]

    def _prompt_again(self, found: GraphNode, ids: Ids) -> None:
        """Prompt `found` once more, with `ids` in place of what it sampled."""
        plan = self.plan
        plan.parent, plan.suffix = found.parent, np.concatenate([found.suffix, ids])
        plan.images = (*found.images, *(image.moved(len(found.suffix)) for image in plan.images))
        plan.forced, plan.special_text = found.forced, found.special_text
        plan.flags += [flag for flag in found.flags if flag in INHERITED_FLAGS and flag not in plan.flags]

    def _branch_at_intact(self, origin: GraphNode) -> None:
        """A message vanished: branch at the last intact turn, or start a new root if there is none."""
        plan, messages = self.plan, self.messages
        plan.reason, plan.origin = ForkReason.VANISHED_MESSAGE, origin
        node, covered = matching.find_intact(self.graph, messages, self.key, plan.hashes)
        if node is not None and self.view.fork_reason(node, covered, messages) is None:
            plan.parent, plan.new = node, list(messages[covered:])
            try:
                made = self._extend(PromptBuilder(), node, node.sampled, covered)
                if not made.spliced or self.view.allows(node, node.tokens(), made.ids, messages):
                    plan.apply(made)
                    return
            except CannotContinue:
                pass
        self._compose(origin)

    def _continue_appended(self, start: int) -> bool:
        """Continue a reply that the harness appended text to: its ids stay as sampled, up to what was added.

        The prompt is that of the turn once more, so tokens of unchanged messages are not encoded again. Returns whether
        the request is such a case.
        """
        plan, messages = self.plan, self.messages
        node, place = lineage.find_diverged_turn(self.graph, messages, self.key, plan.hashes, max(start, 1) - 1)
        if node is None or place + 1 >= len(messages) or messages[place + 1].role == "assistant":
            return False
        kept, added = appended_text(node, messages[place], self.codec)
        if not kept:
            return False
        ended = int(node.sampled[-1]) in self.codec.stop_ids
        reply = [*node.sampled[:kept].tolist(), *self.codec.tokenizer.encode(added)]
        reply += [int(node.sampled[-1])] if ended else []
        head = node.prompt()[-TAIL_LENGTH:].tolist()
        try:
            made = self._extend(PromptBuilder([*head, *reply]), node, np.asarray(reply, np.int32), place + 1)
        except CannotContinue:
            return False
        suffix = np.concatenate([node.suffix, np.asarray(made.ids[len(head) :], np.int32)])
        before = node.parent.tokens() if node.parent is not None else _NO_IDS
        if not self.view.allows(node, before, suffix.tolist(), messages):
            return False
        images = tuple(image.moved(len(node.suffix) - len(head)) for image in made.images)
        plan.apply(made)
        self._prompt_again(node, _NO_IDS)
        plan.suffix, plan.images = suffix, (*node.images, *images)
        plan.special_text = node.special_text + made.special_text
        plan.new = [*messages_asked(node), *messages[place:]]
        plan.reason, plan.origin = ForkReason.HISTORY_EDITED, node
        plan.appended_turn, plan.kept_ids = node, kept
        return True

    def _extend(self, made: PromptBuilder, near: GraphNode, sampled: Ids, covered: int) -> PromptBuilder:
        """Add everything after the reply `messages[covered - 1]`, with later replies of ours as sampled.

        `sampled` are the ids of that reply: the turn `near` itself if nothing is made yet, else the end of what is.
        """
        messages, native = self.messages, self.graph.native
        tail = np.asarray(made.ids[: -len(sampled)][-TAIL_LENGTH:], np.int32) if made.ids else prompt_tail(near)
        splicing = True
        while True:
            splice, node = self._next_own_reply(near, covered) if splicing else (len(messages), None)
            try:
                encoded = self.codec.extend(
                    native(messages[: covered - 1]),
                    native(messages[covered - 1 : covered])[0],
                    tail,
                    sampled,
                    native(messages[covered:splice]),
                    self.context,
                    prefill=self.plan.prefill is not None and node is None,
                )
            except CannotContinue as problem:
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
            tail, sampled, covered = np.asarray(made.ids[-TAIL_LENGTH:], np.int32), node.sampled, splice + 1
            made.splice(node)

    def _next_own_reply(self, near: GraphNode, covered: int) -> tuple[int, GraphNode | None]:
        """The next reply of ours in the rest of the request that can be spliced in as sampled."""
        messages = self.messages
        for index in range(covered + 1, len(messages) - 1):
            message = messages[index]
            if message.role == "assistant" and messages[index + 1].role != "assistant":
                node = matching.find_own_reply(self.graph, message, near, index, self.settings.engine)
                # A reply after a prefill was sampled without its beginning.
                if node is not None and node.prefill is None and self.view.stays(node, message):
                    return index, node
        return len(messages), None

    # From the beginning

    def _render_all(self, near: GraphNode | None) -> None:
        """Render everything as a plain server would."""
        plan, messages = self.plan, self.messages
        plan.parent, plan.new = None, list(messages)
        self._apply_rendered(self.view.messages(messages, self.view.own_replies(messages, near)))

    def _apply_rendered(self, messages: Sequence[Message]) -> None:
        made = PromptBuilder()
        made.add(self.codec.prompt(self.graph.native(messages), self.context, prefill=self.plan.prefill is not None))
        self.plan.apply(made)

    def _compose(self, near: GraphNode | None) -> None:
        """Make a prompt from its beginning, with unchanged replies of ours as sampled."""
        plan, messages = self.plan, self._mint_ids(near)
        plan.parent, plan.new = None, list(messages)
        made = self._spliced(near, messages) if near is not None else None
        if made is None:
            self._render_all(near)
        else:
            plan.apply(made)

    def _spliced(self, near: GraphNode, messages: Sequence[Message]) -> PromptBuilder | None:
        """The whole prompt with our replies spliced in; `None` if there are none, or the policy or template forbids it."""
        splice, node = self._next_own_reply(near, 0)
        if node is None or self.view.rewrites_own_replies(near, messages):
            return None
        made = PromptBuilder()
        made.add(self.codec.prompt(self.graph.native(messages[:splice]), self.context))
        if not made.opens(node):
            return None
        made.splice(node)
        try:
            made = self._extend(made, near, node.sampled, splice + 1)
        except CannotContinue:
            return None
        return made if self.view.allows(near, _NO_IDS, made.ids, messages) else None

    def _render_plain(self, found: GraphNode | None, covered: int, vanished: bool) -> None:
        """Render every request from its messages, and record which turn it continues as a conversation."""
        plan, messages = self.plan, self.messages
        if found is None:
            self._find_origin()
        else:
            plan.origin, plan.new = found, self.request.messages[covered:]
            if vanished:
                plan.reason = ForkReason.VANISHED_MESSAGE
            else:
                taken = any(node.origin is found and node.reason is None for node in self.graph.nodes)
                own = self.view.own_replies(messages, found, covered)
                if taken or any(node.index > found.index and node.root is found.root for _, node in own):
                    plan.reason = ForkReason.HISTORY_EDITED
        self._apply_rendered(messages)
