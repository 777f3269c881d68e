"""The audit itself: it finds exact rows exact, its evidence can be checked without it, and it catches what is not exact."""

from __future__ import annotations

import asyncio
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from towline.arrays import Ids
from towline.audit import AuditOptions, AuditReport, judge, render, run
from towline.audit.behaviours import behaviours
from towline.audit.casting import cast
from towline.audit.evidence import README, read_calls, read_rows
from towline.audit.measure import Figures, Measured
from towline.audit.play import Expected
from towline.audit.targets import find
from towline.audit.tongues import DIALECTS
from towline.engines.embedded import load
from towline.engines.embedded.cache import RadixCache
from towline.errors import ConfigError
from towline.schema import BuilderName
from towline.tokens.graph import Graph, Node
from towline.tokens.tokenizer import Tokenizer

TARGETS = (
    "qwen3",
    "llama3_2",
    "qwen3+plain_special_text",
    "qwen3+glm4moe",
    "qwen3+gptoss",
    "qwen3+gemma",
    "qwen3+deepseekv3",
)
BOUND = 1e-4
MORE = 14
FORKS = {
    *("reasoning_dropped", "template_rewrite", "history_edited", "compaction", "tools_changed", "system_changed"),
    *("side", "sibling", "vanished_message", "stop_mismatch", "prefill"),
}


# The audit that most of these look at takes minutes, more on a busy machine.
pytestmark = pytest.mark.timeout(1500)


def audit(out: Path, **options: Any) -> AuditReport:
    return asyncio.run(run(AuditOptions(out, threads=1, **options)))


@pytest.fixture(scope="module")
def audited(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[AuditReport, Path]:
    """Every behaviour once and a few again, on two real tokenizers and some templates, in all four dialects."""
    out = tmp_path_factory.mktemp("audit")
    return audit(out, conversations=len(behaviours()) + MORE, targets=TARGETS), out


def test_exact_is_exact_for_everything_that_harnesses_do(audited: tuple[AuditReport, Path]) -> None:
    report, out = audited
    assert report.violations == []
    assert report.ok
    result = json.loads(json.dumps(report.as_json()))
    assert result == json.loads((out / "report.json").read_text())
    assert result["conversations"] == len(behaviours()) + MORE
    assert set(result["by_behaviour"]) == set(behaviours())
    assert set(result["targets"]) == set(TARGETS)

    exact, merged, per_turn = (result["builders"][name] for name in ("exact", "merged", "per_turn"))
    figures = {"drifted_tokens", "max_abs_dlogp", "mean_abs_dlogp", "chains_per_conversation"}
    assert figures | {"row_over_distinct_tokens", "forks"} <= set(exact)
    assert exact["drifted_tokens"] == 0
    assert exact["max_abs_dlogp"] < BOUND
    assert set(exact["forks"]) == FORKS
    assert exact["forced_closes"] > 5
    assert 0 < exact["plain_difference"] < 1
    # All three train the same tokens; stitching puts more than a third of them into contexts that never were.
    assert exact["trained_tokens"] == merged["trained_tokens"] == per_turn["trained_tokens"] > 8_000
    assert merged["drifted_tokens"] > exact["trained_tokens"] / 3
    assert merged["mean_abs_dlogp"] > 1000 * exact["mean_abs_dlogp"]
    assert per_turn["drifted_tokens"] == 0
    assert per_turn["max_abs_dlogp"] < BOUND
    assert exact["row_over_distinct_tokens"] < per_turn["row_over_distinct_tokens"]


def test_every_dialect_is_as_exact(audited: tuple[AuditReport, Path]) -> None:
    """Each with its share of the conversations, the same findings, and the control that shows that they can fail."""
    report, out = audited
    result = report.as_json()["by_dialect"]
    assert list(result) == list(DIALECTS)
    assert sum(part["conversations"] for part in result.values()) == report.conversations
    for name, part in result.items():
        exact, merged = part["builders"]["exact"], part["builders"]["merged"]
        assert part["conversations"] == sum(part["told"].values()) >= report.conversations / 6, name
        assert part["violations"] == [], name
        assert exact["drifted_tokens"] == 0, name
        assert exact["max_abs_dlogp"] < BOUND, name
        assert exact["trained_tokens"] > 1_500, name
        assert merged["drifted_tokens"] > exact["trained_tokens"] / 4, name
        assert merged["max_abs_dlogp"] > BOUND, name
    rows = read_rows(out, BuilderName.EXACT)
    assert {row.dialect for row in rows} == set(DIALECTS)
    assert {row.trace.rollout_id.split(".")[1] for row in rows} == set(DIALECTS)


def test_every_behaviour_is_told_in_every_dialect_that_it_can_be_told_in(assets: Path) -> None:
    """In an audit of the usual length; some are of one dialect by their nature, and say so."""
    targets = find(TARGETS)
    able = {name: one for name, one in behaviours().items() if any(one.needs <= target.can for target in targets)}
    parts = cast(able, targets, AuditOptions(Path()).conversations, DIALECTS)
    told = {(part.behaviour.name, part.dialect) for part in parts}
    assert told == {(name, dialect) for name, one in able.items() for dialect in one.dialects}
    assert {name: one.dialects for name, one in behaviours().items() if one.dialects != DIALECTS} == {
        "content_flips": ("chat", "responses", "messages"),
        "fields_differ": ("chat", "responses", "messages"),
        "answer_named": ("responses",),
        "items_named": ("responses",),
        "results_apart": ("messages", "google"),
        "call_ids_dropped": ("google",),
        "responses_repeated": ("google",),
        "names_in_snake_case": ("google",),
        "several_samples": ("chat", "google"),
    }
    # Reasoning comes in the open in some and sealed in others.
    assert {part.open_reasoning for part in parts} == {True, False}


def test_chains_are_those_of_the_table(audited: tuple[AuditReport, Path]) -> None:
    """Some rows of the table once more by hand, so that a change of what a behaviour expects is noticed."""
    found = {name: figures["builders"] for name, figures in audited[0].as_json()["by_behaviour"].items()}
    table: dict[str, tuple[int, dict[str, int]]] = {
        "verbatim": (1, {}),
        "reserialised": (1, {}),
        "reasoning_dropped": (1, {}),
        "truncated": (1, {}),
        "reasoning_dropped_as_sent": (3, {"reasoning_dropped": 2}),
        "template_rewrites": (2, {"template_rewrite": 1}),
        "history_edited": (2, {"history_edited": 1}),
        "compaction": (2, {"compaction": 1}),
        "tools_changed": (2, {"tools_changed": 1}),
        "system_changed": (2, {"system_changed": 1}),
        "subagent": (2, {"system_changed": 1}),
        "side_call": (2, {"side": 1}),
        "answer_named": (1, {}),
        "items_named": (1, {}),
        "retry": (1, {}),
        "connection_lost": (1, {}),
        "sibling": (2, {"sibling": 1}),
        "several_samples": (3, {"sibling": 2}),
        "vanishing": (4, {"vanished_message": 3}),
        "vanishing_kept": (1, {}),
    }
    for name, (chains, forks) in table.items():
        count = audited[0].by_behaviour[name].conversations
        exact = found[name]["exact"]
        assert exact["chains_per_conversation"] == chains, name
        assert exact["forks"] == {reason: times * count for reason, times in forks.items()}, name
    # The control: stitching is right where a plain server renders what was sampled, and wrong where it does not.
    assert found["canonical"]["merged"]["drifted_tokens"] == 0
    assert found["canonical"]["merged"]["max_abs_dlogp"] < BOUND
    assert found["reasoning_dropped"]["merged"]["drifted_tokens"] > 0
    assert found["reasoning_dropped"]["merged"]["max_abs_dlogp"] > BOUND


def test_the_conversations_are_real(audited: tuple[AuditReport, Path]) -> None:
    """Multi-turn, over both wires, with tokens that no encoder would choose and some that nobody chose."""
    _, out = audited
    played = json.loads((out / "conversations.json").read_text())
    assert {one["wire"] for one in played} == {"process", "socket"}
    turns = [found["turns"] for one in played for found in one["found"].values()]
    assert min(turns) >= 2
    assert np.mean(turns) > 3
    calls = read_calls(out)
    tokenizer = Tokenizer.load(Path(os.environ["TOWLINE_ASSETS"]) / "tokenizers" / "llama3_2")
    odd = [
        c for c in calls if "llama3_2" in c.session and tokenizer.encode(tokenizer.decode(c.sampled)) != [*c.sampled]
    ]
    assert len(odd) > 100
    assert {int(version) for call in calls for version in call.versions} >= {0, 1, 2}


def test_anybody_can_compute_the_logprobs_again(
    audited: tuple[AuditReport, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out = audited
    monkeypatch.chdir(out)
    scope: dict[str, Any] = {}
    exec(README.split("```python\n")[1].split("```")[0], scope)
    rows = scope["rows"]("exact")
    assert {"conversation", "behaviour", "target", "dialect", "builder", "token_ids", "loss_mask"} <= set(rows[0])
    torn = [row for row in rows if len({*row["policy_versions"]} - {-1}) > 1]
    assert {row["behaviour"] for row in torn} == {"weights_updated", "weights_updated_in_flight"}
    for row in [*torn, *sorted(rows, key=lambda row: len(row["token_ids"]))[:12]]:
        assert scope["largest_difference"](row) < BOUND

    # The same for one row with nothing but a forward pass; and a row that is not what the model saw shows.
    row = min(read_rows(out, BuilderName.EXACT), key=lambda row: len(row.trace.token_ids))
    weights = json.loads((out / row.model / "versions.json").read_text())
    decoder = load(out / row.model / weights["0"])
    assert (row.trace.policy_versions <= 0).all()

    def worst(ids: Ids) -> float:
        with torch.no_grad():
            logprobs = decoder(torch.from_numpy(ids.astype(np.int64))[None])[0].log_softmax(-1)
        places = np.flatnonzero(row.trace.turn_ids >= 0)
        return float(
            np.abs(logprobs[places - 1, row.trace.token_ids[places]].numpy() - row.trace.logprobs[places]).max()
        )

    ids = row.trace.token_ids.copy()
    assert worst(ids) < BOUND
    ids[1] += 1
    assert worst(ids) > BOUND


def test_a_gateway_that_encodes_again_is_caught(assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the invariant switched off: the rows look right, but the model was shown the canonical tokens of its text."""
    tokenizer = Tokenizer.load(assets / "tokenizers" / "llama3_2")
    opened = Graph.open_prompt

    def encoded_again(graph: Graph, node: Node) -> Ids:
        return np.asarray(tokenizer.encode(tokenizer.decode(opened(graph, node).tolist())), np.int32)

    monkeypatch.setattr(Graph, "open_prompt", encoded_again)
    report = audit(tmp_path, conversations=2, targets=["llama3_2"], behaviours=["canonical", "other_tokens"])
    assert not report.ok
    assert report.by_behaviour["canonical"].violations == []
    found = report.by_behaviour["other_tokens"].violations
    assert any("stand in a context that they were not sampled in" in line for line in found)
    assert any("from the one that was recorded" in line for line in found)
    exact = report.builders[BuilderName.EXACT].measured
    assert exact.drifted_tokens > 0
    assert exact.max_abs_dlogp > BOUND


def test_a_cache_that_outlives_its_weights_is_caught(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token is where it was sampled, but its logprob is that of no version's weights."""
    monkeypatch.setattr(RadixCache, "invalidate", lambda cache, version: setattr(cache, "version", version))
    report = audit(tmp_path, conversations=1, targets=["qwen3"], behaviours=["weights_updated"])
    assert not report.ok
    exact = report.builders[BuilderName.EXACT].measured
    assert exact.drifted_tokens == 0
    assert exact.max_abs_dlogp > BOUND


def test_every_difference_from_the_specification_is_a_line() -> None:
    expected = Expected(
        chains=2,
        forks={"side": 1},
        untrained=1,
        flags=("retry",),
        roles={"side": 1},
        versions=2,
        torn=True,
        plain="always",
    )
    played = judge.Played("c", "b", "t", "chat", "process", expected, unclosed=1)
    played.found = {name: judge.Found(chains=1, versions=1) for name in BuilderName}
    wrong = Figures(drifted_tokens=3, max_abs_dlogp=0.5)
    measured = {
        BuilderName.EXACT: Measured("c", BuilderName.EXACT, wrong, trained_twice=1, untrained=0),
        BuilderName.MERGED: Measured("c", BuilderName.MERGED, Figures(), untrained=1),
    }
    assert list(judge.violations(played, measured)) == [
        "1 chains, expected 2",
        "forks {}, expected {'side': 1}",
        "0 forced closes, expected 1",
        "0 turns of the role side, expected 1",
        "no turn has the flag retry",
        "1 policy versions, expected at least 2",
        "no turn holds tokens of two versions",
        "exact: 1 turns are trained twice",
        "exact: 0 turns are not trained, expected 1",
        "exact: 3 trained tokens stand in a context that they were not sampled in",
        "exact: a logprob is 0.5 from the one that was recorded",
        "merged: the control does not drift",
        "per_turn: no rows",
    ]


def test_a_tokenizer_and_a_template_of_ones_own(assets: Path, tmp_path: Path) -> None:
    chosen = ["verbatim", "canonical", "history_edited"]
    own = audit(
        tmp_path / "both",
        targets=[],
        tokenizer=assets / "tokenizers" / "qwen2_5",
        template=assets / "templates" / "qwen2_5.jinja",
        behaviours=chosen,
        conversations=3,
    )
    assert own.violations == []
    assert own.targets == ["qwen2_5+qwen2_5"]
    assert own.conversations == 3
    template = audit(
        tmp_path / "template",
        targets=[],
        template=assets / "templates" / "phi3.jinja",
        behaviours=chosen,
        conversations=3,
    )
    assert template.violations == []
    assert template.targets == ["user+phi3"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"targets": ["qwen9"]}, "no audit target 'qwen9'"),
        ({"targets": []}, "no target"),
        ({"targets": ["llama3_2"], "behaviours": ["juggling"]}, "no behaviour 'juggling'"),
        ({"targets": ["llama3_2"], "dialects": ["latin"]}, "no dialect 'latin'"),
        ({"targets": ["llama3_2"], "behaviours": ["items_named"], "dialects": ["chat"]}, "no target is able"),
        ({"targets": ["llama3_2"], "behaviours": ["special_text_plain"]}, "no target is able"),
    ],
)
def test_what_cannot_be_audited_is_said(assets: Path, tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        audit(tmp_path, **options)


def test_the_report_for_people(audited: tuple[AuditReport, Path]) -> None:
    report, _ = audited
    shown = _shown(report)
    assert all(name in shown for name in [*behaviours(), *BuilderName, *DIALECTS])
    assert "every token is where it was sampled" in shown
    broken = AuditReport(
        report.conversations, report.builders, dict(report.by_behaviour), report.by_dialect, report.targets
    )
    one = report.by_behaviour["verbatim"]
    broken.by_behaviour["verbatim"] = type(one)(
        one.conversations, one.builders, ["verbatim.x: [red]\x1b[2J wrong"] * 25
    )
    shown = _shown(broken)
    assert "every token is where it was sampled" not in shown
    assert "verbatim.x: [red]\N{SYMBOL FOR ESCAPE}[2J wrong" in shown
    assert "and 5 more" in shown


def _shown(report: AuditReport) -> str:
    console = Console(file=io.StringIO(), width=200)
    render(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
