"""Google's schemas as JSON Schema, so that a model is shown the same tool whatever dialect declared it.

Google's are a dialect of OpenAPI's: types in capitals, `nullable`, counts that may be strings, references without their
dollar sign, names in snake case from its Python client. What is JSON Schema already stays as it is.
"""

from __future__ import annotations

from typing import Any

from towline.dialects.google_fields import camel

_TYPES = frozenset(("STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"))
_UNSPECIFIED = "TYPE_UNSPECIFIED"
_NULL = {"type": "null"}
_COUNTS = frozenset(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"))
_NAMES = frozenset((*_COUNTS, "anyOf", "propertyOrdering", "additionalProperties"))
"""Fields of more than one word; a name that is none of these is not respelled."""
_REFERENCES = {"defs": "$defs", "ref": "$ref"}
_MAPS = frozenset(("properties", "$defs"))
_DATA = frozenset(("enum", "default", "example", "examples", "const", "required", "propertyOrdering"))
"""Fields that hold values, in which nothing is a schema."""


def json_schema(schema: Any) -> Any:
    if isinstance(schema, list):
        return [json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    read: dict[str, Any] = {}
    for given, value in schema.items():
        name = _spelled(given)
        if name in _DATA:
            read[name] = value
        elif name in _MAPS and isinstance(value, dict):
            read[name] = {key: json_schema(item) for key, item in value.items()}
        elif name in _COUNTS:
            read[name] = int(value) if isinstance(value, str) and _is_count(value) else value
        elif name == "type" and isinstance(value, str):
            if value != _UNSPECIFIED:
                read[name] = value.lower() if value in _TYPES else value
        else:
            read[name] = json_schema(value)
    _order(read)
    _allow_null(read)
    return read


def _spelled(name: str) -> str:
    return camel(name) if camel(name) in _NAMES else _REFERENCES.get(name, name)


def _is_count(value: str) -> bool:
    return value.isascii() and value.isdecimal() and len(value) <= 18


def _order(schema: dict[str, Any]) -> None:
    """Put the properties into the order that Google's extra field gives them."""
    ordering = schema.get("propertyOrdering")
    properties = schema.get("properties")
    if isinstance(ordering, list) and isinstance(properties, dict) and all(isinstance(name, str) for name in ordering):
        del schema["propertyOrdering"]
        first = {name: properties[name] for name in ordering if name in properties}
        schema["properties"] = {**first, **properties}


def _allow_null(schema: dict[str, Any]) -> None:
    if schema.get("nullable") is not True:
        return
    kind, choices = schema.get("type"), schema.get("anyOf")
    if isinstance(kind, str):
        schema["type"] = [kind, "null"]
    if isinstance(choices, list) and _NULL not in choices:
        schema["anyOf"] = [*choices, _NULL]
    if isinstance(kind, str) or isinstance(choices, list):
        del schema["nullable"]
