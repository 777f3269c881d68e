"""The conversation graph of a session: an append-only forest of turns.

A node stores its parent, the prompt tokens that are new since that parent (`suffix`) and the sampled tokens, never the
whole prompt again. Invariant: the prompt of a node is `parent's prompt + parent's sampled + suffix`, exactly as sent to
the engine. Prompts are made in buffers that grow from turn to turn: each call checks the seam, and a buffer is compared
with the whole path it represents when it is released and when the session is built. Two indexes find a turn again: by the
rolling fingerprint of its request, and by that of its request with its reply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from towline.common.arrays import Floats, Ids
from towline.common.images import PlacedImage
from towline.common.untrusted.patterns import TextPattern
from towline.conversation import Finish, Hints, Message, Reply
from towline.errors import FidelityError
from towline.schema import POLICY, ForkReason, Untrained
from towline.tokens.graph import fingerprint
from towline.tokens.graph.tool_results import bare_id

_NO_IDS: Ids = np.empty(0, np.int32)
_NO_FLOATS: Floats = np.empty(0, np.float32)
_LIVE_BUFFERS = 8


class TokenBuffer:
    """A growing array of ids. Views of it stay valid: it is only ever appended to."""

    __slots__ = ("_data", "length")

    def __init__(self, ids: Ids = _NO_IDS):
        self._data = np.array(ids, np.int32)
        self.length = len(ids)

    def append(self, ids: Ids) -> None:
        end = self.length + len(ids)
        if end > len(self._data):
            grown = np.empty(max(end, self.length + self.length // 4 + 256), np.int32)
            grown[: self.length] = self._data[: self.length]
            self._data = grown
        self._data[self.length : end] = ids
        self.length = end

    def view(self, end: int | None = None) -> Ids:
        return self._data[: self.length if end is None else end]


@dataclass(slots=True, eq=False, repr=False)
class GraphNode:
    """One turn of the session."""

    id: str
    index: int
    key: str
    """The root key: tools, template arguments and engine."""
    parent: GraphNode | None
    suffix: Ids
    prompt_length: int
    request_hash: bytes
    """Rolling fingerprint of the request's messages as the harness sent them."""
    reply_base: bytes = b""
    """The hash that the reply's fingerprint extends: `request_hash`, or the one before a prefilled message."""
    shortened_hash: bytes | None = None
    """`request_hash` without the last message, if that is one that may vanish from the next request."""
    message_count: int = 0
    """How many messages the request had; the reply is the next one."""
    origin: GraphNode | None = None
    """The turn that this one came from, where it does not continue `parent` in place."""
    origin_inferred: bool = False
    """`origin` is concluded from order and length, not proven by content."""
    reason: ForkReason | None = None
    new: list[Message] = field(default_factory=list)
    """The messages of this call that the parent had not seen."""
    prefill: Message | None = None
    """The assistant message at the end of the request that the reply continues."""
    hints: Hints = field(default_factory=Hints)
    system: bytes = b""
    """Fingerprint of the leading system message."""
    has_tools: bool = False
    model: str = ""
    forced: int = 0
    """Leading ids of `suffix` that close the parent's reply; they were not sampled."""
    flags: list[str] = field(default_factory=list)
    special_text: int = 0
    """How often new user or tool text spelled a special token."""
    engine: str = POLICY
    """The engine that samples it. Token ids of different engines are unrelated."""
    untrained: Untrained | None = None
    images: tuple[PlacedImage, ...] = ()
    """Images in `suffix`, with positions relative to its start."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What the gateway records besides the tokens: dialect, sampling, timing."""
    sampled: Ids = field(default_factory=lambda: _NO_IDS)
    logprobs: Floats = field(default_factory=lambda: _NO_FLOATS)
    versions: Ids = field(default_factory=lambda: _NO_IDS)
    finish: Finish | None = None
    """`None` while the turn is in flight."""
    reply: Reply | None = None
    delivered: bool = False
    """The reply was sent to the harness."""
    difference: dict[str, Any] = field(default_factory=dict)
    """The first message in which a forked request differs from the turn it came from."""
    role_override: str = ""
    """The role that a setting assigns to the turn, if any."""
    appended_turn: GraphNode | None = None
    """The turn whose prompt, and whose reply up to where the harness appended text, this prompt begins with. Both have
    the same parent."""
    kept_ids: int = 0
    """How many sampled ids of `appended_turn` the prompt keeps."""
    children: list[GraphNode] = field(default_factory=list)
    answered: bool = False
    """A later request continued this turn: none of its calls is still open."""
    buffer: TokenBuffer | None = None
    reply_fingerprint: bytes = b""
    """Fingerprint of `reply_message`, set when the turn finishes."""
    stopped_fingerprint: bytes = b""
    """The same with the stop string that ended the turn appended: some harnesses put it back."""
    _root: GraphNode | None = field(default=None, init=False)
    _line_root: GraphNode | None = field(default=None, init=False)

    def __repr__(self) -> str:
        return f"<turn {self.id}>"

    @property
    def end(self) -> int:
        """Length of the prompt plus the sampled tokens."""
        return self.prompt_length + len(self.sampled)

    @property
    def resumes(self) -> bool:
        """Whether this turn continues the reply of its parent, which had no end."""
        return self.parent is not None and not len(self.suffix)

    @property
    def root(self) -> GraphNode:
        """The first turn of this node's conversation; cached, since a turn's ancestry never changes."""
        node = self
        while node._root is None and (before := node.parent or node.continued) is not None:
            node = before
        self._root = node._root or node
        return self._root

    @property
    def continued(self) -> GraphNode | None:
        """The turn this one continues as a conversation although its tokens were re-rendered."""
        return self.origin if self.parent is None and self.reason in _SAME_CONVERSATION else None

    @property
    def line_root(self) -> GraphNode:
        """The first turn of the conversations that this one continues, across other tools and system prompts."""
        node = self
        while node._line_root is None and (before := node.root.handed_over_from) is not None:
            node = before
        self._line_root = node._line_root or node.root
        return self._line_root

    @property
    def handed_over_from(self) -> GraphNode | None:
        """The turn whose conversation this root continues under other tools, another system prompt or model."""
        return self.origin if self.reason in _HAND_OVER and not self.origin_inferred else None

    def path(self) -> list[GraphNode]:
        """From the token root to this node."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def tokens(self) -> Ids:
        """Prompt and sampled tokens, from the buffer if there is one."""
        if self.buffer is not None and self.buffer.length >= self.end:
            return self.buffer.view(self.end)
        return self.path_tokens()

    def path_tokens(self) -> Ids:
        """Prompt and sampled tokens, concatenated along the path."""
        return np.concatenate([part for node in self.path() for part in (node.suffix, node.sampled)])

    def prompt(self) -> Ids:
        return self.tokens()[: self.prompt_length]

    def all_images(self) -> list[PlacedImage]:
        """Images of the whole prompt, with positions relative to its start."""
        return [image.moved(node.prompt_length - len(node.suffix)) for node in self.path() for image in node.images]

    def reply_message(self) -> Message:
        """The reply as a harness sends it back if it changes nothing, after the prefill it continued."""
        if self.reply is None:
            raise FidelityError(f"turn {self.id} has no reply yet")
        message = self.reply.as_message()
        if self.prefill is not None:
            message.text = self.prefill.text + message.text
            message.reasoning = (self.prefill.reasoning or "") + (message.reasoning or "") or None
        return message


_SAME_CONVERSATION = (
    ForkReason.REASONING_DROPPED,
    ForkReason.TEMPLATE_REWRITE,
    ForkReason.HISTORY_EDITED,
    ForkReason.STOP_MISMATCH,
    ForkReason.VANISHED_MESSAGE,
    ForkReason.SIBLING,
    ForkReason.PREFILL,
    ForkReason.IMAGE_UNREPORTED,
    None,
)
_HAND_OVER = (ForkReason.TOOLS_CHANGED, ForkReason.SYSTEM_CHANGED, ForkReason.MODEL_CHANGED)


class Graph:
    """All turns of one session, with the indexes that find them again."""

    def __init__(self, noise: Sequence[TextPattern] = ()) -> None:
        self.noise = tuple(noise)
        self.nodes: list[GraphNode] = []
        self.by_id: dict[str, GraphNode] = {}
        self.by_request: dict[tuple[bytes, str], list[GraphNode]] = {}
        self.after_reply: dict[bytes, list[GraphNode]] = {}
        self.after_vanished: dict[bytes, list[GraphNode]] = {}
        self.by_reply: dict[tuple[bytes, str], list[GraphNode]] = {}
        """By fingerprint and engine."""
        self.by_call: dict[str, GraphNode] = {}
        """By minted call id, in its bare form."""
        self.engines: dict[str, None] = {}
        """Engines with a finished turn, in order."""
        self._live: list[GraphNode] = []
        self._native: dict[str, str] = {}
        self._nativized: dict[int, tuple[Message, Message]] = {}
        """Copies with native ids by the identity of the message, so that what is cached on them lasts for the session."""

    def __iter__(self) -> Iterator[GraphNode]:
        return iter(self.nodes)

    @property
    def roots(self) -> list[GraphNode]:
        return [node for node in self.nodes if node.parent is None and node.continued is None]

    def add(self, node: GraphNode) -> None:
        """Register a turn that is about to be sampled."""
        if node.id in self.by_id:
            raise FidelityError(f"turn {node.id} is already in the graph")
        expected = (node.parent.end if node.parent else 0) + len(node.suffix)
        if node.prompt_length != expected:
            raise FidelityError(f"turn {node.id}: the prompt has {node.prompt_length} tokens, its path has {expected}")
        self.nodes.append(node)
        self.by_id[node.id] = node
        self.by_request.setdefault((node.request_hash, node.key), []).append(node)
        if node.parent is not None:
            node.parent.children.append(node)
            node.parent.answered = True
        if (before := node.handed_over_from or _continues(node)) is not None:
            before.answered = True

    def open_prompt(self, node: GraphNode) -> Ids:
        """The node's prompt as one array; extends its parent's buffer unless another turn already did.

        The seam is checked against what the parent recorded. Since every turn is checked, it follows by induction that
        `prompt[:len(previous) + len(sampled)] == previous + sampled` for the whole prompt.
        """
        parent = node.parent
        if parent is not None and parent.buffer is not None and parent.buffer.length == parent.end:
            buffer, parent.buffer = parent.buffer, None
        else:
            buffer = TokenBuffer(parent.tokens() if parent is not None else _NO_IDS)
        if parent is not None:
            check_seam(parent, buffer.view())
        buffer.append(node.suffix)
        node.buffer = buffer
        self._live.append(node)
        if len(self._live) > _LIVE_BUFFERS:
            oldest = self._live.pop(0)
            check_buffer(oldest)
            oldest.buffer = None
        return buffer.view(node.prompt_length)

    def finish(self, node: GraphNode) -> None:
        """Index a turn whose sampled tokens and reply are set."""
        if node.buffer is not None and node.buffer.length == node.prompt_length:
            node.buffer.append(node.sampled)
        if node.reply is None or node.finish is Finish.ABORT:
            return
        reply = node.reply_fingerprint = fingerprint.of(node.reply_message(), self.noise)
        self.by_reply.setdefault((reply, node.engine), []).append(node)
        self.engines[node.engine] = None
        self.by_call.update({bare_id(call.id): node for call in node.reply.tool_calls})
        self._native.update({bare_id(id): own for id, own in node.meta.get("native_ids", {}).items()})
        after = fingerprint.roll(node.reply_base or node.request_hash, reply)
        self.after_reply.setdefault(after, []).append(node)
        if node.shortened_hash is not None:
            self.after_vanished.setdefault(fingerprint.roll(node.shortened_hash, reply), []).append(node)
        if node.reply.stop_string is not None and not node.reply.tool_calls:
            # The stop string was sampled: a reply with it and one without it are the same turn.
            message = node.reply_message()
            message.text += node.reply.stop_string
            stopped = node.stopped_fingerprint = fingerprint.of(message, self.noise)
            self.by_reply.setdefault((stopped, node.engine), []).append(node)
            after = fingerprint.roll(node.reply_base or node.request_hash, stopped)
            self.after_reply.setdefault(after, []).append(node)

    @property
    def native_ids(self) -> bool:
        """Whether the model samples call ids of its own."""
        return bool(self._native)

    def native(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with the call ids that the model itself sampled, if it did: those are part of its text."""
        return [self._with_native_ids(message) for message in messages] if self._native else messages

    def _with_native_ids(self, message: Message) -> Message:
        if not message.tool_calls and not message.tool_call_id:
            return message
        known = self._nativized.get(id(message))
        if known is not None and known[0] is message:
            return known[1]
        made = self._nativize(message)
        if made is not message:
            self._nativized[id(message)] = (message, made)
        return made

    def _nativize(self, message: Message) -> Message:
        if message.tool_calls:
            calls = tuple(replace(c, id=self._native.get(bare_id(c.id), c.id)) for c in message.tool_calls)
            return message if calls == message.tool_calls else replace(message, tool_calls=calls)
        own = self._native.get(bare_id(message.tool_call_id), message.tool_call_id)
        return message if own == message.tool_call_id else replace(message, tool_call_id=own)


def _continues(node: GraphNode) -> GraphNode | None:
    """The turn other than its parent that a request of the same conversation continues."""
    alike = node.reason in _SAME_CONVERSATION and node.reason is not ForkReason.SIBLING
    return node.origin if alike and not node.origin_inferred else None


def check_seam(parent: GraphNode, tokens: Ids) -> None:
    """Raise unless `tokens` ends with exactly the parent's suffix and sampled tokens."""
    start = parent.prompt_length - len(parent.suffix)
    if len(tokens) != parent.end or not (
        np.array_equal(tokens[parent.prompt_length :], parent.sampled)
        and np.array_equal(tokens[start : parent.prompt_length], parent.suffix)
    ):
        raise FidelityError(f"the token buffer after turn {parent.id} is not what that turn saw and sampled")


def check_buffer(node: GraphNode) -> None:
    """Raise unless the node's buffer, from which prompts were sent, holds the tokens of its path."""
    buffer = node.buffer
    if buffer is not None and not np.array_equal(buffer.view(), node.path_tokens()[: buffer.length]):
        raise FidelityError(f"turn {node.id} was sampled under another prompt than the graph records for it")
