"""What a plain chat server would show the model, as far as the context policy asks for it.

A plain server renders every request from its messages. Under `retain` a sampled reply stays in context whatever such a
server would show; under `as_sent` and `template` a turn is only continued in place where both show the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from towline.common.arrays import Ids
from towline.conversation import Message
from towline.schema import ContextPolicy, ForkReason
from towline.tokens.codec import ModelCodec, RenderContext
from towline.tokens.graph import matching
from towline.tokens.graph.graph import Graph, GraphNode

OwnReplies = Sequence[tuple[int, GraphNode]]
"""Indexes of messages that are replies of ours, each with the turn that sampled it."""


class PlainView:
    """The requests of one session as a plain server renders them."""

    def __init__(self, codec: ModelCodec, policy: ContextPolicy, engine: str, graph: Graph, context: RenderContext):
        self._codec = codec
        self._policy = policy
        self._engine = engine
        self._graph = graph
        self._context = context

    def own_replies(
        self, messages: Sequence[Message], near: GraphNode | None, start: int = 0
    ) -> list[tuple[int, GraphNode]]:
        """The messages from `start` on that are replies of ours, in order."""
        places = range(start, len(messages))
        found = [matching.find_own_reply(self._graph, messages[i], near, i, self._engine) for i in places]
        return [(place, node) for place, node in zip(places, found, strict=True) if node is not None]

    def stays(self, node: GraphNode, message: Message) -> bool:
        """Whether a reply stays in context as sampled, whatever the harness did to its reasoning."""
        return self._policy is not ContextPolicy.AS_SENT or matching.kept_reasoning(node, message)

    def messages(self, messages: Sequence[Message], own: OwnReplies) -> list[Message]:
        """The messages; under `template` with the reasoning that the harness dropped from our replies."""
        shown = list(messages)
        if self._policy is ContextPolicy.TEMPLATE:
            for index, node in own:
                if node.reply is not None and not matching.kept_reasoning(node, shown[index]):
                    shown[index] = replace(shown[index], reasoning=node.reply.reasoning)
        return shown

    def text(self, near: GraphNode, messages: Sequence[Message]) -> str:
        """The prompt of a plain server as text; a trailing assistant message is one to continue."""
        shown = self.messages(messages, self.own_replies(messages, near))
        prefill = messages[-1].role == "assistant" and not messages[-1].tool_calls
        prompt = self._codec.prompt(self._graph.native(shown), self._context, prefill=prefill)
        return self._codec.tokenizer.decode(prompt.ids)

    def allows(self, near: GraphNode, before: Ids, ids: Sequence[int], messages: Sequence[Message]) -> bool:
        """Whether the policy allows the prompt `before + ids`: `retain` always, the others if the text is the same."""
        if self._policy is ContextPolicy.RETAIN:
            return True
        return self.text(near, messages) == self._codec.tokenizer.decode([*before.tolist(), *ids])

    def fork_reason(self, found: GraphNode, covered: int, messages: Sequence[Message]) -> ForkReason | None:
        """Why a plain server would not show the model what it sampled; `None` if it would, or under `retain`."""
        if self._policy is ContextPolicy.RETAIN:
            return None
        own = list(matching.locate_replies(self._graph, found, covered, messages))
        if not all(self.stays(node, messages[index]) for index, node in own):
            return ForkReason.REASONING_DROPPED
        if covered < len(messages) and self._rewrites(own, covered, messages):
            return ForkReason.TEMPLATE_REWRITE
        if covered == len(messages) or any(node.prefill is not None for _, node in own):
            # A message that is still being written is opened in its own way: the prompt must still be shown like that.
            opened = self._codec.tokenizer.decode(found.prompt().tolist())
            if not self.text(found, messages).startswith(opened):
                return ForkReason.TEMPLATE_REWRITE
        return None

    def rewrites_own_replies(self, near: GraphNode, messages: Sequence[Message]) -> bool:
        """Whether the policy wants what the template shows of our replies, and that is not what was sampled."""
        own = [] if self._policy is ContextPolicy.RETAIN else self.own_replies(messages, near)
        covered = own[-1][0] + 1 if own else len(messages)
        return covered < len(messages) and self._rewrites(own, covered, messages)

    def _rewrites(self, own: OwnReplies, covered: int, messages: Sequence[Message]) -> bool:
        """Whether the template shows the first `covered` messages differently from what the model saw."""
        shown = self._graph.native(self.messages(messages, own))
        return self._codec.rewrites(shown[: covered - 1], shown[covered - 1], shown[covered:], self._context)
