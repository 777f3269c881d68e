"""The fields of a responses body besides its input and tools: sampling, reasoning, and what the answer repeats.

A field is either understood and checked, or its name is recorded as ignored, also inside `reasoning`, `text` and `include`.
A field that names history or prompts stored at the provider is refused: the model would miss them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from towline.conversation import Sampling
from towline.dialects.chat.parameters import MAX_STOPS
from towline.dialects.chat.parameters import read_template_args as read_chat_template_args
from towline.dialects.reading import (
    INT32,
    INT64,
    as_text,
    check_depth,
    ignored_names,
    optional_flag,
    optional_integer,
    optional_list,
    optional_number,
    optional_object,
    optional_text,
    read_stops,
    required_text,
    wrong_value,
)

_UNDERSTOOD = frozenset(
    (
        *("model", "input", "instructions", "stream", "stream_options", "max_output_tokens", "temperature", "top_p"),
        *("tools", "tool_choice", "parallel_tool_calls", "reasoning", "text", "include", "store", "metadata"),
        *("previous_response_id", "seed", "stop", "top_k", "chat_template_kwargs", "enable_thinking", "generate"),
        *("reasoning_effort", "max_tool_calls", "prompt_cache_key", "safety_identifier", "user"),
        *("prompt_cache_retention", "conversation", "prompt"),
    )
)
_REFUSED = {
    "conversation": "conversations are not stored here: send the items, or previous_response_id",
    "prompt": "prompts are not stored here: send its text",
}
_INCLUDE = {"reasoning.encrypted_content": "sealed", "message.output_text.logprobs": "logprobs"}
"""Supported values of `include`, and their names in `Request.wire`."""
_REASONING = frozenset(("effort", "summary"))


def read_sampling(body: Mapping[str, Any]) -> Sampling:
    """The sampling settings of the body. Servers compatible with OpenAI's responses also take `stop` and `top_k`."""
    top_k = optional_integer(body, "top_k", -1, INT32)
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
        top_k=None if top_k is None else max(0, top_k),
        max_tokens=optional_integer(body, "max_output_tokens", 1, INT32),
        stop=read_stops(body.get("stop"), "stop", MAX_STOPS),
        seed=optional_integer(body, "seed", -INT64 - 1, INT64),
        other=other,
    )


def read_template_args(body: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for the chat template; `chat_template_kwargs` takes precedence."""
    given = read_chat_template_args(body)
    reasoning = optional_object(body, "reasoning") or {}
    effort = optional_text(reasoning, "effort", "reasoning")
    if effort is None:
        return given
    return {"enable_thinking": False, **given} if effort == "none" else {"reasoning_effort": effort, **given}


def read_wire(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the answer repeats or depends on."""
    for name in ("metadata", "reasoning", "text", "tool_choice"):
        check_depth(body.get(name), name)
    wire: dict[str, Any] = {
        "store": optional_flag(body, "store") is not False,
        "instructions": optional_text(body, "instructions"),
        "previous": optional_text(body, "previous_response_id"),
        "metadata": optional_object(body, "metadata") or {},
        "parallel": optional_flag(body, "parallel_tool_calls") is not False,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": optional_list(body, "tools") or [],
        "text": optional_object(body, "text") or {},
        "reasoning": optional_object(body, "reasoning") or {},
        "max_tool_calls": optional_integer(body, "max_tool_calls", 0, INT32),
    }
    for name in ("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"):
        wire[name] = optional_text(body, name)
    wire.update({_INCLUDE[name]: True for name in _included(body) if name in _INCLUDE})
    return wire


def read_ignored(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the fields that have no effect; refuses those that cannot be ignored."""
    for name, reason in _REFUSED.items():
        if body.get(name) is not None:
            wrong_value(name, reason)
    optional_flag(optional_object(body, "stream_options") or {}, "include_obfuscation", "stream_options")
    optional_integer(body, "top_logprobs", 0, 20)
    optional_flag(body, "background")
    cache = optional_object(body, "prompt_cache_options") or {}
    if optional_flag(cache, "prewarm", "prompt_cache_options"):
        wrong_value("prompt_cache_options.prewarm", "a request without an answer is not supported")
    if optional_flag(body, "generate") is False:
        wrong_value("generate", "a request without an answer is not supported")
    names = [name for name in body.keys() - _UNDERSTOOD if body[name] is not None and not _is_default(name, body[name])]
    for name, understood in (("reasoning", _REASONING), ("text", ("format",))):
        inner = optional_object(body, name) or {}
        names += [f"{name}.{key}" for key in inner if key not in understood and inner[key] is not None]
    names += [f"include:{name}" for name in _included(body) if name not in _INCLUDE]
    return ignored_names(names)


def _included(body: Mapping[str, Any]) -> list[str]:
    return [as_text(one, f"include[{index}]") for index, one in enumerate(optional_list(body, "include") or ())]


def _is_default(name: str, value: Any) -> bool:
    """Whether a field without effect has its default value."""
    return (name, value) in (("background", False), ("truncation", "disabled"), ("top_logprobs", 0))
