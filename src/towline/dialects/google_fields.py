"""Names of fields on Google's wire: camel case or snake case, as each client likes, down to the last level."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from towline.dialects.reading import as_text, missing, path, wrong_value


@cache
def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def field(source: Mapping[str, Any], name: str) -> Any:
    """A field by its camel-case name, or by the same in snake case; `None` if it is absent or null."""
    value = source.get(name)
    return source.get(_snake(name)) if value is None else value


def camel(name: str) -> str:
    """The camel-case spelling of a client's name."""
    if "_" not in name:
        return name
    head, *rest = name.split("_")
    return head + "".join(part[:1].upper() + part[1:] for part in rest)


def needed_text(source: Mapping[str, Any], name: str, where: str) -> str:
    """A string that must be there and not be empty."""
    value = field(source, name)
    if value is None:
        missing(path(where, name))
    if as_text(value, path(where, name)) == "":
        wrong_value(path(where, name), "it is empty")
    return str(value)
