"""The neutral conversation: what every dialect reads requests into and writes answers from.

A dialect turns a provider's JSON into a `Request`; the token layer turns a `Request` into ids and sampled ids into a
`Reply`; the dialect turns the `Reply` back. These types carry meaning only, no wire format and no tokens. They are plain
slotted dataclasses, because a long history makes hundreds of them on every call.

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
    """An image, audio or file inside a message. Compared by `digest`, never by its bytes."""

    kind: str
    """`image`, `audio`, `video` or `file`."""
    digest: str
    """Hex SHA-256 of the decoded bytes, or of the URL if the media is remote."""
    url: str
    """A data URL or a remote URL, as passed to the engine."""
    offset: int = 0
    """Position in the message's text."""


@dataclass(slots=True)
class ToolCall:
    """A tool call, as sampled or as a harness sends it back."""

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
    """Reasoning, `None` if the request has none."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """For a `tool` message: the id of the call it answers."""
    name: str = ""
    """For a `tool` message: the tool's name if the dialect gives it. Otherwise the name of the author."""
    media: tuple[Media, ...] = ()
    fingerprint: bytes | None = field(default=None, compare=False, repr=False)
    """Cache of `tokens.graph.fingerprint.of`; nothing else writes it."""
    traits: Any = field(default=None, compare=False, repr=False)
    """Cache of `tokens.templates.history_scope`; nothing else writes it."""


_FREEFORM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(slots=True)
class Tool:
    """A tool that the harness offers."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    """JSON Schema of the arguments; empty for a freeform tool."""
    custom: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    """Other fields of the declaration (`strict`, a grammar, …): part of the root key, not passed to the template."""

    def as_function(self) -> dict[str, Any]:
        """The declaration in the format that chat templates expect; a freeform tool takes one string, `input`."""
        parameters = _FREEFORM if self.custom else self.parameters
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(slots=True)
class Sampling:
    """Sampling settings that the harness asked for; `None` where it set none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    other: dict[str, Any] = field(default_factory=dict)
    """Parameters that bias sampling (penalties, logit bias, guided decoding): recorded, never applied in training."""


@dataclass(slots=True)
class Hints:
    """What headers say about a call. Hints inform roles, lineage and retries; they never decide a match alone."""

    session: str = ""
    parent_session: str = ""
    agent: str = ""
    window: str = ""
    retry: bool = False
    """The client says that this is a retry."""
    idempotency_key: str = ""


@dataclass(slots=True)
class Request:
    """One model call, in any dialect."""

    dialect: str
    model: str
    messages: list[Message]
    tools: tuple[Tool, ...] = ()
    shown: tuple[Tool, ...] = ()
    """Tools that only messages show: a reply may call them, no template declares them."""
    tool_choice: str | dict[str, Any] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stream: bool = False
    template_args: dict[str, Any] = field(default_factory=dict)
    """Arguments for the chat template (`enable_thinking`, `reasoning_effort`, …); part of the root key."""
    hints: Hints = field(default_factory=Hints)
    previous: str = ""
    """Id of an earlier answer that `messages` continues; its history is put before them."""
    ignored: tuple[str, ...] = ()
    """Names of request fields without effect, recorded with the turn."""
    wire: Mapping[str, Any] = field(default_factory=dict)
    """What the dialect needs to write its answer (`stream_options`, `include`, …); opaque to all other code."""


class Finish(StrEnum):
    """Why a turn ended."""

    STOP = "stop"
    """The model sampled one of its end-of-turn ids."""
    STOP_STRING = "stop_string"
    """A stop sequence of the harness appeared."""
    LENGTH = "length"
    """The token budget of the turn or of the context is exhausted."""
    ABORT = "abort"
    """Sampling was aborted and will not be resumed."""


@dataclass(slots=True)
class Reply:
    """The model's reply, parsed from its sampled ids."""

    text: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish: Finish = Finish.STOP
    stop_string: str | None = None
    """The stop sequence that ended the turn; it is not part of `text`."""
    malformed: tuple[str, ...] = ()
    """Tool calls that could not be parsed. Their raw text is part of `text`, so that the harness sees them."""

    def as_message(self) -> Message:
        """The message that a harness sends back if it changes nothing."""
        return Message("assistant", self.text, self.reasoning, self.tool_calls)


@dataclass(slots=True)
class Usage:
    """Token counts of a call, as providers report them."""

    prompt: int
    sampled: int
    cached: int = 0
    """Prompt tokens that the engine had cached."""
    reasoning: int = 0


@dataclass(slots=True)
class TokenLogprob:
    """One sampled token for clients that ask for logprobs."""

    text: str
    logprob: float
    data: bytes


@dataclass(slots=True)
class Answer:
    """What a dialect needs to write a response: replies and usage."""

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
    """Logprobs of the sampled tokens of reply `i`, computed on demand."""
