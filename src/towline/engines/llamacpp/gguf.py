"""The metadata of a GGUF file: its header, read without the weights behind it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from towline.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_LONGEST = 1 << 30
"""No text and no list is longer; a file that says so is broken."""
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class Gguf:
    """One file: where it is, and what its header says."""

    def __init__(self, path: Path, metadata: dict[str, Any]):
        self.path = path
        self.metadata = metadata

    @classmethod
    def find(cls, place: Path) -> Gguf:
        """The file itself, or the one GGUF file of a folder (of a model in parts, the first)."""
        if place.is_dir():
            found = sorted(place.glob("*.gguf"))
            first = [path for path in found if "-00001-of-" in path.name] or found
            if len(first) != 1:
                raise ConfigError(f"{place} holds {len(first)} GGUF files; name the one to use")
            place = first[0]
        return cls.read(place)

    @classmethod
    def read(cls, path: Path) -> Gguf:
        try:
            with path.open("rb") as file:
                return cls(path, _header(file))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except (struct.error, KeyError, ValueError) as error:
            raise ConfigError(f"{path} is no GGUF file that can be read: {error}") from error

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def context(self) -> int:
        """The longest context that the model was trained for."""
        return int(self.metadata.get(f"{self.architecture}.context_length", 0))

    @property
    def tokens(self) -> list[str]:
        """The vocabulary, by id."""
        return self.metadata.get("tokenizer.ggml.tokens") or []

    @property
    def token_types(self) -> list[int]:
        return self.metadata.get("tokenizer.ggml.token_type") or [1] * len(self.tokens)


def _header(file: BinaryIO) -> dict[str, Any]:
    if file.read(4) != _MAGIC:
        raise ValueError("it does not begin with `GGUF`")
    version, _, count = _unpack(file, "<IQQ")
    if version not in _VERSIONS:
        raise ValueError(f"version {version} is not known")
    return {_text(file): _value(file, _unpack(file, "<I")[0]) for _ in range(count)}


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind != _ARRAY:
        return _unpack(file, _NUMBERS[kind])[0]
    of, length = _unpack(file, "<IQ")
    if length > _LONGEST:
        raise ValueError(f"a list of {length} entries")
    if of in _NUMBERS:
        return list(_unpack(file, f"<{length}{_NUMBERS[of][1]}"))
    read: Callable[[BinaryIO], Any] = _text if of == _STRING else lambda file: _value(file, of)
    return [read(file) for _ in range(length)]


def _text(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<Q")
    if length > _LONGEST:
        raise ValueError(f"a text of {length} bytes")
    return file.read(length).decode("utf-8", "replace")


def _unpack(file: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(form, file.read(struct.calcsize(form)))
