"""The neutral conversation: what every dialect is read into and written from.

A dialect turns a provider's JSON into a `Request`; the token layer turns a `Request` into ids and sampled ids into a
`Reply`; the dialect turns the `Reply` back. These types carry meaning only, no wire shape and no tokens, and they are
plain slotted dataclasses because a long history makes hundreds of them on every call.

Invariant: a `Message` is immutable once built. Its fingerprint is cached on it, and the gateway shares unchanged
messages between the requests of a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
"""`developer` is read as `system`; function and tool results are `tool`."""


@dataclass(slots=True)
class Media:
    """An image, sound or file inside a message. Compared by `digest`, never by its bytes."""

    kind: str
    """`image`, `audio`, `video` or `file`."""
    digest: str
    """Hex SHA-256 of the decoded bytes, or of the URL when the bytes are elsewhere."""
    url: str
    """A data URL or a remote URL, as the engine is to receive it."""
    offset: int = 0
    """Where in the message's text it stands."""


@dataclass(slots=True)
class ToolCall:
    """A call of a tool, as sampled or as a harness sends it back."""

    id: str
    name: str
    arguments: dict[str, Any] | str
    """The parsed object; a string for freeform (`custom`) tools and for arguments that are not a JSON object."""
    custom: bool = False
    """A freeform tool: `arguments` is its raw input text."""


@dataclass(slots=True)
class Message:
    """One message. An assistant message may carry text, reasoning and calls at once."""

    role: Role
    text: str = ""
    """All text parts joined in order; `null` content is the empty string."""
    reasoning: str | None = None
    """Reasoning text the dialect carried, `None` if it carried none."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """For a `tool` message: the id of the call it answers."""
    name: str = ""
    """For a `tool` message: the tool's name where the dialect gives it; else the speaker's name."""
    media: tuple[Media, ...] = ()
    fingerprint: bytes | None = field(default=None, compare=False, repr=False)
    """Cache of `tokens.fingerprint.of`; nothing else writes it."""
    traits: Any = field(default=None, compare=False, repr=False)
    """Cache of `tokens.dependence`; nothing else writes it."""


_FREEFORM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(slots=True)
class Tool:
    """A tool the harness offers."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    """JSON Schema of the arguments; empty for a freeform tool."""
    custom: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the declaration (`strict`, a grammar, …): part of the root key, shown to no template."""

    def as_function(self) -> dict[str, Any]:
        """The declaration in the shape that chat templates expect; a freeform tool takes one text, `input`."""
        parameters = _FREEFORM if self.custom else self.parameters
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(slots=True)
class Sampling:
    """What the harness asked of the sampler; `None` where it asked nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    other: dict[str, Any] = field(default_factory=dict)
    """Parameters that bias sampling (penalties, logit bias, guided decoding): recorded, never applied when training."""


@dataclass(slots=True)
class Hints:
    """What headers say about a call. Hints settle roles, lineage and retries; they never decide a match alone."""

    session: str = ""
    parent_session: str = ""
    agent: str = ""
    window: str = ""
    retry: bool = False
    """The client says that this is a retry."""
    idempotency_key: str = ""


@dataclass(slots=True)
class Request:
    """One model call, whatever dialect it came in."""

    dialect: str
    model: str
    messages: list[Message]
    tools: tuple[Tool, ...] = ()
    shown: tuple[Tool, ...] = ()
    """Tools that messages show and the declarations do not offer: a reply may call them, no template declares them."""
    tool_choice: str | dict[str, Any] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stream: bool = False
    template_args: dict[str, Any] = field(default_factory=dict)
    """Arguments for the chat template (`enable_thinking`, `reasoning_effort`, …); part of the root key."""
    hints: Hints = field(default_factory=Hints)
    previous: str = ""
    """Id of an earlier answer of ours that `messages` goes on from; its history is put before them."""
    ignored: tuple[str, ...] = ()
    """Fields that were understood and left out, recorded with the turn."""
    wire: Mapping[str, Any] = field(default_factory=dict)
    """What the dialect itself needs to shape its answer (`stream_options`, `include`, …); opaque to everybody else."""


class Finish(StrEnum):
    """Why a turn ended."""

    STOP = "stop"
    """The model sampled one of its end-of-turn ids."""
    STOP_STRING = "stop_string"
    """A stop sequence of the harness appeared."""
    LENGTH = "length"
    """The token budget of the turn or of the context ran out."""
    ABORT = "abort"
    """Sampling was cut short and will not go on."""


@dataclass(slots=True)
class Reply:
    """What the model said, parsed from its sampled ids."""

    text: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish: Finish = Finish.STOP
    stop_string: str | None = None
    """The stop sequence that ended the turn; it is not part of `text`."""
    malformed: tuple[str, ...] = ()
    """Tool calls that could not be read. Their raw text is part of `text`, so that the harness sees them."""

    def as_message(self) -> Message:
        """The message that a harness which echoes faithfully would send back."""
        return Message("assistant", self.text, self.reasoning, self.tool_calls)


@dataclass(slots=True)
class Usage:
    """Token counts of a call, as providers report them."""

    prompt: int
    sampled: int
    cached: int = 0
    """Prompt tokens that the engine did not have to compute again."""
    reasoning: int = 0


@dataclass(slots=True)
class TokenLogprob:
    """One sampled token for clients that ask for logprobs."""

    text: str
    logprob: float
    data: bytes


@dataclass(slots=True)
class Answer:
    """Everything a dialect needs to write a response: the call, its replies and their usage."""

    id: str
    """Unique and alphanumeric; a dialect adds its usual prefix (`chatcmpl-`, `msg_`, `resp_`)."""
    created: int
    """Unix time in seconds."""
    model: str
    """The model name as the harness gave it."""
    replies: Sequence[Reply]
    """One, or `n` of them."""
    usage: Usage
    logprobs: Callable[[int], Sequence[TokenLogprob]] | None = None
    """Logprobs of the sampled tokens of reply `i`, computed only when asked for."""
