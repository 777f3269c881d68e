"""SGLang's native JSON: calls of `/generate`, what their answers tell, and how busy the server says it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from towline.conversation import Finish
from towline.engines.base import Ids, Load, SampleRequest
from towline.engines.remote import Flight
from towline.engines.validation import count, logprob, token_id


def body(prompt: Ids, limit: int, temperature: float, request: SampleRequest | None = None) -> dict[str, Any]:
    """A call of `/generate`. Every parameter that shapes the distribution is said, whatever the server's defaults are."""
    params: dict[str, Any] = {
        "max_new_tokens": limit,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if request is not None:
        params |= {"top_p": request.top_p, "top_k": request.top_k or -1}
        params |= {"stop_token_ids": sorted(request.stop_ids), "stop": list(request.stop_strings)}
    return {"input_ids": [int(id) for id in prompt], "sampling_params": params, "return_logprob": True}


def _finish(reason: object) -> tuple[Finish | None, str | None]:
    """How a turn ended, and the stop string that ended it."""
    if reason is None:
        return None, None
    if not isinstance(reason, Mapping):
        raise ValueError(f"the finish reason {reason!r:.60} is no object")
    kind, matched = reason.get("type"), reason.get("matched")
    if kind == "stop" and isinstance(matched, str):
        return Finish.STOP_STRING, matched
    known = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}
    if kind == "abort" and reason.get("status_code"):
        raise ValueError(f"the turn failed with status {reason['status_code']}: {reason.get('message')}")
    if kind not in known:
        raise ValueError(f"the finish reason {kind!r} is not one of {', '.join(known)}")
    return known[kind], None


def read(meta: Mapping[str, Any], flight: Flight) -> int:
    """Note what an answer tells, be it of all tokens of the turn or of those since the last; how many are fresh."""
    told = meta.get("output_token_logprobs") or []
    if not isinstance(told, list):
        raise ValueError(f"output_token_logprobs is no list: {told!r:.60}")
    sampled = meta.get("completion_tokens")
    fresh = (len(told) if sampled is None else count(sampled, "completion_tokens")) - len(flight.ids)
    if not 0 <= fresh <= len(told):
        raise ValueError(f"it counts {sampled} tokens after {len(flight.ids)}, and holds the logprobs of {len(told)}")
    found = [(token_id(id, flight.vocabulary), logprob(value)) for value, id, *_ in told[len(told) - fresh :]]
    flight.ids += [id for id, _ in found]
    flight.logprobs += [value for _, value in found]
    if meta.get("prompt_tokens") is not None:
        flight.prompt_tokens = count(meta["prompt_tokens"], "prompt_tokens")
    flight.cached_tokens = count(meta.get("cached_tokens") or 0, "cached_tokens")
    flight.finish, flight.stop_string = _finish(meta.get("finish_reason"))
    return fresh


def load(ranks: Sequence[Mapping[str, Any]]) -> Load:
    """From `/v1/loads`, which tells of each data-parallel rank."""
    return Load(
        sum(rank["num_running_reqs"] for rank in ranks),
        sum(rank["num_waiting_reqs"] for rank in ranks),
        max((float(rank["token_usage"]) for rank in ranks), default=None),
    )


def older_load(ranks: Sequence[Mapping[str, Any]], capacity: int) -> Load:
    """From `/get_load` of servers without the other; those count the waiting among all, and tell tokens for a share."""
    waiting, tokens = sum(rank["num_waiting_reqs"] for rank in ranks), sum(rank["num_tokens"] for rank in ranks)
    usage = min(1.0, tokens / capacity) if capacity else None
    return Load(sum(rank["num_reqs"] for rank in ranks) - waiting, waiting, usage)
