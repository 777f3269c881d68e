"""What the audit runs on: a tokenizer with a chat template, and what conversations that pair can have.

Real tokenizers come with templates of their own. Every other template is put on one tokenizer that has the special
tokens of all of them added, so that they share a vocabulary and with it one model. What a pair can do (tools, reasoning,
a system prompt, …) is found by asking it, never by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import tokenizers

from towline import assets
from towline.audit.content import TOOLS, neutral
from towline.audit.script import Line, write
from towline.conversation import Message, ToolCall
from towline.errors import ConfigError
from towline.tokens.codec import Frame, SpecialText
from towline.tokens.jinja import ChatTemplate, TemplateError
from towline.tokens.loading import load_codec, make_codec
from towline.tokens.parser import Unwritable
from towline.tokens.template import SentinelCodec
from towline.tokens.tokenizer import Tokenizer

BASE = "qwen3"
"""The tokenizer that lends its vocabulary to templates without one."""
PLAIN = f"{BASE}+plain_special_text"
"""That tokenizer with its own template, where text that spells a special token stays text."""
_PAIRED = {"deepseek_v3": "deepseekv3", "gptoss": "gptoss"}
"""Tokenizers whose package has no template, or one that cannot close a single call, with the template of their family."""

_SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|?>|<[^|<>\s]{1,40}\|>|<[|\uff5c][^|\uff5c<>\n]{1,40}[|\uff5c]>|</?s>|<bos>|<eos>"
    r"|<(?:start|end)_of_(?:turn|utterance|image)>|\[/?[A-Z_]{3,20}\]"
)
"""Text in a template that is a token of its own in the template's own tokenizer."""
_MARK = "TOWLINEPROBE"
_NO_EOS = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Abilities:
    """What conversations a target can have."""

    system: bool = False
    tools: bool = False
    """Calls can be written, read back and continued."""
    parallel: bool = False
    """Several calls in a turn."""
    text_beside_call: bool = False
    reasoning: bool = False
    """Reasoning is read apart from the text."""
    keeps_reasoning: bool = False
    """The template shows the reasoning of a turn behind its tool results."""
    strips_reasoning: bool = False
    """The template takes reasoning out once a user message follows."""
    notes: bool = False
    """A user message may follow a result, or another user message."""
    prefill: bool = False
    closes: bool = False
    """The end of a turn belongs to the turn."""
    opens: bool = False
    """The end of a turn is what opens the next message."""
    plain_special_text: bool = False
    """Text that spells a special token stays text."""
    text_round_trips: bool = False
    """A canonical answer is re-rendered to the ids it was sampled as."""
    call_round_trips: bool = False

    def names(self) -> set[str]:
        return {field.name for field in fields(self) if getattr(self, field.name)}


@dataclass(slots=True)
class Target:
    """One tokenizer with one template."""

    name: str
    vocabulary: str
    """Names the tokenizer; targets with the same one share a model."""
    codec: SentinelCodec
    abilities: Abilities
    primary: bool
    """Has a tokenizer of its own, or is the user's: every behaviour is run on it."""

    @property
    def can(self) -> set[str]:
        return self.abilities.names()


def find(
    names: Sequence[str] | None = None, *, tokenizer: Path | None = None, template: Path | None = None
) -> list[Target]:
    """The targets: those named, else all at hand; and the user's own tokenizer and template beside them."""
    known = _known() if names is None or names else {}
    chosen: dict[str, Path] = {}
    targets = []
    for name in known if names is None else names:
        if name not in known:
            raise ConfigError(f"no audit target {name!r}; there are: {', '.join(known)}")
        path = known[name]
        if path is not None:
            chosen[name] = path
        elif name == PLAIN:
            codec = load_codec(assets.tokenizer(BASE), special_text=SpecialText.PLAIN)
            targets.append(_target(name, BASE, codec, primary=False))
        else:
            own = assets.templates()[_PAIRED[name]] if name in _PAIRED else None
            targets.append(_target(name, name, load_codec(assets.tokenizer(name), template=own), primary=True))
    if tokenizer is not None:
        name = f"{tokenizer.name}+{template.stem}" if template else tokenizer.name
        targets.append(_target(name, f"user-{tokenizer.name}", load_codec(tokenizer, template=template), primary=True))
    elif template is not None:
        chosen[f"user+{template.stem}"] = template
    targets += _borrowed(chosen)
    if not targets:
        raise ConfigError("the audit has no target: name one, or give a tokenizer or a template")
    return targets


def _known() -> dict[str, Path | None]:
    """The targets at hand by name, with the file of those that are only a template."""
    templates = {name: path for name, path in assets.templates().items() if not name.endswith("_training")}
    return {
        **dict.fromkeys([*assets.tokenizers(), PLAIN]),
        **{f"{BASE}+{name}": path for name, path in templates.items()},
    }


def _borrowed(templates: dict[str, Path]) -> Iterable[Target]:
    """Templates on the tokenizer `BASE`, with the special tokens of all of them added."""
    if not templates:
        return
    sources = {name: path.read_text("utf-8") for name, path in templates.items()}
    special = {match for source in sources.values() for match in _SPECIAL.findall(source)}
    backend = tokenizers.Tokenizer.from_file(str(assets.tokenizer(BASE) / "tokenizer.json"))
    backend.add_special_tokens(sorted(special | {"<s>"}))
    for name, source in sources.items():
        tokens = {"bos_token": "<s>", "eos_token": _NO_EOS}
        tokens["eos_token"] = _end_of_turn(ChatTemplate(source, tokens=tokens)) or _NO_EOS
        pair = Tokenizer(backend, tokens, name)
        codec = make_codec(pair, ChatTemplate(source, tokens=tokens))
        yield _target(name, f"{BASE}-extended", codec, primary=name.startswith("user+"))


def _end_of_turn(template: ChatTemplate) -> str | None:
    """The special token that the template itself writes behind an answer, if any."""
    for content in (_MARK, [{"type": "text", "text": _MARK}]):
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        try:
            text = template.render(messages, generation_prompt=False)
        except TemplateError:
            continue
        found = _SPECIAL.findall(text, text.rfind(_MARK)) if text.count(_MARK) > 1 else []
        if found:
            return str(found[-1])
    return None


def _target(name: str, vocabulary: str, codec: SentinelCodec, *, primary: bool) -> Target:
    return Target(name, vocabulary, codec, _Probe(codec).abilities(), primary)


class _Probe:
    """Asks a codec for what it can do, through the same doors as a conversation."""

    def __init__(self, codec: SentinelCodec):
        self.codec = codec
        self.frame = Frame(tuple(neutral(tool) for tool in TOOLS))
        self.bare = Frame()
        self.user = Message("user", "Please do it.")
        self.more = Message("user", "Go on.")
        self.calls = tuple(ToolCall(f"abcdefgh{n}", "bash", {"command": f"ls {n}", "timeout": n}) for n in (1, 2))
        self.results = [Message("tool", "done", tool_call_id=call.id, name="bash") for call in self.calls]

    def abilities(self) -> Abilities:
        called = Message("assistant", "", None, self.calls[:1])
        answer = Message("assistant", "All of it is done.")
        thought = Message("assistant", "All of it is done.", "It is quite simple.")
        reasoning = self._says(thought, self.bare)
        tools = self._says(called, self.frame) and self._continues(called, self.results[:1])
        both = Message("assistant", "", None, self.calls)
        beside = Message("assistant", "Now this.", None, self.calls[:1])
        full = Message("assistant", "Now this.", "It is quite simple." if reasoning else None, self.calls[:1])
        reasoned_call = Message("assistant", "", "It is quite simple.", self.calls[:1])
        behind_results = self._shown([self.user, reasoned_call, self.results[0]], self.frame) if tools else ""
        return Abilities(
            system=self._accepts([Message("system", "Be brief."), self.user], self.bare, "Be brief."),
            tools=tools,
            parallel=tools and self._says(both, self.frame) and self._continues(both, self.results),
            text_beside_call=tools and self._says(beside, self.frame) and self._continues(full, self.results[:1]),
            reasoning=reasoning,
            keeps_reasoning=reasoning and tools and "quite simple" in behind_results,
            strips_reasoning=reasoning
            and "quite simple" in self._ended(thought)
            and "quite simple" not in self._shown([self.user, thought, self.more], self.bare),
            notes=self._accepts([self.user, self.more], self.bare, "Go on.")
            and (not tools or self._accepts([self.user, called, self.results[0], self.more], self.frame, "Go on.")),
            prefill=self._prefills(),
            plain_special_text=self.codec.special_text is SpecialText.PLAIN,
            closes=self._closes(answer),
            opens=not self._closes(answer),
            text_round_trips=self._round_trips(answer, [self.more], self.bare),
            call_round_trips=tools and self._round_trips(called, self.results[:1], self.frame),
        )

    def _says(self, reply: Message, frame: Frame) -> bool:
        """Whether the reply can be written in the model's format and is read back as it is."""
        try:
            tail = self.codec.tokenizer.decode(self.codec.prompt([self.user], frame).ids[-64:])
            ids = self._written(reply, tail, frame)
        except (Unwritable, TemplateError):
            return False
        read = self.codec.parse(self.codec.tokenizer.decode(ids[:-1]), tail, frame.tools)
        calls = [(call.name, call.arguments) for call in read.calls]
        wanted = [(call.name, call.arguments) for call in reply.tool_calls]
        return (read.text.strip(), read.reasoning, calls) == (reply.text, reply.reasoning, wanted)

    def _written(self, reply: Message, tail: str, frame: Frame) -> list[int]:
        calls = tuple(
            (call.name, dict(call.arguments)) for call in reply.tool_calls if isinstance(call.arguments, dict)
        )
        return write(self.codec, Line(reply.text, reply.reasoning, calls), tail, frame.tools)

    def _shown(self, messages: Sequence[Message], frame: Frame, *, open: bool = True) -> str:
        """What the model is shown; without `open`, with the last message, an assistant's, still being written."""
        try:
            return self.codec.tokenizer.decode(self.codec.prompt(messages, frame, prefill=not open).ids)
        except TemplateError:
            return ""

    def _accepts(self, messages: Sequence[Message], frame: Frame, text: str) -> bool:
        return text in self._shown(messages, frame)

    def _continues(self, reply: Message, results: Sequence[Message]) -> bool:
        """Whether the template shows the results of a reply's calls."""
        shown = self._shown([self.user, reply, *results], self.frame)
        return all(message.text in shown for message in results)

    def _prefills(self) -> bool:
        start = Message("assistant", "The answer begins")
        return self._shown([self.user, start], self.bare, open=False).endswith("The answer begins")

    def _ended(self, reply: Message) -> str:
        """The history with the reply as its last message."""
        shown = [self.codec.fields(message) for message in (self.user, reply)]
        try:
            return self.codec.template.render(shown, generation_prompt=False)
        except TemplateError:
            return ""

    def _closes(self, answer: Message) -> bool:
        """Whether an end-of-turn token stands behind the answer before anything follows it."""
        text = self._ended(answer)
        behind = text[text.rfind(answer.text) :]
        return any((end := self.codec.tokenizer.token_of(id)) and end in behind for id in self.codec.stop_ids)

    def _round_trips(self, reply: Message, new: Sequence[Message], frame: Frame) -> bool:
        """Whether the next prompt of a plain server starts with the ids before."""
        try:
            before = self.codec.prompt([self.user], frame).ids
            before = before + self._written(reply, self.codec.tokenizer.decode(before[-64:]), frame)
            after = self.codec.prompt([self.user, reply, *new], frame).ids
        except (TemplateError, Unwritable):
            return False
        return after[: len(before)] == before
