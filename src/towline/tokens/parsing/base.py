"""What an output format is: sampled text to a reply, and a reply to the text that a model of the family would sample.

Invariant: `parse` is total and loses nothing. It raises on no input, and every visible character that is not recognised
markup is in the reply's text, its reasoning or one of its calls. A call that cannot be parsed stays in the text as it is,
so that the harness, and the model on its next turn, see what was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from towline.conversation import Tool
from towline.errors import TowlineError

SPACE = " \t\r\n"
"""White space around markup; other Unicode white space is content."""


@dataclass(slots=True)
class ParsedCall:
    """One well-formed call."""

    name: str
    arguments: dict[str, Any] | str
    """An object; a string only for a freeform (`custom`) tool."""
    native_id: str = ""
    """The id that the model itself sampled, in formats that have one."""


@dataclass(slots=True)
class ParsedReply:
    """What was parsed from one turn's text."""

    text: str
    """What the harness receives as content."""
    reasoning: str | None
    """Stripped; `None` if there is none or it is empty."""
    calls: tuple[ParsedCall, ...]
    malformed: tuple[str, ...]
    """Raw text of calls that could not be parsed; it is part of `text` too."""
    reasoning_open: bool
    """The text ended inside reasoning."""


class UnwritableReply(TowlineError):
    """A reply that a format cannot express: parsing its text would give something else."""

    def __init__(self, format: str, reason: str):
        super().__init__(f"the format {format!r} cannot express this reply: {reason}")
        self.format = format
        self.reason = reason


class OutputFormat(Protocol):
    """How one family of models writes reasoning, text and calls."""

    @property
    def name(self) -> str: ...

    @property
    def thinking(self) -> tuple[tuple[str, str], ...]:
        """Pairs of reasoning tags. A prompt that ends with an opening tag has opened the reasoning."""
        ...

    def parse(self, text: str, tools: Sequence[Tool], *, reasoning_open: bool) -> ParsedReply:
        """Parse one turn's text, special tokens kept, without its end-of-turn token.

        `reasoning_open` says that the prompt already opened the reasoning.
        """
        ...

    def write(
        self,
        reasoning: str | None,
        text: str,
        calls: Sequence[ParsedCall],
        *,
        tools: Sequence[Tool] = (),
        reasoning_open: bool = False,
    ) -> str:
        """What a model of the family would sample for this reply, without the end-of-turn token.

        `parse` gives the same reply back, except for white space around text and reasoning, and for native ids in formats
        that have none. `tools` are those that it will be parsed with; without them, each parameter counts as declared
        with the type of its values. Raises `UnwritableReply` with the reason if the reply cannot be parsed back.
        """
        ...
