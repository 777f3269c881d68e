"""Records as bytes: a kind, JSON fields and raw arrays.

Invariant: `decode(encode(…))` gives the same kind, fields and arrays, and copies no array.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from towline.errors import TowlineError

_ARRAY_ALIGNMENT = 16


class JournalError(TowlineError):
    """The journal cannot do what was asked. After a failed write or sync it acknowledges nothing any more."""

    failure = "storage"


class RecordError(JournalError):
    """A record that cannot be encoded, or bytes that are not one."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A decoded payload."""

    kind: str
    fields: dict[str, Any]
    """JSON values."""
    arrays: dict[str, npt.NDArray[Any]]
    """Read-only, little-endian views into the payload."""


def encode(kind: str, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> bytes:
    """A JSON header, then each array's raw little-endian bytes, aligned. Floats that may be NaN or infinite belong in
    an array: JSON has none."""
    shapes: list[tuple[str, str, tuple[int, ...]]] = []
    parts: list[bytes | memoryview] = []
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc":
            raise RecordError(f"array {name!r} of {kind!r}: {array.dtype} has no raw little-endian form")
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        shapes.append((name, little.dtype.str, array.shape))
        parts += (little.data.cast("B") if little.size else b"", bytes(-little.nbytes % _ARRAY_ALIGNMENT))
    try:
        header = orjson.dumps((kind, fields, shapes))
    except TypeError as error:
        raise RecordError(f"the fields of {kind!r} are not JSON: {error}") from error
    return b"".join((struct.pack("<I", len(header)), header, bytes(-(4 + len(header)) % _ARRAY_ALIGNMENT), *parts))


def decode(payload: bytes) -> Record:
    """The inverse of `encode`; copies no array."""
    try:
        (length,) = struct.unpack_from("<I", payload)
        kind, fields, shapes = orjson.loads(memoryview(payload)[4 : 4 + length])
        offset = 4 + length + -(4 + length) % _ARRAY_ALIGNMENT
        arrays = {}
        for name, code, shape in shapes:
            array = np.frombuffer(payload, np.dtype(code), math.prod(shape), offset).reshape(shape)
            arrays[name] = array
            offset += array.nbytes + -array.nbytes % _ARRAY_ALIGNMENT
    except (struct.error, ValueError, TypeError, OverflowError) as error:
        raise RecordError(f"not an encoded record: {error}") from error
    if offset != len(payload):
        raise RecordError(f"not an encoded record: {len(payload)} bytes, expected {offset}")
    return Record(kind, fields, arrays)
