"""A memory of bounded size: what was put in first is forgotten first."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Bounded(dict[Key, Value]):
    """A dictionary that holds at most `most` entries."""

    def __init__(self, most: int):
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        if key not in self and len(self) >= self._most:
            del self[next(iter(self))]
        super().__setitem__(key, value)
