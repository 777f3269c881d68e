"""Validation of engine responses on arrival: ids, logprobs, counts and versions, before anything is kept.

Parsers take single values through `token_id`, `logprob` and `token_count`, inside `parsing`, which names the engine and
quotes the response. `check_sample` holds a whole turn to the engine contract (`base.py`); every engine passes its turns
through it, and the gateway does so once more before a turn is recorded.

Invariant: a response that breaks the contract is an `EngineError`, whatever is wrong with it, and nothing of it is kept.

A logprob may exceed 0 by `LOGPROB_SLACK`, which float32 rounding explains; such a value is stored as 0. Anything larger is
refused: it is a logit, a probability or another distribution's logprob, and no trainer can correct for it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from towline.common.arrays import LOGPROB_SLACK
from towline.conversation import Finish
from towline.errors import EngineError

if TYPE_CHECKING:
    from towline.engines.base import Sample, SampleRequest

_QUOTED = 200
_LARGEST = 2**31 - 1
"""Ids, counts and versions are stored as 32-bit integers."""
_LOWEST = float(np.finfo(np.float32).min)


class InvalidResponse(EngineError):
    """The engine responded, and the response breaks its contract."""


@contextlib.contextmanager
def parsing(source: str, response: Any) -> Iterator[None]:
    """Turn any error while a response is parsed into an `InvalidResponse` that names the engine and quotes the response."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise InvalidResponse(f"{source} sent an invalid response: {what}; it begins: {excerpt(response)}") from error


def excerpt(response: Any) -> str:
    """The beginning of a response, on one line."""
    if not isinstance(response, bytes | str):
        try:
            response = orjson.dumps(response)
        except TypeError:
            response = repr(response)
    head = response[: 4 * _QUOTED]
    text = head.decode("utf-8", "replace") if isinstance(head, bytes) else head
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return (line[:_QUOTED] + "…" if len(line) > _QUOTED else line) or "(empty)"


def token_id(value: Any, vocabulary: int = 0) -> int:
    """A token id; with `vocabulary`, one below its size."""
    if type(value) is not int or not 0 <= value <= (vocabulary - 1 if vocabulary else _LARGEST):
        allowed = f"from 0 to {vocabulary - 1}" if vocabulary else "that is not negative"
        raise ValueError(f"{_show(value)} is not a token id (an integer {allowed})")
    return value


def token_ids(values: Any, vocabulary: int = 0) -> list[int]:
    """A list of token ids; null counts as an empty one."""
    if values is None:
        return []
    if not isinstance(values, list):
        raise ValueError(f"{_show(values)} is not a list of token ids")
    return [token_id(value, vocabulary) for value in values]


def logprob(value: Any) -> float:
    """A logprob: finite, and above 0 by no more than rounding explains."""
    if type(value) not in (int, float) or not _LOWEST <= value <= LOGPROB_SLACK:
        raise ValueError(f"{_show(value)} is not a logprob (a finite number, at most 0)")
    return min(float(value), 0.0)


def token_count(value: Any, name: str) -> int:
    """A number of tokens."""
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"{name} is {_show(value)}, not a number of tokens")
    return value


def check_sample(sample: Sample, request: SampleRequest, vocabulary: int = 0) -> Sample:
    """The sample, if it keeps the engine contract: the prompt that was sent, and tokens that may be trained on."""
    ids, logprobs, versions = sample.ids, sample.logprobs, sample.versions
    if not len(ids) == len(logprobs) == len(versions):
        raise InvalidResponse(
            f"the engine returned {len(ids)} ids, {len(logprobs)} logprobs and {len(versions)} versions"
        )
    server_rendered = sample.prompt is not None
    if not server_rendered:
        expands = any(not image.reported for image in request.media)
        if sample.prompt_tokens != len(request.prompt) and not expands:
            raise InvalidResponse(
                f"the engine saw {sample.prompt_tokens} prompt tokens, {len(request.prompt)} were sent"
            )
        if len(ids) > request.max_tokens:
            raise InvalidResponse(f"the engine returned {len(ids)} tokens, the limit was {request.max_tokens}")
        if not len(ids) and sample.finish in (Finish.STOP, Finish.STOP_STRING):
            raise InvalidResponse("the engine ended the turn without a token")
    if not len(ids):
        return sample
    for name, values in (("ids", ids), ("versions", versions)):
        if values.dtype.kind not in "iu" or values.ndim != 1:
            raise InvalidResponse(f"the engine returned {name} that are not a row of integers ({values.dtype})")
    if int(ids.min()) < 0 or (vocabulary and int(ids.max()) >= vocabulary):
        size = vocabulary or "an unknown number of"
        raise InvalidResponse(f"the engine returned ids from {ids.min()} to {ids.max()}; the vocabulary has {size} ids")
    if int(versions.min()) < 0:
        raise InvalidResponse(f"the engine returned the weight version {versions.min()}")
    if logprobs.dtype.kind != "f" or not np.isfinite(logprobs).all():
        raise InvalidResponse("the engine returned a logprob that is not a finite number")
    if float(logprobs.max()) > LOGPROB_SLACK:
        raise InvalidResponse(f"the engine returned the logprob {logprobs.max():g}; logprobs are at most 0")
    if logprobs.max() > 0:
        sample.logprobs = np.minimum(logprobs, 0).astype(logprobs.dtype)
    return sample


def _show(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return excerpt(value)[:60]
