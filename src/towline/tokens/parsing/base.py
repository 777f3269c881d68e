"""What a format is: sampled text to a reply, and a reply to the text that a model of the family would sample.

Invariant: `parse` is total and loses nothing. It raises on no input, and every visible character of the text that is
not recognised markup is in the reply's text, its reasoning or one of its calls. A call that cannot be read is left in
the text as it stands, so that the harness, and the model on its next turn, see what was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from towline.conversation import Tool
from towline.errors import TowlineError

SPACE = " \t\r\n"
"""What counts as space around markup; wider Unicode space is content."""


@dataclass(slots=True)
class ParsedCall:
    """One well-formed call."""

    name: str
    arguments: dict[str, Any] | str
    """An object; a string only for a freeform (`custom`) tool."""
    native_id: str = ""
    """The id that the model itself sampled, in formats that have one."""


@dataclass(slots=True)
class Parsed:
    """What was read from one turn's text."""

    text: str
    """What the harness is shown as content."""
    reasoning: str | None
    """Without its outer space; `None` where there is none or nothing in it."""
    calls: tuple[ParsedCall, ...]
    malformed: tuple[str, ...]
    """Raw text of calls that could not be read; it is part of `text` too."""
    reasoning_open: bool
    """The text ended inside reasoning."""


class Unwritable(TowlineError):
    """A reply that a format cannot carry: reading its text back would give something else."""

    def __init__(self, format: str, reason: str):
        super().__init__(f"the format {format!r} cannot carry this reply: {reason}")
        self.format = format
        self.reason = reason


class Format(Protocol):
    """How one family of models writes reasoning, text and calls."""

    @property
    def name(self) -> str: ...

    @property
    def thinking(self) -> tuple[tuple[str, str], ...]:
        """Tags of reasoning. A prompt that ends with an opening one has begun it."""
        ...

    def parse(self, text: str, tools: Sequence[Tool], *, reasoning_open: bool) -> Parsed:
        """Read one turn's text, special tokens kept, without its end-of-turn token.

        `reasoning_open` says that the prompt has opened the reasoning already.
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

        `parse` reads it back to the same reply, but for space around the text and the reasoning and for native ids in
        formats that have none. `tools` are those that it will be parsed with; without them, a parameter is taken to
        be declared as its values are. Raises `Unwritable` with the reason if the reply cannot be read back.
        """
        ...
