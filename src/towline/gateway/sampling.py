"""What a harness asks of the sampler, and what of it is followed."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from towline.config import SamplingSettings
from towline.conversation import Request, Sampling

_NAMES = tuple(field.name for field in fields(Sampling))
_LEAST = 1e-6
"""Below this a temperature is 0, and top-p is this: the likeliest token alone either way, as providers take it."""


def asked(request: Request) -> dict[str, Any]:
    """What the harness asked, in JSON values: so it compares equal after a restart too."""
    sampling = request.sampling
    values = {name: value for name in _NAMES if (value := getattr(sampling, name)) not in (None, (), {}, [])}
    if request.sampling.stop:
        values["stop"] = list(request.sampling.stop)
    if request.tool_choice is not None:
        values["tool_choice"] = request.tool_choice
    return values


def distribution(
    fixed: SamplingSettings, request: Request, *, trained: bool = True
) -> tuple[float, float, int, list[str]]:
    """Temperature, top-p and top-k of the turn, and what of the harness's wishes is not followed.

    A turn that is not trained is sampled as the harness wishes, whatever the mode.
    """
    wished = request.sampling
    overridden = list(wished.other)
    if request.tool_choice not in (None, "auto") and (request.tools or request.tool_choice != "none"):
        overridden.append("tool_choice")
    if fixed.mode == "harness" or not trained:
        temperature = fixed.temperature if wished.temperature is None else wished.temperature
        top_p = fixed.top_p if wished.top_p is None else max(wished.top_p, _LEAST)
        top_k = fixed.top_k if wished.top_k is None else wished.top_k
        return temperature if temperature >= _LEAST else 0.0, top_p, top_k, overridden
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(wished, name)
        if value is not None and value != getattr(fixed, name):
            overridden.append(name)
    return fixed.temperature, fixed.top_p, fixed.top_k, overridden
