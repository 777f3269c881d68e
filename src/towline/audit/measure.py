"""The figures of an audit, computed from its folder alone.

Nothing here looks at a graph. A trained token has drifted unless the log says that the engine really had the row up to
that token as its context, and sampled that token there with that logprob under that version. And what the engine
recorded is compared with one forward pass over the row, in float32 and without a cache, by the weights of the version
that each token carries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from towline.arrays import Floats, Ids
from towline.audit import models
from towline.audit.engine import Call
from towline.audit.evidence import Row, read_calls, read_rows
from towline.engines.embedded import Decoder, load
from towline.schema import BuilderName, Trace
from towline.schema.checks import runs
from towline.tokens.builders import distinct_tokens

_BLOCK = 32
"""Positions whose logits are held at once."""


@dataclass(slots=True)
class Figures:
    """What was measured over some rows."""

    rows: int = 0
    row_tokens: int = 0
    distinct_tokens: int = 0
    trained_tokens: int = 0
    drifted_tokens: int = 0
    sampled_tokens: int = 0
    """Tokens whose logprob was computed again: all that were sampled, in every row they stand in."""
    sum_abs_dlogp: float = 0.0
    max_abs_dlogp: float = 0.0

    def add(self, other: Figures) -> None:
        self.rows += other.rows
        self.row_tokens += other.row_tokens
        self.distinct_tokens += other.distinct_tokens
        self.trained_tokens += other.trained_tokens
        self.drifted_tokens += other.drifted_tokens
        self.sampled_tokens += other.sampled_tokens
        self.sum_abs_dlogp += other.sum_abs_dlogp
        self.max_abs_dlogp = max(self.max_abs_dlogp, other.max_abs_dlogp)

    @property
    def mean_abs_dlogp(self) -> float:
        return self.sum_abs_dlogp / self.sampled_tokens if self.sampled_tokens else 0.0


@dataclass(slots=True)
class Measured:
    """The figures of one conversation under one builder."""

    conversation: str
    builder: BuilderName
    figures: Figures = field(default_factory=Figures)
    trained_twice: int = 0
    """Turns with a token that is trained more than once."""
    untrained: int = 0
    """Turns of the log that no row trains, or not whole."""
    unended: int = 0
    """Turns of the log that are trained but for their last token."""


Log = Mapping[tuple[str, int], Sequence[Call]]
"""The calls of each turn: one, or several if it was aborted and went on."""


def measure(
    out: Path, builders: Iterable[BuilderName], progress: Callable[[int], None] | None = None
) -> list[Measured]:
    """The figures of every conversation in the folder. `progress` is told how many rows are done."""
    log: dict[tuple[str, int], list[Call]] = {}
    for call in read_calls(out):
        log.setdefault((call.session, call.turn), []).append(call)
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
    rows: Sequence[Row],
    log: Log,
    turns: Mapping[str, set[int]],
    scorer: Scorer,
) -> Measured:
    measured = Measured(conversation, builder)
    trained: dict[int, int] = {}
    for row in rows:
        trace = row.trace
        differences = scorer.differences(row)
        measured.figures.add(
            Figures(
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


def drifted(trace: Trace, log: Log) -> int:
    """How many trained tokens of a row stand in another context than they were sampled in."""
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


def _agreeing(trace: Trace, start: int, stop: int, call: Call) -> int:
    """How many tokens from `start` on are the call's, before the first that is not."""
    size = stop - start
    same = (
        (trace.token_ids[start:stop] == call.sampled[:size])
        & (trace.logprobs[start:stop] == call.logprobs[:size])
        & (trace.policy_versions[start:stop] == call.versions[:size])
    )
    return size if same.all() else int(np.argmin(same))


class Scorer:
    """Computes the logprobs of rows again, with the models of an audit's folder."""

    def __init__(self, out: Path):
        self._out = out
        self._versions: dict[str, dict[int, Path]] = {}
        self._decoders: dict[Path, Decoder] = {}

    def differences(self, row: Row) -> Floats:
        """How far each sampled token's logprob is from the recorded one."""
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
            self._versions[model] = models.read_versions(self._out / model)
        folder = self._versions[model][version]
        if folder not in self._decoders:
            # Rows come model by model: what another one needed is not needed again soon.
            self._decoders = {path: kept for path, kept in self._decoders.items() if path.parent == folder.parent}
            self._decoders[folder] = load(folder)
        return self._decoders[folder]


@torch.inference_mode()
def logprobs(
    decoder: Decoder, ids: Ids, places: np.ndarray[tuple[int], np.dtype[np.int64]], divisors: Floats
) -> Floats:
    """The log-probability of the ids at `places`, each given all ids before it and its logits divided."""
    row = torch.from_numpy(np.array(ids, np.int64))
    hidden = decoder.hidden(row[:-1].unsqueeze(0))[0]
    found = []
    # One buffer, and all in place: over a large vocabulary it is memory that takes the time.
    buffer = torch.empty(_BLOCK, decoder.config.vocab_size)
    for start in range(0, len(places), _BLOCK):
        block = torch.from_numpy(places[start : start + _BLOCK])
        logits = torch.mm(hidden[block - 1], decoder.head.T, out=buffer[: len(block)])
        logits.div_(torch.from_numpy(divisors[block.numpy()]).unsqueeze(1))
        chosen = logits.gather(1, row[block].unsqueeze(1))[:, 0]
        largest = logits.amax(-1, keepdim=True)
        found.append(chosen - largest[:, 0] - logits.sub_(largest).exp_().sum(-1).log())
    return torch.cat(found).numpy() if found else np.empty(0, np.float32)
