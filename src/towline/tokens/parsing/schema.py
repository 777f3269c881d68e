"""Typing of bare values by the tool's JSON Schema, for formats that write `<parameter=n>5</parameter>`.

A bare `5` may be a string or a number, and only the schema tells: a string parameter is the text verbatim, any other is
JSON with the text itself as the last resort. Templates print booleans and null as Python does, so models sample those
spellings too; they are understood where the schema allows such a value.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from towline.tokens.parsing.base import SPACE
from towline.tokens.parsing.values import canonical, decode

_LONGEST = 100_000
"""Characters of a list or object in Python's notation that is read."""
_PYTHON: dict[str, tuple[str, Any]] = {
    "True": ("boolean", True),
    "False": ("boolean", False),
    "None": ("null", None),
}


def typed(text: str, parameters: Mapping[str, Any], key: str) -> Any:
    """The value of parameter `key` under the tool's schema `parameters`."""
    return typed_as(text, child(parameters, key, parameters), parameters)


def typed_as(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value of a bare text under `schema`, whose references are into `root`."""
    allowed = _types(schema, root)
    if allowed == {"string"}:
        return text
    bare = text.strip(SPACE)
    if not bare and allowed in ({"object"}, {"array"}):
        return {} if allowed == {"object"} else []
    spelled = _PYTHON.get(bare)
    if spelled is not None and spelled[0] in allowed:
        return spelled[1]
    read = decode(bare)
    if read is None and allowed and allowed <= {"object", "array", "null"}:
        read = _python(bare)
    if read is None or ("string" in allowed and not _is_one_of(read[0], allowed)):
        return text
    return read[0]


def child(schema: Any, key: str, root: Mapping[str, Any]) -> Any:
    """The schema of a field of an object; `None` if nothing is known."""
    for part in _parts(schema, root):
        properties = part.get("properties")
        if isinstance(properties, dict) and key in properties:
            return properties[key]
        if isinstance(part.get("additionalProperties"), dict):
            return part["additionalProperties"]
    return None


def items(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema of an array's items; `None` if nothing is known."""
    return next((part["items"] for part in _parts(schema, root) if isinstance(part.get("items"), dict)), None)


def _parts(schema: Any, root: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema and what it refers to or is united of."""
    waiting, followed = [schema], set[str]()
    while waiting:
        part = waiting.pop(0)
        if not isinstance(part, dict):
            continue
        yield part
        for union in ("anyOf", "oneOf", "allOf"):
            waiting += _listed(part.get(union))
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            waiting.append(_resolve(reference, root))


def _python(text: str) -> tuple[Any] | None:
    """A list or an object that was printed as Python does; `None` if it is none that JSON can carry."""
    if len(text) > _LONGEST or text[:1] not in ("[", "{"):
        return None
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    if not isinstance(value, dict | list):
        return None
    written = canonical(value)
    return None if written is None else decode(written.decode())


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    found: set[str] = set()
    nullable = False
    followed: set[str] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        nullable = nullable or part.get("nullable") is True
        declared = part.get("type")
        if declared is not None:
            found.update(kind for kind in _listed(declared) if isinstance(kind, str))
            continue
        if isinstance(part.get("enum"), list):
            found.update(_type(value) for value in part["enum"])
        if "const" in part:
            found.add(_type(part["const"]))
        for union in ("anyOf", "oneOf", "allOf"):
            waiting += _listed(part.get(union))
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            waiting.append(_resolve(reference, root))
    return found | {"null"} if found and nullable else found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference inside the same schema names (`#/$defs/Mode`)."""
    if not reference.startswith("#/"):
        return None
    place: Any = root
    for step in reference[2:].split("/"):
        place = place.get(step) if isinstance(place, dict) else None
    return place


def _type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "array" if isinstance(value, list) else "object"


def _is_one_of(value: Any, allowed: set[str]) -> bool:
    kind = _type(value)
    return kind in allowed or (kind == "integer" and "number" in allowed)
