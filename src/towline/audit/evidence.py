"""What an audit leaves behind: rows, the engine's log and the models, enough to check every figure again.

    rows-exact.arrow, rows-merged.arrow, rows-per_turn.arrow
                    the traces as trainers get them, with the columns conversation, behaviour, target and model
    calls.arrow     every call of an engine: session, turn, prompt, sampled, logprobs, versions
    model-*/        the models: two sets of weights, and `versions.json` which says what version each is
    conversations.json, report.json

A row's token was sampled by the call with the row's `rollout_id` as session and the token's `turn_ids` as turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from towline.audit.engine import Call
from towline.schema import BuilderName, Trace, traces_from_table, traces_table
from towline.schema.files import arrow_bytes, read_arrow, write_atomically

_NAMES = ("conversation", "behaviour", "target", "model")
_CALLS = pa.schema(
    [
        ("session", pa.string()),
        ("turn", pa.int32()),
        ("prompt", pa.list_(pa.int32())),
        ("sampled", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
    ]
)


@dataclass(slots=True)
class Row:
    """A trace and where it comes from."""

    conversation: str
    behaviour: str
    target: str
    model: str
    """The folder of its model."""
    trace: Trace


def rows_file(builder: BuilderName) -> str:
    return f"rows-{builder.value}.arrow"


def write_rows(out: Path, builder: BuilderName, rows: Sequence[Row]) -> None:
    table = traces_table([row.trace for row in rows])
    for name in _NAMES:
        table = table.append_column(name, pa.array([getattr(row, name) for row in rows], pa.string()))
    write_atomically(out / rows_file(builder), arrow_bytes(table))


def read_rows(out: Path, builder: BuilderName) -> list[Row]:
    table = read_arrow(out / rows_file(builder))
    columns = [table.column(name).to_pylist() for name in _NAMES]
    return [Row(*names, trace) for *names, trace in zip(*columns, traces_from_table(table), strict=True)]


def write_calls(out: Path, calls: Sequence[Call]) -> None:
    columns = [pa.array([getattr(call, field.name) for call in calls], field.type) for field in _CALLS]
    write_atomically(out / "calls.arrow", arrow_bytes(pa.Table.from_arrays(columns, schema=_CALLS)))


def read_calls(out: Path) -> list[Call]:
    table = read_arrow(out / "calls.arrow").combine_chunks()
    if not table.num_rows:
        return []
    session, turn = table.column("session").to_pylist(), table.column("turn").to_pylist()
    arrays = [_arrays(table.column(name).chunk(0)) for name in _CALLS.names[2:]]
    return [Call(*fields) for fields in zip(session, turn, *arrays, strict=True)]


def _arrays(lists: pa.ListArray) -> list[np.ndarray[tuple[int], np.dtype[np.generic]]]:
    """The lists as views of one array."""
    values, bounds = lists.flatten().to_numpy(), np.cumsum([0, *lists.value_lengths().to_pylist()])
    return [values[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
