"""Audit targets: a tokenizer with a chat template, and the kinds of conversation that the pair supports.

Real families have their own tokenizer and template. Every other template runs on one tokenizer with the special tokens of
all of them added, so that they share a vocabulary and one model. What a pair supports (tools, reasoning, a system prompt,
…) follows from what its family documents and its template shows. The codec under test has no say in it: a supported feature
that it cannot handle is a violation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tokenizers

from towline import assets
from towline.audit.content import TOOLS
from towline.audit.families import FAMILIES, TEMPLATES, FormatCall, ModelFamily, ReplyFormat, detect_format
from towline.audit.families import PLAIN_TEXT as PLAIN_TEXT
from towline.audit.oracle import HfMessage, Oracle, TemplateRefused, special_tokens
from towline.errors import ConfigError
from towline.tokens.codec import SpecialText
from towline.tokens.loading import load_codec, make_codec
from towline.tokens.templates.chat_template import ChatTemplate
from towline.tokens.templates.sentinel import SentinelCodec
from towline.tokens.tokenizer import Tokenizer

_SIMPLE = "It is quite simple."
_DONE = "All of it is done."


@dataclass(frozen=True, slots=True)
class TargetCapabilities:
    """The kinds of conversation that a target supports: documented by its family and shown by its template."""

    system: bool = False
    """The template shows a system prompt."""
    tools: bool = False
    """The family documents how calls are written, and the template shows calls and results."""
    parallel: bool = False
    """Several calls per turn."""
    text_beside_call: bool = False
    """Text before a call."""
    reasoning: bool = False
    """The family documents how reasoning is written."""
    keeps_reasoning: bool = False
    """The template still shows a turn's reasoning once tool results follow."""
    strips_reasoning: bool = False
    """The template removes reasoning once a user message follows."""
    notes: bool = False
    """A user message may follow a tool result or another user message."""
    prefill: bool = False
    """The model can continue an assistant message."""
    closes: bool = False
    """The end-of-turn token belongs to the turn."""
    opens: bool = False
    """The end-of-turn token opens the next message."""
    other_ends: bool = False
    """A model can sample several end-of-turn ids."""
    plain_special_text: bool = False
    """Text that spells a special token is encoded as text."""
    text_round_trips: bool = False
    """A canonical answer renders to the ids it was sampled as."""
    call_round_trips: bool = False
    """A canonical call renders to the ids it was sampled as."""


def probe_capabilities(
    oracle: Oracle, format: ReplyFormat, ends: Iterable[str], *, other_ends: bool, plain_special_text: bool
) -> TargetCapabilities:
    """Probe the template. `ends` are the tokens that end a message; the last two are settings of the target."""
    asked = _Probe(oracle, format)
    user, more, called, both, results = asked.user, asked.more, asked.called, asked.both, asked.results
    tools = format.calls and asked.shown([user, called, results[0]], "ls 1", "result 1")
    beside = {**called, "content": "Now this."}
    reasoning = format.think is not None
    thought: HfMessage = {"role": "assistant", "content": _DONE, "reasoning": _SIMPLE}
    closes = asked.closes(ends)
    return TargetCapabilities(
        system=oracle.shows([{"role": "system", "content": "Be brief."}, user], "Be brief."),
        tools=tools,
        parallel=tools and format.parallel and asked.shown([user, both, *results], "ls 1", "ls 2", "result 2"),
        text_beside_call=tools and format.beside and asked.shown([user, beside, results[0]], "Now this.", "ls 1"),
        reasoning=reasoning,
        keeps_reasoning=reasoning
        and tools
        and asked.shown([user, {**called, "reasoning": _SIMPLE}, results[0]], _SIMPLE),
        strips_reasoning=reasoning
        and oracle.shows([user, thought], _SIMPLE, generation=False)
        and not oracle.shows([user, thought, more], _SIMPLE),
        notes=oracle.shows([user, more], more["content"])
        and (not tools or asked.shown([user, called, results[0], more], more["content"])),
        prefill=asked.prefills(),
        closes=closes,
        opens=not closes,
        other_ends=other_ends,
        plain_special_text=plain_special_text,
        text_round_trips=asked.round_trips({"role": "assistant", "content": _DONE}, [more], ()),
        call_round_trips=tools and asked.round_trips(called, results[:1], TOOLS),
    )


class _Probe:
    def __init__(self, oracle: Oracle, format: ReplyFormat):
        self.oracle = oracle
        self.format = format
        self.user: HfMessage = {"role": "user", "content": "Please do it."}
        self.more: HfMessage = {"role": "user", "content": "Go on, do."}
        calls = [
            {"id": f"abcdefgh{n}", "name": "bash", "arguments": {"command": f"ls {n}", "timeout": n}} for n in (1, 2)
        ]
        self.both: HfMessage = {"role": "assistant", "content": "", "tool_calls": calls}
        self.called: HfMessage = {"role": "assistant", "content": "", "tool_calls": calls[:1]}
        self.results: list[HfMessage] = [
            {"role": "tool", "content": f"result {n}", "tool_call_id": call["id"], "name": "bash"}
            for n, call in enumerate(calls, 1)
        ]

    def shown(self, messages: Sequence[HfMessage], *texts: str) -> bool:
        return all(self.oracle.shows(messages, text, TOOLS) for text in texts)

    def prefills(self) -> bool:
        start = {"role": "assistant", "content": "The answer begins"}
        try:
            return self.oracle.continued([self.user, start]).endswith("The answer begins")
        except TemplateRefused:
            return False

    def closes(self, ends: Iterable[str]) -> bool:
        """Whether the template writes an end-of-turn token after a final answer."""
        try:
            text = self.oracle.render([self.user, {"role": "assistant", "content": _DONE}], generation=False)
        except TemplateRefused:
            return False
        return any(end in text[text.rfind(_DONE) :] for end in ends)

    def round_trips(self, reply: HfMessage, new: Sequence[HfMessage], tools: Sequence[dict[str, object]]) -> bool:
        """Whether a plain server's next prompt starts with the previous prompt and reply."""
        calls = [FormatCall(c["name"], c["arguments"], c["id"]) for c in reply.get("tool_calls", ())]
        oracle, format = self.oracle, self.format
        system: HfMessage = {"role": "system", "content": "Be brief."}
        # Mistral's template shows the system prompt in the last user message.
        asked = [system, self.user] if oracle.shows([system, self.user], "Be brief.") else [self.user]
        try:
            prompt = oracle.render(asked, tools)
            after = oracle.encode(oracle.render([*asked, reply, *new], tools))
        except TemplateRefused:
            return False
        opened = prompt.rstrip().endswith("<think>")
        before = oracle.encode(prompt)
        before += oracle.encode(format.text(None, reply["content"], calls, opened=opened, as_shown=True))
        end = oracle.id_of(format.ending(calls))
        return end is not None and after[: len(before) + 1] == [*before, end]


BASE = "qwen3"
"""The tokenizer that templates without one borrow."""
PLAIN_SPECIAL_TEXT = f"{BASE}+plain_special_text"
"""That tokenizer with its own template, and special tokens in messages encoded as text."""

_SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|?>|<[^|<>\s]{1,40}\|>|<[|\uff5c][^|\uff5c<>\n]{1,40}[|\uff5c]>|</?s>|<bos>|<eos>"
    r"|<(?:start|end)_of_(?:turn|utterance|image)>|\[/?[A-Z_]{3,20}\]|<SPECIAL_\d+>"
)
"""Template text that is a special token in the template's own tokenizer."""
_MARK = "AUDITANSWER"
_NO_EOS = "<|endoftext|>"


@dataclass(slots=True)
class AuditTarget:
    """One tokenizer with one template."""

    name: str
    vocabulary: str
    """The tokenizer's name; targets with the same one share a model."""
    codec: SentinelCodec
    oracle: Oracle
    format: ReplyFormat
    abilities: TargetCapabilities
    primary: bool
    """It has its own tokenizer, or is the user's: every behaviour runs on it."""
    family: str = ""
    """The family, if both tokenizer and template are its own."""

    @property
    def can(self) -> set[str]:
        return {field.name for field in fields(self.abilities) if getattr(self.abilities, field.name)}


def find_targets(
    names: Sequence[str] | None = None, *, tokenizer: Path | None = None, template: Path | None = None
) -> list[AuditTarget]:
    """The named targets, by default all available ones, plus the user's tokenizer and template."""
    known = _known_targets() if names is None or names else {}
    chosen: dict[str, tuple[Path, ReplyFormat]] = {}
    targets = []
    for name in known if names is None else names:
        if name not in known:
            raise ConfigError(f"unknown audit target {name!r}; available: {', '.join(known)}")
        borrowed = known[name]
        if borrowed is not None:
            chosen[name] = borrowed
        elif name == PLAIN_SPECIAL_TEXT:
            folder = assets.tokenizer(BASE)
            codec = load_codec(folder, special_text=SpecialText.PLAIN)
            oracle = Oracle.of_folder(folder)
            targets.append(_target(name, BASE, codec, oracle, FAMILIES[BASE].format, primary=False))
        else:
            targets.append(_family_target(name, FAMILIES[name]))
    if tokenizer is not None:
        name = f"{tokenizer.name}+{template.stem}" if template else tokenizer.name
        codec, oracle = load_codec(tokenizer, template=template), Oracle.of_folder(tokenizer, template)
        format = detect_format(oracle.source)
        targets.append(_target(name, f"user-{tokenizer.name}", codec, oracle, format, primary=True))
    elif template is not None:
        chosen[f"user+{template.stem}"] = template, detect_format(template.read_text("utf-8"))
    targets += _template_targets(chosen)
    if not targets:
        raise ConfigError("the audit has no target: name one, or pass --tokenizer or --template")
    return targets


def _known_targets() -> dict[str, tuple[Path, ReplyFormat] | None]:
    """The available targets by name, with file and format for those that are only a template."""
    templates, installed = assets.templates(), assets.tokenizers()
    real = [
        name
        for name, family in FAMILIES.items()
        if (family.tokenizer or name) in installed and (not family.template or family.template in templates)
    ]
    return {
        **dict.fromkeys([*real, PLAIN_SPECIAL_TEXT]),
        **{f"{BASE}+{name}": (templates[name], format) for name, format in TEMPLATES.items() if name in templates},
    }


def _family_target(name: str, family: ModelFamily) -> AuditTarget:
    folder = assets.tokenizer(family.tokenizer or name)
    template = assets.templates()[family.template] if family.template else None
    if not family.stops and not family.renamed:
        codec, oracle = load_codec(folder, template=template), Oracle.of_folder(folder, template)
        return _target(name, name, codec, oracle, family.format, primary=True, family=family.name)
    document = (folder / "tokenizer.json").read_text("utf-8")
    for old, new in family.renamed:
        document = document.replace(json.dumps(old), json.dumps(new))
    backend = tokenizers.Tokenizer.from_str(document)
    config: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    if family.renamed:
        config["eos_token"] = family.format.end
    tokens = special_tokens(config)
    source = template.read_text("utf-8") if template else config["chat_template"]
    stops = frozenset(id for stop in family.stops if (id := backend.token_to_id(stop)) is not None)
    codec = make_codec(Tokenizer(backend, config, name), ChatTemplate(source, tokens=tokens), stops)
    real = "" if family.renamed else family.name
    return _target(
        name, name, codec, Oracle(backend, {"default": source}, tokens), family.format, primary=True, family=real
    )


def _template_targets(templates: dict[str, tuple[Path, ReplyFormat]]) -> Iterable[AuditTarget]:
    """Templates on the tokenizer `BASE`, with the special tokens of all of them added."""
    if not templates:
        return
    sources = {name: path.read_text("utf-8") for name, (path, _) in templates.items()}
    special = {match for source in sources.values() for match in _SPECIAL.findall(source)}
    ends = {end for _, format in templates.values() for end in (format.end, format.call_end) if end}
    backend = tokenizers.Tokenizer.from_file(str(assets.tokenizer(BASE) / "tokenizer.json"))
    backend.add_special_tokens(sorted(special | ends | {"<s>"}))
    for name, source in sources.items():
        format = templates[name][1]
        tokens = {"bos_token": "<s>", "eos_token": format.end or _end_of_turn(backend, source)}
        codec = make_codec(Tokenizer(backend, tokens, name), ChatTemplate(source, tokens=tokens))
        oracle = Oracle(backend, {"default": source}, tokens)
        yield _target(name, f"{BASE}-extended", codec, oracle, format, primary=name.startswith("user+"))


def _end_of_turn(backend: tokenizers.Tokenizer, source: str) -> str:
    """The end-of-turn token of a template of an unknown family: the special token that it writes after an answer."""
    oracle = Oracle(backend, {"default": source}, {"bos_token": "<s>", "eos_token": _NO_EOS})
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
    try:
        found = _SPECIAL.findall(oracle.render(messages, generation=False).partition(_MARK)[2])
    except TemplateRefused:
        found = []
    return str(found[0]) if found else _NO_EOS


def _target(
    name: str,
    vocabulary: str,
    codec: SentinelCodec,
    oracle: Oracle,
    format: ReplyFormat,
    *,
    primary: bool,
    family: str = "",
) -> AuditTarget:
    if not format.end:
        format = _with_end(format, codec)
    ends = [text for id in codec.end_ids if (text := oracle.backend.id_to_token(id))]
    abilities = probe_capabilities(
        oracle,
        format,
        ends,
        other_ends=len(codec.stop_ids) > 1,
        plain_special_text=codec.special_text is SpecialText.PLAIN,
    )
    return AuditTarget(name, vocabulary, codec, oracle, format, abilities, primary, family)


def _with_end(format: ReplyFormat, codec: SentinelCodec) -> ReplyFormat:
    """The format of an unknown family, with the tokenizer's end-of-turn token."""
    end = codec.tokenizer.eos_token or codec.tokenizer.token_of(min(codec.stop_ids)) or ""
    return ReplyFormat(format.name or PLAIN_TEXT.name, end, format.write)
