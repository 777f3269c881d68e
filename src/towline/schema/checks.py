"""The invariants of a trajectory as plain functions; each raises `ValueError` with the turn or trace at fault.

- The graph: parents come earlier, and a turn's prompt is its parent's prompt, what the parent sampled, and its suffix.
- Ownership: a turn of a trained role is trained whole in exactly one trace, without its end if that is `unended`; any
  other turn, and one that is `untrained`, in none.
- Exactness: a row of the `exact` builder is, token for token, the path of turns that ends in its last turn. A turn beside
  that path is trained in it only as far as the row holds that turn's whole prompt and what it sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from towline.schema import turn as turn_module
from towline.schema.trace import Trace
from towline.schema.turn import Turn, TurnSampling
from towline.schema.vocabulary import BuilderName, TurnRole


def check_graph(turns: Sequence[Turn]) -> None:
    """Ids and indices are unique; parents and origins come earlier; prompt lengths add up."""
    seen: dict[str, Turn] = {}
    indices: set[int] = set()
    for turn in turns:
        if turn.id in seen:
            raise ValueError(f"two turns have the id {turn.id}")
        if turn.index in indices:
            raise ValueError(f"two turns have the index {turn.index}")
        for relation, name in (("parent", turn.parent), ("origin", turn.origin)):
            if name is not None and (name not in seen or seen[name].index >= turn.index):
                raise ValueError(f"turn {turn.id}: its {relation} {name} is not an earlier turn")
        before = 0
        if turn.parent is not None:
            parent = seen[turn.parent]
            before = parent.prompt_length + len(parent.sampled)
        if turn.prompt_length != before + len(turn.suffix):
            raise ValueError(
                f"turn {turn.id}: prompt_length {turn.prompt_length} is not {before} tokens of its parent "
                f"and {len(turn.suffix)} of its suffix"
            )
        seen[turn.id] = turn
        indices.add(turn.index)


def runs(turn_ids: npt.NDArray[np.int32]) -> Iterator[tuple[int, int, int]]:
    """Runs of equal turn ids: `(turn index, start, end)`, -1 for context."""
    edges = np.flatnonzero(np.diff(turn_ids)) + 1
    bounds = [0, *edges.tolist(), len(turn_ids)]
    for start, end in pairwise(bounds):
        yield int(turn_ids[start]), start, end


def check_ownership(
    turns: Sequence[Turn], traces: Sequence[Trace], trained_roles: Collection[TurnRole], *, complete: bool
) -> int:
    """Check that no turn is trained twice; returns the number of trained tokens. `complete`: no turn may be missing."""
    by_index = {turn.index: turn for turn in turns}
    owner: dict[int, str] = {}
    trained = 0
    for trace in traces:
        for index, start, end in runs(trace.turn_ids):
            if index < 0:
                continue
            turn = by_index.get(index)
            if turn is None:
                raise ValueError(f"trace {trace.trace_id} names a turn {index} that does not exist")
            mask = trace.loss_mask[start:end]
            if not mask.any():
                continue
            if turn.untrained is not None:
                raise ValueError(
                    f"trace {trace.trace_id} trains turn {turn.id}, which is not trained: {turn.untrained}"
                )
            if turn.role not in trained_roles:
                raise ValueError(f"trace {trace.trace_id} trains turn {turn.id}, whose role {turn.role} is not trained")
            if index in owner:
                raise ValueError(f"turn {turn.id} is trained twice, in traces {owner[index]} and {trace.trace_id}")
            length = end - start + turn.unended
            if not mask.all() or length != len(turn.sampled) or not _is_sampled(trace, start, end, turn):
                raise ValueError(f"trace {trace.trace_id} does not train turn {turn.id} whole and as it was sampled")
            owner[index] = trace.trace_id
            trained += end - start
    if complete:
        for turn in turns:
            trainable = turn.role in trained_roles and turn.untrained is None
            if trainable and len(turn.sampled) and turn.index not in owner:
                raise ValueError(f"turn {turn.id} of the trained role {turn.role} is trained in no trace")
    return trained


def check_exact(trace: Trace, by_id: Mapping[str, Turn], by_index: Mapping[int, Turn]) -> None:
    """Check that the row is the path to its last turn. `check_ownership` has checked that all turn ids exist."""
    if trace.turn_ids[-1] < 0:
        raise ValueError(f"trace {trace.trace_id} ends with context, not with a sampled token")
    path = path_to(by_index[int(trace.turn_ids[-1])], by_id)
    leaf = path[-1]
    if len(trace.token_ids) != leaf.prompt_length + len(leaf.sampled):
        raise ValueError(f"trace {trace.trace_id} does not have the length of the path to turn {leaf.id}")
    for turn in path:
        start, end = turn.prompt_length, turn.prompt_length + len(turn.sampled)
        if not np.array_equal(trace.token_ids[start - len(turn.suffix) : start], turn.suffix):
            raise ValueError(f"trace {trace.trace_id} differs from the prompt of turn {turn.id}")
        if not (trace.turn_ids[start:end] == turn.index).all() or not _is_sampled(trace, start, end, turn):
            raise ValueError(f"trace {trace.trace_id} differs from what turn {turn.id} sampled")
    on_path = {turn.index for turn in path}
    for index, start, end in runs(trace.turn_ids):
        if index >= 0 and index not in on_path:
            turn = by_index[index]
            if trace.loss_mask[start:end].any() and not _is_prompted(trace, start, turn, by_id):
                raise ValueError(f"trace {trace.trace_id} trains turn {index} in a context it was not sampled in")
            if not np.array_equal(trace.token_ids[start:end], turn.sampled[: end - start]):
                raise ValueError(f"trace {trace.trace_id} differs from what turn {index} sampled")


def path_to(turn: Turn, by_id: Mapping[str, Turn]) -> list[Turn]:
    """The turns from the root to `turn`."""
    path = [turn]
    while path[-1].parent is not None:
        path.append(by_id[path[-1].parent])
    path.reverse()
    return path


def check_traces(traces: Sequence[Trace], session_id: str, group_id: str, builder: BuilderName) -> None:
    """Trace ids are unique, parents exist, and every trace is of this session."""
    names = {trace.trace_id for trace in traces}
    if len(names) != len(traces):
        raise ValueError("two traces have the same trace_id")
    for trace in traces:
        found, expected = (trace.rollout_id, trace.group_id, trace.builder), (session_id, group_id, builder)
        if found != expected:
            raise ValueError(f"trace {trace.trace_id}: rollout, group and builder are {found}, not {expected}")
        if trace.parent_trace is not None and (trace.parent_trace not in names or trace.parent_trace == trace.trace_id):
            raise ValueError(
                f"trace {trace.trace_id}: parent_trace {trace.parent_trace} is not another trace of this session"
            )


def prompt_of(turn: Turn, by_id: Mapping[str, Turn]) -> npt.NDArray[np.int32]:
    """The whole prompt of a turn, as the model saw it."""
    *before, last = path_to(turn, by_id)
    return np.concatenate([part for parent in before for part in (parent.suffix, parent.sampled)] + [last.suffix])


def _is_prompted(trace: Trace, start: int, turn: Turn, by_id: Mapping[str, Turn]) -> bool:
    """Whether the row up to `start` is the turn's prompt."""
    return start == turn.prompt_length and np.array_equal(trace.token_ids[:start], prompt_of(turn, by_id))


def _is_sampled(trace: Trace, start: int, end: int, turn: Turn) -> bool:
    """Whether the run has the turn's first ids, logprobs and versions."""
    size = end - start
    return (
        np.array_equal(trace.token_ids[start:end], turn.sampled[:size])
        and np.array_equal(trace.logprobs[start:end], turn.logprobs[:size])
        and np.array_equal(trace.policy_versions[start:end], turn.versions[:size])
    )


def check_sampling(trace: Trace, by_index: Mapping[int, TurnSampling]) -> None:
    """Raise `ValueError` unless the row's settings are those of its turns, all of which exist."""
    temperatures, own = turn_module.of_turns(trace.turn_ids, by_index)
    if not np.array_equal(trace.temperatures, temperatures):
        place = int(np.flatnonzero(trace.temperatures != temperatures)[0])
        raise ValueError(
            f"trace {trace.trace_id}: token {place} has temperature {trace.temperatures[place]:g}, and its turn was "
            f"sampled at {temperatures[place]:g}"
        )
    if trace.sampling != own:
        raise ValueError(f"trace {trace.trace_id}: its sampling settings are not those of its turns")
