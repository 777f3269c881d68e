"""Records as bytes: JSON text, Arrow files, and Arrow columns derived from the models.

A field's annotation decides its Arrow type:

| annotation | Arrow |
|---|---|
| `Int32Array`, `Float32Array`, `UInt8Array` | list of that element, the arrays' own buffers |
| `bool`, `int`, `float`, `str`, a `StrEnum` | bool, int64, double, string |
| a record, a list of records | struct, list of structs |
| `dict[str, int]`, `dict[str, float]` | map |
| any other dictionary, alone or in a list | string of JSON, since its keys are free |

Invariant: decoding an encoded table gives the same records. A field without a column, because the file is older than the
field, has its default.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.ipc as ipc
from pydantic import BaseModel

from towline.common import exact_json
from towline.schema.base import SCHEMA_VERSION, ArrayOf, Model, SchemaError, SchemaVersionError, check_version


def is_json(path: Path) -> bool:
    """Whether the path is a JSON file; raises for a suffix that is neither JSON nor Arrow."""
    if path.suffix not in (".json", ".arrow"):
        raise SchemaError(f"{path}: a trajectory file needs the suffix .arrow or .json")
    return path.suffix == ".json"


def dump_json(value: Any) -> bytes:
    """JSON of records, arrays and plain values; arrays are encoded directly."""
    try:
        return orjson.dumps(value, _plain, orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        # Models write integers beyond 64 bits and lone surrogates into tool arguments; the slower encoder can hold both.
        return _dump_slowly(value)


def _dump_slowly(value: Any) -> bytes:
    try:
        return json.dumps(value, default=_plain, separators=(",", ":"), allow_nan=False).encode()
    except (RecursionError, TypeError, ValueError) as error:
        raise SchemaError(f"cannot be written as JSON: {error}") from error


def load_json(data: bytes | str) -> Any:
    """The value that `dump_json` was given, records as objects."""
    try:
        return exact_json.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(data)
    except (RecursionError, ValueError) as error:
        raise SchemaError(f"not JSON: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.__dict__
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def arrow_bytes(table: pa.Table) -> pa.Buffer:
    """The table as an Arrow file."""
    options = ipc.IpcWriteOptions(compression="zstd" if pa.Codec.is_available("zstd") else None)
    sink = pa.BufferOutputStream()
    with ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue()


def read_arrow(path: Path) -> pa.Table:
    """The table of an Arrow file."""
    data = pa.py_buffer(path.read_bytes())
    try:
        return ipc.open_file(data).read_all()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SchemaError(f"{path} is not a complete Arrow file: {error}") from error


VERSION_KEY = b"towline.schema"
"""Key of the schema version in the metadata of a table."""
DAMAGED = b"towline.damaged"
"""Key of the damaged trajectories in the metadata of a stream's last batch: JSON, reasons by session id."""

SCALARS: dict[type, pa.DataType] = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


@dataclass(frozen=True, slots=True)
class ColumnCodec:
    """Encodes the values of one field as an Arrow array, and decodes it."""

    type: pa.DataType
    encode: Callable[[Sequence[Any]], pa.Array]
    decode: Callable[[pa.Array], list[Any]]


def to_table(model: type[Model], records: Sequence[Model]) -> pa.Table:
    """One row per record, one column per field."""
    codecs = _fields(model)
    arrays = [codec.encode([getattr(record, name) for record in records]) for name, codec in codecs.items()]
    schema = pa.schema([(name, codec.type) for name, codec in codecs.items()])
    return pa.Table.from_arrays(arrays, schema=schema.with_metadata({VERSION_KEY: str(SCHEMA_VERSION).encode()}))


def from_table(model: type[Model], table: pa.Table) -> list[dict[str, Any]]:
    """The fields of the record in each row; columns that the model does not have are ignored."""
    codecs = _fields(model)
    try:
        table = conform(model, table).combine_chunks()
        # Offsets out of their buffer, from a damaged file, would otherwise be read as memory.
        table.validate(full=True)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise SchemaError(f"not a table of {model.__name__}: {error}") from error
    if not table.num_rows:
        return []
    decoded = [codec.decode(table.column(name).chunk(0)) for name, codec in codecs.items()]
    return [_given(model, row) for row in zip(*decoded, strict=True)]


def conform(model: type[Model], table: pa.Table) -> pa.Table:
    """The table with exactly the columns of the model, in order; missing ones are null."""
    codecs = _fields(model)
    expected = pa.schema([(name, codec.type) for name, codec in codecs.items()])
    try:
        check_table_version(table)
        absent = [name for name in codecs if name not in table.column_names]
        missing = [name for name in absent if model.model_fields[name].is_required()]
        if missing:
            raise SchemaError(f"not a table of {model.__name__}: it has no column {', '.join(missing)}")
        for name in absent:
            table = table.append_column(name, pa.nulls(table.num_rows, codecs[name].type))
        return table.select(expected.names).cast(expected)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise SchemaError(f"not a table of {model.__name__}: {error}") from error


def _given(model: type[Model], row: Iterable[Any]) -> dict[str, Any]:
    """The fields of a record without those that are null because the file is older: they have their defaults."""
    fields = zip(model.model_fields.items(), row, strict=True)
    return {name: value for (name, field), value in fields if value is not None or field.default is None}


def one_row(model: type[Model], table: pa.Table) -> dict[str, Any]:
    rows = from_table(model, table)
    if len(rows) != 1:
        raise SchemaError(f"expected one {model.__name__}, found {len(rows)} rows")
    return rows[0]


def check_table_version(table: pa.Table) -> None:
    recorded = (table.schema.metadata or {}).get(VERSION_KEY)
    if recorded is not None:
        if not recorded.isdigit():
            raise SchemaVersionError(recorded.decode(errors="replace"))
        check_version(int(recorded))
    if "schema_version" in table.column_names:
        for found in table.column("schema_version").to_pylist():
            check_version(found)


@cache
def _fields(model: type[Model]) -> dict[str, ColumnCodec]:
    return {name: _codec(field.annotation, field.metadata) for name, field in model.model_fields.items()}


def _codec(annotation: Any, metadata: Iterable[Any] = ()) -> ColumnCodec:
    array = next((mark for mark in metadata if isinstance(mark, ArrayOf)), None)
    if array is not None:
        return _array_codec(array)
    annotation = _bare(annotation)
    arguments = [_bare(argument) for argument in get_args(annotation)]
    origin = get_origin(annotation) or annotation
    if origin is list:
        return _list_codec(arguments[0])
    if origin is dict:
        if arguments[1] in (int, float):
            return _plain_codec(pa.map_(pa.string(), SCALARS[arguments[1]]), _mapping_items, _mapping)
        return _plain_codec(pa.string(), _json_text, load_json)
    if issubclass(origin, Model):
        return _struct_codec(origin)
    return _plain_codec(pa.string() if issubclass(origin, StrEnum) else SCALARS[origin])


def _bare(annotation: Any) -> Any:
    """The annotation without its constraints and without `None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (choice for choice in get_args(annotation) if choice is not type(None))
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _plain_codec(
    type: pa.DataType,
    write: Callable[[Any], Any] | None = None,
    read: Callable[[Any], Any] | None = None,
) -> ColumnCodec:
    def encode(values: Sequence[Any]) -> pa.Array:
        return pa.array([write(value) for value in values] if write else values, type)

    def decode(array: pa.Array) -> list[Any]:
        values: list[Any] = array.to_pylist()
        return [None if value is None else read(value) for value in values] if read else values

    return ColumnCodec(type, encode, decode)


def _json_text(value: Any) -> str:
    return dump_json(value).decode()


def _mapping_items(value: dict[str, Any]) -> list[tuple[str, Any]]:
    return list(value.items())


def _mapping(value: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(value)


def _array_codec(mark: ArrayOf) -> ColumnCodec:
    def encode(values: Sequence[Any]) -> pa.Array:
        flat = values[0] if len(values) == 1 else np.concatenate([np.empty(0, mark.dtype), *values])
        return pa.ListArray.from_arrays(_offsets(values), pa.array(flat, mark.arrow))

    def decode(array: pa.ListArray) -> list[Any]:
        flat = array.values.to_numpy(zero_copy_only=True)
        return [flat[start:end] for start, end in _bounds(array)]

    return ColumnCodec(pa.list_(mark.arrow), encode, decode)


def _list_codec(element: Any) -> ColumnCodec:
    inner = _codec(element)

    def encode(values: Sequence[Any]) -> pa.Array:
        return pa.ListArray.from_arrays(_offsets(values), inner.encode([item for value in values for item in value]))

    def decode(array: pa.ListArray) -> list[Any]:
        flat = inner.decode(array.values)
        return [flat[start:end] for start, end in _bounds(array)]

    return ColumnCodec(pa.list_(inner.type), encode, decode)


def _struct_codec(model: type[Model]) -> ColumnCodec:
    codecs = _fields(model)
    fields = [pa.field(name, codec.type) for name, codec in codecs.items()]

    def encode(values: Sequence[Any]) -> pa.Array:
        # A missing record still needs a row in every child column.
        blank = next((value for value in values if value is not None), None)
        if blank is None:
            return pa.nulls(len(values), pa.struct(fields))
        rows = [blank if value is None else value for value in values]
        children = [codec.encode([getattr(row, name) for row in rows]) for name, codec in codecs.items()]
        return pa.StructArray.from_arrays(children, fields=fields, mask=pa.array([value is None for value in values]))

    def decode(array: pa.StructArray) -> list[Any]:
        present = array.is_valid().to_pylist()
        children = [codec.decode(array.field(name)) for name, codec in codecs.items()]
        rows = zip(*children, strict=True)
        return [_given(model, row) if real else None for real, row in zip(present, rows, strict=True)]

    return ColumnCodec(pa.struct(fields), encode, decode)


def _offsets(values: Sequence[Any]) -> pa.Array:
    ends = np.cumsum([0, *map(len, values)], dtype=np.int64)
    if ends[-1] > np.iinfo(np.int32).max:
        raise SchemaError(f"{ends[-1]} tokens do not fit one Arrow column: write fewer records at a time")
    return pa.array(ends.astype(np.int32))


def _bounds(array: pa.ListArray) -> Iterable[tuple[int, int]]:
    offsets = array.offsets.to_pylist()
    return pairwise(offsets)
