"""The benchmarks run, say what they promise, and notice when work grows with the history.

Nothing here looks at a clock: what must not depend on the length of the history is counted.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from towline.benchmarks import continuation, load, pacing
from towline.benchmarks.profiling import OperationCounter, Stopwatch, patched
from towline.errors import ConfigError, TowlineError
from towline.tokens.templates.sentinel import SentinelCodec

LENGTHS = (1000, 3000, 9000)


def shown(render: Callable[[dict[str, Any], Console], None], result: dict[str, Any]) -> str:
    page = io.StringIO()
    render(result, Console(file=page, width=160))
    return page.getvalue()


@pytest.mark.parametrize("target", ["qwen3", "qwen2_5"])
def test_a_continued_turn_is_measured_and_its_work_does_not_grow(assets: Path, target: str) -> None:
    result = continuation.run(LENGTHS, repeats=2, target=target)
    assert json.loads(json.dumps(result)) == result
    assert result["history_tokens"] == list(LENGTHS)
    assert all(abs(real - wanted) < 120 for real, wanted in zip(result["measured_tokens"], LENGTHS, strict=True))
    series = [result["ms_per_turn"], result["full_render_ms"], *result["parts"].values(), *result["work"].values()]
    assert all(len(values) == len(LENGTHS) for values in series)
    assert set(result["parts"]) == set(continuation.PARTS)
    assert set(result["apart"]) == {"json_parse", "send_ids"}
    # What was measured is the turn: its parts make up the whole, and none of them is missing.
    for place, total in enumerate(result["ms_per_turn"]):
        counted = [result["parts"][name][place] for name in continuation.PARTS if name not in result["apart"]]
        assert min(counted) > 0
        assert 0.5 * total < sum(counted) < 2 * total

    work = result["work"]
    assert work["messages_read"] == [2, 2, 2], "the reply that comes back and the tool result, nothing older"
    assert len(set(work["messages_hashed"])) == 1
    # The shortest conversation is in its first turns, whose suffixes are compared with the whole, short history.
    assert len(set(work["characters_rendered"][1:])) == len(set(work["characters_encoded"][1:])) == 1
    assert work["characters_rendered"][0] < 12_000
    assert all(1000 < count < 6000 for count in work["characters_encoded"]), "the tool result and the markup around it"

    page = shown(continuation.render, result)
    assert "9,000" in page
    assert "characters encoded" in page


def test_a_codec_that_renders_all_history_is_detected(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the counts see it when a continued turn goes through the whole history."""
    extend = SentinelCodec.extend

    def wasteful(self: SentinelCodec, before: Any, reply: Any, *rest: Any, **named: Any) -> Any:
        self.prompt(before, rest[3])
        return extend(self, before, reply, *rest, **named)

    monkeypatch.setattr(SentinelCodec, "extend", wasteful)
    work = continuation.run(LENGTHS, repeats=1, target="qwen2_5")["work"]
    assert work["characters_rendered"] == sorted(set(work["characters_rendered"]))
    assert work["characters_encoded"][-1] > 5 * work["characters_encoded"][0]
    assert work["messages_read"] == [2, 2, 2]


def test_a_load_is_measured_in_its_own_process(assets: Path) -> None:
    result = load.run(3, 4, 3000, fresh_conversations=1, plain_conversations=2, target="qwen2_5", seconds=120)
    assert json.loads(json.dumps(result)) == result
    assert [result[name]["turns"] for name in ("exact", "fresh", "plain")] == [12, 4, 8]
    for capture in ("exact", "fresh", "plain"):
        assert abs(result[capture]["longest_tokens"] - 3000) < 300
        assert result[capture]["cpu_seconds"] >= 0
        assert result[capture]["turns_per_cpu_second"] > 0
    assert min(result["ratio"], result["fresh_ratio"]) > 0
    assert "x the turns per CPU second" in shown(load.render, result)


def test_invalid_measurements_are_refused_with_a_reason(assets: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="increasing history lengths"):
        continuation.run((8000, 1000), repeats=1)
    with pytest.raises(ConfigError, match="at least one conversation"):
        load.run(conversations=0)
    with pytest.raises(ConfigError, match="no tokenizer"):
        continuation.run(target="no-such-tokenizer")
    with pytest.raises(TowlineError, match="did not finish within"):
        load.run(conversations=1, turns=2, tokens=2000, plain_conversations=1, seconds=0.01)


def test_time_counts_for_the_innermost_part_and_wrappers_are_removed() -> None:
    class Work:
        def outer(self) -> int:
            return sum(range(20_000)) + self.inner()

        def inner(self) -> int:
            return sum(range(200_000))

        async def later(self) -> int:
            return self.inner()

    originals = dict(vars(Work))
    watch, tally = Stopwatch(), OperationCounter(["calls"])
    places = [
        (Work, "outer", watch.timing("outer")),
        (Work, "inner", watch.timing("inner")),
        (Work, "inner", tally.counting("calls", lambda result, *_: 1)),
        (Work, "later", watch.timing("later")),
    ]
    with patched(places), watch.part("rest"):
        Work().outer()
        asyncio.run(Work().later())
    assert dict(vars(Work)) == originals
    assert tally.counts == {"calls": 2}
    assert set(watch.spent) == {"outer", "inner", "later", "rest"}
    assert all(spent > 0 for spent in watch.spent.values())
    Work().outer()
    assert tally.counts == {"calls": 2}
    with pytest.raises(KeyError), patched([(Work, "gone", watch.timing("gone"))]):
        pass


def test_pacing_trains_on_slow_tasks_as_much_as_they_are_submitted() -> None:
    plan = pacing.PacingPlan(updates=6, groups=4, shortest=0.02, longest=0.4, slots=24, seed=5)
    result = pacing.run(plan)
    assert json.loads(json.dumps(result)) == result
    assert all(result["within"].values()), result
    drop, paced = (result["modes"][mode] for mode in pacing.MODES)
    assert paced["submitted_groups"] == paced["trained_groups"] == drop["trained_groups"] == 24
    assert drop["submitted_groups"] >= 24 + drop["dropped_groups"]
    page = shown(pacing.render, result)
    assert "share of trained groups" in page
    assert "slot time lost to pacing" in page
