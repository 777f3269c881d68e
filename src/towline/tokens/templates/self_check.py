"""The self-check of a chat template: probes it once at start-up to learn what it expects and does.

How it takes content, calls and call ids; whether the sentinel survives before a user message and before tool results; and
what the text after a turn depends on, so that as little as possible is rendered per call. A template that fails a check is
reported; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from towline.common.arrays import Ids
from towline.common.images import ImagePlaceholder
from towline.conversation import Media, Message, Tool, ToolCall
from towline.tokens.codec import CannotContinue, EncodedPrompt, RenderContext
from towline.tokens.tokenizer import Tokenizer

PLACEHOLDER_TOOL = Tool("lookup", "Looks something up.", {"type": "object", "properties": {"s": {"type": "string"}}})
"""A tool for renders in which the actual tools do not matter."""
_OTHER = Tool("search", "Searches.", {"type": "object", "properties": {"q": {"type": "string"}}})
_CALL = ToolCall("zyxwvuts1", PLACEHOLDER_TOOL.name, {"s": "w"})
PLACEHOLDER_CALL = (
    Message("assistant", "", "a thought", (_CALL,)),
    Message("tool", "an earlier result", tool_call_id=_CALL.id, name=_CALL.name),
)
"""A call and its result, for templates that check whether there were any."""
CALLS_AS_TEXT_WARNING = "tool calls of this template reach the harness as text"
"""The warning about a template whose tool-call format is unknown."""
_NONE: Ids = np.empty(0, np.int32)
_USER = "PROBEuser"
_ARGUMENT = "PROBEargument"


@dataclass(slots=True)
class TemplateCheck:
    """The findings of the self-check."""

    string_arguments: bool = False
    """The template takes tool-call arguments as JSON text, not as an object."""
    part_content: bool = False
    """The template takes content as a list of parts."""
    short_call_ids: bool = False
    """Call ids must be nine alphanumeric characters."""
    tool_calls: bool = False
    """The template renders tool calls."""
    no_reasoning_with_calls: bool = False
    """The template refuses text, calls and reasoning in one message (gpt-oss): reasoning is then left out."""
    continues: dict[str, bool] = field(default_factory=dict)
    """Whether the sentinel survives before a `tool`, `parallel` tool and `user` message."""
    needs_history: bool = False
    """The text after a turn depends on the whole history."""
    needs_calls: bool = False
    """The text after a turn depends on whether there was a tool result (DeepSeek)."""
    needs_system: bool = False
    """The text after a turn depends on the system prompt."""
    needs_tools: bool = False
    """The text after a turn depends on the tools."""
    image: str = ""
    """What the template writes for an image, from the first special token to the last; empty if it writes nothing."""
    image_roles: frozenset[str] = frozenset()
    """Roles of the messages in which it does."""
    problems: list[str] = field(default_factory=list)


class CheckedCodec(Protocol):
    """A codec under self-check."""

    check: TemplateCheck
    tokenizer: Tokenizer

    def shown(self, messages: Sequence[Message], context: RenderContext) -> str:
        """The rendered text; empty if the template refuses the messages."""
        ...

    def text_after(
        self, history: Sequence[Message], reply: Message, new: Sequence[Message], context: RenderContext
    ) -> str | None:
        """The text after a reply, rendered with the full history; `None` if the template refuses the messages."""
        ...

    def extend(
        self,
        before: Sequence[Message],
        reply: Message,
        tail: Ids,
        sampled: Ids,
        new: Sequence[Message],
        context: RenderContext,
    ) -> EncodedPrompt: ...


def run_self_check(codec: CheckedCodec) -> None:
    """Run all probes and fill in `codec.check`."""
    _check_content(codec)
    _check_calls(codec)
    context = RenderContext((PLACEHOLDER_TOOL,))
    working = []
    for name, (reply, new) in _probe_turns().items():
        try:
            codec.extend([Message("user", _USER)], reply, _NONE, _NONE, new, context)
        except CannotContinue as problem:
            codec.check.continues[name] = False
            codec.check.problems.append(f"cannot continue before a {name} message: {problem}")
        else:
            codec.check.continues[name] = True
            working.append((reply, new))
    for reply, new in working:
        _check_dependence(codec, reply, new)
    _check_images(codec)


def _check_content(codec: CheckedCodec) -> None:
    for parts in (False, True):
        codec.check.part_content = parts
        if _USER in codec.shown([Message("user", _USER)], RenderContext()):
            return
    codec.check.part_content = False
    codec.check.problems.append("the template does not show user messages")


def _check_calls(codec: CheckedCodec) -> None:
    check, context = codec.check, RenderContext((PLACEHOLDER_TOOL,))
    for id in ("call1", "abcdefgh1"):
        call = ToolCall(id, PLACEHOLDER_TOOL.name, {"s": _ARGUMENT})
        asked, answer = Message("user", "x"), Message("tool", "y", tool_call_id=id, name=PLACEHOLDER_TOOL.name)
        for as_text in (False, True):
            check.string_arguments, check.short_call_ids = as_text, id == "abcdefgh1"
            text = codec.shown([asked, Message("assistant", "", None, (call,)), answer], context)
            # Arguments given as text to a template that wants an object come out quoted twice.
            if _ARGUMENT in text and '\\"s\\"' not in text:
                check.tool_calls = True
                everything = Message("assistant", "words", "a thought", (call,))
                check.no_reasoning_with_calls = not codec.shown([asked, everything, answer], context)
                return
    check.string_arguments = check.short_call_ids = False
    check.problems.append("the template does not render tool calls")


def _check_images(codec: CheckedCodec) -> None:
    """What the template writes for an image between two words, in a user message and in a tool result."""
    check, context = codec.check, RenderContext((PLACEHOLDER_TOOL,), images={"": ImagePlaceholder(None)})
    image = (Media("image", "", "", len(_USER)),)
    asked = [Message("user", "x"), Message("assistant", "", None, (_CALL,))]
    written: dict[str, str] = {}
    check.image_roles = frozenset(("user", "tool"))
    for messages in (
        [Message("user", _USER + _ARGUMENT, media=image)],
        [*asked, Message("tool", _USER + _ARGUMENT, None, (), _CALL.id, _CALL.name, image)],
    ):
        _, _, behind = codec.shown(messages, context).partition(_USER)
        between, _, rest = behind.partition(_ARGUMENT)
        tokens = list(codec.tokenizer.added_pattern.finditer(between)) if rest else []
        if tokens:
            written[messages[-1].role] = between[tokens[0].start() : tokens[-1].end()]
    check.image = written.get("user", "")
    check.image_roles = frozenset(role for role, text in written.items() if text == check.image)


def _probe_turns() -> dict[str, tuple[Message, list[Message]]]:
    calls = tuple(ToolCall(f"abcdefgh{i}", PLACEHOLDER_TOOL.name, {"s": "v"}) for i in (1, 2))
    results = [Message("tool", "result", tool_call_id=call.id, name=call.name) for call in calls]
    return {
        "user": (Message("assistant", "answer"), [Message("user", "question")]),
        "tool": (Message("assistant", "", None, calls[:1]), results[:1]),
        "parallel": (Message("assistant", "", None, calls), results),
    }


def _check_dependence(codec: CheckedCodec, reply: Message, new: Sequence[Message]) -> None:
    """What the text after a turn depends on. A variant that the template refuses cannot change it."""
    check, context, question = codec.check, RenderContext((PLACEHOLDER_TOOL,)), Message("user", "q")

    def afters(*variants: tuple[list[Message], RenderContext]) -> set[str]:
        texts = (codec.text_after(history, reply, new, under) for history, under in variants)
        return {text for text in texts if text is not None}

    systems = [[Message("system", text)] for text in ("one", "two")]
    check.needs_system |= len(afters(*(([*lead, question], context) for lead in [[], *systems]))) > 1
    check.needs_tools |= len(afters(([question], context), ([question], RenderContext((PLACEHOLDER_TOOL, _OTHER))))) > 1
    asked = [Message("assistant", "an earlier answer"), Message("user", "another question")]
    with_text = [Message("assistant", "words with a call", None, (_CALL,)), PLACEHOLDER_CALL[1], *asked]
    without = afters(*(([question, *middle], context) for middle in ([], asked, [*asked, *asked])))
    called = afters(
        *(
            ([question, *middle], context)
            for middle in (PLACEHOLDER_CALL, PLACEHOLDER_CALL * 2, (*PLACEHOLDER_CALL, *asked), with_text)
        )
    )
    check.needs_history |= len(without) > 1 or len(called) > 1
    check.needs_calls |= len(without | called) > 1
