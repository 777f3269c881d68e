"""The fields of a Google body besides its contents: tools, generation config, thinking.

A field is either understood and checked, or its name is recorded as ignored; nothing is dropped silently. Parameters that
would bias sampling away from the model's own distribution are only recorded (`Sampling.other`). Names may be in camel case
or snake case at any level: Google's Python client writes the outer ones in camel case and the inner ones in snake case.

Google's schemas are converted to JSON Schema, so that a model sees the same tool whatever dialect declared it. They are a
variant of OpenAPI's: types in capitals, `nullable`, counts that may be strings, references without their dollar sign, names
in snake case from its Python client. What is JSON Schema already stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from towline.conversation import Sampling, Tool
from towline.dialects.base import CachedTools
from towline.dialects.reading import (
    INT32,
    INT64,
    as_list,
    as_object,
    as_text,
    check_depth,
    ignored_names,
    json_source,
    missing,
    optional_flag,
    optional_integer,
    optional_list,
    optional_number,
    optional_text,
    path,
    quoted,
    read_stops,
    required_text,
    wrong_value,
)


@cache
def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def field(source: Mapping[str, Any], name: str) -> Any:
    """A field by its camel-case name or its snake-case spelling; `None` if it is absent or null."""
    value = source.get(name)
    return source.get(_snake(name)) if value is None else value


def camel(name: str) -> str:
    """The camel-case spelling of a name."""
    if "_" not in name:
        return name
    head, *rest = name.split("_")
    return head + "".join(part[:1].upper() + part[1:] for part in rest)


def needed_text(source: Mapping[str, Any], name: str, where: str) -> str:
    """A string that must be present and not empty, in either spelling."""
    value = field(source, name)
    if value is None:
        missing(path(where, name))
    if as_text(value, path(where, name)) == "":
        wrong_value(path(where, name), "it is empty")
    return str(value)


_TYPES = frozenset(("STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"))
_UNSPECIFIED = "TYPE_UNSPECIFIED"
_NULL = {"type": "null"}
_COUNTS = frozenset(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"))
_NAMES = frozenset((*_COUNTS, "anyOf", "propertyOrdering", "additionalProperties"))
"""Fields of more than one word; other names keep their spelling."""
_REFERENCES = {"defs": "$defs", "ref": "$ref"}
_MAPS = frozenset(("properties", "$defs"))
_DATA = frozenset(("enum", "default", "example", "examples", "const", "required", "propertyOrdering"))
"""Fields that hold values, not schemas."""


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
    """Sort the properties by Google's `propertyOrdering` field."""
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


_CONFIG = "generationConfig"
_THINKING = "generationConfig.thinkingConfig"
_CALLING = "toolConfig.functionCallingConfig"
_UNDERSTOOD = {
    "": ("contents", "systemInstruction", "tools", "toolConfig", _CONFIG, "model"),
    _CONFIG: (
        *("temperature", "topP", "topK", "maxOutputTokens", "stopSequences", "candidateCount", "seed"),
        *("presencePenalty", "frequencyPenalty", "responseMimeType", "responseSchema", "responseJsonSchema"),
        *("responseFormat", "thinkingConfig", "responseLogprobs"),
    ),
    _THINKING: ("includeThoughts", "thinkingBudget", "thinkingLevel"),
    "toolConfig": ("functionCallingConfig",),
    _CALLING: ("mode", "allowedFunctionNames"),
}
"""Fields that have an effect, by the path of their object."""
_CONSTRAINTS = ("responseSchema", "responseJsonSchema", "responseFormat")
_MAX_CANDIDATES = 8
_MAX_STOPS = 16
_MODES = {"AUTO": "auto", "ANY": "required", "NONE": "none", "VALIDATED": "auto", "MODE_UNSPECIFIED": None}
_TOOL_FIELDS = frozenset(("name", "description", "parameters", "parametersJsonSchema"))


def _object(body: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The object at a path of the body, with camel-case names; empty if absent."""
    value: Any = body
    here = ""
    for name in filter(None, where.split(".")):
        here = path(here, name)
        value = field(value, name)
        if value is None:
            return {}
        as_object(value, here)
    return {camel(name): item for name, item in value.items()}


def read_sampling(body: Mapping[str, Any]) -> Sampling:
    config, where = _object(body, _CONFIG), _CONFIG
    top_k = config.get("topK")
    if isinstance(top_k, float) and top_k.is_integer():
        config["topK"] = int(top_k)
    return Sampling(
        temperature=optional_number(config, "temperature", 0, 2, where),
        top_p=optional_number(config, "topP", 0, 1, where),
        top_k=optional_integer(config, "topK", 0, INT32, where),
        max_tokens=optional_integer(config, "maxOutputTokens", 1, INT32, where),
        stop=read_stops(optional_list(config, "stopSequences", where), path(where, "stopSequences"), _MAX_STOPS),
        seed=optional_integer(config, "seed", -INT64 - 1, INT64, where),
        n=optional_integer(config, "candidateCount", 1, _MAX_CANDIDATES, where) or 1,
        other=_biases(config, where),
    )


def _biases(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    other: dict[str, Any] = {}
    for name in ("presencePenalty", "frequencyPenalty"):
        if (value := optional_number(config, name, -2, 2, where)) not in (None, 0.0):
            other[name] = value
    if (mime := optional_text(config, "responseMimeType", where)) not in (None, "", "text/plain"):
        other["responseMimeType"] = mime
    for name in _CONSTRAINTS:
        if (schema := config.get(name)) is not None:
            check_depth(schema, path(where, name))
            other[name] = schema
    return other


def read_template_args(body: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for the chat template. A thinking budget of 0 disables thinking; any other is only recorded."""
    thinking = _object(body, _THINKING)
    arguments: dict[str, Any] = {}
    if optional_integer(thinking, "thinkingBudget", -1, INT32, _THINKING) == 0:
        arguments["enable_thinking"] = False
    level = optional_text(thinking, "thinkingLevel", _THINKING)
    if level and level != "THINKING_LEVEL_UNSPECIFIED":
        arguments["reasoning_effort"] = level.lower()
    return arguments


def read_wire(body: Mapping[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
    """What determines the shape of the answer."""
    wire: dict[str, Any] = {}
    if query.get("alt") == "sse":
        wire["sse"] = True
    if optional_flag(_object(body, _THINKING), "includeThoughts", _THINKING):
        wire["thoughts"] = True
    if optional_flag(_object(body, _CONFIG), "responseLogprobs", _CONFIG):
        wire["logprobs"] = True
    return wire


def read_ignored(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the fields that have no effect."""
    names = [
        path(where, name)
        for where, understood in _UNDERSTOOD.items()
        for name, value in _object(body, where).items()
        if value is not None and name not in understood
    ]
    if _object(body, _THINKING).get("thinkingBudget") not in (None, -1, 0):
        names.append(path(_THINKING, "thinkingBudget"))
    if _mode(body) == "VALIDATED":
        names.append(f"{_CALLING}.mode:VALIDATED")
    return ignored_names(names)


def read_tools(body: Mapping[str, Any], cached: CachedTools) -> CachedTools:
    """The declared functions; `cached` itself if the declarations are unchanged. Google's own tools are left out."""
    tools = body.get("tools")
    if not tools:
        return cached.without_tools()
    listed = [tools] if isinstance(tools, dict) else as_list(tools, "tools")
    source = json_source(listed)
    if cached.unchanged(source):
        return cached
    read: list[Tool] = []
    ignored: list[str] = []
    for index, item in enumerate(listed):
        where = f"tools[{index}]"
        check_depth(as_object(item, where), where)
        for name, value in item.items():
            if value is None:
                continue
            if camel(name) != "functionDeclarations":
                ignored.append(f"{where}:{camel(name)[:64]}")
                continue
            here = path(where, "functionDeclarations")
            declarations = [value] if isinstance(value, dict) else as_list(value, here)
            read += [_declaration(one, f"{here}[{place}]") for place, one in enumerate(declarations)]
    return CachedTools(source, tuple(read), tuple(ignored))


def _declaration(declaration: Any, where: str) -> Tool:
    source = {camel(name): value for name, value in as_object(declaration, where).items()}
    schema = source.get("parametersJsonSchema")
    if schema is not None:
        schema = as_object(schema, path(where, "parametersJsonSchema"))
    elif (given := source.get("parameters")) is not None:
        schema = json_schema(as_object(given, path(where, "parameters")))
    return Tool(
        required_text(source, "name", where),
        optional_text(source, "description", where) or "",
        schema or {},
        extra={name: value for name, value in source.items() if name not in _TOOL_FIELDS and value is not None},
    )


def _mode(body: Mapping[str, Any]) -> str | None:
    mode = optional_text(_object(body, _CALLING), "mode", _CALLING)
    return None if mode is None else mode.upper()


def read_tool_choice(body: Mapping[str, Any], declared: CachedTools) -> str | dict[str, Any] | None:
    """`none`, `auto`, `required`, `{"name": …}` for one function, or `{"mode": …, "names": […]}` for some of them."""
    mode = _mode(body)
    if mode is None:
        return None
    if mode not in _MODES:
        wrong_value(path(_CALLING, "mode"), f"{quoted(mode)} is not one of {', '.join(_MODES)}")
    chosen = _MODES[mode]
    where = path(_CALLING, "allowedFunctionNames")
    allowed = optional_list(_object(body, _CALLING), "allowedFunctionNames", _CALLING) or []
    names = [as_text(name, f"{where}[{index}]") for index, name in enumerate(allowed)]
    if chosen in (None, "none"):
        return chosen
    known = {tool.name for tool in declared.tools}
    # Google's own tools, which are left out, may add functions.
    if not declared.ignored:
        if chosen == "required" and not known:
            wrong_value(path(_CALLING, "mode"), "a call is required, but no functions are declared")
        for index, name in enumerate(names):
            if name not in known:
                wrong_value(f"{where}[{index}]", f"no function named {quoted(name)} is declared")
    if not names:
        return chosen
    return {"name": names[0]} if chosen == "required" and len(names) == 1 else {"mode": chosen, "names": names}
