"""How a request is prompted: the plan of one turn, and the builder of its prompt ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from towline.common.arrays import Ids
from towline.common.images import PlacedImage
from towline.conversation import Finish, Message
from towline.schema import ForkReason
from towline.tokens.codec import EncodedPrompt
from towline.tokens.graph.graph import GraphNode

TAIL_LENGTH = 64
"""Prompt ids before a turn that a family's bridge may look at: enough to see whether reasoning was opened."""
FORCED_CLOSE = "forced_close"
"""Flag: the turn before did not end by itself, and was closed by a token that was not sampled."""
SPLICED = "spliced_replies"
"""Flag: earlier replies stand in the prompt as sampled, though the history before them was rendered."""
VANISHED_KEPT = "vanished_kept"
"""Flag: a message that is gone from the request is still in the prompt."""
NOISE_IGNORED = "noise_ignored"
"""Flag: text that counts as noise differs from what the model was shown."""
INHERITED_FLAGS = (FORCED_CLOSE, SPLICED, VANISHED_KEPT, NOISE_IGNORED)
"""Flags of a prompt, which hold for another turn with the same prompt too."""
CALLS_AS_TEXT = "calls_as_text"
"""Flag: the turn has tools, and calls that it makes stay part of its text."""
IMAGE_UNREPORTED = "image_unreported"
"""Flag: the engine does not report what it puts into the prompt for an image."""
REASONS_WITH_DIFFERENCE = (ForkReason.HISTORY_EDITED, ForkReason.UNMATCHED)
"""Fork reasons that are recorded with the first differing message."""


class VanishingPolicy(StrEnum):
    """What to do about a last message that is gone from the next request."""

    FORK = "fork"
    """Branch at the last turn that is intact without it."""
    KEEP = "keep"
    """Continue; the message stays in the prompt."""


class PromptMode(StrEnum):
    """How prompts are made."""

    EXACT = "exact"
    """Continue from the tokens of the turn before."""
    PLAIN = "plain"
    """Re-render and re-encode every request, as a plain chat server does: the baseline for `merged` and `per_turn`."""


@dataclass(slots=True)
class PromptBuilder:
    """Suffix ids being put together."""

    ids: list[int] = field(default_factory=list)
    forced: int = 0
    special_text: int = 0
    spliced: int = 0
    images: list[PlacedImage] = field(default_factory=list)

    def add(self, encoded: EncodedPrompt) -> None:
        # Only what closes the parent is a forced close of this turn; a spliced reply was closed before.
        self.forced += 0 if self.ids else encoded.forced
        self.images += [image.moved(len(self.ids)) for image in encoded.images]
        self.ids += encoded.ids
        self.special_text += encoded.special_text

    def splice(self, node: GraphNode) -> None:
        self.ids += node.sampled.tolist()
        self.spliced += 1

    def opens(self, node: GraphNode) -> bool:
        """Whether the prompt so far ends as the node's did: a reply is only spliced in after the same opening."""
        return bool(self.ids) and self.ids[-1] == int(node.suffix[-1])


@dataclass(slots=True)
class PromptPlan:
    """How a request is prompted: the tokens of `parent`, then `suffix`."""

    parent: GraphNode | None
    suffix: Ids
    request_hash: bytes
    hashes: list[bytes]
    """Rolling hash before each message and after the last."""
    shortened_hash: bytes | None = None
    """Hash without the last message, if that is one that may vanish."""
    origin: GraphNode | None = None
    """The turn that the request came from, if it does not continue `parent` in place."""
    inferred: bool = False
    """`origin` is concluded from order and length, not proven by content."""
    reason: ForkReason | None = None
    new: list[Message] = field(default_factory=list)
    """Messages that `parent` had not seen."""
    prefill: Message | None = None
    """The assistant message at the end of the request that the model is to continue."""
    forced: int = 0
    """Leading ids of `suffix` that close the parent's reply; they were not sampled."""
    special_text: int = 0
    """How often new user or tool text spelled a special token."""
    flags: list[str] = field(default_factory=list)
    images: tuple[PlacedImage, ...] = ()
    """Images in `suffix`, with positions relative to its start."""
    difference: dict[str, Any] = field(default_factory=dict)
    """The first message in which the request differs from the turn it came from, if it forked."""
    appended_turn: GraphNode | None = None
    kept_ids: int = 0
    """The prompt begins with the prompt of `appended_turn` and this many of its sampled ids."""

    def apply(self, made: PromptBuilder) -> None:
        """Take the ids of `made` as the suffix."""
        self.suffix = np.asarray(made.ids, np.int32)
        self.images = tuple(made.images)
        self.forced, self.special_text = made.forced, made.special_text
        if made.forced:
            self.flags.append(FORCED_CLOSE)
        if made.spliced:
            self.flags.append(SPLICED)

    def mark_image_unreported(
        self, found: GraphNode | None, same: GraphNode | None, messages: Sequence[Message]
    ) -> None:
        """Record why the prompt was re-rendered: only the engine knows what the model sees for an image."""
        self.flags.append(IMAGE_UNREPORTED)
        self.new = list(messages)
        if same is not None and same.finish is not Finish.ABORT:
            self.origin, self.reason, self.inferred = same, ForkReason.SIBLING, False
        elif found is not None:
            self.reason = self.reason or ForkReason.IMAGE_UNREPORTED

    def compared_turn(self) -> GraphNode | None:
        """The turn that an edited history is compared with: the latest one that continued `origin`, or `origin`."""
        if self.reason is not ForkReason.HISTORY_EDITED or self.origin is None:
            return None
        return self.origin.children[-1] if self.origin is self.parent and self.origin.children else self.origin


def messages_asked(node: GraphNode) -> list[Message]:
    """The messages that were new to a turn, without a prefilled reply."""
    return node.new if node.prefill is None else node.new[:-1]


def prompt_tail(node: GraphNode) -> Ids:
    """The last ids of a turn's prompt."""
    return node.suffix[-TAIL_LENGTH:] if len(node.suffix) >= TAIL_LENGTH else node.prompt()[-TAIL_LENGTH:]
