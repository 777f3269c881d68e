"""The audit itself: it finds exact rows exact, its evidence can be checked without it, and it catches what is not exact."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import os
from collections import Counter
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from towline.audit import AuditOptions, AuditReport, checks, conversion, families, mutations, oracle, render, run
from towline.audit.assignment import assign
from towline.audit.behaviours import behaviours
from towline.audit.clients import DIALECTS
from towline.audit.comparison import ComparisonTally, Exclusion, PromptChecker
from towline.audit.engine import EngineCall, ScriptedReply
from towline.audit.evidence import README, FidelityFigures, MeasuredConversation, read_calls, read_rows
from towline.audit.simulation import Expected
from towline.audit.targets import find_targets
from towline.common.arrays import Ids
from towline.engines.embedded import load_decoder
from towline.engines.embedded.cache import RadixCache
from towline.errors import ConfigError
from towline.schema import BuilderName
from towline.tokens.graph.graph import Graph, GraphNode
from towline.tokens.tokenizer import Tokenizer

TARGETS = (
    "qwen3",
    "llama3_2",
    "mistral_nemo",
    "smollm3",
    "qwen3+plain_special_text",
    "qwen3+glm4moe",
    "qwen3+gptoss",
    "qwen3+gemma",
    "qwen3+deepseekv3",
)
FAMILIES = ("Qwen3", "Qwen2.5", "Llama 3.2", "Mistral-Nemo", "DeepSeek-V3", "Gemma 3", "gpt-oss", "Command R+")
BOUND = 1e-4
MORE = 6
LONG = ("longest_context",)
"""Behaviours that only a whole audit has time for."""
FORKS = {
    *("reasoning_dropped", "template_rewrite", "history_edited", "compaction", "tools_changed", "system_changed"),
    *("side", "sibling", "vanished_message", "stop_mismatch", "prefill"),
}
PLAYED = tuple(name for name in behaviours() if name not in LONG)


# The audit that most of these look at takes minutes, more on a busy machine.
pytestmark = pytest.mark.timeout(1500)


def audit(out: Path, **options: Any) -> AuditReport:
    return asyncio.run(run(AuditOptions(out, threads=1, **options)))


@pytest.fixture(scope="module")
def audited(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[AuditReport, Path]:
    """Every behaviour once and a few again, on two real tokenizers and some templates, in all four dialects."""
    out = tmp_path_factory.mktemp("audit")
    return audit(out, conversations=len(PLAYED) + MORE, targets=TARGETS, behaviours=PLAYED), out


def test_exact_is_exact_for_everything_that_harnesses_do(audited: tuple[AuditReport, Path]) -> None:
    report, out = audited
    assert report.violations == []
    assert report.ok
    result = json.loads(json.dumps(report.as_json()))
    assert result == json.loads((out / "report.json").read_text())
    assert result["conversations"] == len(PLAYED) + MORE
    assert set(result["by_behaviour"]) == set(PLAYED)
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
    # Only the end of a reply that a harness writes on behind is in no row of `exact`.
    assert merged["trained_tokens"] == per_turn["trained_tokens"] == exact["trained_tokens"] + 3 > 8_000
    assert merged["drifted_tokens"] > exact["trained_tokens"] / 3
    assert merged["mean_abs_dlogp"] > 1000 * exact["mean_abs_dlogp"]
    assert per_turn["drifted_tokens"] == 0
    assert per_turn["max_abs_dlogp"] < BOUND
    assert exact["row_over_distinct_tokens"] < per_turn["row_over_distinct_tokens"]


def test_every_dialect_is_exact(audited: tuple[AuditReport, Path]) -> None:
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


def test_every_behaviour_is_played_in_every_dialect_that_supports_it(assets: Path) -> None:
    """In an audit of the usual length; some are of one dialect by their nature, and say so."""
    targets = find_targets(TARGETS)
    able = {name: one for name, one in behaviours().items() if any(one.needs <= target.can for target in targets)}
    parts = assign(able, targets, AuditOptions(Path()).conversations, DIALECTS)
    told = {(part.behaviour.name, part.dialect) for part in parts}
    every = {(name, dialect) for name, one in able.items() if one.most is None for dialect in one.dialects}
    assert told >= every
    few = {name: one.most for name, one in able.items() if one.most is not None}
    assert set(few) == {"long_context", "longest_context"}
    assert all(2 <= sum(part.behaviour.name == name for part in parts) <= most for name, most in few.items())
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
        "turns_merged": ("chat", "messages", "google"),
        "temperatures": ("chat", "responses", "google"),
    }
    # Reasoning comes in the open in some and sealed in others.
    assert {part.open_reasoning for part in parts} == {True, False}


def test_chains_match_the_specification(audited: tuple[AuditReport, Path]) -> None:
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
        "first_reply_edited": (2, {"history_edited": 1}),
        "interrupted": (2, {"history_edited": 1}),
        "handed_off": (2, {"system_changed": 1}),
        "last_answer_without_tools": (2, {"tools_changed": 1}),
        "subagents_in_parallel": (3, {"system_changed": 2}),
        "other_names": (1, {}),
        "dialect_switched": (1, {}),
        "temperatures": (1, {}),
        "long_context": (1, {}),
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


def test_the_conversations_are_realistic(audited: tuple[AuditReport, Path]) -> None:
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
        call
        for call in calls
        if "llama3_2" in call.session
        and tokenizer.encode(tokenizer.decode(call.sampled.tolist())) != call.sampled.tolist()
    ]
    assert len(odd) > 100
    assert {int(version) for call in calls for version in call.versions} >= {0, 1, 2}


def test_the_logprobs_can_be_recomputed_from_the_evidence(
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
    plain = [row for row in read_rows(out, BuilderName.EXACT) if row.behaviour != "temperatures"]
    row = min(plain, key=lambda row: len(row.trace.token_ids))
    weights = json.loads((out / row.model / "versions.json").read_text())
    decoder = load_decoder(out / row.model / weights["0"])
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


def test_prompts_are_those_of_an_independent_rendering(audited: tuple[AuditReport, Path]) -> None:
    """On nine turns of ten at least, on every target; and what is left out is said by name."""
    result = audited[0].as_json()
    compared, skipped = result["oracle"], result["skipped"]
    assert compared["different"] == 0
    assert compared["compared"] > 9 * sum(compared["excluded"].values()) > 0
    assert set(compared["excluded"]) <= {reason.value for reason in Exclusion}
    assert set(result["oracle_by_target"]) == set(TARGETS)
    assert result["families"] == ["Qwen3", "Llama 3.2", "Mistral-Nemo"]
    # Llama 3's template takes one call a turn, SmolLM3's and Gemma's none, gpt-oss's one; Gemma's has no system prompt.
    assert skipped["results_out_of_order"] == 4
    assert skipped["system_changed"] == 1
    assert not {"verbatim", "history_edited"} & set(skipped)


def test_the_oracle_shares_no_code_with_the_code_under_test() -> None:
    for module in (oracle, conversion, families):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        imported = {
            name
            for node in ast.walk(tree)
            for name in (
                [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in getattr(node, "names", [])]
            )
        }
        own = {name for name in imported if name and name.startswith("towline.")}
        assert own <= {"towline.errors", "towline.audit.oracle"}, module.__name__


def test_every_family_is_available(assets: Path) -> None:
    from towline.assets import templates, tokenizers

    real = {name: family for name, family in families.FAMILIES.items() if not family.renamed}
    assert tuple(family.name for family in real.values()) == FAMILIES
    assert set(real) <= set(tokenizers())
    assert {family.template for family in families.FAMILIES.values() if family.template} <= set(templates())
    assert set(families.TEMPLATES) <= set(templates())


def test_as_sent_shows_what_a_plain_server_shows(assets: Path, tmp_path: Path) -> None:
    """Where a template shows the beginning otherwise once more has been said, takes reasoning out, or writes call ids."""
    for target, chosen in {
        "mistral_nemo": ["handed_off", "reply_resumed", "call_ids_dropped"],
        "smollm3": ["results_cleared", "thinking_switched_off"],
    }.items():
        report = audit(
            tmp_path / target,
            conversations=len(chosen),
            targets=[target],
            behaviours=chosen,
            captures=("exact", "as_sent"),
        )
        assert report.violations == []
        assert report.oracle.different == 0


def test_known_faults_are_caught(assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short: dict[str, Any] = {
        "conversations": 1,
        "targets": ["llama3_2"],
        "behaviours": ["canonical"],
        "mutations": True,
    }
    report = audit(tmp_path / "all", **short)
    assert report.mutations == dict.fromkeys(
        [
            *(
                "dropped_message",
                "wrong_suffix",
                "stale_seam_id",
                "single_temperature",
                "lost_role",
                "swapped_branches",
            ),
        ],
        True,
    )
    assert report.ok
    harmless = mutations.Fault("harmless", "llama3_2", ("verbatim",), nullcontext)
    monkeypatch.setattr(mutations, "FAULTS", (harmless,))
    report = audit(tmp_path / "harmless", **short)
    assert report.violations == ["mutation harmless: not caught"]
    assert not report.ok


def test_too_few_compared_turns_are_a_violation() -> None:
    report = AuditReport(1, {}, {}, {}, [], oracle=ComparisonTally(compared=8, excluded=Counter(end_kept=2)))
    assert report.violations == ["oracle: only 80.0% of turns were compared (minimum 90%)"]


def test_chosen_behaviours_need_no_share_of_compared_turns(tmp_path: Path) -> None:
    """Every turn after the first may differ from a plain server's where other ids were sampled."""
    report = audit(tmp_path, conversations=1, targets=["qwen3"], behaviours=["other_tokens"])
    assert report.oracle.share < 0.9
    assert report.violations == []


def test_a_gateway_that_re_encodes_is_caught(assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the invariant switched off: the rows look right, but the model was shown the canonical tokens of its text."""
    tokenizer = Tokenizer.load(assets / "tokenizers" / "llama3_2")
    opened = Graph.open_prompt

    def encoded_again(graph: Graph, node: GraphNode) -> Ids:
        return np.asarray(tokenizer.encode(tokenizer.decode(opened(graph, node).tolist())), np.int32)

    monkeypatch.setattr(Graph, "open_prompt", encoded_again)
    report = audit(tmp_path, conversations=2, targets=["llama3_2"], behaviours=["canonical", "other_tokens"])
    assert not report.ok
    assert report.by_behaviour["canonical"].violations == []
    found = report.by_behaviour["other_tokens"].violations
    assert any("are in a context that they were not sampled in" in line for line in found)
    assert any("differs from the recorded one by" in line for line in found)
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
    played = checks.PlayedConversation("c", "b", "t", "chat", "process", expected, unclosed=1)
    played.found = {name: checks.ObservedTrajectory(chains=1, versions=1) for name in BuilderName}
    wrong = FidelityFigures(drifted_tokens=3, max_abs_dlogp=0.5)
    measured = {
        BuilderName.EXACT: MeasuredConversation("c", BuilderName.EXACT, wrong, trained_twice=1, untrained=0),
        BuilderName.MERGED: MeasuredConversation("c", BuilderName.MERGED, FidelityFigures(), untrained=1),
    }
    assert list(checks.violations(played, measured)) == [
        "1 chains, expected 2",
        "forks {}, expected {'side': 1}",
        "0 forced closes, expected 1",
        "0 turns have the role side, expected 1",
        "no turn has the flag retry",
        "1 policy versions, expected at least 2",
        "no turn holds tokens of two versions",
        "exact: 1 turns are trained more than once",
        "exact: 0 turns are not trained, expected 1",
        "exact: 3 trained tokens are in a context that they were not sampled in",
        "exact: a logprob differs from the recorded one by 0.5",
        "merged: the control does not drift",
        "per_turn: no rows",
    ]


def test_a_tokenizer_and_a_template_of_the_user(assets: Path, tmp_path: Path) -> None:
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
        ({"targets": ["qwen9"]}, "unknown audit target 'qwen9'"),
        ({"targets": []}, "no target"),
        ({"targets": ["llama3_2"], "behaviours": ["juggling"]}, "unknown behaviour 'juggling'"),
        ({"targets": ["llama3_2"], "dialects": ["latin"]}, "unknown dialect 'latin'"),
        ({"targets": ["llama3_2"], "behaviours": ["items_named"], "dialects": ["chat"]}, "no target supports"),
        ({"targets": ["llama3_2"], "behaviours": ["special_text_plain"]}, "no target supports"),
    ],
)
def test_invalid_options_are_refused_with_a_reason(
    assets: Path, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        audit(tmp_path, **options)


def test_the_report_is_readable(audited: tuple[AuditReport, Path]) -> None:
    report, _ = audited
    shown = _shown(report)
    assert all(name in shown for name in [*PLAYED, *BuilderName, *DIALECTS, *TARGETS])
    assert "families with their own tokenizer and template: Qwen3, Llama 3.2, Mistral-Nemo" in shown
    assert "behaviours skipped, with the number of targets that do not support them: " in shown
    assert "is in the context it was sampled in" in shown
    broken = AuditReport(
        report.conversations, report.builders, dict(report.by_behaviour), report.by_dialect, report.targets
    )
    one = report.by_behaviour["verbatim"]
    broken.by_behaviour["verbatim"] = type(one)(
        one.conversations, one.builders, ["verbatim.x: [red]\x1b[2J wrong"] * 25
    )
    shown = _shown(broken)
    assert "is in the context it was sampled in" not in shown
    assert "verbatim.x: [red]\N{SYMBOL FOR ESCAPE}[2J wrong" in shown
    assert "and 5 more" in shown


def _shown(report: AuditReport) -> str:
    console = Console(file=io.StringIO(), width=200)
    render(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_text_that_a_tokenizer_normalizes_is_no_difference(assets: Path) -> None:
    """A reply of decomposed characters: a plain server, and a fork, encode them composed."""
    (target,) = find_targets(["qwen3"])
    checker = PromptChecker(
        target.oracle, target.format, {}, datetime.fromtimestamp(0, UTC), closes=True, plain_text=False
    )
    asked: list[dict[str, Any]] = [{"role": "user", "content": "Say it."}]
    checker.record_request("chat", json.dumps({"model": "m", "messages": asked}).encode(), [0])
    sampled = [*target.oracle.encode("a"), *target.oracle.encode("\u0303"), target.oracle.encode("<|im_end|>")[0]]
    reply = {"role": "assistant", "content": "a\u0303"}
    nothing = np.zeros(0, np.int32)

    def call(number: int, prompt: list[int], sampled: list[int]) -> EngineCall:
        shown, chosen = np.asarray(prompt, np.int32), np.asarray(sampled, np.int32)
        return EngineCall("s", number, shown, chosen, nothing.astype(np.float32), nothing, number)

    checker.record_reply(0, ScriptedReply(free=True), reply, [call(0, [], sampled)], frozenset(sampled[-1:]))
    asked += [reply, {"role": "user", "content": "Again."}]
    checker.record_request("chat", json.dumps({"model": "m", "messages": asked}).encode(), [1])
    composed, other = checker._requests[1].ids, checker._requests[1].ids[1:]
    for ids, different in ((composed, 0), (other, 1)):
        tally, _ = checker.compare([call(1, ids, [])])
        assert (tally.excluded, tally.different) == (Counter({Exclusion.IDS_KEPT.value: 1}), different)


def test_an_image_token_that_a_message_spells_shows_no_image_and_is_no_difference(tmp_path: Path) -> None:
    report = audit(tmp_path, conversations=8, targets=["gemma3"], behaviours=["special_text"], seed=16)
    assert report.oracle.excluded[Exclusion.IMAGE_TEXT.value]
    assert report.violations == []
