"""The base of every record: strict fields, equality that understands arrays, numpy inside and lists outside.

Invariant: an array field holds a one-dimensional, contiguous array of exactly its element type. An array that already
is one is not copied; a value that conversion would change is rejected.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from towline.errors import TowlineError

SCHEMA_VERSION = 1
"""The version of the contract; recorded in every file."""


class SchemaError(TowlineError):
    """A file or table is not a record of this contract."""


class SchemaVersionError(SchemaError):
    """A record has a contract version that this Towline cannot read."""

    def __init__(self, found: object) -> None:
        super().__init__(
            f"this record has schema version {found}; this Towline reads versions 1 to {SCHEMA_VERSION}. "
            "Read it with the Towline version that wrote it, or a later one."
        )
        self.found = found


def check_version(found: object) -> None:
    """Raise `SchemaVersionError` unless this code can read version `found`."""
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= SCHEMA_VERSION:
        raise SchemaVersionError(found)


class ArrayOf:
    """Marks a field as a numpy array of one element type (`Annotated[npt.NDArray[...], ArrayOf(...)]`)."""

    def __init__(self, element: type[np.generic]) -> None:
        self.dtype = np.dtype(element)
        self.arrow = pa.from_numpy_dtype(self.dtype)

    def validate(self, value: Any) -> npt.NDArray[Any]:
        """The array itself if it has the right type, else an exact conversion of a sequence or another array."""
        if isinstance(value, np.ndarray) and value.dtype == self.dtype and value.ndim == 1:
            return np.ascontiguousarray(value)
        if not isinstance(value, np.ndarray | list | tuple):
            raise ValueError(f"expected a list or an array of {self.dtype}, not {type(value).__name__}")
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"expected a flat list of {self.dtype}") from error
        if array.ndim != 1:
            raise ValueError(f"expected one dimension, not {array.ndim}")
        if array.size == 0:
            return np.empty(0, self.dtype)
        if self.dtype.kind == "f":
            if array.dtype.kind not in "fiu":
                raise ValueError(f"expected numbers, not {array.dtype}")
            with np.errstate(over="ignore"):
                return array.astype(self.dtype)
        if array.dtype.kind not in ("iub" if self.dtype == np.uint8 else "iu"):
            raise ValueError(f"expected integers, not {array.dtype}")
        limits = np.iinfo(self.dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise ValueError(f"an entry is out of the range of {self.dtype}")
        return array.astype(self.dtype)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.validate,
            serialization=core_schema.plain_serializer_function_ser_schema(_as_list, when_used="json"),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "array", "items": {"type": "number" if self.dtype.kind == "f" else "integer"}}


def _as_list(array: npt.NDArray[Any]) -> list[Any]:
    return list(array.tolist())


Int32Array = Annotated[npt.NDArray[np.int32], ArrayOf(np.int32)]
Float32Array = Annotated[npt.NDArray[np.float32], ArrayOf(np.float32)]
UInt8Array = Annotated[npt.NDArray[np.uint8], ArrayOf(np.uint8)]

Id = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
"""A name: not empty, no control characters."""
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
TenantName = Annotated[str, Field(pattern=rf"^{TENANT_NAME.pattern}$")]
"""The name of a tenant: letters, digits, `.`, `_` and `-`."""
Count = Annotated[int, Field(ge=0)]
Json = dict[str, Any]
"""Any JSON object, kept as given; NaN and infinities are written as null."""
Scores = dict[str, FiniteFloat]


class Model(BaseModel):
    """Base of every record. Rejects unknown fields; two records are equal if their fields are, arrays included."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, theirs = self.__dict__, other.__dict__
        return all(_same(mine[name], theirs[name]) for name in type(self).model_fields)

    __hash__ = None  # type: ignore[assignment]


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(two, np.ndarray):
        return bool(np.array_equal(one, two))
    return bool(one == two)
