"""Trajectories to one file, as they come: Parquet, Arrow or lines of JSON. The file appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from towline.errors import ConfigError
from towline.schema import Model, SessionState, Trace, Trajectory
from towline.schema.columns import to_table
from towline.schema.files import dump_json

SUFFIXES = (".parquet", ".arrow", ".jsonl")


def is_usable(trajectory: Trajectory) -> bool:
    """Whether a trainer can learn from it."""
    scored = trajectory.reward is None or trajectory.reward.score is not None
    return trajectory.state is SessionState.DONE and trajectory.report.trained_tokens > 0 and scored


class Export:
    """A file that is being written."""

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
        # One at a time: so many tokens as an Arrow column cannot hold may well be asked for.
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
def opened(path: Path, *, whole: bool) -> Iterator[Export]:
    """`whole` writes sessions, else their training rows."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: the file's name ends in {', '.join(SUFFIXES)}")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("wb") as file:
            export = Export(file, path.suffix, whole=whole)
            try:
                yield export
            finally:
                export.close()
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)
