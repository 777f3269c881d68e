"""Text to ids and back, through the `tokenizers` library itself.

`tokenizer.json` is loaded as it is: wrappers that rebuild a tokenizer from a class name give other ids for some families.
No id is ever added by a post-processor here; what begins or ends a prompt is written by the chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from towline.errors import ConfigError
from towline.tokens.lines import Lines, bytes_of_ids


class Tokenizer:
    """A model's tokenizer with its special tokens by name.

    The attributes and methods in camel-less Hugging Face spelling (`convert_tokens_to_ids`, `eos_token_id`, …) are the
    protocol that the `renderers` package asks for.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None, name: str = ""):
        # Files that were saved while training may hold both; a prompt is never cut, and never filled up.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.config = config or {}
        self.name_or_path = name
        self.added = {token.content: id for id, token in backend.get_added_tokens_decoder().items()}
        """Every added token: the special ones and markup such as `<tool_call>`."""
        self.special = {t.content: id for id, t in backend.get_added_tokens_decoder().items() if t.special}
        self.bos_token = _token_text(self.config.get("bos_token"))
        self.eos_token = _token_text(self.config.get("eos_token"))
        self.pad_token = _token_text(self.config.get("pad_token"))
        self.unk_token = _token_text(self.config.get("unk_token"))

    @classmethod
    def unknown(cls) -> Tokenizer:
        """Stands in where nobody has the model's tokenizer: it knows no token."""
        return cls(tokenizers.Tokenizer(tokenizers.models.BPE()))

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder} holds no tokenizer.json; give a model folder in the Hugging Face layout")
        config_path = folder / "tokenizer_config.json"
        config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
        return cls(tokenizers.Tokenizer.from_file(str(path)), config, folder.name)

    @cached_property
    def size(self) -> int:
        """One more than the highest id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Ids of `text`; text that spells an added token becomes that token, as an engine would do."""
        return self._lines.encode(text)

    @cached_property
    def _lines(self) -> Lines:
        return Lines(self._encode, bytes_of=bytes_of_ids(self.backend))

    def _encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def remember(self, most: int) -> None:
        """Forget what was encoded, and remember up to `most` bytes of it from now on; with 0, nothing."""
        self._lines = Lines(self._encode, bytes_of=bytes_of_ids(self.backend) if most else (), most=most)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` where even the text of a special token is plain text."""
        return self._plain.encode(text, add_special_tokens=False).ids

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        document = json.loads(self.backend.to_str())
        document["added_tokens"] = []
        document["post_processor"] = None
        return tokenizers.Tokenizer.from_str(json.dumps(document))

    @cached_property
    def added_pattern(self) -> re.Pattern[str]:
        """Finds the text of any added token, the longest first."""
        texts = sorted((t for t in self.added if t.strip()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of `ids`, special tokens included unless told otherwise."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_of(self, token: str) -> int | None:
        """The id of a token by its exact text, `None` if it is no single token."""
        return self.backend.token_to_id(token)

    def id_of_text(self, text: str) -> int | None:
        """The id of the one token whose decoded text this is, `None` if it is not one token."""
        ids = self.encode(text)
        return ids[0] if len(ids) == 1 and self.decode(ids) == text else None

    def token_of(self, id: int) -> str | None:
        return self.backend.id_to_token(id)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self.id_of(tokens)
        return [self.id_of(token) for token in tokens]

    @property
    def all_special_tokens(self) -> list[str]:
        return list(self.special)

    @property
    def eos_token_id(self) -> int | None:
        return self.id_of(self.eos_token) if self.eos_token else None

    @property
    def unk_token_id(self) -> int | None:
        return self.id_of(self.unk_token) if self.unk_token else None


def _token_text(value: Any) -> str:
    """A token in tokenizer_config.json is a string, an object with `content`, or null."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
