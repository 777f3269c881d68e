"""Bytes on disk: JSON text, Arrow files, and writing that leaves a whole file or none.

Invariant: when `write_atomically` returns, the file is complete and durable under its name; when it raises, or the
machine stops, the name holds what it held before.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.ipc as ipc
from pydantic import BaseModel

from towline import exact_json
from towline.schema.base import SchemaError


def is_json(path: Path) -> bool:
    """Whether the path names a JSON file; raises for a name that is neither JSON nor Arrow."""
    if path.suffix not in (".json", ".arrow"):
        raise SchemaError(f"{path}: a trajectory file is named .arrow or .json")
    return path.suffix == ".json"


def dump_json(value: Any) -> bytes:
    """JSON of records, arrays and free values, straight from the arrays."""
    try:
        return orjson.dumps(value, _plain, orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        # Models write integers past 64 bits and broken surrogates into tool arguments; the slow way can hold both.
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
        raise SchemaError(f"{path} is not a whole Arrow file: {error}") from error


def write_atomically(path: Path, data: bytes | pa.Buffer) -> None:
    """Write, fsync, rename, fsync the folder."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
