"""What a chat template wants and does, found out by probing it once at start-up.

How it takes content, calls and their ids; whether the sentinel survives in it before a user message and before tool
results; and on what the text after a turn depends, so that as little as possible is rendered on each call. A template
that fails is reported, never guessed around.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from towline.arrays import Ids
from towline.conversation import Media, Message, Tool, ToolCall
from towline.images import Placeholder
from towline.tokens.codec import Encoded, Frame, Unbridgeable
from towline.tokens.tokenizer import Tokenizer

STAND_IN = Tool("lookup", "Looks something up.", {"type": "object", "properties": {"s": {"type": "string"}}})
"""A tool for renders in which the tools do not matter."""
_OTHER = Tool("search", "Searches.", {"type": "object", "properties": {"q": {"type": "string"}}})
_CALL = ToolCall("zyxwvuts1", STAND_IN.name, {"s": "w"})
CALLED = (
    Message("assistant", "", "a thought", (_CALL,)),
    Message("tool", "an earlier result", tool_call_id=_CALL.id, name=_CALL.name),
)
"""A call and its result, for histories in which it matters that there were some."""
CALLS_AS_TEXT = "tool calls of this template reach the harness as text"
"""What is said of a template whose format of calls is not known."""
_NONE: Ids = np.empty(0, np.int32)
_USER = "PROBEuser"
_ARGUMENT = "PROBEargument"


@dataclass(slots=True)
class TemplateCheck:
    """What the self-check found."""

    string_arguments: bool = False
    """Tool-call arguments are given as JSON text, not as an object."""
    part_content: bool = False
    """Content is given as a list of parts."""
    short_call_ids: bool = False
    tool_calls: bool = False
    """Tool calls are rendered at all."""
    one_thought: bool = False
    """Refuses words, calls and reasoning in one message (gpt-oss): the reasoning is then left out."""
    continues: dict[str, bool] = field(default_factory=dict)
    """Whether the sentinel survives before a `tool`, `parallel` tool and `user` message."""
    needs_history: bool = False
    """The text after a turn depends on the whole history."""
    needs_calls: bool = False
    """Of the history, it depends on whether there was a tool result (DeepSeek)."""
    needs_system: bool = False
    needs_tools: bool = False
    image: str = ""
    """What the template writes for an image, from the first special token to the last; empty if it shows none."""
    image_roles: frozenset[str] = frozenset()
    """In whose messages it does."""
    problems: list[str] = field(default_factory=list)


class Checked(Protocol):
    """A codec that is being found out about."""

    check: TemplateCheck
    tokenizer: Tokenizer

    def shown(self, messages: Sequence[Message], frame: Frame) -> str:
        """The rendered text; empty if the template refuses the messages."""
        ...

    def text_after(
        self, history: Sequence[Message], reply: Message, new: Sequence[Message], frame: Frame
    ) -> str | None:
        """The text after a reply with nothing left out before it; `None` if the template refuses the messages."""
        ...

    def extend(
        self,
        before: Sequence[Message],
        reply: Message,
        tail: Ids,
        sampled: Ids,
        new: Sequence[Message],
        frame: Frame,
    ) -> Encoded: ...


def find_out(codec: Checked) -> None:
    """Fill in the codec's check."""
    _content(codec)
    _calls(codec)
    frame = Frame((STAND_IN,))
    working = []
    for name, (reply, new) in _turns().items():
        try:
            codec.extend([Message("user", _USER)], reply, _NONE, _NONE, new, frame)
        except Unbridgeable as problem:
            codec.check.continues[name] = False
            codec.check.problems.append(f"cannot continue before a {name} message: {problem}")
        else:
            codec.check.continues[name] = True
            working.append((reply, new))
    for reply, new in working:
        _dependence(codec, reply, new)
    _images(codec)


def _content(codec: Checked) -> None:
    for parts in (False, True):
        codec.check.part_content = parts
        if _USER in codec.shown([Message("user", _USER)], Frame()):
            return
    codec.check.part_content = False
    codec.check.problems.append("the template does not show a user message")


def _calls(codec: Checked) -> None:
    check, frame = codec.check, Frame((STAND_IN,))
    for id in ("call1", "abcdefgh1"):
        call = ToolCall(id, STAND_IN.name, {"s": _ARGUMENT})
        asked, answer = Message("user", "x"), Message("tool", "y", tool_call_id=id, name=STAND_IN.name)
        for as_text in (False, True):
            check.string_arguments, check.short_call_ids = as_text, id == "abcdefgh1"
            text = codec.shown([asked, Message("assistant", "", None, (call,)), answer], frame)
            # An object that was given as text where one is wanted comes out quoted twice.
            if _ARGUMENT in text and '\\"s\\"' not in text:
                check.tool_calls = True
                everything = Message("assistant", "words", "a thought", (call,))
                check.one_thought = not codec.shown([asked, everything, answer], frame)
                return
    check.string_arguments = check.short_call_ids = False
    check.problems.append("the template does not render tool calls")


def _images(codec: Checked) -> None:
    """What stands between two words with an image between them, in a user's message and in a tool's result."""
    check, frame = codec.check, Frame((STAND_IN,), images={"": Placeholder(None)})
    image = (Media("image", "", "", len(_USER)),)
    asked = [Message("user", "x"), Message("assistant", "", None, (_CALL,))]
    written: dict[str, str] = {}
    check.image_roles = frozenset(("user", "tool"))
    for messages in (
        [Message("user", _USER + _ARGUMENT, media=image)],
        [*asked, Message("tool", _USER + _ARGUMENT, None, (), _CALL.id, _CALL.name, image)],
    ):
        _, _, behind = codec.shown(messages, frame).partition(_USER)
        between, _, rest = behind.partition(_ARGUMENT)
        tokens = list(codec.tokenizer.added_pattern.finditer(between)) if rest else []
        if tokens:
            written[messages[-1].role] = between[tokens[0].start() : tokens[-1].end()]
    check.image = written.get("user", "")
    check.image_roles = frozenset(role for role, text in written.items() if text == check.image)


def _turns() -> dict[str, tuple[Message, list[Message]]]:
    calls = tuple(ToolCall(f"abcdefgh{i}", STAND_IN.name, {"s": "v"}) for i in (1, 2))
    results = [Message("tool", "result", tool_call_id=call.id, name=call.name) for call in calls]
    return {
        "user": (Message("assistant", "answer"), [Message("user", "question")]),
        "tool": (Message("assistant", "", None, calls[:1]), results[:1]),
        "parallel": (Message("assistant", "", None, calls), results),
    }


def _dependence(codec: Checked, reply: Message, new: Sequence[Message]) -> None:
    """What changes the text after a turn. A variant that the template refuses cannot change it."""
    check, frame, question = codec.check, Frame((STAND_IN,)), Message("user", "q")

    def afters(*variants: tuple[list[Message], Frame]) -> set[str]:
        texts = (codec.text_after(history, reply, new, under) for history, under in variants)
        return {text for text in texts if text is not None}

    systems = [[Message("system", text)] for text in ("one", "two")]
    check.needs_system |= len(afters(*(([*lead, question], frame) for lead in [[], *systems]))) > 1
    check.needs_tools |= len(afters(([question], frame), ([question], Frame((STAND_IN, _OTHER))))) > 1
    asked = [Message("assistant", "an earlier answer"), Message("user", "another question")]
    said = [Message("assistant", "words with a call", None, (_CALL,)), CALLED[1], *asked]
    without = afters(*(([question, *middle], frame) for middle in ([], asked, [*asked, *asked])))
    called = afters(*(([question, *middle], frame) for middle in (CALLED, CALLED * 2, (*CALLED, *asked), said)))
    check.needs_history |= len(without) > 1 or len(called) > 1
    check.needs_calls |= len(without | called) > 1
