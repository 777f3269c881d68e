"""The fields of a chat-completions body besides its messages: tools, sampling, template arguments.

A field is either understood and checked, or its name is recorded as ignored; nothing is dropped silently. Parameters
that would bias sampling away from the model's own distribution are only recorded (`Sampling.other`), and only if they are
not neutral (such as a penalty of 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from towline.conversation import Sampling, Tool
from towline.dialects.base import CachedTools
from towline.dialects.reading import (
    INT32,
    INT64,
    as_list,
    as_number,
    as_object,
    check_depth,
    ignored_names,
    json_source,
    missing,
    optional_flag,
    optional_integer,
    optional_list,
    optional_number,
    optional_object,
    optional_text,
    path,
    quoted,
    read_stops,
    required_text,
    wrong_type,
    wrong_value,
)

MAX_CHOICES = 128
MAX_STOPS = 16
_PENALTIES = {
    "presence_penalty": (-2.0, 2.0, 0.0),
    "frequency_penalty": (-2.0, 2.0, 0.0),
    "repetition_penalty": (0.0, 10.0, 1.0),
    "length_penalty": (-10.0, 10.0, 1.0),
    "min_p": (0.0, 1.0, 0.0),
    "typical_p": (0.0, 1.0, 1.0),
}
"""Minimum, maximum and neutral value."""
_CONSTRAINTS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
    "structured_outputs",
    "structural_tag",
    "grammar",
    "json_schema",
    "regex",
    "ebnf",
    "allowed_token_ids",
    "bad_words",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
)
"""Decoding constraints of engines, recorded as they are."""
_UNDERSTOOD = frozenset(
    (
        *("model", "messages", "stream", "stream_options", "n", "stop", "seed", "temperature", "top_p", "top_k"),
        *("max_tokens", "max_completion_tokens", "logit_bias", "response_format", "logprobs"),
        *("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls"),
        *("chat_template_kwargs", "reasoning_effort", "enable_thinking"),
        *_PENALTIES,
        *_CONSTRAINTS,
    )
)
_RESERVED = frozenset(
    (
        *("messages", "tools", "documents", "conversation", "chat_template", "tokenize", "return_dict"),
        *("add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now"),
    )
)
"""Template arguments that only the renderer may set."""
_TOOL_FIELDS = frozenset(("name", "description", "parameters", "cache_control"))
_MODES = ("none", "auto", "required")


def read_sampling(body: Mapping[str, Any]) -> Sampling:
    """The sampling settings of the body."""
    most = optional_integer(body, "max_tokens", 1, INT32)
    newer = optional_integer(body, "max_completion_tokens", 1, INT32)
    top_k = optional_integer(body, "top_k", -1, INT32)
    count = optional_integer(body, "n", 1, MAX_CHOICES)
    return Sampling(
        temperature=optional_number(body, "temperature", 0, 2),
        top_p=optional_number(body, "top_p", 0, 1),
        top_k=None if top_k is None else max(0, top_k),
        max_tokens=most if newer is None else newer,
        stop=read_stops(body.get("stop"), "stop", MAX_STOPS),
        seed=optional_integer(body, "seed", -INT64 - 1, INT64),
        n=count or 1,
        other=_biases(body),
    )


def read_template_args(body: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for the chat template; `chat_template_kwargs` takes precedence over the other fields."""
    arguments: dict[str, Any] = {}
    if (thinking := optional_flag(body, "enable_thinking")) is not None:
        arguments["enable_thinking"] = thinking
    if (effort := optional_text(body, "reasoning_effort")) is not None:
        arguments["reasoning_effort"] = effort
    if given := optional_object(body, "chat_template_kwargs"):
        check_depth(given, "chat_template_kwargs")
        if taken := sorted(_RESERVED.intersection(given)):
            wrong_value(f"chat_template_kwargs.{taken[0]}", "this argument is set by the server")
        arguments.update(given)
    return arguments


def read_wire(body: Mapping[str, Any]) -> dict[str, Any]:
    """What determines the shape of the answer."""
    wire: dict[str, Any] = {}
    options = optional_object(body, "stream_options")
    if options and optional_flag(options, "include_usage", "stream_options"):
        wire["include_usage"] = True
    if optional_flag(body, "logprobs"):
        wire["logprobs"] = True
    optional_integer(body, "top_logprobs", 0, 20)
    if body.get("functions") and not body.get("tools"):
        wire["functions"] = True
    return wire


def read_ignored(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the fields that have no effect."""
    return ignored_names(name for name in body.keys() - _UNDERSTOOD if body[name] is not None)


def read_tools(body: Mapping[str, Any], cached: CachedTools) -> CachedTools:
    """The declared tools; `cached` itself if the declarations are unchanged."""
    tools = optional_list(body, "tools")
    functions = optional_list(body, "functions")
    if not tools and not functions:
        return cached.without_tools()
    source = json_source([tools, functions])
    if cached.unchanged(source):
        return cached
    read: list[Tool] = []
    ignored: list[str] = []
    for index, item in enumerate(tools or ()):
        where = f"tools[{index}]"
        check_depth(as_object(item, where), where)
        kind = optional_text(item, "type", where)
        if kind is None and "function" not in item:
            missing(path(where, "type"))
        if kind is None or kind == "function":
            read.append(_function(item.get("function"), path(where, "function")))
        elif kind == "custom":
            read.append(_custom(item.get("custom"), path(where, "custom")))
        else:
            ignored.append(f"{where}:{kind[:64]}")
    for index, item in enumerate(functions or ()):
        where = f"functions[{index}]"
        check_depth(item, where)
        read.append(_function(item, where))
    return CachedTools(source, tuple(read), tuple(ignored))


def read_tool_choice(body: Mapping[str, Any], declared: CachedTools) -> str | dict[str, Any] | None:
    """`none`, `auto`, `required`, `{"name": …}` for one tool, or `{"mode": …, "names": […]}` for some of them."""
    choice, where = body.get("tool_choice"), "tool_choice"
    if choice is None:
        choice, where = body.get("function_call"), "function_call"
    if choice is None:
        return None
    names = {tool.name for tool in declared.tools}
    if isinstance(choice, str):
        return read_choice_mode(choice, declared, where)
    if not isinstance(choice, dict):
        wrong_type(where, "a string or an object", choice)
    if where == "function_call":
        return {"name": _declared_name(choice, names, where)}
    kind = required_text(choice, "type", where)
    here = path(where, kind) if kind in ("function", "custom", "allowed_tools") else ""
    if not here:
        if any(entry.endswith(f":{kind[:64]}") for entry in declared.ignored):
            return None
        wrong_value(path(where, "type"), f"{quoted(kind)} is not one of function, custom, allowed_tools")
    details = as_object(choice.get(kind), here)
    if kind != "allowed_tools":
        return {"name": _declared_name(details, names, here)}
    mode = required_text(details, "mode", here)
    if mode not in ("auto", "required"):
        wrong_value(path(here, "mode"), f"{quoted(mode)} is not one of auto, required")
    here = path(here, "tools")
    allowed = []
    for index, item in enumerate(as_list(details.get("tools"), here)):
        entry = f"{here}[{index}]"
        kind = required_text(as_object(item, entry), "type", entry)
        if kind in ("function", "custom"):
            nested = path(entry, kind)
            allowed.append(_declared_name(as_object(item.get(kind), nested), names, nested))
    return {"mode": mode, "names": allowed}


def read_choice_mode(choice: str, declared: CachedTools, where: str) -> str:
    """A tool choice that names no tool."""
    if choice not in _MODES:
        wrong_value(where, f"{quoted(choice)} is not one of {', '.join(_MODES)}")
    if choice == "required" and not declared.tools and not declared.ignored:
        wrong_value(where, "a tool call is required, but no tools are declared")
    return choice


def _declared_name(source: Mapping[str, Any], names: set[str], where: str) -> str:
    name = required_text(source, "name", where)
    if name not in names:
        wrong_value(path(where, "name"), f"no tool named {quoted(name)} is declared")
    return name


def _function(function: Any, where: str) -> Tool:
    if function is None:
        missing(where)
    source = as_object(function, where)
    return Tool(
        required_text(source, "name", where),
        optional_text(source, "description", where) or "",
        optional_object(source, "parameters", where) or {},
        extra={key: value for key, value in source.items() if key not in _TOOL_FIELDS and value is not None},
    )


def _custom(custom: Any, where: str) -> Tool:
    if custom is None:
        missing(where)
    source = as_object(custom, where)
    form = optional_object(source, "format", where)
    return Tool(
        required_text(source, "name", where),
        optional_text(source, "description", where) or "",
        custom=True,
        extra={} if form is None else {"format": form},
    )


def _biases(body: Mapping[str, Any]) -> dict[str, Any]:
    other: dict[str, Any] = {}
    for name, (low, high, neutral) in _PENALTIES.items():
        if name in body and (value := optional_number(body, name, low, high)) not in (None, neutral):
            other[name] = value
    for name in _CONSTRAINTS:
        if (constraint := body.get(name)) is not None:
            check_depth(constraint, name)
            other[name] = constraint
    if bias := optional_object(body, "logit_bias"):
        other["logit_bias"] = {
            _token(token): as_number(value, -100, 100, f"logit_bias.{token}") for token, value in bias.items()
        }
    if (shape := optional_object(body, "response_format")) is not None:
        kind = required_text(shape, "type", "response_format")
        check_depth(shape, "response_format")
        if kind == "json_schema":
            as_object(shape.get("json_schema"), "response_format.json_schema")
        if kind != "text":
            other["response_format"] = shape
    if optional_flag(body, "parallel_tool_calls") is False:
        other["parallel_tool_calls"] = False
    return other


def _token(token: str) -> str:
    if not (token.isascii() and token.isdecimal() and len(token) <= 10):
        wrong_value("logit_bias", f"{quoted(token)} is not a token id")
    return token
