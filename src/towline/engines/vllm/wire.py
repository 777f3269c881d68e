"""What goes over the wire to vLLM and back, as functions of data.

Two routes take ids. `/inference/v1/generate` returns ids, logprobs by id and the spans of weight versions;
`/v1/completions` with a list of ids returns the first two. Both are read as streams.

Every field that shapes the distribution is sent, whatever its value: the server fills in what is omitted from the model's
own generation settings, and `ignore_eos` keeps it from stopping at ids of its own. The server applies stop strings.

What stands for an image is found by rendering a message that holds nothing else. A turn is then sent with the template's own
token in place of each placeholder and the images beside it; the server expands the prompt and reports the result, which
must be exactly the intended prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import numpy as np

from towline.common.images import ImagePlaceholder
from towline.conversation import Finish, Media
from towline.engines.base import EngineLoad, Ids, SampleRequest
from towline.engines.remote import ActiveTurn
from towline.engines.validation import logprob, token_count, token_id, token_ids
from towline.engines.weight_labels import label_spans
from towline.errors import EngineError

_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT, "repetition": Finish.LENGTH}
_SEEDS = 1 << 63


class VllmRoute(StrEnum):
    """The endpoint that takes token ids."""

    GENERATE = "/inference/v1/generate"
    """Returns ids, logprobs by id and the weight version of each span."""
    COMPLETIONS = "/v1/completions"
    """Returns ids and logprobs; for servers without the other route."""


def turn_body(route: VllmRoute, model: str, request: SampleRequest, limit: int, salt: str) -> dict[str, Any]:
    """The body that samples a turn. `salt` identifies the weights, so that no key-value cache crosses versions."""
    params = {**sampling_params(request.temperature, request.top_p, request.top_k), "max_tokens": limit, "logprobs": 0}
    params |= {
        "stop_token_ids": sorted(request.stop_ids),
        "stop": list(request.stop_strings),
        # Stop strings are matched in the text as the model's own tokenizer decodes it.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    if request.seed is not None:
        # A turn that continues after an abort has a longer prompt, and must not draw the same numbers again.
        params["seed"] = (request.seed * 1_000_003 + len(request.prompt)) % _SEEDS
    return _body(route, model, request.prompt, params, salt) | {
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def single_token_body(
    route: VllmRoute, model: str, prompt: Ids, params: Mapping[str, Any], salt: str
) -> dict[str, Any]:
    """The body that requests a single token, not streamed."""
    return _body(route, model, prompt, {"max_tokens": 1, **params}, salt)


def sampling_params(temperature: float, top_p: float = 1.0, top_k: int = 0) -> dict[str, Any]:
    """Everything that shapes the sampling distribution."""
    return {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": True,
    }


def _body(route: VllmRoute, model: str, prompt: Ids, params: Mapping[str, Any], salt: str) -> dict[str, Any]:
    ids = [int(id) for id in prompt]
    if route is VllmRoute.GENERATE:
        return {"model": model, "token_ids": ids, "sampling_params": dict(params), "cache_salt": salt}
    options = {"return_token_ids": True, "return_tokens_as_token_ids": True, "add_special_tokens": False}
    return {"model": model, "prompt": ids, **params, **options, "cache_salt": salt}


def read_event(route: VllmRoute, event: Mapping[str, Any], turn: ActiveTurn) -> int:
    """Record one event of a stream; returns how many tokens it carried. Raises `ValueError` or similar if invalid."""
    usage = event.get("usage")
    if usage:
        turn.prompt_tokens = token_count(usage["prompt_tokens"], "prompt_tokens")
        turn.cached_tokens = cached_tokens(usage) or 0
    fresh = 0
    for choice in event.get("choices") or ():
        ids = token_ids(choice.get("token_ids"), turn.vocabulary)
        logprobs = _logprobs(route, choice, ids)
        turn.ids += ids
        turn.logprobs += logprobs
        fresh += len(ids)
        if choice.get("finish_reason") is not None:
            _end(choice, turn)
    return fresh


def _logprobs(route: VllmRoute, choice: Mapping[str, Any], ids: list[int]) -> list[float]:
    reported = choice.get("logprobs") or {}
    if route is VllmRoute.GENERATE:
        found = [(token_id(entry["token_id"]), logprob(entry["logprob"])) for entry in reported.get("content") or ()]
    else:
        pairs = zip(reported.get("tokens") or (), reported.get("token_logprobs") or (), strict=True)
        found = [(parse_token_id(token), logprob(value)) for token, value in pairs]
    if [id for id, _ in found] != ids:
        raise ValueError(f"it holds the ids {ids[:8]} and logprobs of the ids {[id for id, _ in found][:8]}")
    return [value for _, value in found]


def parse_token_id(token: str) -> int:
    """The id in `token_id:7`."""
    digits = token.removeprefix("token_id:")
    if not (digits.isascii() and digits.isdecimal()):
        raise ValueError(f"{token!r} names no token id")
    return token_id(int(digits))


def _end(choice: Mapping[str, Any], turn: ActiveTurn) -> None:
    reason, stopped = choice["finish_reason"], choice.get("stop_reason")
    if isinstance(stopped, str):
        turn.finish, turn.stop_string = Finish.STOP_STRING, stopped
    elif reason in _FINISH:
        turn.finish = _FINISH[reason]
    else:
        raise ValueError(f"finish reason {reason!r} is not one of {', '.join(_FINISH)}")


def weight_spans(event: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """The labels of the weights that sampled each span of the turn, according to an event: none before its end."""
    return [span for choice in event.get("choices") or () for span in label_spans(choice.get("weight_versions"))]


def cached_tokens(usage: Mapping[str, Any]) -> int | None:
    """How many prompt tokens came from the prefix cache; None if the server does not report it."""
    details = usage.get("prompt_tokens_details")
    reported = details.get("cached_tokens") if details else None
    return None if reported is None else token_count(reported, "cached_tokens")


def top_logprobs(route: VllmRoute, answer: Mapping[str, Any]) -> dict[int, float]:
    """The logprobs of the first position, by id, of a response to `single_token_body`."""
    reported = answer["choices"][0].get("logprobs") or {}
    if route is VllmRoute.GENERATE:
        content = reported.get("content") or [{}]
        return {token_id(entry["token_id"]): float(entry["logprob"]) for entry in content[0].get("top_logprobs") or ()}
    found = (reported.get("top_logprobs") or [{}])[0]
    return {parse_token_id(token): float(logprob) for token, logprob in found.items()}


RENDER = "/v1/chat/completions/render"
PROBE_IMAGE = Media(
    "image",
    "",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAADgAAAA4CAIAAAAn5KxJAAAARElEQVR42u3OQQkAAAgEsItjRCMay4cphMECLNXzQkRFRU"
    "VFRUVFRUVFRUVFRUVFRUVFRUVFRUVFRUVFRUVFRUVFRc8CPfE7AD+J8GEAAAAASUVORK5CYII=",
)
"""An image that any vision model accepts."""
_CONTEXT_IDS = 8


def image_render_body(model: str, media: Media) -> dict[str, Any]:
    """The body that renders a message with one image."""
    part = {"type": "image_url", "image_url": {"url": media.url}}
    return {"model": model, "messages": [{"role": "user", "content": [part]}]}


def image_placeholder(answer: Mapping[str, Any]) -> ImagePlaceholder | None:
    """The placeholder of a rendered message's image; `None` if it holds none."""
    features = answer.get("features") or {}
    places, keys = (features.get(name, {}).get("image") or [] for name in ("mm_placeholders", "mm_hashes"))
    if len(places) != 1 or len(keys) != 1:
        return None
    ids = np.asarray(answer["token_ids"], np.int32)
    start, end = int(places[0]["offset"]), int(places[0]["offset"]) + int(places[0]["length"])
    return ImagePlaceholder(
        ids[start:end], ids[max(0, start - _CONTEXT_IDS) : start], ids[end : end + _CONTEXT_IDS], str(keys[0])
    )


def image_fields(request: SampleRequest) -> dict[str, Any]:
    """The fields for a turn with images: the prompt as the template wrote it, and the images in order."""
    parts: list[Ids] = []
    place = 0
    for image in request.media:
        parts += (request.prompt[place : image.start], np.asarray(image.written, np.int32))
        place = image.start + image.length
    parts.append(request.prompt[place:])
    content = [{"type": "image_url", "url": image.media.url} for image in request.media]
    return {"token_ids": np.concatenate(parts).tolist(), "content_parts": content, "return_token_ids": True}


def check_rendered_prompt(event: Mapping[str, Any], request: SampleRequest) -> bool:
    """Whether an event reports the prompt; raises if it is not the intended one."""
    reported = event.get("prompt_token_ids")
    if reported is None:
        return False
    if not np.array_equal(np.asarray(reported, np.int32), request.prompt):
        raise EngineError(
            f"the server rendered a prompt of {len(reported)} tokens, not the {len(request.prompt)} that were intended"
        )
    ranges = [(place["offset"], place["length"]) for place in (event.get("mm_placeholders") or {}).get("image", ())]
    intended = [(image.start, image.length) for image in request.media]
    if ranges and ranges != intended:
        raise EngineError(f"the server put images at {ranges}, not at {intended}")
    return True


def sum_metric(text: str, name: str) -> float | None:
    """A Prometheus metric, summed over its labels."""
    values = _metric_values(text, name)
    return sum(values) if values else None


def _metric_values(text: str, name: str) -> list[float]:
    """A Prometheus metric, one value per set of labels: a server with data-parallel ranks has one per rank."""
    lines = (line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return [float(line.rpartition(" ")[2]) for line in lines]


def parse_load(text: str) -> EngineLoad:
    """How busy the server is, from its metrics; with several ranks, the fullest cache counts."""
    running, waiting = sum_metric(text, "vllm:num_requests_running"), sum_metric(text, "vllm:num_requests_waiting")
    if running is None or waiting is None:
        raise EngineError("the server's /metrics do not report its requests: start it without --disable-log-stats")
    return EngineLoad(int(running), int(waiting), max(_metric_values(text, "vllm:kv_cache_usage_perc"), default=None))
