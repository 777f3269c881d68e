"""The rules that go wrong elsewhere, once for every adapter: what a group of sessions is to a trainer, whichever it is."""

from __future__ import annotations

import pytest

from support.trainers.adapter_views import ALL_ROWS, ONE_ROW, VIEWS, Seen, View, group_of, rows_in, session
from towline.schema import EndReason, Trace

every_adapter = pytest.mark.parametrize("name", VIEWS)


def check_tokens(seen: list[Seen], traces: list[Trace]) -> None:
    """Every row is a trace, token for token, with its mask, and its logprobs where it is trained."""
    assert len(seen) == len(traces)
    for row, trace in zip(seen, traces, strict=True):
        assert row.tokens == trace.token_ids.tolist()
        assert row.mask == trace.loss_mask.tolist()
        assert row.logprobs == pytest.approx(trace.logprobs.tolist())


@every_adapter
def test_rows_are_the_traces_token_for_token(name: str) -> None:
    group = group_of(session("a", 1.0), session("b", 0.0))
    seen = VIEWS[name](group)
    check_tokens(seen, rows_in(group.sessions, True))
    # The tool's result stands between the turns, and is not trained.
    assert [sum(row.mask) for row in seen] == [8, 8]
    assert [row.advantage for row in seen] == pytest.approx([0.5, -0.5])


@every_adapter
def test_a_failed_session_leaves_the_group_and_is_not_a_zero(name: str) -> None:
    group = group_of(session("a", 1.0), session("b", None), session("c", 0.5), session("d", 0.0, broken=True))
    assert group.unusable == {"b": "the judge fell ill", "d": "the sandbox burned down"}
    seen = VIEWS[name](group)
    check_tokens(seen, rows_in(group.sessions, True))
    assert [row.advantage for row in seen] == pytest.approx([0.25, -0.25])


@every_adapter
def test_a_timed_out_session_is_included_and_marked(name: str) -> None:
    group = group_of(session("a", 1.0), session("b", 0.0, end=EndReason.TIMEOUT))
    seen = VIEWS[name](group)
    check_tokens(seen, rows_in(group.sessions, True))
    assert [row.short for row in seen] in ([False, True], [None, None])


@every_adapter
def test_an_incomplete_group_is_dropped_whole(name: str) -> None:
    group = group_of(session("a", 1.0), session("b", None), session("c", 0.0), min_samples=3)
    assert not group.complete
    assert VIEWS[name](group) == []


@every_adapter
def test_one_session_is_not_a_group(name: str) -> None:
    group = group_of(session("a", 1.0), session("b", None), min_samples=1)
    assert len(group.sessions) == 1
    assert VIEWS[name](group) == []


@pytest.mark.parametrize("view", ALL_ROWS.values(), ids=ALL_ROWS)
def test_a_session_with_several_traces_counts_once(view: View) -> None:
    group = group_of(session("a", 1.0, subagent=True), session("b", 0.0), session("c", 0.0))
    seen = view(group)
    check_tokens(seen, rows_in(group.sessions, True))
    assert [row.advantage for row in seen] == pytest.approx([2 / 3, 2 / 3, -1 / 3, -1 / 3], abs=1e-5)


@pytest.mark.parametrize("view", ONE_ROW.values(), ids=ONE_ROW)
def test_a_single_row_is_that_of_the_main_conversation(view: View) -> None:
    group = group_of(session("a", 1.0, subagent=True), session("b", 0.0), session("c", 0.0))
    seen = view(group)
    check_tokens(seen, rows_in(group.sessions, False))
    assert [row.advantage for row in seen] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
