"""Mappings: deep merge, and a dict of bounded size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar


def deep_merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `changes`; mappings are merged at every depth, all other values replaced."""
    merged = dict(base)
    for name, value in changes.items():
        old = merged.get(name)
        nested = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[name] = deep_merge(merged[name], value) if nested else value
    return merged


Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedDict(dict[Key, Value]):
    """A dictionary with at most `max_entries` entries; the entry added first is evicted first."""

    def __init__(self, max_entries: int):
        super().__init__()
        self._max_entries = max_entries

    def __setitem__(self, key: Key, value: Value) -> None:
        if key not in self and len(self) >= self._max_entries:
            del self[next(iter(self))]
        super().__setitem__(key, value)
