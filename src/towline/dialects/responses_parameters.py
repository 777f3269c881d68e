"""What a responses body says besides its input: tools (also those inside input items), sampling, reasoning.

A field is either understood and checked, or its name is recorded as ignored. Tools that run at the provider are left out
and recorded; those of a namespace are offered under `namespace.name`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from towline.conversation import Sampling, Tool
from towline.dialects.base import Declared
from towline.dialects.reading import (
    INT32,
    as_list,
    as_object,
    as_text,
    check_depth,
    optional_flag,
    optional_integer,
    optional_list,
    optional_number,
    optional_object,
    optional_text,
    path,
    quoted,
    required_text,
    wrong_type,
    wrong_value,
)
from towline.dialects.responses_items import qualified

_UNDERSTOOD = frozenset(
    (
        *("model", "input", "instructions", "stream", "stream_options", "max_output_tokens", "temperature", "top_p"),
        *("tools", "tool_choice", "parallel_tool_calls", "reasoning", "text", "include", "store"),
        *("previous_response_id", "metadata", "seed", "stop", "top_k"),
    )
)
_TOOL_FIELDS = frozenset(("type", "name", "description", "parameters", "defer_loading", "cache_control", "format"))
_MODES = ("none", "auto", "required")


def read_sampling(body: Mapping[str, Any]) -> Sampling:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else optional_list(body, "stop") or []
    other: dict[str, Any] = {}
    if optional_flag(body, "parallel_tool_calls") is False:
        other["parallel_tool_calls"] = False
    form = optional_object(optional_object(body, "text") or {}, "format", "text")
    if form is not None and required_text(form, "type", "text.format") != "text":
        check_depth(form, "text.format")
        other["text.format"] = form
    return Sampling(
        temperature=optional_number(body, "temperature", 0, 2),
        top_p=optional_number(body, "top_p", 0, 1),
        top_k=optional_integer(body, "top_k", 0, INT32),
        max_tokens=optional_integer(body, "max_output_tokens", 1, INT32),
        stop=tuple(as_text(one, f"stop[{index}]") for index, one in enumerate(stops)),
        seed=optional_integer(body, "seed", -(2**63), 2**63 - 1),
        other=other,
    )


def read_template_args(body: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = optional_object(body, "reasoning") or {}
    effort = optional_text(reasoning, "effort", "reasoning")
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def read_wire(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the answer repeats or depends on."""
    include = [as_text(one, f"include[{i}]") for i, one in enumerate(optional_list(body, "include") or [])]
    metadata = optional_object(body, "metadata") or {}
    check_depth(metadata, "metadata")
    return {
        "sealed": "reasoning.encrypted_content" in include,
        "logprobs": "message.output_text.logprobs" in include,
        "store": optional_flag(body, "store") is not False,
        "instructions": body.get("instructions"),
        "previous": optional_text(body, "previous_response_id"),
        "metadata": metadata,
        "parallel": optional_flag(body, "parallel_tool_calls") is not False,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
    }


def read_ignored(body: Mapping[str, Any]) -> tuple[str, ...]:
    names = sorted(name for name in body.keys() - _UNDERSTOOD if body[name] is not None)
    return tuple(name[:64] for name in names[:64])


def read_tools(body: Mapping[str, Any], items: Sequence[Any], known: Declared) -> Declared:
    """The declared tools, those of `additional_tools` items last; `known` itself if nothing changed."""
    lists = [("tools", optional_list(body, "tools") or [])]
    for index, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "additional_tools":
            where = f"input[{index}].tools"
            lists.append((where, as_list(item.get("tools"), where)))
    if not any(tools for _, tools in lists):
        return known if not known.source else Declared()
    try:
        source = orjson.dumps([tools for _, tools in lists])
    except TypeError:
        source = b""
    if source and source == known.source:
        return known
    read: dict[str, Tool] = {}
    ignored: list[str] = []
    for where, tools in lists:
        for index, item in enumerate(tools):
            here = f"{where}[{index}]"
            check_depth(as_object(item, here), here)
            for tool in _tools(item, here, ignored, None):
                read.setdefault(tool.name, tool)
    return Declared(source, tuple(read.values()), tuple(ignored))


def _tools(item: Mapping[str, Any], where: str, ignored: list[str], namespace: str | None) -> list[Tool]:
    kind = required_text(item, "type", where)
    if kind == "namespace" and namespace is None:
        name, inner = required_text(item, "name", where), path(where, "tools")
        nested = as_list(item.get("tools"), inner)
        return [
            tool
            for index, one in enumerate(nested)
            for tool in _tools(as_object(one, f"{inner}[{index}]"), f"{inner}[{index}]", ignored, name)
        ]
    if kind not in ("function", "custom"):
        ignored.append(f"{where}:{kind[:64]}")
        return []
    # Chat's nesting under `function` is accepted, as some gateways send it.
    inner_function = item.get("function")
    source: Mapping[str, Any] = inner_function if isinstance(inner_function, dict) else item
    name = qualified(required_text(source, "name", where), namespace)
    description = optional_text(source, "description", where) or ""
    extra = {key: value for key, value in source.items() if key not in _TOOL_FIELDS and value is not None}
    if kind == "custom":
        form = optional_object(source, "format", where)
        return [Tool(name, description, custom=True, extra={**extra, "format": form} if form else extra)]
    return [Tool(name, description, optional_object(source, "parameters", where) or {}, extra=extra)]


def read_tool_choice(body: Mapping[str, Any]) -> str | dict[str, Any] | None:
    choice = body.get("tool_choice")
    if choice is None:
        return None
    if isinstance(choice, str):
        if choice not in _MODES:
            wrong_value("tool_choice", f"{quoted(choice)} is not one of {', '.join(_MODES)}")
        return choice
    if not isinstance(choice, dict):
        wrong_type("tool_choice", "a string or an object", choice)
    check_depth(choice, "tool_choice")
    kind = required_text(choice, "type", "tool_choice")
    if kind in ("function", "custom"):
        return {"name": required_text(choice, "name", "tool_choice")}
    if kind == "allowed_tools":
        mode = required_text(choice, "mode", "tool_choice")
        tools = as_list(choice.get("tools"), "tool_choice.tools")
        names = [one["name"] for one in tools if isinstance(one, dict) and isinstance(one.get("name"), str)]
        return {"mode": mode, "names": names}
    return {"type": kind}
