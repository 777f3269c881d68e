"""The evidence of an audit: rows, the engine's log and the models on disk, and the figures computed from them alone.

    rows-exact.arrow, rows-merged.arrow, rows-per_turn.arrow
                    the traces as trainers get them, with the columns conversation, behaviour, target, dialect and model
    calls.arrow     every engine call: session, turn, prompt, sampled, logprobs, versions, and the request's number
    model-*/        the models: two sets of weights, and `versions.json`, which maps versions to them
    conversations.json, report.json
    README.md       how to recompute the logprobs

A row's token was sampled by the call with the row's `rollout_id` as session and the token's `turn_ids` as turn.

Nothing here looks at a graph. A trained token has drifted unless the log says that the engine had exactly the row up to
that token as its context, and sampled that token there with that logprob under that version. In addition, the recorded
logprobs are compared with one forward pass over the row, in float32 and without a cache, with the weights of each token's
version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from towline.audit.engine import EngineCall, read_versions
from towline.common.arrays import Floats, Ids
from towline.common.files import write_atomically
from towline.engines.embedded import Decoder, load_decoder
from towline.schema import BuilderName, Trace, traces_from_table, traces_table
from towline.schema.checks import runs
from towline.schema.files import arrow_bytes, read_arrow
from towline.tokens.traces.builders import distinct_tokens

_ROW_COLUMNS = ("conversation", "behaviour", "target", "dialect", "model")
_CALL_SCHEMA = pa.schema(
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
class EvidenceRow:
    """A trace with the conversation it comes from."""

    conversation: str
    behaviour: str
    target: str
    dialect: str
    model: str
    """The model's folder."""
    trace: Trace


def rows_file(builder: BuilderName) -> str:
    return f"rows-{builder.value}.arrow"


README = """\
# Evidence of a fidelity audit

`rows-*.arrow` are the training rows by builder, `calls.arrow` holds every call of the engine, `model-*` are the models with
the weights of each policy version, and `report.json` is the audit's report. To recompute the logprobs of the rows, run
this in this folder:

```python
import json
from functools import cache
from pathlib import Path

import pyarrow.ipc as ipc
import torch
from towline.engines.embedded import load_decoder

load = cache(load_decoder)

def rows(builder):
    return ipc.open_file(f"rows-{builder}.arrow").read_all().to_pylist()

@torch.no_grad()
def largest_difference(row):
    "One forward pass per version that the row has tokens of."
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


def write_rows(out: Path, builder: BuilderName, rows: Sequence[EvidenceRow]) -> None:
    table = traces_table([row.trace for row in rows])
    for name in _ROW_COLUMNS:
        table = table.append_column(name, pa.array([getattr(row, name) for row in rows], pa.string()))
    write_atomically(out / rows_file(builder), arrow_bytes(table))


def read_rows(out: Path, builder: BuilderName) -> list[EvidenceRow]:
    table = read_arrow(out / rows_file(builder))
    columns = [table.column(name).to_pylist() for name in _ROW_COLUMNS]
    return [EvidenceRow(*fields) for fields in zip(*columns, traces_from_table(table), strict=True)]


def write_readme(out: Path) -> None:
    (out / "README.md").write_text(README, encoding="utf-8")


def write_calls(out: Path, calls: Sequence[EngineCall]) -> None:
    columns = [pa.array([getattr(call, field.name) for call in calls], field.type) for field in _CALL_SCHEMA]
    write_atomically(out / "calls.arrow", arrow_bytes(pa.Table.from_arrays(columns, schema=_CALL_SCHEMA)))


def read_calls(out: Path) -> list[EngineCall]:
    table = read_arrow(out / "calls.arrow").combine_chunks()
    if not table.num_rows:
        return []
    session, turn = table.column("session").to_pylist(), table.column("turn").to_pylist()
    arrays = [_arrays(table.column(name).chunk(0)) for name in _CALL_SCHEMA.names[2:-1]]
    return [
        EngineCall(*fields) for fields in zip(session, turn, *arrays, table.column("number").to_pylist(), strict=True)
    ]


def _arrays(lists: pa.ListArray) -> list[np.ndarray[tuple[int], np.dtype[np.generic]]]:
    """The lists as views into one array."""
    values, bounds = lists.flatten().to_numpy(), np.cumsum([0, *lists.value_lengths().to_pylist()])
    return [values[start:end] for start, end in pairwise(bounds)]


_BLOCK = 32
"""Positions whose logits are in memory at the same time."""


@dataclass(slots=True)
class FidelityFigures:
    """Figures measured over some rows."""

    rows: int = 0
    row_tokens: int = 0
    distinct_tokens: int = 0
    trained_tokens: int = 0
    drifted_tokens: int = 0
    sampled_tokens: int = 0
    """Tokens whose logprob was recomputed: all sampled tokens, in every row that contains them."""
    sum_abs_dlogp: float = 0.0
    max_abs_dlogp: float = 0.0

    def add(self, other: FidelityFigures) -> None:
        for name in (one.name for one in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, max(mine, theirs) if name == "max_abs_dlogp" else mine + theirs)

    @property
    def mean_abs_dlogp(self) -> float:
        return self.sum_abs_dlogp / self.sampled_tokens if self.sampled_tokens else 0.0


@dataclass(slots=True)
class MeasuredConversation:
    """The figures of one conversation under one builder."""

    conversation: str
    builder: BuilderName
    figures: FidelityFigures = field(default_factory=FidelityFigures)
    trained_twice: int = 0
    """Turns with a token that is trained more than once."""
    untrained: int = 0
    """Logged turns that no row trains in full."""
    unended: int = 0
    """Logged turns that are trained except for their last token."""


CallsByTurn = Mapping[tuple[str, int], Sequence[EngineCall]]
"""The calls of each turn: one, or several if it was aborted and resumed."""


def calls_by_turn(calls: Iterable[EngineCall]) -> CallsByTurn:
    log: dict[tuple[str, int], list[EngineCall]] = {}
    for call in calls:
        log.setdefault((call.session, call.turn), []).append(call)
    return log


def measure(
    out: Path, builders: Iterable[BuilderName], progress: Callable[[int], None] | None = None
) -> list[MeasuredConversation]:
    """The figures of every conversation in the folder. `progress` gets the number of rows done."""
    log = calls_by_turn(read_calls(out))
    turns: dict[str, set[int]] = {}
    for session, turn in log:
        turns.setdefault(session, set()).add(turn)
    scorer = Scorer(out)
    results = []
    for builder in builders:
        for conversation, group in groupby(read_rows(out, builder), key=lambda row: row.conversation):
            rows = list(group)
            results.append(_measure(conversation, builder, rows, log, turns, scorer))
            if progress is not None:
                progress(len(rows))
    return results


def _measure(
    conversation: str,
    builder: BuilderName,
    rows: Sequence[EvidenceRow],
    log: CallsByTurn,
    turns: Mapping[str, set[int]],
    scorer: Scorer,
) -> MeasuredConversation:
    measured = MeasuredConversation(conversation, builder)
    trained: dict[int, int] = {}
    for row in rows:
        trace = row.trace
        differences = scorer.differences(row)
        measured.figures.add(
            FidelityFigures(
                rows=1,
                row_tokens=len(trace.token_ids),
                trained_tokens=trace.trained_tokens,
                drifted_tokens=drifted(trace, log),
                sampled_tokens=len(differences),
                sum_abs_dlogp=float(differences.sum()),
                max_abs_dlogp=float(differences.max(initial=0.0)),
            )
        )
        for turn in trace.turn_ids[trace.loss_mask == 1].tolist():
            trained[turn] = trained.get(turn, 0) + 1
    measured.figures.distinct_tokens = distinct_tokens([row.trace.token_ids for row in rows])
    session = rows[0].trace.rollout_id
    for turn in turns.get(session, ()):
        sampled = sum(len(call.sampled) for call in log[session, turn])
        measured.trained_twice += trained.get(turn, 0) > sampled
        measured.unended += trained.get(turn, 0) == sampled - 1
        measured.untrained += trained.get(turn, 0) < sampled - 1
    return measured


def drifted(trace: Trace, log: CallsByTurn) -> int:
    """The number of trained tokens of a row that are in another context than they were sampled in."""
    count = 0
    for turn, start, end in runs(trace.turn_ids):
        if turn < 0 or not trace.loss_mask[start:end].any():
            continue
        place = start
        for call in log.get((trace.rollout_id, turn), ()):
            stop = min(place + len(call.sampled), end)
            right = 0
            if np.array_equal(trace.token_ids[:place], call.prompt):
                right = _agreeing(trace, place, stop, call)
            count += int(trace.loss_mask[place + right : stop].sum())
            place = stop
        count += int(trace.loss_mask[place:end].sum())
    return count


def _agreeing(trace: Trace, start: int, stop: int, call: EngineCall) -> int:
    """The number of tokens from `start` on that match the call, before the first mismatch."""
    size = stop - start
    same = (
        (trace.token_ids[start:stop] == call.sampled[:size])
        & (trace.logprobs[start:stop] == call.logprobs[:size])
        & (trace.policy_versions[start:stop] == call.versions[:size])
    )
    return size if same.all() else int(np.argmin(same))


class Scorer:
    """Recomputes the logprobs of rows with the models in an audit's folder."""

    def __init__(self, out: Path):
        self._out = out
        self._versions: dict[str, dict[int, Path]] = {}
        self._decoders: dict[Path, Decoder] = {}

    def differences(self, row: EvidenceRow) -> Floats:
        """The absolute difference between each sampled token's logprob and the recorded one."""
        trace = row.trace
        places = np.flatnonzero(trace.turn_ids >= 0)
        differences = np.empty(len(places), np.float32)
        versions = trace.policy_versions[places]
        for version in np.unique(versions):
            mine = versions == version
            decoder = self._decoder(row.model, int(version))
            computed = logprobs(decoder, trace.token_ids, places[mine], trace.logit_divisors)
            differences[mine] = np.abs(computed - trace.logprobs[places[mine]])
        return differences

    def _decoder(self, model: str, version: int) -> Decoder:
        if model not in self._versions:
            self._versions[model] = read_versions(self._out / model)
        folder = self._versions[model][version]
        if folder not in self._decoders:
            # Rows are ordered by model, so decoders of other models can be dropped.
            self._decoders = {path: kept for path, kept in self._decoders.items() if path.parent == folder.parent}
            self._decoders[folder] = load_decoder(folder)
        return self._decoders[folder]


@torch.inference_mode()
def logprobs(
    decoder: Decoder, ids: Ids, places: np.ndarray[tuple[int], np.dtype[np.int64]], divisors: Floats
) -> Floats:
    """The logprobs of the ids at `places`, each given all ids before it, with logits divided by `divisors`."""
    row = torch.from_numpy(np.array(ids, np.int64))
    hidden = decoder.hidden(row[:-1].unsqueeze(0))[0]
    found = []
    # One buffer and in-place operations: over a large vocabulary, memory traffic dominates the time.
    buffer = torch.empty(_BLOCK, decoder.config.vocab_size)
    for start in range(0, len(places), _BLOCK):
        block = torch.from_numpy(places[start : start + _BLOCK])
        logits = torch.mm(hidden[block - 1], decoder.head.T, out=buffer[: len(block)])
        logits.div_(torch.from_numpy(divisors[block.numpy()]).unsqueeze(1))
        chosen = logits.gather(1, row[block].unsqueeze(1))[:, 0]
        largest = logits.amax(-1, keepdim=True)
        found.append(chosen - largest[:, 0] - logits.sub_(largest).exp_().sum(-1).log())
    return torch.cat(found).numpy() if found else np.empty(0, np.float32)
