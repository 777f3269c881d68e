"""What an audit leaves behind: rows, the engine's log and the models, enough to check every figure again.

    rows-exact.arrow, rows-merged.arrow, rows-per_turn.arrow
                    the traces as trainers get them, with the columns conversation, behaviour, target, dialect and model
    calls.arrow     every call of an engine: session, turn, prompt, sampled, logprobs, versions, and the number that the
                    harness gave its request
    model-*/        the models: two sets of weights, and `versions.json` which says what version each is
    conversations.json, report.json
    README.md       how to compute the logprobs again

A row's token was sampled by the call with the row's `rollout_id` as session and the token's `turn_ids` as turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from towline.audit.engine import Call
from towline.schema import BuilderName, Trace, traces_from_table, traces_table
from towline.schema.files import arrow_bytes, read_arrow, write_atomically

_NAMES = ("conversation", "behaviour", "target", "dialect", "model")
_CALLS = pa.schema(
    [
        ("session", pa.string()),
        ("turn", pa.int32()),
        ("prompt", pa.list_(pa.int32())),
        ("sampled", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("number", pa.int64()),
    ]
)


@dataclass(slots=True)
class Row:
    """A trace and where it comes from."""

    conversation: str
    behaviour: str
    target: str
    dialect: str
    model: str
    """The folder of its model."""
    trace: Trace


def rows_file(builder: BuilderName) -> str:
    return f"rows-{builder.value}.arrow"


README = """\
# Evidence of a fidelity audit

`rows-*.arrow` are the training rows by builder, `calls.arrow` is every call of the engine, `model-*` are the models with
the weights of each policy version, `report.json` is what the audit made of them. To compute the logprobs of the rows
again, in this folder:

```python
import json
from functools import cache
from pathlib import Path

import pyarrow.ipc as ipc
import torch
from towline.engines.embedded import load

load = cache(load)

def rows(builder):
    return ipc.open_file(f"rows-{builder}.arrow").read_all().to_pylist()

@torch.no_grad()
def largest_difference(row):
    "One forward pass for each version that the row has tokens of."
    folder, ids = Path(row["model"]), torch.tensor(row["token_ids"])
    weights = json.loads((folder / "versions.json").read_text())
    largest = 0.0
    for version in {version for version in row["policy_versions"] if version >= 0}:
        model = load(folder / weights[str(version)])
        places = [place for place, of in enumerate(row["policy_versions"]) if of == version]
        before = model.hidden(ids[None])[0, torch.tensor(places) - 1]
        temperatures = torch.tensor([row["temperatures"][place] or 1.0 for place in places])
        logprobs = (before @ model.head.T / temperatures[:, None]).log_softmax(-1)
        for place, computed in zip(places, logprobs):
            largest = max(largest, abs(float(computed[ids[place]]) - row["logprobs"][place]))
    return largest
```

`max(map(largest_difference, rows("exact")))` is the report's `max_abs_dlogp` of `exact`, up to rounding.
"""


def write_rows(out: Path, builder: BuilderName, rows: Sequence[Row]) -> None:
    table = traces_table([row.trace for row in rows])
    for name in _NAMES:
        table = table.append_column(name, pa.array([getattr(row, name) for row in rows], pa.string()))
    write_atomically(out / rows_file(builder), arrow_bytes(table))


def read_rows(out: Path, builder: BuilderName) -> list[Row]:
    table = read_arrow(out / rows_file(builder))
    columns = [table.column(name).to_pylist() for name in _NAMES]
    return [Row(*fields) for fields in zip(*columns, traces_from_table(table), strict=True)]


def write_readme(out: Path) -> None:
    (out / "README.md").write_text(README, encoding="utf-8")


def write_calls(out: Path, calls: Sequence[Call]) -> None:
    columns = [pa.array([getattr(call, field.name) for call in calls], field.type) for field in _CALLS]
    write_atomically(out / "calls.arrow", arrow_bytes(pa.Table.from_arrays(columns, schema=_CALLS)))


def read_calls(out: Path) -> list[Call]:
    table = read_arrow(out / "calls.arrow").combine_chunks()
    if not table.num_rows:
        return []
    session, turn = table.column("session").to_pylist(), table.column("turn").to_pylist()
    arrays = [_arrays(table.column(name).chunk(0)) for name in _CALLS.names[2:-1]]
    return [Call(*fields) for fields in zip(session, turn, *arrays, table.column("number").to_pylist(), strict=True)]


def _arrays(lists: pa.ListArray) -> list[np.ndarray[tuple[int], np.dtype[np.generic]]]:
    """The lists as views of one array."""
    values, bounds = lists.flatten().to_numpy(), np.cumsum([0, *lists.value_lengths().to_pylist()])
    return [values[start:end] for start, end in pairwise(bounds)]
