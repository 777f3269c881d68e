"""What an engine may answer, checked on arrival: ids, logprobs, counts and versions, before anything keeps them.

Readers of an answer take single values through `token_id`, `logprob` and `count`, inside `reading`, which names the
engine and quotes the answer. `check_sample` holds a whole turn to the engine's contract; every engine passes its turns
through it, and the gateway does so once more before a turn is recorded.

Invariant: an answer that breaks the contract is an `EngineError`, whatever is wrong with it, and nothing of it is kept.

A logprob may exceed 0 by `LOGPROB_SLACK`, which float32 rounding explains; such a value is stored as 0. Anything larger is
refused: it is a logit, a probability or another distribution's, and no trainer can correct for it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from towline.arrays import LOGPROB_SLACK
from towline.conversation import Finish
from towline.errors import EngineError

if TYPE_CHECKING:
    from towline.engines.base import Sample, SampleRequest

_QUOTED = 200
_LARGEST = 2**31 - 1
"""Ids, counts and versions are stored as 32-bit integers."""
_LOWEST = float(np.finfo(np.float32).min)


class BadAnswer(EngineError):
    """The engine answered, and the answer breaks its contract."""


@contextlib.contextmanager
def reading(source: str, answer: Any) -> Iterator[None]:
    """Turn whatever is wrong with an answer while it is read into a `BadAnswer` that names the engine and quotes it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise BadAnswer(f"{source} sent an invalid answer: {what}; it begins: {quote(answer)}") from error


def quote(answer: Any) -> str:
    """The beginning of an answer, on one line."""
    if not isinstance(answer, bytes | str):
        try:
            answer = orjson.dumps(answer)
        except TypeError:
            answer = repr(answer)
    text = answer[: 4 * _QUOTED].decode("utf-8", "replace") if isinstance(answer, bytes) else answer[: 4 * _QUOTED]
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return (line[:_QUOTED] + "…" if len(line) > _QUOTED else line) or "(empty)"


def token_id(value: Any, vocabulary: int = 0) -> int:
    """A token id; with `vocabulary`, one that the vocabulary has."""
    if type(value) is not int or not 0 <= value <= (vocabulary - 1 if vocabulary else _LARGEST):
        known = f"from 0 to {vocabulary - 1}" if vocabulary else "that is not negative"
        raise ValueError(f"{_shown(value)} is not a token id (an integer {known})")
    return value


def token_ids(values: Any, vocabulary: int = 0) -> list[int]:
    """A list of token ids; null is an empty one."""
    if values is None:
        return []
    if not isinstance(values, list):
        raise ValueError(f"{_shown(values)} is not a list of token ids")
    return [token_id(value, vocabulary) for value in values]


def logprob(value: Any) -> float:
    """A logprob: finite, and not above 0 by more than rounding explains."""
    if type(value) not in (int, float) or not _LOWEST <= value <= LOGPROB_SLACK:
        raise ValueError(f"{_shown(value)} is not a logprob (a finite number, at most 0)")
    return min(float(value), 0.0)


def count(value: Any, name: str) -> int:
    """A number of tokens."""
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"{name} is {_shown(value)}, not a number of tokens")
    return value


def version_spans(spans: Iterable[tuple[int, int, int]], length: int) -> list[int]:
    """One policy version per token, from spans of `(version, start, end)` that cover at least `length` tokens in order."""
    versions: list[int] = []
    for version, start, end in spans:
        if count(start, "the start of a version span") != len(versions) or count(end, "its end") < start:
            raise ValueError(f"a version span from {start} to {end} does not follow {len(versions)} tokens")
        versions += [count(version, "a weight version")] * (min(end, length) - start)
        if end >= length:
            return versions
    raise ValueError(f"the version spans cover {len(versions)} of {length} tokens")


def check_sample(sample: Sample, request: SampleRequest, vocabulary: int = 0) -> Sample:
    """The sample, if it keeps the engine's contract: the prompt that was sent, and tokens that may be trained on."""
    ids, logprobs, versions = sample.ids, sample.logprobs, sample.versions
    if not len(ids) == len(logprobs) == len(versions):
        raise BadAnswer(f"the engine returned {len(ids)} ids, {len(logprobs)} logprobs and {len(versions)} versions")
    rendered_there = sample.prompt is not None
    if not rendered_there:
        expands = any(not image.reported for image in request.media)
        if sample.prompt_tokens != len(request.prompt) and not expands:
            raise BadAnswer(f"the engine saw {sample.prompt_tokens} prompt tokens, {len(request.prompt)} were sent")
        if len(ids) > request.max_tokens:
            raise BadAnswer(f"the engine returned {len(ids)} tokens, at most {request.max_tokens} were asked for")
        if not len(ids) and sample.finish in (Finish.STOP, Finish.STOP_STRING):
            raise BadAnswer("the engine ended the turn without a token")
    if not len(ids):
        return sample
    for name, values in (("ids", ids), ("versions", versions)):
        if values.dtype.kind not in "iu" or values.ndim != 1:
            raise BadAnswer(f"the engine returned {name} that are no row of integers ({values.dtype})")
    if int(ids.min()) < 0 or (vocabulary and int(ids.max()) >= vocabulary):
        size = vocabulary or "an unknown number of"
        raise BadAnswer(f"the engine returned ids from {ids.min()} to {ids.max()}; the vocabulary has {size} ids")
    if int(versions.min()) < 0:
        raise BadAnswer(f"the engine returned the weight version {versions.min()}")
    if logprobs.dtype.kind != "f" or not np.isfinite(logprobs).all():
        raise BadAnswer("the engine returned a logprob that is not a finite number")
    if float(logprobs.max()) > LOGPROB_SLACK:
        raise BadAnswer(f"the engine returned the logprob {logprobs.max():g}; logprobs are at most 0")
    if logprobs.max() > 0:
        sample.logprobs = np.minimum(logprobs, 0).astype(logprobs.dtype)
    return sample


def _shown(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return quote(value)[:60]
