"""Traces as a flat table, one row each: what trainers read from Arrow or Parquet."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from towline.schema import columns
from towline.schema.trajectory import Trace, Trajectory


def traces_table(records: Iterable[Trajectory | Trace]) -> pa.Table:
    """The traces, or the traces of the trajectories, in order. The table's metadata holds the schema version."""
    traces: list[Trace] = []
    for record in records:
        traces.extend(record.traces if isinstance(record, Trajectory) else [record])
    return columns.to_table(Trace, traces)


def traces_from_table(table: pa.Table) -> list[Trace]:
    """The traces of a table. Their arrays are read-only views of the table's memory."""
    return [Trace.model_validate(row) for row in columns.from_table(Trace, table)]
