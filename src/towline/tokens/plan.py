"""How a request is answered: the plan, and the prompt ids that it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from towline.arrays import Ids
from towline.conversation import Finish, Message
from towline.images import Placed
from towline.schema import ForkReason
from towline.tokens.codec import Encoded
from towline.tokens.graph import Node

TAIL = 64
"""Prompt ids before a turn that a family's bridge may look at: enough to see whether reasoning was opened."""
FORCED_CLOSE, SPLICED, VANISHED_KEPT, NOISE = "forced_close", "spliced_replies", "vanished_kept", "noise_ignored"
"""What a plan says about its turn beside a fork's reason."""
DIFFERS = (ForkReason.HISTORY_EDITED, ForkReason.UNMATCHED)
"""Reasons that are told with the first differing message."""
FLAGS = (FORCED_CLOSE, SPLICED, VANISHED_KEPT, NOISE)
CALLS_AS_TEXT = "calls_as_text"
"""The flag of a turn with tools whose calls, if it made any, are part of its text."""
UNREPORTED = "image_unreported"
"""The flag of a turn in whose prompt the engine puts something for an image that it does not tell."""


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
    images: tuple[Placed, ...] = ()
    """The images in `suffix`, counted from its beginning."""
    difference: dict[str, Any] = field(default_factory=dict)
    """The first message in which the request differs from the turn it came from, if it forked."""
    shares: Node | None = None
    kept: int = 0
    """The prompt begins with that of `shares` and so many of its sampled ids."""


@dataclass(slots=True)
class PromptIds:
    """Suffix ids being put together."""

    ids: list[int] = field(default_factory=list)
    forced: int = 0
    special_text: int = 0
    spliced: int = 0
    images: list[Placed] = field(default_factory=list)

    def add(self, encoded: Encoded) -> None:
        # Only what closes the parent is a forced close of this turn; a spliced reply was closed before.
        self.forced += 0 if self.ids else encoded.forced
        self.images += [image.moved(len(self.ids)) for image in encoded.images]
        self.ids += encoded.ids
        self.special_text += encoded.special_text

    def splice(self, node: Node) -> None:
        self.ids += node.sampled.tolist()
        self.spliced += 1

    def opens(self, node: Node) -> bool:
        """Whether the prompt so far ends as the node's did: a reply is only ever read behind the same opening."""
        return bool(self.ids) and self.ids[-1] == int(node.suffix[-1])


def compared(plan: Plan) -> Node | None:
    """The turn that an edited history is compared with: what went on from the parent before, or what it came from."""
    if plan.reason is not ForkReason.HISTORY_EDITED or plan.origin is None:
        return None
    return plan.origin.children[-1] if plan.origin is plan.parent and plan.origin.children else plan.origin


def untold(plan: Plan, found: Node | None, twin: Node | None, messages: Sequence[Message]) -> Plan:
    """Say why a prompt was made anew: what the model sees for an image is the engine's to know."""
    plan.flags.append(UNREPORTED)
    plan.new = list(messages)
    if twin is not None and twin.finish is not Finish.ABORT:
        plan.origin, plan.reason, plan.inferred = twin, ForkReason.SIBLING, False
    elif found is not None:
        plan.reason = plan.reason or ForkReason.IMAGE_UNREPORTED
    return plan


def made_of(plan: Plan, made: PromptIds) -> Plan:
    plan.suffix = np.asarray(made.ids, np.int32)
    plan.images = tuple(made.images)
    plan.forced, plan.special_text = made.forced, made.special_text
    if made.forced:
        plan.flags.append(FORCED_CLOSE)
    if made.spliced:
        plan.flags.append(SPLICED)
    return plan


def asked(node: Node) -> list[Message]:
    """What was new to a turn, without the beginning of its reply."""
    return node.new if node.prefill is None else node.new[:-1]


def tail_of(node: Node) -> Ids:
    """The last ids of a turn's prompt."""
    return node.suffix[-TAIL:] if len(node.suffix) >= TAIL else node.prompt()[-TAIL:]
