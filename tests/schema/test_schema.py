"""The contract: what a record accepts and rejects, and that files round-trip."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from towline.errors import TowlineError
from towline.schema import (
    SCHEMA_VERSION,
    TRAINED_ROLES,
    VALID_TRANSITIONS,
    BuilderName,
    ContextPolicy,
    EndReason,
    FidelityReport,
    ForkReason,
    Reward,
    RewardStatus,
    SchemaError,
    SchemaVersionError,
    Session,
    SessionState,
    Task,
    Timeouts,
    Trace,
    Trajectory,
    TransitionError,
    Turn,
    TurnRole,
    traces_from_table,
    traces_table,
)

AWKWARD: list[Any] = [
    "plain",
    "",
    "[red]\x1b[31m\x00",
    "naïve 模型 🪢",
    "\ud800",  # what a harness gets to by cutting a string between surrogates
    2**80,  # integers have no bound in JSON
    -1.5e-300,
    None,
    True,
    {"a": [1, {"b": []}]},
]


def row(turns: list[Turn], leaf: Turn, trained: set[int], **fields: Any) -> Trace:
    """The trace of the path to `leaf`, with the turns in `trained` trained."""
    by_id = {turn.id: turn for turn in turns}
    path = [*reversed(ancestors(leaf, by_id)), leaf]
    tokens, mask, logprobs, versions, owners = [], [], [], [], []
    for turn in path:
        context, count = len(turn.suffix), len(turn.sampled)
        tokens += [*turn.suffix, *turn.sampled]
        mask += [0] * context + [int(turn.index in trained)] * count
        logprobs += [0.0] * context + list(turn.logprobs)
        versions += [-1] * context + list(turn.versions)
        owners += [-1] * context + [turn.index] * count
    arrays = {
        "token_ids": np.array(tokens, np.int32),
        "loss_mask": np.array(mask, np.uint8),
        "logprobs": np.array(logprobs, np.float32),
        "policy_versions": np.array(versions, np.int32),
        "turn_ids": np.array(owners, np.int32),
    }
    return Trace(role=leaf.role, rollout_id="session", group_id="group", finish_reason=leaf.finish, **arrays | fields)


def build(turns: list[Turn], **fields: Any) -> Trajectory:
    """A done trajectory: a trained turn belongs to the earliest row through it that ends in a trained role."""
    by_id = {turn.id: turn for turn in turns}
    sampled = [turn for turn in turns if len(turn.sampled)]
    above = {turn.id: [t.id for t in ancestors(turn, by_id)] for turn in sampled}
    owned: set[int] = set()
    traces: list[Trace] = []
    for leaf in sampled:
        trained = leaf.role in TRAINED_ROLES
        if any(leaf.id in above[t.id] and (not trained or t.role in TRAINED_ROLES) for t in sampled):
            continue
        path = [leaf, *ancestors(leaf, by_id)]
        mine = {turn.index for turn in path if trained and turn.role in TRAINED_ROLES} - owned
        owned |= mine
        parent = traces[0].trace_id if traces else None
        traces.append(row(turns, leaf, mine, trace_id=f"{leaf.id}-row", parent_trace=parent))
    defaults: dict[str, Any] = {"state": SessionState.DONE, "end_reason": EndReason.EXITED}
    return Trajectory(session_id="session", group_id="group", turns=turns, traces=traces, **defaults | fields)


def ancestors(turn: Turn, by_id: dict[str, Turn]) -> list[Turn]:
    found = []
    while turn.parent is not None:
        turn = by_id[turn.parent]
        found.append(turn)
    return found


def turn(index: int, parent: Turn | None, suffix: list[int], sampled: list[int], **fields: Any) -> Turn:
    before = parent.prompt_length + len(parent.sampled) if parent else 0
    defaults: dict[str, Any] = {
        "id": f"t{index}",
        "index": index,
        "parent": parent.id if parent else None,
        "prompt_length": before + len(suffix),
        "suffix": np.array(suffix, np.int32),
        "sampled": np.array(sampled, np.int32),
        "logprobs": -np.arange(1, len(sampled) + 1, dtype=np.float32) / 7,
        "versions": np.full(len(sampled), index, np.int32),
        "finish": "stop",
    }
    return Turn(**defaults | fields)


def example() -> Trajectory:
    """Two turns, a branch from the first, a side call, a discarded turn: every kind of ownership."""
    first = turn(
        0,
        None,
        [1, 2, 3],
        [10, 11],
        tools_key="k",
        requested={"temperature": 0.2},
        overridden=["temperature"],
        temperature=0.3,
        top_k=5,
    )
    second = turn(1, first, [4], [12, 13, 14], messages=[{"role": "tool", "text": "ok"}], reply={"text": "done"})
    branch = turn(2, first, [5, 6], [15], reason=ForkReason.HISTORY_EDITED, origin="t1", origin_inferred=True)
    side = turn(3, None, [7], [16], role=TurnRole.SIDE, reason=ForkReason.SIDE)
    lost = turn(4, second, [8], [17, 18], role=TurnRole.DISCARDED, delivered=False)
    again = turn(5, second, [8], [19], flags=["retry"], seconds=0.25, cached_tokens=9)
    return build(
        [first, second, branch, side, lost, again],
        context_policy=ContextPolicy.RETAIN,
        reward=Reward(value=0.5, components={"tests": 1.0}, per_turn={"t1": -1.0}, evaluator="command"),
        report=FidelityReport(turns=6, forks={ForkReason.SIDE: 1}, row_tokens=30, distinct_tokens=20),
        tools={"k": [{"name": "read", "parameters": {}}]},
        timings={"run": 1.5},
        metadata={"seed": 3},
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Any forest of turns, with any roles, values and empty turns."""
    ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)
    free = st.dictionaries(st.text(max_size=5), st.sampled_from(AWKWARD), max_size=3)
    turns: list[Turn] = []
    for number in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *turns]))
        sampled = draw(ids)
        low = st.floats(-(2.0**99), 0, width=32)
        turns.append(
            turn(
                number * 3,
                parent,
                draw(ids.filter(bool) if parent is None else ids),
                sampled,
                logprobs=[draw(low) for _ in sampled],
                versions=[draw(st.integers(0, 9)) for _ in sampled],
                role=draw(st.sampled_from([TurnRole.MAIN, TurnRole.MAIN, *TurnRole])),
                origin=draw(st.sampled_from([None, *(t.id for t in turns)])),
                reason=draw(st.sampled_from([None, *ForkReason])),
                finish=draw(st.sampled_from(["stop", "length", "abort"])),
                requested=draw(free),
                messages=draw(st.lists(free, max_size=3)),
                reply=draw(free),
                flags=draw(st.lists(st.text(max_size=4), max_size=2)),
                temperature=draw(st.sampled_from([1.0, 0.0, 0.3, 0.7])),
                top_p=draw(st.sampled_from([1.0, 0.9])),
            )
        )
    reward = draw(
        st.sampled_from(
            [
                None,
                Reward(value=1, per_turn={turns[0].id: 2.5}),
                Reward(value=0, status=RewardStatus.FAILED, error="the verifier crashed"),
            ]
        )
    )
    trajectory = build(turns, error="nothing was sampled", tools={"k": draw(st.lists(free, max_size=2))})
    return trajectory if reward is None else trajectory.with_reward(reward)


@given(trajectories())
def test_json_and_arrow_round_trip(trajectory: Trajectory) -> None:
    table = trajectory.to_arrow()
    assert table.num_rows == 1
    assert table.schema.metadata[b"towline.schema"] == str(SCHEMA_VERSION).encode()
    copies = [Trajectory.from_json(trajectory.to_json()), Trajectory.from_arrow(table)]
    assert copies == [trajectory, trajectory]
    for copied in copies:
        for mine, theirs in zip(trajectory.turns + trajectory.traces, copied.turns + copied.traces, strict=True):
            for name, value in mine.__dict__.items():
                if isinstance(value, np.ndarray):
                    other = getattr(theirs, name)
                    assert other.dtype == value.dtype
                    assert other.tobytes() == value.tobytes()  # bit for bit, whatever the format
    flat = traces_table([trajectory, *trajectory.traces])
    assert traces_from_table(flat) == trajectory.traces * 2
    for one in trajectory.traces:
        leaf = next(t for t in trajectory.turns if t.index == one.turn_ids[-1])
        assert [*trajectory.prompt(leaf.id), *leaf.sampled] == one.token_ids.tolist()
        by_index = {t.index: t for t in trajectory.turns}
        sampled_at = [1.0 if i < 0 else by_index[int(i)].temperature for i in one.turn_ids]
        assert one.temperatures.tolist() == np.array(sampled_at, np.float32).tolist()
        assert {each.turn: each.top_p for each in one.sampling} == {
            int(i): by_index[int(i)].top_p for i in one.turn_ids if i >= 0
        }


def test_rows_without_settings_per_token_are_readable() -> None:
    whole = example()
    data = json.loads(whole.to_json())
    for one in data["traces"]:
        without_sampling(one)
    # The turns know better than the row's single setting.
    assert Trajectory.from_json(orjson.dumps(data)) == whole
    assert [each.truncated for each in whole.traces[3].sampling] == [True, False, False]
    # So they do in an Arrow file whose rows lack the columns.
    table = whole.to_arrow()
    rows = table.column("traces").chunk(0)
    names = [f.name for f in rows.type.value_type if f.name not in ("temperatures", "sampling")]
    columns = [rows.values.field(name) for name in names]
    old = pa.ListArray.from_arrays(rows.offsets, pa.StructArray.from_arrays(columns, names))
    table = table.set_column(table.column_names.index("traces"), "traces", old)
    assert Trajectory.from_arrow(table) == whole
    # Rows alone have their own setting and nothing else.
    flat = traces_table(whole.traces).drop_columns(["temperatures", "sampling"])
    for one, back in zip(whole.traces, traces_from_table(flat), strict=True):
        assert back.temperatures.tolist() == [1.0] * len(one.token_ids)  # the last turn's
    cold = traces_table([Trace(**whole.traces[3].__dict__ | {"temperature": 0.5, "temperatures": [], "sampling": []})])
    (back,) = traces_from_table(cold.drop_columns(["temperatures", "sampling"]))
    assert back.temperatures.tolist() == [0.5 if i >= 0 else 1.0 for i in back.turn_ids]
    assert back.trained_temperatures == [0.5]


def test_rewards_reach_the_rows_that_train_their_turns() -> None:
    scored = example().with_reward(Reward(value=0.5, per_turn={"t0": 1.0, "t2": -1.0, "t3": 9.0}))
    assert {trace.trace_id: trace.turn_rewards for trace in scored.traces} == {
        "t2-row": {"t0": 1.0, "t2": -1.0},
        "t3-row": {},  # a side call is not trained, and the row of t5 sees t0 as context only
        "t4-row": {},
        "t5-row": {},
    }
    assert {trace.reward for trace in scored.traces} == {0.5}
    failed = scored.with_reward(Reward(value=0.0, status=RewardStatus.FAILED, error="out of disk"))
    assert {trace.reward for trace in failed.traces} == {None}  # a failure is never reward 0
    with pytest.raises(ValidationError, match="a reward names a turn t99 that does not exist"):
        scored.with_reward(Reward(value=1.0, per_turn={"t99": 1.0}))


Change = Callable[[dict[str, Any]], Any]


def at(*path: str | int, to: Any) -> Change:
    """A change of one value inside the JSON form."""

    def change(data: dict[str, Any]) -> None:
        target: Any = data
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = to

    return change


def train_side_call(data: dict[str, Any]) -> None:
    data["traces"][1]["loss_mask"][-1] = 1


def drop_row(data: dict[str, Any]) -> None:
    del data["traces"][3]
    data["traces"][1]["parent_trace"] = None


def without_sampling(row: dict[str, Any]) -> dict[str, Any]:
    """The row as older records have it, without settings per token and per turn."""
    del row["temperatures"], row["sampling"]
    return row


def end_with_context(data: dict[str, Any]) -> None:
    row = without_sampling(data["traces"][3])
    for name, value in {"token_ids": 8, "loss_mask": 0, "logprobs": 0, "policy_versions": -1, "turn_ids": -1}.items():
        row[name].append(value)


def borrow(data: dict[str, Any], trained: int) -> None:
    """Put what t3 sampled into the suffix of t5, attributed to t3."""
    data["turns"][5]["suffix"] = [16]
    row = without_sampling(data["traces"][3])
    position = data["turns"][5]["prompt_length"] - 1
    changes = {"token_ids": 16, "loss_mask": trained, "policy_versions": 3, "turn_ids": 3}
    changes["logprobs"] = data["turns"][3]["logprobs"][0]
    for name, value in changes.items():
        row[name][position] = value


def borrow_and_train(data: dict[str, Any]) -> None:
    borrow(data, trained=1)
    data["turns"][3]["role"] = "main"


def borrow_in_part(data: dict[str, Any]) -> None:
    borrow(data, trained=0)
    data["turns"][5]["suffix"] = [15]
    data["traces"][3]["token_ids"][data["turns"][5]["prompt_length"] - 1] = 15


def repeat_last_token(data: dict[str, Any]) -> None:
    """In the row of the discarded turn, where nothing is trained and ownership is not checked."""
    row = without_sampling(data["traces"][2])
    for name in ("token_ids", "loss_mask", "logprobs", "policy_versions", "turn_ids"):
        row[name].append(row[name][-1])


def credit_another_turn(data: dict[str, Any]) -> None:
    """Name t0 as the one that sampled t1's tokens, again where nothing is trained."""
    without_sampling(data["traces"][2])["turn_ids"][6:9] = [0, 0, 0]


def steal_turn(data: dict[str, Any]) -> None:
    """Train t0 in the second row that runs through it as well."""
    data["traces"][3]["loss_mask"][3:5] = [1, 1]


VIOLATIONS: dict[str, Change] = {
    # the graph
    "two turns have the id t0": at("turns", 3, "id", to="t0"),
    "two turns have the index 1": at("turns", 3, "index", to=1),
    "its parent t5 is not an earlier turn": at("turns", 3, "parent", to="t5"),
    "its origin t1 is not an earlier turn": at("turns", 1, "index", to=9),
    "its origin nobody is not an earlier turn": at("turns", 3, "origin", to="nobody"),
    "turn t2: prompt_length 8 is not 5 tokens of its parent and 2 of its suffix": at("turns", 2, "prompt_length", to=8),
    "its tools elsewhere are not recorded": at("turns", 1, "tools_key", to="elsewhere"),
    # the rows as a set
    "two traces have the same trace_id": at("traces", 1, "trace_id", to="t2-row"),
    "is not another trace of this session": at("traces", 1, "parent_trace", to="t3-row"),
    "rollout, group and builder are": at("traces", 1, "rollout_id", to="another"),
    # ownership
    "trains turn t3, whose role side is not trained": train_side_call,
    "turn t0 is trained twice, in traces t2-row and t5-row": steal_turn,
    "turn t1 of the trained role main is trained in no trace": drop_row,
    "does not train turn t2 whole and as it was sampled": at("traces", 0, "token_ids", 7, to=99),
    "t5-row does not train turn t1 whole": at("traces", 3, "loss_mask", 7, to=0),
    "names a turn 77 that does not exist": at("traces", 1, "turn_ids", 1, to=77),
    "t1-as-sampled: logprobs": at("traces", 3, "logprobs", 7, to=-9.0),
    "t1-as-sampled: versions": at("traces", 3, "policy_versions", 7, to=0),
    # exactness
    "t5-row differs from the prompt of turn t0": at("traces", 3, "token_ids", 0, to=99),
    "t5-row differs from what turn t0 sampled": at("traces", 3, "token_ids", 3, to=99),
    "t5-row ends with context": end_with_context,
    "t3-row differs from what turn t3 sampled": at("traces", 1, "logprobs", 1, to=-9.0),
    "trains turn 3 in a context it was not sampled in": borrow_and_train,
    "t5-row differs from what turn 3 sampled": borrow_in_part,
    "t4-row does not have the length of the path to turn t4": repeat_last_token,
    "t4-row differs from what turn t1 sampled": credit_another_turn,
    # sampling
    "t5-row: token 3 has temperature 0.5, and its turn was sampled at 0.3": at("traces", 3, "temperatures", 3, to=0.5),
    "t5-row: token 0 has temperature 0.3, and its turn was sampled at 1": at("traces", 3, "temperatures", 0, to=0.3),
    "t5-row: its sampling settings are not those of its turns": at("traces", 3, "sampling", 0, "top_p", to=0.5),
    "temperatures has 0 entries for": at("traces", 3, "temperatures", to=[]),
    "temperatures must be finite and not negative": at("traces", 3, "temperatures", 3, to=-1),
    # the session
    "a session that is done needs an end_reason": at("end_reason", to=None),
    "a failed session needs an error": at("state", to="failed"),
    "discarded turns are never trained": at("trained_roles", to=["main", "discarded"]),
    "a role is named twice": at("trained_roles", to=["main", "main"]),
    "Extra inputs are not permitted": at("surprise", to=1),
    "a reward names a turn t9 that": at("reward", "per_turn", to={"t9": 1.0}),
}


@pytest.mark.parametrize("message", VIOLATIONS)
def test_a_trajectory_whose_sides_disagree_cannot_be_read(message: str) -> None:
    data = json.loads(example().to_json())
    VIOLATIONS[message](data)
    expected = "does not train turn t1 whole and as it was sampled" if message.startswith("t1-as") else message
    with pytest.raises(ValidationError, match=expected):
        Trajectory.from_json(orjson.dumps(data))


def test_what_the_checks_allow() -> None:
    data = json.loads(example().to_json())
    # Another turn's tokens may stand in a row as context under their own name, if they are whole and not trained.
    borrowed = copy.deepcopy(data)
    borrow(borrowed, trained=0)
    Trajectory.from_json(orjson.dumps(borrowed))
    # The stitched builder may show a turn another context than it was sampled in; ownership still holds.
    stitched = copy.deepcopy(data) | {"builder": "merged"}
    for trace in stitched["traces"]:
        trace["builder"] = "merged"
        trace["token_ids"][0] = 99
    assert Trajectory.from_json(orjson.dumps(stitched)).builder is BuilderName.MERGED
    # A turn that was aborted before its first token has nothing to train.
    empty = turn(6, example().turns[5], [9], [], finish="abort")
    Trajectory.model_validate(example().__dict__ | {"turns": [*example().turns, empty]})
    # A session that broke before its rows were built keeps its turns; one that is done may not.
    broken = data | {"traces": [], "state": "failed", "error": "the node ran out of memory"}
    assert len(Trajectory.from_json(orjson.dumps(broken)).turns) == 6
    with pytest.raises(ValidationError, match="turn t0 of the trained role main is trained in no trace"):
        Trajectory.from_json(orjson.dumps(data | {"traces": []}))
    # Which roles are trained is the run's own choice.
    both = data | {"trained_roles": ["main", "side"]}
    train_side_call(both)
    Trajectory.from_json(orjson.dumps(both))
    # Done without a trained token is an error with a reason.
    nothing = {"turns": [], "traces": [], "reward": None}
    with pytest.raises(ValidationError, match="done without a trained token needs an error"):
        Trajectory.from_json(orjson.dumps(data | nothing))
    Trajectory.from_json(orjson.dumps(data | nothing | {"error": "the harness made no call"}))


BAD_TRACES: dict[str, dict[str, Any]] = {
    "must have one length, found \\[3, 2, 3, 3, 3\\]": {"loss_mask": [0, 1]},
    "needs at least one token": dict.fromkeys(
        ["token_ids", "loss_mask", "logprobs", "policy_versions", "turn_ids"], np.empty(0)
    ),
    "logprobs must be finite": {"logprobs": [0, float("nan"), -1]},
    "logprobs must not exceed 0, found 0.5": {"logprobs": [0, 0.5, -1]},
    "token_ids must not be negative": {"token_ids": [1, -2, 3]},
    "holds 0 and 1 only": {"loss_mask": [0, 2, 1]},
    "start at -1": {"turn_ids": [-2, 0, 0]},
    "must be -1 at the same tokens": {"policy_versions": [-1, -1, 0]},
    "1 at a token that was not sampled": {"loss_mask": [1, 1, 1]},
    "must be 0 where nothing was sampled": {"logprobs": [-1, -1, -1]},
    "expected integers, not float64": {"token_ids": [1.0, 2.0, 3.0]},
    "expected integers, not bool": {"token_ids": [True, False, True]},
    "out of the range of int32": {"token_ids": [1, 2, 2**31]},
    "expected integers, not object": {"token_ids": [1, 2, 2**70]},
    "out of the range of uint8": {"loss_mask": [0, 1, 256]},
    "expected numbers, not <U1": {"logprobs": ["a", "b", "c"]},
    "expected one dimension": {"token_ids": np.ones((3, 1), np.int32)},
    "expected a flat list": {"token_ids": [[1], [2, 3]]},
    "not str": {"token_ids": "123"},
    "finite number": {"reward": float("inf")},
    "less than or equal to 1": {"top_p": 1.5},
    "should match pattern": {"trace_id": "a\x1bb"},
}


@pytest.mark.parametrize("message", BAD_TRACES)
def test_trace_rejects_inconsistent_arrays(message: str) -> None:
    good: dict[str, Any] = {
        "trace_id": "a",
        "rollout_id": "s",
        "group_id": "g",
        "token_ids": [1, 2, 3],
        "loss_mask": [False, True, 1],
        "logprobs": [0, 5e-7, -1],  # rounding may leave a log probability just above 0
        "policy_versions": [-1, 4, 3],
        "turn_ids": np.array([-1, 0, 0]),
    }
    trace = Trace(**good)
    assert (trace.trained_tokens, trace.lowest_version, trace.turn_ids.dtype) == (2, 3, np.int32)
    with pytest.raises(ValidationError, match=message):
        Trace(**good | BAD_TRACES[message])


def test_turn_rejects_inconsistent_arrays() -> None:
    for fields, message in [
        ({"logprobs": [-1.0]}, "have 2, 1 and 2 entries"),
        ({"prompt_length": 1}, "prompt_length 1 is less than the 3 suffix tokens"),
        ({"versions": [-1, 0]}, "versions must not be negative"),
        ({"logprobs": [float("-inf"), 0]}, "logprobs must be finite"),
        ({"temperature": float("nan")}, "temperature"),
        ({"role": "boss"}, "role"),
    ]:
        with pytest.raises(ValidationError, match=message):
            turn(0, None, [1, 2, 3], [4, 5], **fields)


def test_arrays_are_not_copied(tmp_path: Path) -> None:
    whole = example()
    ids = np.arange(200_000, dtype=np.int32)
    trace = Trace(
        trace_id="long",
        rollout_id="s",
        group_id="g",
        token_ids=ids,
        loss_mask=np.zeros(len(ids), np.uint8),
        logprobs=np.zeros(len(ids), np.float32),
        policy_versions=np.full(len(ids), -1, np.int32),
        turn_ids=np.full(len(ids), -1, np.int32),
    )
    assert trace.token_ids is ids
    column = traces_table([trace]).column("token_ids").chunk(0)
    assert column.values.buffers()[1].address == ids.ctypes.data  # Arrow reads numpy's own memory
    (back,) = traces_from_table(traces_table([trace]))
    assert np.shares_memory(back.token_ids, ids)
    every_second = Trace(**trace.__dict__ | {"token_ids": np.arange(400_000, dtype=np.int32)[::2]})
    assert every_second.token_ids.flags.c_contiguous
    assert orjson.loads(trace.model_dump_json())["token_ids"] == ids.tolist()
    assert trace.model_json_schema()["properties"]["logprobs"]["items"] == {"type": "number"}
    assert every_second != trace
    assert whole == example() != example().with_reward(Reward(value=1.0))
    assert whole.turns[0] != whole.traces[0]


def test_the_flat_table_is_what_trainers_read(tmp_path: Path) -> None:
    scored = example().with_reward(Reward(value=0.5, per_turn={"t0": 1.0}))
    table = traces_table([scored, example().with_reward(Reward(value=0, status=RewardStatus.MISSING))])
    for name, kind in {
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.uint8()),
        "logprobs": pa.list_(pa.float32()),
        "policy_versions": pa.list_(pa.int32()),
        "turn_ids": pa.list_(pa.int32()),
        "rollout_id": pa.string(),
        "group_id": pa.string(),
        "trace_id": pa.string(),
        "parent_trace": pa.string(),
        "role": pa.string(),
        "reward": pa.float64(),
        "turn_rewards": pa.map_(pa.string(), pa.float64()),
        "temperature": pa.float64(),
        "top_p": pa.float64(),
        "temperatures": pa.list_(pa.float32()),
        "finish_reason": pa.string(),
    }.items():
        assert table.schema.field(name).type == kind
    assert table.column("reward").to_pylist() == [0.5] * 4 + [None] * 4
    # Through Parquet, sliced, in several chunks, and with a column of the consumer's own.
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=3)
    again = pq.read_table(tmp_path / "rows.parquet")
    chunked = pa.concat_tables([again.slice(1, 2), again.slice(5)])
    chunked = chunked.append_column("advantage", pa.array([0.0] * 5))
    expected = traces_from_table(table)
    assert traces_from_table(chunked) == expected[1:3] + expected[5:]
    wide = table.set_column(0, "trace_id", table.column("trace_id").cast(pa.large_string()))
    assert traces_from_table(wide) == expected
    assert traces_from_table(traces_table([])) == []
    with pytest.raises(SchemaError, match="it has no column loss_mask, turn_ids"):
        traces_from_table(table.drop_columns(["loss_mask", "turn_ids"]))
    with pytest.raises(SchemaError, match="not a table of Trace"):
        traces_from_table(table.set_column(5, "builder", pa.array([{"a": 1}] * 8)))
    broken = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe"))
    with pytest.raises(SchemaError, match="not a table of Trace"):
        traces_from_table(table.slice(0, 1).set_column(0, "trace_id", broken))
    with pytest.raises(SchemaError, match="expected one Trajectory, found 2 rows"):
        Trajectory.from_arrow(pa.concat_tables([scored.to_arrow()] * 2))


def test_newer_schema_version_is_an_error(tmp_path: Path) -> None:
    newer = SCHEMA_VERSION + 1
    data = json.loads(example().to_json()) | {"schema_version": newer, "a_field_of_tomorrow": 1}
    path = tmp_path / "newer.json"
    path.write_bytes(orjson.dumps(data))
    with pytest.raises(SchemaVersionError, match=f"schema version {newer}; this Towline reads versions 1 to 1"):
        Trajectory.read(path)
    table = example().to_arrow()
    for changed in (
        table.replace_schema_metadata({"towline.schema": str(newer)}),
        table.replace_schema_metadata({"towline.schema": "next"}),
        table.set_column(0, "schema_version", pa.array([newer])).replace_schema_metadata(None),
    ):
        with pytest.raises(SchemaVersionError):
            Trajectory.from_arrow(changed)
    with pytest.raises(SchemaVersionError):
        traces_from_table(traces_table([example()]).replace_schema_metadata({"towline.schema": "2"}))
    with pytest.raises(SchemaVersionError):
        Trajectory.from_json(orjson.dumps(data | {"schema_version": "1"}))


@pytest.mark.parametrize("name", ["trajectory.arrow", "trajectory.json"])
def test_files_are_written_atomically(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    trajectory = example()
    trajectory.write(path)
    assert Trajectory.read(path) == trajectory
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    changed = trajectory.with_reward(Reward(value=1.0))
    with path.open("rb") as reader:
        before = path.read_bytes()
        changed.write(path)
        assert reader.read() == before  # whoever reads the old file goes on reading the old file
    assert len(synced) == 2  # the file, then its folder
    assert Trajectory.read(path) == changed

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        trajectory.write(path)
    assert Trajectory.read(path) == changed
    assert list(tmp_path.iterdir()) == [path]  # no draft is left behind
    # Whatever happens to the bytes, reading gives a typed error or a record that passed every check.
    data = path.read_bytes()
    chance = random.Random(5)
    errors = 0
    for _ in range(150):
        damaged = bytearray(data[: chance.choice([len(data), chance.randrange(len(data))])])
        for _ in range(min(3, len(damaged))):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            Trajectory.read(path)
        except (TowlineError, ValidationError):
            errors += 1
    assert errors > 50
    with pytest.raises(SchemaError, match=r"needs the suffix \.arrow or \.json"):
        trajectory.write(tmp_path / "trajectory.txt")


def test_values_that_json_cannot_hold() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value in (deep, object(), {1, 2}):
        trajectory = example().model_copy(update={"metadata": {"value": value}})
        with pytest.raises(SchemaError, match="cannot be written as JSON"):
            trajectory.to_json()
        with pytest.raises(SchemaError, match="cannot be written as JSON"):
            trajectory.to_arrow()
    with pytest.raises(SchemaError, match="not JSON"):
        Trajectory.from_json("[" * 5000)


def test_the_life_of_a_session_follows_the_table() -> None:
    for state in SessionState:
        session = Session(session_id="s", task_id="t", state=state, end_reason=EndReason.TIMEOUT, error="why")
        assert state.terminal == (state in {SessionState.DONE, *list(SessionState)[-3:]})
        for target in SessionState:
            if target in VALID_TRANSITIONS[state]:
                moved = session.advance(target, at=7.0)
                assert (moved.state, moved.updated, moved.end_reason, session.state) == (target, 7.0, "timeout", state)
            else:
                with pytest.raises(TransitionError, match=f"session s cannot go from {state} to {target}"):
                    session.advance(target, at=7.0)
    steps = ["init", "ready", "running", "building", "evaluating", "done"]
    session = Session(session_id="s", task_id="t")
    for step in steps[:-1]:
        session = session.advance(SessionState(step), at=0)
    with pytest.raises(ValidationError, match="needs an end_reason"):
        session.advance(SessionState.DONE, at=0)
    assert session.advance(SessionState.DONE, at=0, end_reason=EndReason.LOOPING).state.terminal


def test_tasks_and_rewards_reject_inconsistent_values() -> None:
    task = Task(task_id="org/name-1", instruction="fix it", harness="codex", num_samples=8, timeouts=Timeouts(run=60))
    assert task.required_samples == 8
    assert Task(**task.__dict__ | {"min_samples": 6}).required_samples == 6
    for fields, message in [
        ({"min_samples": 9}, "min_samples 9 exceeds num_samples 8"),
        ({"num_samples": 0}, "num_samples"),
        ({"task_id": ""}, "task_id"),
        ({"timeouts": {"run": 0}}, "greater than 0"),
        ({"timeouts": {"nap": 1}}, "Extra inputs"),
    ]:
        with pytest.raises(ValidationError, match=message):
            Task(**task.__dict__ | fields)
    assert Reward(value=0.0, status=RewardStatus.MISSING).score is None
    assert Reward(value=0.0).score == 0.0
    for fields, message in [
        ({"value": float("nan")}, "finite"),
        ({"components": {"a": float("inf")}}, "finite"),
        ({"status": "failed"}, "needs an error"),
        ({"error": "hm"}, "a scored reward has no error"),
        ({"status": "missing", "cause": "hm"}, "only a scored reward has a cause"),
    ]:
        with pytest.raises(ValidationError, match=message):
            Reward(**{"value": 1.0} | fields)
    assert FidelityReport(row_tokens=30, distinct_tokens=20).row_over_distinct == 1.5
    assert FidelityReport().row_over_distinct == 1.0
    with pytest.raises(ValidationError):
        FidelityReport(plain_difference=1.2)
