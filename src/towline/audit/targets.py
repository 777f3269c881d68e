"""What the audit runs on: a tokenizer with a chat template, and what conversations that pair can have.

Real families come with a tokenizer and a template of their own. Every other template is put on one tokenizer that has the
special tokens of all of them added, so that they share a vocabulary and with it one model. What a pair can do (tools,
reasoning, a system prompt, …) is what its family documents and its template shows. The codec under test has no say in it:
what it cannot do and should is a finding.
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
from towline.audit.abilities import Abilities, probe
from towline.audit.families import FAMILIES, TEMPLATES, Family, recognised
from towline.audit.formats import PLAIN as PLAIN_TEXT
from towline.audit.formats import Format
from towline.audit.oracle import Oracle, Refusal, special_tokens
from towline.errors import ConfigError
from towline.tokens.codec import SpecialText
from towline.tokens.jinja import ChatTemplate
from towline.tokens.loading import load_codec, make_codec
from towline.tokens.template import SentinelCodec
from towline.tokens.tokenizer import Tokenizer

BASE = "qwen3"
"""The tokenizer that lends its vocabulary to templates without one."""
PLAIN = f"{BASE}+plain_special_text"
"""That tokenizer with its own template, where text that spells a special token stays text."""

_SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|?>|<[^|<>\s]{1,40}\|>|<[|\uff5c][^|\uff5c<>\n]{1,40}[|\uff5c]>|</?s>|<bos>|<eos>"
    r"|<(?:start|end)_of_(?:turn|utterance|image)>|\[/?[A-Z_]{3,20}\]|<SPECIAL_\d+>"
)
"""Text in a template that is a token of its own in the template's own tokenizer."""
_MARK = "AUDITANSWER"
_NO_EOS = "<|endoftext|>"


@dataclass(slots=True)
class Target:
    """One tokenizer with one template."""

    name: str
    vocabulary: str
    """Names the tokenizer; targets with the same one share a model."""
    codec: SentinelCodec
    oracle: Oracle
    format: Format
    abilities: Abilities
    primary: bool
    """Has a tokenizer of its own, or is the user's: every behaviour is run on it."""
    family: str = ""
    """The family whose own tokenizer and template these are."""

    @property
    def can(self) -> set[str]:
        return {field.name for field in fields(self.abilities) if getattr(self.abilities, field.name)}


def find(
    names: Sequence[str] | None = None, *, tokenizer: Path | None = None, template: Path | None = None
) -> list[Target]:
    """The targets: those named, else all at hand; and the user's own tokenizer and template beside them."""
    known = _known() if names is None or names else {}
    chosen: dict[str, tuple[Path, Format]] = {}
    targets = []
    for name in known if names is None else names:
        if name not in known:
            raise ConfigError(f"no audit target {name!r}; there are: {', '.join(known)}")
        borrowed = known[name]
        if borrowed is not None:
            chosen[name] = borrowed
        elif name == PLAIN:
            folder = assets.tokenizer(BASE)
            codec = load_codec(folder, special_text=SpecialText.PLAIN)
            oracle = Oracle.of_folder(folder)
            targets.append(_target(name, BASE, codec, oracle, FAMILIES[BASE].format, primary=False))
        else:
            targets.append(_real(name, FAMILIES[name]))
    if tokenizer is not None:
        name = f"{tokenizer.name}+{template.stem}" if template else tokenizer.name
        codec, oracle = load_codec(tokenizer, template=template), Oracle.of_folder(tokenizer, template)
        format = recognised(oracle.source)
        targets.append(_target(name, f"user-{tokenizer.name}", codec, oracle, format, primary=True))
    elif template is not None:
        chosen[f"user+{template.stem}"] = template, recognised(template.read_text("utf-8"))
    targets += _borrowed(chosen)
    if not targets:
        raise ConfigError("the audit has no target: name one, or give a tokenizer or a template")
    return targets


def _known() -> dict[str, tuple[Path, Format] | None]:
    """The targets at hand by name, with the file and format of those that are only a template."""
    templates, at_hand = assets.templates(), assets.tokenizers()
    real = [
        name
        for name, family in FAMILIES.items()
        if (family.tokenizer or name) in at_hand and (not family.template or family.template in templates)
    ]
    return {
        **dict.fromkeys([*real, PLAIN]),
        **{f"{BASE}+{name}": (templates[name], format) for name, format in TEMPLATES.items() if name in templates},
    }


def _real(name: str, family: Family) -> Target:
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


def _borrowed(templates: dict[str, tuple[Path, Format]]) -> Iterable[Target]:
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
    """The end of a turn in a template of no known family: the special token that it writes behind an answer."""
    oracle = Oracle(backend, {"default": source}, {"bos_token": "<s>", "eos_token": _NO_EOS})
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
    try:
        found = _SPECIAL.findall(oracle.render(messages, generation=False).partition(_MARK)[2])
    except Refusal:
        found = []
    return str(found[0]) if found else _NO_EOS


def _target(
    name: str, vocabulary: str, codec: SentinelCodec, oracle: Oracle, format: Format, *, primary: bool, family: str = ""
) -> Target:
    if not format.end:
        format = _ended(format, codec)
    ends = [text for id in codec.end_ids if (text := oracle.backend.id_to_token(id))]
    abilities = probe(
        oracle,
        format,
        ends,
        other_ends=len(codec.stop_ids) > 1,
        plain_special_text=codec.special_text is SpecialText.PLAIN,
    )
    return Target(name, vocabulary, codec, oracle, format, abilities, primary, family)


def _ended(format: Format, codec: SentinelCodec) -> Format:
    """A format of no known family, with the tokenizer's own end."""
    end = codec.tokenizer.eos_token or codec.tokenizer.token_of(min(codec.stop_ids)) or ""
    return Format(format.name or PLAIN_TEXT.name, end, format.write)
