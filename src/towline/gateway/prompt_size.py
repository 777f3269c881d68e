"""How long a prompt is, and the refusal of one that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from towline.common.images import ImagePlaceholder
from towline.errors import ApiError, ErrorKind
from towline.tokens.codec import RenderContext
from towline.tokens.continuation.plan import PromptPlan


def prompt_length(plan: PromptPlan) -> int:
    """The number of tokens in a planned prompt."""
    return (plan.parent.end if plan.parent else 0) + len(plan.suffix)


def with_images(context: RenderContext, images: Mapping[str, ImagePlaceholder]) -> RenderContext:
    """A context with what the engine puts into the prompt for each image."""
    return replace(context, images=images) if images else context


def too_long(length: int, found: str) -> ApiError:
    """The refusal of a prompt that does not fit, in the words that clients look for."""
    return ApiError(
        ErrorKind.CONTEXT_LENGTH,
        f"This model's maximum context length is {length} tokens. However, your messages resulted in {found} tokens. "
        "Please reduce the length of the messages.",
        param="messages",
    )
