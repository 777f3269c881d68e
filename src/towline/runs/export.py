"""Stream trajectories to one Parquet, Arrow or JSONL file, which appears complete or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from towline.common.files import atomic_file
from towline.errors import ConfigError
from towline.schema import Model, Trace, Trajectory
from towline.schema.files import dump_json, to_table

SUFFIXES = (".parquet", ".arrow", ".jsonl")


class ExportFile:
    """An export file that is being written."""

    def __init__(self, file: IO[bytes], suffix: str, *, whole: bool):
        self.sessions = self.rows = 0
        self._file = file
        self._kind: type[Model] = Trajectory if whole else Trace
        self._writer: Any = None
        schema = to_table(self._kind, []).schema
        if suffix == ".parquet":
            self._writer = pq.ParquetWriter(file, schema, compression="zstd")
        elif suffix == ".arrow":
            codec = "zstd" if pa.Codec.is_available("zstd") else None
            self._writer = ipc.new_file(file, schema, options=ipc.IpcWriteOptions(compression=codec))

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        # One at a time: a large export has more tokens than one Arrow column can hold.
        for one in trajectories:
            records: list[Model] = [one] if self._kind is Trajectory else [*one.traces]
            self.sessions += 1
            self.rows += len(records)
            if self._writer is None:
                for record in records:
                    self._file.write(dump_json(record) + b"\n")
            elif records:
                self._writer.write_table(to_table(self._kind, records))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


@contextlib.contextmanager
def open_export(path: Path, *, whole: bool) -> Iterator[ExportFile]:
    """A file for whole sessions if `whole`, or for their training rows."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: unknown format; use a name that ends in {', '.join(SUFFIXES)}")
    try:
        with atomic_file(path) as file:
            export = ExportFile(file, path.suffix, whole=whole)
            try:
                yield export
            finally:
                export.close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
