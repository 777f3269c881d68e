"""Readers of JSON fields whose errors name the invalid field.

Every reader returns a value of the promised type or raises `BadRequest` whose `param` is the path of the field in the
client's notation (`messages[3].tool_calls[0].function.arguments`). Paths are built only on errors. Nothing but
`BadRequest` leaves this module, whatever the JSON holds: types are checked before use, `true` is not a number, and nesting
is bounded so that no later comparison or serialization can exhaust the stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import orjson

from towline.common import exact_json
from towline.errors import BadRequest

MAX_DEPTH = 128
"""Deepest nesting of values that are kept."""
_SERIALIZER_DEPTH = 254
"""orjson refuses anything deeper, which makes it a depth check that runs in C."""
INT32 = 2**31 - 1
INT64 = 2**63 - 1
_MAX_QUOTED = 60
_MAX_IGNORED = 64
"""Maximum number of ignored fields that are recorded, and of characters of their names."""


def path(where: str, key: str) -> str:
    """The path of field `key` of the object at `where` (the empty string is the body)."""
    return f"{where}.{key}" if where else key


def type_name(value: object) -> str:
    """The JSON type of a value, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def quoted(value: str) -> str:
    """A value from the client, shortened for an error message."""
    return f"'{value}'" if len(value) <= _MAX_QUOTED else f"'{value[:_MAX_QUOTED]}…'"


def wrong_type(where: str, expected: str, value: object) -> NoReturn:
    raise BadRequest(
        f"Invalid type for '{where}': expected {expected}, but got {type_name(value)} instead.", param=where
    )


def wrong_value(where: str, reason: str) -> NoReturn:
    raise BadRequest(f"Invalid value for '{where}': {reason}.", param=where)


def missing(where: str) -> NoReturn:
    raise BadRequest(f"Missing required parameter: '{where}'.", param=where)


def check_depth(value: Any, where: str) -> None:
    """Raise for values nested deeper than `MAX_DEPTH`."""
    if too_deep(value):
        wrong_value(where, f"it is nested more than {MAX_DEPTH} levels deep or holds values that JSON cannot express")


def too_deep(value: Any) -> bool:
    """Whether a value is nested deeper than `MAX_DEPTH`, or is not a JSON value at all."""
    for _ in range(_SERIALIZER_DEPTH - MAX_DEPTH):
        value = [value]
    return not exact_json.is_writable(value)


def as_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        wrong_type(where, "an object", value)
    return value


def as_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        wrong_type(where, "an array", value)
    return value


def as_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        wrong_type(where, "a string", value)
    return value


def required_text(source: Mapping[str, Any], key: str, where: str = "") -> str:
    """A string that must be present and not empty."""
    value = source.get(key)
    if value is None:
        missing(path(where, key))
    if as_text(value, path(where, key)) == "":
        wrong_value(path(where, key), "it is empty")
    return str(value)


def optional_text(source: Mapping[str, Any], key: str, where: str = "") -> str | None:
    """A string, or `None` if the field is absent or null."""
    value = source.get(key)
    if value is None or isinstance(value, str):
        return value
    wrong_type(path(where, key), "a string", value)


def optional_flag(source: Mapping[str, Any], key: str, where: str = "") -> bool | None:
    value = source.get(key)
    if value is None or isinstance(value, bool):
        return value
    wrong_type(path(where, key), "a boolean", value)


def optional_object(source: Mapping[str, Any], key: str, where: str = "") -> dict[str, Any] | None:
    value = source.get(key)
    if value is None or isinstance(value, dict):
        return value
    wrong_type(path(where, key), "an object", value)


def optional_list(source: Mapping[str, Any], key: str, where: str = "") -> list[Any] | None:
    value = source.get(key)
    if value is None or isinstance(value, list):
        return value
    wrong_type(path(where, key), "an array", value)


def optional_integer(source: Mapping[str, Any], key: str, low: int, high: int, where: str = "") -> int | None:
    """An integer from `low` to `high`, or `None` if the field is absent or null."""
    value = source.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        wrong_type(path(where, key), "an integer", value)
    if not low <= value <= high:
        wrong_value(path(where, key), f"expected an integer from {low} to {high}")
    return value


def optional_number(source: Mapping[str, Any], key: str, low: float, high: float, where: str = "") -> float | None:
    """A finite number from `low` to `high`, or `None` if the field is absent or null."""
    value = source.get(key)
    return None if value is None else as_number(value, low, high, path(where, key))


def as_number(value: Any, low: float, high: float, where: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        wrong_type(where, "a number", value)
    if not low <= value <= high:
        wrong_value(where, f"expected a number from {low:g} to {high:g}")
    return float(value)


def read_arguments(value: Any, where: str) -> dict[str, Any] | str:
    """The arguments of a call: a JSON object, given directly or as a string; any other string is kept as it is.

    So is one that could not be serialized again; the parsers of replies apply the same limit, so that what a model
    sampled comes back unchanged.
    """
    if isinstance(value, str):
        try:
            parsed = exact_json.loads(value)
        except orjson.JSONDecodeError:
            return value
        if not isinstance(parsed, dict):
            return value
        shallow = value.count("{") + value.count("[") <= MAX_DEPTH
        return parsed if shallow or exact_json.is_writable([parsed]) else value
    if value is None:
        return {}
    if isinstance(value, dict):
        check_depth(value, where)
        return value
    wrong_type(where, "a string or an object", value)


def read_stops(stop: Any, where: str, most: int) -> tuple[str, ...]:
    """Stop sequences: one string or an array of up to `most`."""
    if stop is None:
        return ()
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list):
        wrong_type(where, "a string or an array of strings", stop)
    if len(stop) > most:
        wrong_value(where, f"expected at most {most} sequences")
    for index, sequence in enumerate(stop):
        if as_text(sequence, f"{where}[{index}]") == "":
            wrong_value(f"{where}[{index}]", "it is empty")
    return tuple(stop)


def json_source(value: Any) -> bytes:
    """A value as JSON, to compare it with that of a later request; empty if it cannot be serialized."""
    try:
        return exact_json.dumps(value)
    except TypeError:
        return b""


def ignored_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names of ignored fields as they are recorded: sorted, and limited in number and length."""
    return tuple(name[:_MAX_IGNORED] for name in sorted(names)[:_MAX_IGNORED])
