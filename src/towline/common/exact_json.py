"""JSON that keeps integers of any length exact.

orjson is fast, but it reads an integer beyond 64 bits as a float and cannot write one. Models write such integers into
tool calls, and harnesses send them back. Only text with that long a run of digits takes the slow path.

Invariant: `loads(dumps(value)) == value` for every JSON value with integers of up to `DIGITS` digits. A number beyond the
range of a double (`1e400`) is read as the integer that it equals.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal, InvalidOperation
from typing import Any

import orjson

DIGITS = 4300
"""Maximum number of digits of an integer: Python's own limit, beyond which parsing takes quadratic time."""
_RUN = b"0" * 19
"""Integers with fewer than 19 digits, the length of -2^63, fit into 64 bits."""
_ZEROS = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))
_LOWEST, _HIGHEST = -(2**63), 2**64 - 1


def parse_integer(text: str) -> int:
    """An integer of at most `DIGITS` digits. Raises `ValueError` for a longer one without parsing it."""
    if len(text) > DIGITS:
        raise ValueError(f"an integer of more than {DIGITS} digits")
    return int(text)


def parse_number(text: str) -> float | int:
    """A double, or the equal integer for a number beyond its range. Raises `ValueError` if there is none."""
    value = float(text)
    if math.isfinite(value):
        return value
    try:
        exact = Decimal(text)
    except InvalidOperation as error:
        raise ValueError("a number that cannot be represented") from error
    if exact.adjusted() >= DIGITS or exact != exact.to_integral_value():
        raise ValueError(f"a number of more than {DIGITS} digits")
    return int(exact)


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


decoder = json.JSONDecoder(parse_int=parse_integer, parse_float=parse_number, parse_constant=_constant)
"""Strict and exact, but slow."""


def loads(data: bytes | str) -> Any:
    """The value of JSON text. Raises `orjson.JSONDecodeError`, as orjson does."""
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
    """The value as JSON. A lone surrogate, which a model may sample, is written as its escape."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def without_long_integers(value: Any) -> Any:
    """The value with 0 for integers beyond 64 bits, which orjson cannot write."""
    if isinstance(value, dict):
        return {key: without_long_integers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_long_integers(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and not _LOWEST <= value <= _HIGHEST:
        return 0
    return value


def is_writable(value: Any) -> bool:
    """Whether a value is JSON of bounded depth without lone surrogates: what orjson can write, long integers aside."""
    try:
        orjson.dumps(value)
    except TypeError:
        try:
            orjson.dumps(without_long_integers(value))
        except (TypeError, RecursionError):
            return False
    return True
