"""What goes over the wire to vLLM and back, as functions of data.

Two routes take ids. `/inference/v1/generate` gives ids, logprobs by id and the spans of weight versions;
`/v1/completions` with a list of ids gives the first two. Both are read as streams.

Every field that shapes the distribution is sent, whatever its value: what is left out, a server fills in from the model's
own generation settings, and `ignore_eos` keeps it from stopping at ids of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from towline.conversation import Finish
from towline.engines.base import Ids, SampleRequest
from towline.engines.remote import Flight
from towline.engines.validation import count, logprob, token_id, token_ids, version_spans

_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT, "repetition": Finish.LENGTH}
_SEEDS = 1 << 63


class Route(StrEnum):
    """The way that ids go in."""

    GENERATE = "/inference/v1/generate"
    COMPLETIONS = "/v1/completions"


def turn(route: Route, model: str, request: SampleRequest, limit: int, salt: str) -> dict[str, Any]:
    """The body that samples a turn. `salt` names the weights, so that no key-value cache crosses them."""
    params = {**distribution(request.temperature, request.top_p, request.top_k), "max_tokens": limit, "logprobs": 0}
    params |= {
        "stop_token_ids": sorted(request.stop_ids),
        "stop": list(request.stop_strings),
        # Stop strings are found in the text as the model's own tokenizer writes it.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    if request.seed is not None:
        # A turn that goes on after an abort has a longer prompt, and must not draw the same numbers again.
        params["seed"] = (request.seed * 1_000_003 + len(request.prompt)) % _SEEDS
    return _body(route, model, request.prompt, params, salt) | {
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def one(route: Route, model: str, prompt: Ids, params: Mapping[str, Any], salt: str) -> dict[str, Any]:
    """The body of a single token, answered at once and not as a stream."""
    return _body(route, model, prompt, {"max_tokens": 1, **params}, salt)


def distribution(temperature: float, top_p: float = 1.0, top_k: int = 0) -> dict[str, Any]:
    """All that shapes what is sampled from."""
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


def _body(route: Route, model: str, prompt: Ids, params: Mapping[str, Any], salt: str) -> dict[str, Any]:
    ids = [int(id) for id in prompt]
    if route is Route.GENERATE:
        return {"model": model, "token_ids": ids, "sampling_params": dict(params), "cache_salt": salt}
    wishes = {"return_token_ids": True, "return_tokens_as_token_ids": True, "add_special_tokens": False}
    return {"model": model, "prompt": ids, **params, **wishes, "cache_salt": salt}


def read(route: Route, event: Mapping[str, Any], flight: Flight) -> int:
    """Take one event of a stream; how many tokens it brought. Raises `ValueError` and the like for what it may not say."""
    usage = event.get("usage")
    if usage:
        flight.prompt_tokens = count(usage["prompt_tokens"], "prompt_tokens")
        flight.cached_tokens = cached(usage) or 0
    fresh = 0
    for choice in event.get("choices") or ():
        ids = token_ids(choice.get("token_ids"), flight.vocabulary)
        logprobs = _logprobs(route, choice, ids)
        flight.ids += ids
        flight.logprobs += logprobs
        fresh += len(ids)
        if choice.get("finish_reason") is not None:
            _end(choice, flight)
    return fresh


def _logprobs(route: Route, choice: Mapping[str, Any], ids: list[int]) -> list[float]:
    told = choice.get("logprobs") or {}
    if route is Route.GENERATE:
        found = [(token_id(entry["token_id"]), logprob(entry["logprob"])) for entry in told.get("content") or ()]
    else:
        pairs = zip(told.get("tokens") or (), told.get("token_logprobs") or (), strict=True)
        found = [(id_of(token), logprob(value)) for token, value in pairs]
    if [id for id, _ in found] != ids:
        raise ValueError(f"it holds the ids {ids[:8]} and logprobs of the ids {[id for id, _ in found][:8]}")
    return [value for _, value in found]


def id_of(token: str) -> int:
    """The id in `token_id:7`."""
    digits = token.removeprefix("token_id:")
    if not (digits.isascii() and digits.isdecimal()):
        raise ValueError(f"{token!r} names no token id")
    return token_id(int(digits))


def _end(choice: Mapping[str, Any], flight: Flight) -> None:
    reason, stopped = choice["finish_reason"], choice.get("stop_reason")
    if isinstance(stopped, str):
        flight.finish, flight.stop_string = Finish.STOP_STRING, stopped
    elif reason in _FINISH:
        flight.finish = _FINISH[reason]
    else:
        raise ValueError(f"the finish reason {reason!r} is not one of {', '.join(_FINISH)}")
    spans = choice.get("weight_versions") or ()
    # Before the first update a server's label is a word.
    if spans and all(str(span["version"]).isdecimal() for span in spans):
        told = ((int(span["version"]), span["start"], span["end"]) for span in spans)
        flight.versions = version_spans(told, len(flight.ids))


def labels(event: Mapping[str, Any]) -> list[str]:
    """What an event says that the weights are called which sampled the turn: nothing before its end."""
    choices = event.get("choices") or ()
    return [str(span["version"]) for choice in choices for span in choice.get("weight_versions") or ()]


def cached(usage: Mapping[str, Any]) -> int | None:
    """How many prompt tokens came from the prefix cache; None if the server does not tell."""
    details = usage.get("prompt_tokens_details")
    told = details.get("cached_tokens") if details else None
    return None if told is None else count(told, "cached_tokens")


def top(route: Route, answer: Mapping[str, Any]) -> dict[int, float]:
    """The logprobs of the first position, by id, of an answer to `one`."""
    told = answer["choices"][0].get("logprobs") or {}
    if route is Route.GENERATE:
        content = told.get("content") or [{}]
        return {token_id(entry["token_id"]): float(entry["logprob"]) for entry in content[0].get("top_logprobs") or ()}
    found = (told.get("top_logprobs") or [{}])[0]
    return {id_of(token): float(logprob) for token, logprob in found.items()}
