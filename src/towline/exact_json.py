"""JSON whose integers stay what they are, however long.

orjson is the fast way, but it reads an integer past 64 bits as a float and refuses to write one. Models do write such
integers into tool calls, and harnesses send them back. Only a text with a run of digits that long is read the slow way.

Invariant: `loads(dumps(value)) == value` for what JSON can carry, with integers of up to `DIGITS` digits. A number past
the range of a double (`1e400`) is the integer that it equals.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal, InvalidOperation
from typing import Any

import orjson

DIGITS = 4300
"""Digits of the longest integer that is read: Python's own limit, past which reading one takes quadratic time."""
_RUN = b"0" * 19
"""-2^63 has 19 digits: a shorter integer fits into 64 bits."""
_ZEROS = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))
_LOWEST, _HIGHEST = -(2**63), 2**64 - 1


def integer(text: str) -> int:
    """An integer of at most `DIGITS` digits. Raises `ValueError` for a longer one, before it costs anything."""
    if len(text) > DIGITS:
        raise ValueError(f"an integer of more than {DIGITS} digits")
    return int(text)


def number(text: str) -> float | int:
    """A double, or the integer that a number past a double's range is. Raises `ValueError` for any other."""
    value = float(text)
    if math.isfinite(value):
        return value
    try:
        exact = Decimal(text)
    except InvalidOperation as error:
        raise ValueError("a number that nothing can hold") from error
    if exact.adjusted() >= DIGITS or exact != exact.to_integral_value():
        raise ValueError(f"a number of more than {DIGITS} digits")
    return int(exact)


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


decoder = json.JSONDecoder(parse_int=integer, parse_float=number, parse_constant=_constant)
"""Reads JSON strictly and exactly, one number at a time."""


def loads(data: bytes | str) -> Any:
    """The value of a JSON text. Raises `orjson.JSONDecodeError`, as orjson does."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if "infinity" not in str(error):
            raise
        exact = _exactly(data)
        if exact is None:
            raise
        return exact[0]
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if _RUN not in raw.translate(_ZEROS):
        return value
    exact = _exactly(data)
    return value if exact is None else exact[0]


def _exactly(data: bytes | str) -> tuple[Any] | None:
    try:
        return (decoder.decode(data if isinstance(data, str) else data.decode()),)
    except (ValueError, RecursionError):
        return None


def dumps(value: Any) -> bytes:
    """JSON of a value. A lone surrogate, which a model may sample, is written as its escape."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def short(value: Any) -> Any:
    """The value with 0 for integers past 64 bits, which orjson can write if it can write the rest."""
    if isinstance(value, dict):
        return {key: short(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [short(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and not _LOWEST <= value <= _HIGHEST:
        return 0
    return value


def writable(value: Any) -> bool:
    """Whether a value is JSON of bounded depth without lone surrogates: what orjson writes, but for long integers."""
    try:
        orjson.dumps(value)
    except TypeError:
        try:
            orjson.dumps(short(value))
        except (TypeError, RecursionError):
            return False
    return True
