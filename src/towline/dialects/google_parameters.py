"""What a Google body says besides its contents: tools, generation config, thinking.

A field is either understood and checked, or its name is recorded as ignored. Schemas in Google's own dialect (`STRING`,
`OBJECT`) are read as the JSON Schema that they mean, so that a model is shown the same tool whatever dialect declared it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from towline.conversation import Sampling, Tool
from towline.dialects.base import Declared
from towline.dialects.google_items import field
from towline.dialects.reading import (
    INT32,
    INT64,
    as_list,
    as_object,
    as_text,
    check_depth,
    optional_flag,
    optional_integer,
    optional_number,
    optional_text,
    path,
    quoted,
    required_text,
    wrong_type,
    wrong_value,
)

_TYPES = {"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"}
_BODY = frozenset(("contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "model"))
_CONFIG = frozenset(
    (
        *(
            "temperature",
            "topP",
            "topK",
            "maxOutputTokens",
            "stopSequences",
            "candidateCount",
            "seed",
            "thinkingConfig",
        ),
        *("responseMimeType", "responseSchema", "responseJsonSchema", "presencePenalty", "frequencyPenalty"),
    )
)
_MOST_CANDIDATES = 8
_MOST_STOPS = 16
_MODES = {"AUTO": "auto", "ANY": "required", "NONE": "none", "VALIDATED": "auto", "MODE_UNSPECIFIED": None}


def _optional(source: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    value = field(source, name)
    if value is None:
        return {}
    return as_object(value, path(where, name))


def config_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The generation config with camel-case names."""
    config = _optional(body, "generationConfig", "")
    return {_camel(name): value for name, value in config.items()}


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part[:1].upper() + part[1:] for part in rest)


def read_sampling(body: Mapping[str, Any]) -> Sampling:
    config, where = config_of(body), "generationConfig"
    stops = config.get("stopSequences")
    sequences = [] if stops is None else as_list(stops, path(where, "stopSequences"))
    if len(sequences) > _MOST_STOPS:
        wrong_value(path(where, "stopSequences"), f"expected at most {_MOST_STOPS} sequences")
    for index, stop in enumerate(sequences):
        if as_text(stop, f"{where}.stopSequences[{index}]") == "":
            wrong_value(f"{where}.stopSequences[{index}]", "it is empty")
    top_k = config.get("topK")
    if isinstance(top_k, float) and top_k.is_integer():
        config["topK"] = int(top_k)
    return Sampling(
        temperature=optional_number(config, "temperature", 0, 2, where),
        top_p=optional_number(config, "topP", 0, 1, where),
        top_k=optional_integer(config, "topK", 0, INT32, where),
        max_tokens=optional_integer(config, "maxOutputTokens", 1, INT32, where),
        stop=tuple(sequences),
        seed=optional_integer(config, "seed", -INT64 - 1, INT64, where),
        n=optional_integer(config, "candidateCount", 1, _MOST_CANDIDATES, where) or 1,
        other=_constraints(config, where),
    )


def _constraints(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    other: dict[str, Any] = {}
    for name in ("presencePenalty", "frequencyPenalty"):
        if (value := optional_number(config, name, -2, 2, where)) not in (None, 0.0):
            other[name] = value
    mime = optional_text(config, "responseMimeType", where)
    if mime not in (None, "", "text/plain"):
        other["responseMimeType"] = mime
    for name in ("responseSchema", "responseJsonSchema"):
        if (schema := config.get(name)) is not None:
            check_depth(schema, path(where, name))
            other[name] = schema
    return other


def read_template_args(body: Mapping[str, Any]) -> dict[str, Any]:
    thinking = _optional(config_of(body), "thinkingConfig", "generationConfig")
    where = "generationConfig.thinkingConfig"
    arguments: dict[str, Any] = {}
    budget = field(thinking, "thinkingBudget")
    if budget is not None:
        if not isinstance(budget, int) or isinstance(budget, bool):
            wrong_type(path(where, "thinkingBudget"), "an integer", budget)
        if budget == 0:
            arguments["enable_thinking"] = False
    level = field(thinking, "thinkingLevel")
    if level is not None:
        arguments["reasoning_effort"] = as_text(level, path(where, "thinkingLevel")).lower()
    return arguments


def includes_thoughts(body: Mapping[str, Any]) -> bool:
    thinking = _optional(config_of(body), "thinkingConfig", "generationConfig")
    given = {"includeThoughts": field(thinking, "includeThoughts")}
    return bool(optional_flag(given, "includeThoughts", "generationConfig.thinkingConfig"))


def read_ignored(body: Mapping[str, Any]) -> tuple[str, ...]:
    names = [name for name in body if body[name] is not None and _camel(name) not in _BODY]
    names += [
        f"generationConfig.{name}"
        for name, value in config_of(body).items()
        if value is not None and name not in _CONFIG
    ]
    return tuple(name[:64] for name in sorted(names)[:64])


def read_tools(body: Mapping[str, Any], known: Declared) -> Declared:
    """The declared functions; `known` itself if the declarations are the same. Google's own tools are left out."""
    tools = body.get("tools")
    if not tools:
        return known if not known.source else Declared()
    listed = tools if isinstance(tools, list) else [as_object(tools, "tools")]
    try:
        source = orjson.dumps(listed)
    except TypeError:
        source = b""
    if source and source == known.source:
        return known
    read: list[Tool] = []
    ignored: list[str] = []
    for index, item in enumerate(listed):
        where = f"tools[{index}]"
        check_depth(as_object(item, where), where)
        for name, value in item.items():
            if _camel(name) != "functionDeclarations":
                ignored.append(f"{where}:{name[:64]}")
            elif value is not None:
                here = path(where, "functionDeclarations")
                declarations = as_list(value, here)
                read += [_declaration(one, f"{here}[{place}]") for place, one in enumerate(declarations)]
    return Declared(source, tuple(read), tuple(ignored))


def _declaration(declaration: Any, where: str) -> Tool:
    source = as_object(declaration, where)
    schema = field(source, "parametersJsonSchema")
    if schema is None:
        schema = source.get("parameters")
        schema = {} if schema is None else json_schema(as_object(schema, path(where, "parameters")))
    elif not isinstance(schema, dict):
        wrong_type(path(where, "parametersJsonSchema"), "an object", schema)
    return Tool(required_text(source, "name", where), optional_text(source, "description", where) or "", schema)


def json_schema(schema: Any) -> Any:
    """Google's schema as JSON Schema: type names in lower case, all else as it is."""
    if isinstance(schema, list):
        return [json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    read: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "type" and isinstance(value, str) and value in _TYPES:
            read[name] = value.lower()
        elif name == "properties" and isinstance(value, dict):
            read[name] = {key: json_schema(item) for key, item in value.items()}
        elif name in ("enum", "default", "example", "required", "propertyOrdering"):
            read[name] = value
        else:
            read[name] = json_schema(value)
    return read


def read_tool_choice(body: Mapping[str, Any]) -> str | dict[str, Any] | None:
    calling = _optional(_optional(body, "toolConfig", ""), "functionCallingConfig", "toolConfig")
    where = "toolConfig.functionCallingConfig"
    mode = optional_text(calling, "mode", where)
    if mode is None:
        return None
    if mode.upper() not in _MODES:
        wrong_value(path(where, "mode"), f"{quoted(mode)} is not one of {', '.join(_MODES)}")
    names = field(calling, "allowedFunctionNames")
    chosen = _MODES[mode.upper()]
    if not names or chosen is None:
        return chosen
    here = path(where, "allowedFunctionNames")
    return {"mode": chosen, "names": [as_text(n, f"{here}[{i}]") for i, n in enumerate(as_list(names, here))]}
