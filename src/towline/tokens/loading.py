"""Load the codec of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from towline.errors import ConfigError
from towline.tokens.codec import SpecialText
from towline.tokens.templates.chat_template import ChatTemplate
from towline.tokens.templates.family import FamilyCodec, detect_family
from towline.tokens.templates.sentinel import SentinelCodec
from towline.tokens.tokenizer import Tokenizer

_DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")
"""End a turn in every tokenizer that has them: they are never content."""
_TURN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eot|>", "<|call|>", "<|return|>", "<|user|>", "<|observation|>", "<end_of_turn>",
    "<turn|>", "<|tool_response>", "</s>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "[e~[", "<|assistant_end|>",
    "<|tools_suffix|>", "<|message_sep|>", "<|end_of_msg|>", "<seed:eos>", "<SPECIAL_12>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
"""End-of-turn tokens by family; one counts if the tokenizer has it and the template writes it."""
_MESSAGE_ENDS = ("<|end|>",)
"""End a message in history; in families with channels a turn continues after them."""


def load_codec(
    folder: Path,
    *,
    template: Path | None = None,
    renderer: str = "auto",
    format: str | None = None,
    special_text: SpecialText = SpecialText.ENGINE,
) -> SentinelCodec:
    """The codec of a model folder. `renderer` is `auto`, `sentinel`, or a family's name."""
    tokenizer = Tokenizer.load(folder)
    names = {key: getattr(tokenizer, key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    if template is None:
        chat = ChatTemplate.load(folder, tokenizer.config, names)
    else:
        chat = ChatTemplate(template.read_text("utf-8"), tokens=names)
    return make_codec(tokenizer, chat, eos_ids(folder), renderer=renderer, format=format, special_text=special_text)


def make_codec(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    eos: frozenset[int] = frozenset(),
    *,
    renderer: str = "auto",
    format: str | None = None,
    special_text: SpecialText = SpecialText.ENGINE,
) -> SentinelCodec:
    channels = "<|channel|>" in template.source
    stops = set(eos)
    if tokenizer.eos_token_id is not None:
        stops.add(tokenizer.eos_token_id)
    ends = _TURN_ENDS if channels else _TURN_ENDS + _MESSAGE_ENDS
    written = [name for name in ends if name in template.source]
    stops |= {id for name in (*written, *_DOCUMENT_ENDS) if (id := tokenizer.id_of(name)) is not None}
    if not stops:
        raise ConfigError("no end-of-turn token found: set eos_token_id in generation_config.json")
    closers = frozenset(id for name in _MESSAGE_ENDS if (id := tokenizer.id_of(name)) is not None)
    options: dict[str, Any] = {"closers": closers, "format": format, "special_text": special_text}
    codec = SentinelCodec(tokenizer, template, frozenset(stops), **options)
    family = detect_family(codec) if renderer == "auto" else renderer
    if family is None or family == "sentinel":
        return codec
    return FamilyCodec(tokenizer, template, frozenset(stops), family=family, **options)


def eos_ids(folder: Path) -> frozenset[int]:
    """End-of-sequence ids from `generation_config.json` and `config.json`."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            value: Any = json.loads(path.read_text("utf-8")).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    return frozenset(ids)
