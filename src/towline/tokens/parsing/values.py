"""JSON values of calls: parsed strictly, typed by the tool's schema, and certain to be serializable again.

Arguments are passed on to harnesses as JSON, so a value only counts if it survives that: no NaN or infinity, no lone
surrogate, no nesting beyond what the serializer accepts. Integers stay exact, whatever their length. Of duplicate keys the
last one wins, as in every common parser.

Some formats write values bare (`<parameter=n>5</parameter>`), and only the tool's JSON Schema tells a string from a number:
a string parameter is the text verbatim, any other is JSON with the text itself as the last resort. Templates print booleans
and null as Python does, so models sample those spellings too; they are accepted where the schema allows such a value.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from towline.common import exact_json
from towline.conversation import Tool
from towline.tokens.parsing.base import SPACE, ParsedCall

_CALL_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})
_MAX_LITERAL = 100_000
"""Longest list or object in Python notation that is parsed, in characters."""
_PYTHON: dict[str, tuple[str, Any]] = {
    "True": ("boolean", True),
    "False": ("boolean", False),
    "None": ("null", None),
}


def decode_at(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON value that begins exactly at `start` and where it ends; `None` if there is none."""
    try:
        return exact_json.decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def decode(text: str) -> tuple[Any] | None:
    """The JSON value that `text` is, in a tuple since the value itself may be `None`; `None` if it is not JSON."""
    try:
        return (exact_json.decoder.decode(text),)
    except (ValueError, RecursionError):
        return None


def encode(value: Any) -> str:
    """JSON as chat templates write it. Raises `ValueError` with the reason for what JSON cannot express."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def bare(value: Any) -> str:
    """A string as it is, any other value as JSON."""
    return value if isinstance(value, str) else encode(value)


def canonical(value: Any) -> bytes | None:
    """The value as harnesses will receive it; `None` if it cannot be serialized."""
    return exact_json.dumps(value) if exact_json.is_writable(value) else None


# Calls


class DeclaredTools:
    """The tools of a request by name. Calls to other tools are calls too; only typing needs to know a tool."""

    __slots__ = ("_tools",)

    def __init__(self, tools: Iterable[Tool]):
        self._tools = {tool.name: tool for tool in tools}

    def custom(self, name: str) -> bool:
        tool = self._tools.get(name)
        return tool is not None and tool.custom

    def known(self, name: str) -> bool:
        return name in self._tools

    def parameters(self, name: str) -> Mapping[str, Any]:
        """The JSON Schema of a tool's arguments; empty if unknown."""
        tool = self._tools.get(name)
        return tool.parameters if tool is not None and isinstance(tool.parameters, dict) else {}


def make_call(name: Any, arguments: Any, declared: DeclaredTools, native_id: Any = "") -> ParsedCall | None:
    """A call, if it has a name and arguments that can be passed on; else `None`.

    Arguments are an object, or the JSON text of one. A custom tool takes any string as it is.
    """
    if not isinstance(name, str) or not name.strip() or not isinstance(native_id, str):
        return None
    if isinstance(arguments, str) and not declared.custom(name):
        inner = decode(arguments)
        arguments = inner[0] if inner else None
        if isinstance(arguments, str):
            return None
    if not isinstance(arguments, dict | str) or canonical([name, arguments, native_id]) is None:
        return None
    return ParsedCall(name, arguments, native_id)


def is_call_object(value: Any) -> bool:
    """Whether a JSON value has the keys of a call and no others: anything else in it would be lost."""
    if not isinstance(value, dict) or not _CALL_KEYS.issuperset(value) or value.get("type", "function") != "function":
        return False
    return not ("arguments" in value and "parameters" in value)


def call_from_object(value: Any, declared: DeclaredTools) -> ParsedCall | None:
    """A call from its JSON object: `name`, and `arguments` or `parameters` if there are any."""
    if not is_call_object(value):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return make_call(value.get("name"), arguments, declared, value.get("id", ""))


def calls_from_list(value: Any, declared: DeclaredTools) -> list[ParsedCall] | None:
    """The calls of a JSON list, or of a single object; `None` unless all are calls: a list is one piece of text."""
    listed = value if isinstance(value, list) else [value]
    calls = [call for item in listed if (call := call_from_object(item, declared)) is not None]
    return calls if calls and len(calls) == len(listed) else None


def named_arguments(call: ParsedCall) -> dict[str, Any]:
    """The arguments of a call in formats that only write named ones."""
    if isinstance(call.arguments, str):
        raise ValueError("the format only takes named arguments, not a text")
    return call.arguments


# Bare values


def typed_value(text: str, parameters: Mapping[str, Any], key: str) -> Any:
    """The value of parameter `key` under the tool's schema `parameters`."""
    return value_as(text, field_schema(parameters, key, parameters), parameters)


def value_as(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value of a bare text under `schema`, whose references are into `root`."""
    allowed = _types(schema, root)
    if allowed == {"string"}:
        return text
    stripped = text.strip(SPACE)
    if not stripped and allowed in ({"object"}, {"array"}):
        return {} if allowed == {"object"} else []
    spelled = _PYTHON.get(stripped)
    if spelled is not None and spelled[0] in allowed:
        return spelled[1]
    read = decode(stripped)
    if read is None and allowed and allowed <= {"object", "array", "null"}:
        read = _python(stripped)
    if read is None or ("string" in allowed and not _is_one_of(read[0], allowed)):
        return text
    return read[0]


def field_schema(schema: Any, key: str, root: Mapping[str, Any]) -> Any:
    """The schema of an object's field; `None` if unknown."""
    for part in _parts(schema, root):
        properties = part.get("properties")
        if isinstance(properties, dict) and key in properties:
            return properties[key]
        if isinstance(part.get("additionalProperties"), dict):
            return part["additionalProperties"]
    return None


def item_schema(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema of an array's items; `None` if unknown."""
    return next((part["items"] for part in _parts(schema, root) if isinstance(part.get("items"), dict)), None)


def _parts(schema: Any, root: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema, and the schemas that it refers to or is a union of."""
    waiting, followed = [schema], set[str]()
    while waiting:
        part = waiting.pop(0)
        if not isinstance(part, dict):
            continue
        yield part
        waiting += _referred(part, root, followed)


def _referred(part: Mapping[str, Any], root: Mapping[str, Any], followed: set[str]) -> list[Any]:
    """The members of a schema's unions, and the target of its reference unless it was `followed`."""
    found = [one for union in ("anyOf", "oneOf", "allOf") for one in _as_list(part.get(union))]
    reference = part.get("$ref")
    if isinstance(reference, str) and reference not in followed:
        followed.add(reference)
        found.append(_resolve(reference, root))
    return found


def _python(text: str) -> tuple[Any] | None:
    """A list or object in Python notation; `None` if it is not one that JSON can express."""
    if len(text) > _MAX_LITERAL or text[:1] not in ("[", "{"):
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
            found.update(kind for kind in _as_list(declared) if isinstance(kind, str))
            continue
        if isinstance(part.get("enum"), list):
            found.update(_type(value) for value in part["enum"])
        if "const" in part:
            found.add(_type(part["const"]))
        waiting += _referred(part, root, followed)
    return found | {"null"} if found and nullable else found


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The target of a reference inside the same schema (`#/$defs/Mode`)."""
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
