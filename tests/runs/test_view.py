"""`towline trace`: what it shows, and that a trajectory cannot control the terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from towline.common.text import visible
from towline.runs.view import SHOWN_SPANS, SHOWN_TOKENS, fidelity_panel, render
from towline.schema import (
    EndReason,
    FidelityReport,
    ForkReason,
    Reward,
    RewardStatus,
    SessionState,
    Trace,
    Trajectory,
    Turn,
    TurnRole,
)

HOSTILE = (
    "[bold red]pwned[/] [link=http://evil]x[/link] \x1b[2J\x1b]0;title\x07 \x9b31m \u202egnp.exe :skull: \u2028 \x7f"
)


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


def decode(ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes, so that most characters of other scripts take several."""
    return bytes(id % 256 for id in ids).decode(errors="replace")


def turn(index: int, parent: Turn | None, suffix: str, sampled: str, **fields: Any) -> Turn:
    before = parent.prompt_length + len(parent.sampled) if parent else 0
    ids = bytes_of(sampled)
    defaults: dict[str, Any] = {
        "id": f"t{index}",
        "index": index,
        "parent": parent.id if parent else None,
        "prompt_length": before + len(bytes_of(suffix)),
        "suffix": bytes_of(suffix),
        "sampled": ids,
        "logprobs": [-0.01] * len(ids),
        "versions": [3] * len(ids),
        "finish": "stop",
        "dialect": "chat",
    }
    return Turn(**defaults | fields)


def row(path: list[Turn], trained: set[int], **fields: Any) -> Trace:
    owners = np.concatenate([part for t in path for part in ([-1] * len(t.suffix), [t.index] * len(t.sampled))])
    arrays = {
        "token_ids": np.concatenate([part for t in path for part in (t.suffix, t.sampled)]),
        "turn_ids": owners.astype(np.int32),
        "loss_mask": np.isin(owners, list(trained)),
        "logprobs": np.concatenate([part for t in path for part in (np.zeros(len(t.suffix)), t.logprobs)]),
        "policy_versions": np.concatenate([part for t in path for part in (-np.ones(len(t.suffix), int), t.versions)]),
    }
    return Trace(rollout_id="s", group_id="g", **{"finish_reason": "stop"} | arrays | fields)


def trajectory(turns: list[Turn], traces: list[Trace], **fields: Any) -> Trajectory:
    defaults: dict[str, Any] = {"state": SessionState.DONE, "end_reason": EndReason.EXITED}
    return Trajectory(session_id="s", group_id="g", turns=turns, traces=traces, **defaults | fields)


def show(record: Trajectory, **options: Any) -> tuple[str, str]:
    """What is printed, plain and with its styles."""
    console = Console(
        record=True, width=160, file=io.StringIO(), force_terminal=True, color_system="standard", legacy_windows=False
    )
    render(record, options.pop("decode", decode), console=console, **options)
    return console.export_text(clear=False), console.export_text(styles=True)


def forked() -> Trajectory:
    first = turn(0, None, "system prompt", "first reply", model="tiny", versions=[*[3] * 10, 5])
    second = turn(1, first, "tool result", "ok", finish="length", forced_close=True, flags=["truncated_sampling"])
    branch = turn(2, first, "other", "sure", reason=ForkReason.HISTORY_EDITED, logprobs=[-0.01, -1.0, -3.0, -9.0])
    root = turn(3, None, "summary", "go", reason=ForkReason.COMPACTION, role=TurnRole.COMPACTION, origin="t1")
    side = turn(4, None, "title?", "T", reason=ForkReason.SIDE, role=TurnRole.SIDE, delivered=False)
    traces = [
        row([first, second], {0, 1}, trace_id="a", reward=0.25),
        row(
            [first, branch], {2}, trace_id="b", parent_trace="a", fork_reason=ForkReason.HISTORY_EDITED, truncated=True
        ),
        row([root], {3}, trace_id="c", role=TurnRole.COMPACTION),
    ]
    return trajectory(
        [first, second, branch, root, side],
        traces,
        reward=Reward(value=0.25, components={"tests": 0.5}, evaluator="command"),
        report=FidelityReport(
            conversations=3,
            turns=5,
            chains=3,
            forks={"side": 1, "history_edited": 2},
            row_tokens=3000,
            distinct_tokens=2000,
            plain_difference=0.125,
        ),
        engine="vllm",
        timings={"run": 2.0},
    )


def test_render_shows_turns_rows_and_reward() -> None:
    text, styled = show(forked())
    lines = text.splitlines()

    def line(start: str) -> str:
        return next(line for line in lines if start in line)

    assert "session s" in lines[0]
    for fact in ("done (exited)", "retain", "exact", "vllm", "run 2.0 s", "0.25  tests 0.5  by command"):
        assert fact in text
    for fact in ("3,000 ÷ 2,000 distinct = 1.50", "history_edited 2, side 1", "12.5% of context would differ"):
        assert fact in text
    # The tree: a continuation stands below its parent on the same level, a branch hangs under it, roots stand apart.
    assert "#0 main  chat tiny  prompt 13 (+13)  sampled 11  stop  v3-5  logp -0.010" in text
    assert line("#1 main").index("#") == line("#0 main").index("#") == line("#3 comp").index("#")
    assert line("#2 main").index("#") > line("#0 main").index("#")
    assert "length  v3  logp -0.010  forced close  truncated_sampling" in line("#1 main")
    assert "⑂ history_edited" in line("#2 main")
    assert "⑂ compaction  from #1" in line("#3 compaction")
    assert "⑂ side" in line("#4 side")
    assert "not delivered" in line("#4 side")
    # The rows: the label of each span stands beside it, and its colour says the same.
    assert "24 trained" not in text
    assert "37 tokens  13 trained  reward 0.25" in text
    assert "fork history_edited  parent a  truncated" in text
    assert re.search(r"prompt 13 +system prompt", text)
    assert re.search(r"#0 trained 11 +first reply", text)
    assert re.search(r"#0 masked 11 +first reply", text)
    assert "\x1b[33mfirst reply\x1b[0m" in styled
    assert "\x1b[2msystem prompt\x1b[0m" in styled
    assert "\x1b[32ms\x1b[0m\x1b[92mu\x1b[0m\x1b[1;92mr\x1b[0m\x1b[1;4;92me\x1b[0m" in styled  # rarer is brighter
    for word in ("legend", "prompt", "trained", "p ≥ 0.1", "rare", "sampled, not trained in this row"):
        assert word in line("legend")


def test_without_a_tokenizer_ids_are_shown() -> None:
    text, _ = show(forked(), decode=None)
    assert re.search(r"#1 trained 2 +111 107", text)
    assert "first reply" not in text


def test_sampling_settings_are_shown_where_they_differ() -> None:
    first = turn(0, None, "prompt", "cold", temperature=0.3, top_p=0.9)
    second = turn(1, first, "more", "warm")
    plain, _ = show(trajectory([first, second], [row([first, second], {0, 1}, trace_id="r")]))
    assert "temperature 0.3  top-p 0.9" in plain
    assert "temperature 0.3, 1" in plain
    assert "#0 trained at 0.3 4" in plain
    assert "#1 trained at 1 4" in plain


def test_failures_differ_from_reward_zero() -> None:
    text, _ = show(trajectory([], [], state=SessionState.FAILED, error="image not found", end_reason=None))
    assert "image not found" in text
    assert "legend" not in text
    assert re.search(r"reward +none", text)
    broken = Reward(value=0.0, status=RewardStatus.FAILED, error="verifier crashed")
    text, _ = show(forked().with_reward(broken))
    assert "failed: verifier crashed" in text
    assert "trained  reward none" in text
    text, _ = show(forked().with_reward(Reward(value=0.0, cause="a folder in the way")))
    assert "the agent caused its evaluation to fail: a folder in the way" in text


def test_long_rows_are_shortened_unless_full() -> None:
    long = turn(0, None, "a" * 300 + "MIDDLE" + "z" * 300, "b" * 150 + "CENTRE" + "y" * 150)
    turns = [long]
    for index in range(1, 60):
        turns.append(turn(index, turns[-1], f"<{index}>", f"({index})", flags=["odd"] if index == 30 else []))
    record = trajectory(turns, [row(turns, set(range(60)), trace_id="a")])
    text, _ = show(record)
    assert "MIDDLE" not in text
    assert "CENTRE" not in text
    assert f"… {606 - 2 * SHOWN_TOKENS} tokens …" in text
    assert f"{120 - 2 * SHOWN_SPANS} spans" in text
    assert "(30)" not in text
    assert "… 22 plain turns …" in text  # of turns 0 to 29, four at either end stay
    assert re.search(r"#30 main.*odd", text)  # what is remarkable always stays
    assert "(59)" in text
    whole, _ = show(record, full=True)
    joined = re.sub(r"\s", "", whole)
    for index in range(1, 60):
        assert f"({index})" in joined
        assert f"#{index} main" in whole
    assert "MIDDLE" in joined
    assert "CENTRE" in joined
    assert "plain turns" not in whole


def test_deep_branches_stay_on_the_screen() -> None:
    turns = [turn(0, None, "root", "0")]
    for index in range(1, 40):
        turns.append(turn(index, turns[-1], "e", "x", reason=ForkReason.REASONING_DROPPED))
    text, _ = show(trajectory(turns, [row(turns, set(range(40)), trace_id="a")]))
    lines = [line for line in text.splitlines() if "⑂" in line]
    assert len(lines) == 39
    assert max(line.index("#") for line in lines) < 40
    assert "#7 main  ⑂ reasoning_dropped  on #6" in text


def test_hostile_text_is_escaped() -> None:
    """Every string that a harness, a model, a verifier or a file can choose."""
    only = turn(0, None, HOSTILE, HOSTILE + "\n\t模型", model=HOSTILE, dialect=HOSTILE, finish=HOSTILE, flags=[HOSTILE])
    safe = re.sub(r"[\x00-\x1f\x7f-\x9f]", "", HOSTILE)
    record = trajectory(
        [only],
        [row([only], {0}, trace_id=safe, finish_reason=HOSTILE)],
        error=HOSTILE,
        engine=HOSTILE,
        template=HOSTILE,
        timings={HOSTILE: 1.0},
        reward=Reward(value=1.0, components={HOSTILE: 1.0}, evaluator=HOSTILE),
        report=FidelityReport(forks={HOSTILE: 1}),
    )
    record = record.model_copy(update={"session_id": HOSTILE, "group_id": HOSTILE})
    # No colours: then every escape in the output would be one of the text's own.
    stream = io.StringIO()
    render(record, decode, console=Console(file=stream, width=400, force_terminal=True, color_system=None), full=True)
    output = stream.getvalue()
    assert {c for c in output if not c.isprintable()} == {"\n"}
    shown = "[bold red]pwned[/] [link=http://evil]x[/link] ␛[2J␛]0;title␇ \\x9b31m \\u202egnp.exe :skull: \\u2028 ␡"
    flat = re.sub(r"\s+", "", output)
    assert flat.count(re.sub(r"\s+", "", shown)) >= 12  # the markup is text wherever it stands
    assert "↵" in output
    assert "模型" in output  # a character made of several tokens is put together
    coloured = io.StringIO()
    render(record, decode, console=Console(file=coloured, width=400, force_terminal=True, color_system="standard"))
    styles = set(re.findall(r"\x1b(.*?m)", coloured.getvalue()))
    assert all(re.fullmatch(r"\[[0-9;]*m", style) for style in styles)  # colours of ours only: no links, no titles
    assert "]8;" not in coloured.getvalue()


@given(st.text(st.characters(codec=None), max_size=40))
def test_non_printing_characters_are_escaped(text: str) -> None:
    assert visible(text).isprintable()
    assert visible(visible(text)) == visible(text)
    kept = visible(text, lines=True)
    assert kept.count("\n") == text.count("\n")
    assert kept.replace("\n", "").isprintable()


@pytest.mark.parametrize("width", [40, 200])
def test_width_is_respected(width: int) -> None:
    stream = io.StringIO()
    render(forked(), decode, width=width, console=Console(file=stream, width=300, color_system=None))
    assert max(map(len, stream.getvalue().splitlines())) <= width
    assert "first reply" in stream.getvalue()


def test_fidelity_panel() -> None:
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(fidelity_panel(FidelityReport(trained_tokens=12_345, malformed_calls=2)))
    text = console.export_text()
    assert "12,345" in text
    assert "malformed calls 2" in text
    assert "not measured" in text
    assert re.search(r"forks +none", text)
