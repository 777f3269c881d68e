"""The report of an audit: the same figures per builder, in total, by behaviour and by dialect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from towline.audit.behaviours import behaviours
from towline.audit.checks import LOGPROB_BOUND, PlayedConversation, violations
from towline.audit.clients import DIALECTS
from towline.audit.comparison import MIN_COMPARED_SHARE, ComparisonTally
from towline.audit.evidence import FidelityFigures, MeasuredConversation
from towline.audit.targets import AuditTarget
from towline.common.text import visible
from towline.schema import BuilderName

_SHOWN_VIOLATIONS = 20


@dataclass(slots=True)
class BuilderFigures:
    """One builder's figures over some conversations."""

    conversations: int = 0
    chains: int = 0
    turns: int = 0
    forced_closes: int = 0
    forks: dict[str, int] = field(default_factory=dict)
    measured: FidelityFigures = field(default_factory=FidelityFigures)
    plain_differences: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        figures, differences = self.measured, self.plain_differences
        return {
            "drifted_tokens": figures.drifted_tokens,
            "max_abs_dlogp": figures.max_abs_dlogp,
            "mean_abs_dlogp": figures.mean_abs_dlogp,
            "chains_per_conversation": self.chains / self.conversations if self.conversations else 0.0,
            "row_over_distinct_tokens": figures.row_tokens / (figures.distinct_tokens or 1),
            "forks": dict(sorted(self.forks.items())),
            "rows": figures.rows,
            "turns": self.turns,
            "trained_tokens": figures.trained_tokens,
            "forced_closes": self.forced_closes,
            "plain_difference": sum(differences) / len(differences) if differences else None,
        }


@dataclass(slots=True)
class BreakdownFigures:
    """The figures of one behaviour, or of one dialect."""

    conversations: int = 0
    builders: dict[BuilderName, BuilderFigures] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    oracle: ComparisonTally = field(default_factory=ComparisonTally)
    """For a behaviour, its turns under `as_sent`."""
    counts: dict[str, int] = field(default_factory=dict)
    """For a behaviour, its conversations by dialect; for a dialect, by behaviour."""

    def as_json(self) -> dict[str, Any]:
        return {
            "conversations": self.conversations,
            "told": self.counts,
            "builders": {name.value: figures.as_json() for name, figures in self.builders.items()},
            "violations": self.violations,
            "oracle": self.oracle.as_json(),
        }


@dataclass(slots=True)
class AuditReport:
    """The result of an audit. It is `ok` if every conversation matches the specification."""

    conversations: int
    builders: dict[BuilderName, BuilderFigures]
    by_behaviour: dict[str, BreakdownFigures]
    by_dialect: dict[str, BreakdownFigures]
    targets: list[str]
    seconds: float = 0.0
    oracle: ComparisonTally = field(default_factory=ComparisonTally)
    """Prompts under `as_sent`, compared with the oracle."""
    by_target: dict[str, ComparisonTally] = field(default_factory=dict)
    """The same per target."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of targets that do not support a behaviour, by behaviour."""
    families: list[str] = field(default_factory=list)
    """Families with their own tokenizer and template."""
    mutations: dict[str, bool] = field(default_factory=dict)
    """Whether each fault was caught."""
    min_compared: float = MIN_COMPARED_SHARE
    """Share of turns that the oracle must compare; 0 for chosen behaviours, as some consist of turns that may differ."""

    @property
    def violations(self) -> list[str]:
        lines = [line for figures in self.by_behaviour.values() for line in figures.violations]
        if self.oracle.turns and self.oracle.share < self.min_compared:
            lines.append(
                f"oracle: only {self.oracle.share:.1%} of turns were compared (minimum {self.min_compared:.0%})"
            )
        return [*lines, *(f"mutation {name}: not caught" for name, caught in self.mutations.items() if not caught)]

    @property
    def ok(self) -> bool:
        return self.conversations > 0 and not self.violations

    def as_json(self) -> dict[str, Any]:
        return {
            "conversations": self.conversations,
            "builders": {name.value: figures.as_json() for name, figures in self.builders.items()},
            "by_behaviour": {name: figures.as_json() for name, figures in self.by_behaviour.items()},
            "by_dialect": {name: figures.as_json() for name, figures in self.by_dialect.items()},
            "ok": self.ok,
            "bound": LOGPROB_BOUND,
            "violations": self.violations,
            "targets": self.targets,
            "oracle": self.oracle.as_json(),
            "oracle_by_target": {name: tally.as_json() for name, tally in self.by_target.items()},
            "skipped": self.skipped,
            "families": self.families,
            "mutations": self.mutations,
            "seconds": round(self.seconds, 1),
        }


def make_report(
    played: Sequence[PlayedConversation], measured: Sequence[MeasuredConversation], targets: Sequence[AuditTarget]
) -> AuditReport:
    """The report of played conversations and their figures."""
    by_conversation: dict[str, dict[BuilderName, MeasuredConversation]] = {}
    for result in measured:
        by_conversation.setdefault(result.conversation, {})[result.builder] = result
    names_of_targets = [target.name for target in targets]
    report = AuditReport(0, {name: BuilderFigures() for name in BuilderName}, {}, {}, names_of_targets)
    report.families = [target.family for target in targets if target.family]
    names: set[str] = set()
    for one in sorted(played, key=lambda one: one.conversation):
        figures = by_conversation.get(one.conversation, {})
        found = [f"{one.conversation}: {line}" for line in violations(one, figures)]
        if one.oracle is not None:
            report.oracle.add(one.oracle)
            report.by_target.setdefault(one.target, ComparisonTally()).add(one.oracle)
            report.by_behaviour.setdefault(one.behaviour, BreakdownFigures()).oracle.add(one.oracle)
        _count(report.builders, one, figures)
        of_behaviour = report.by_behaviour.setdefault(one.behaviour, BreakdownFigures())
        of_dialect = report.by_dialect.setdefault(one.dialect, BreakdownFigures())
        for part, other in ((of_behaviour, one.dialect), (of_dialect, one.behaviour)):
            _count(part.builders, one, figures)
            part.violations += found
            if one.conversation not in names:
                part.conversations += 1
                part.counts[other] = part.counts.get(other, 0) + 1
        names.add(one.conversation)
    report.conversations = len(names)
    report.by_behaviour = _ordered(report.by_behaviour, behaviours(), DIALECTS)
    report.by_dialect = _ordered(report.by_dialect, DIALECTS, behaviours())
    return report


def _ordered(
    parts: Mapping[str, BreakdownFigures], names: Iterable[str], others: Iterable[str]
) -> dict[str, BreakdownFigures]:
    """The parts in the order of `names`, each with its builders and `counts` in order."""
    ordered = {name: parts[name] for name in names if name in parts}
    for part in ordered.values():
        part.builders = {name: part.builders[name] for name in BuilderName if name in part.builders}
        part.counts = {name: part.counts[name] for name in others if name in part.counts}
    return ordered


def _count(
    totals: dict[BuilderName, BuilderFigures],
    played: PlayedConversation,
    measured: Mapping[BuilderName, MeasuredConversation],
) -> None:
    for builder, found in played.found.items():
        total = totals.setdefault(builder, BuilderFigures())
        result = measured.get(builder)
        total.conversations += 1
        total.turns += found.turns
        total.forced_closes += found.forced_closes
        for reason, count in found.forks.items():
            total.forks[reason] = total.forks.get(reason, 0) + count
        if found.plain_difference is not None:
            total.plain_differences.append(found.plain_difference)
        if result is not None:
            total.measured.add(result.figures)
        # Only `exact` has chains; for other builders a chain is a row.
        total.chains += found.chains if builder is BuilderName.EXACT or result is None else result.figures.rows


def render(report: AuditReport, console: Console) -> None:
    """Print the report: builders, dialects, behaviours, the oracle, and violations."""
    console.print(_builder_table(report))
    console.print(_breakdown_table("dialect", "behaviours", report.by_dialect))
    console.print(_breakdown_table("behaviour", "dialects", report.by_behaviour))
    console.print(_oracle_table(report))
    for line in _summary_lines(report):
        console.print(line, highlight=False)
    if report.ok:
        console.print(
            Text(
                f"exact: every token of {report.conversations} conversations is in the context it was sampled in",
                "green",
            )
        )
        return
    for line in report.violations[:_SHOWN_VIOLATIONS]:
        console.print(Text(f"✗ {visible(line)}", "red"))
    if len(report.violations) > _SHOWN_VIOLATIONS:
        console.print(Text(f"… and {len(report.violations) - _SHOWN_VIOLATIONS} more", "red"))


def _builder_table(report: AuditReport) -> Table:
    table = Table(title=f"{report.conversations} conversations on {len(report.targets)} targets", title_justify="left")
    table.add_column("builder")
    for name in ("drifted tokens", "max |Δlogp|", "mean |Δlogp|", "chains", "row ÷ distinct", "trained tokens"):
        table.add_column(name, justify="right")
    for builder, figures in report.builders.items():
        values = figures.as_json()
        table.add_row(
            builder.value,
            f"{values['drifted_tokens']:,}",
            f"{values['max_abs_dlogp']:.1e}",
            f"{values['mean_abs_dlogp']:.1e}",
            f"{values['chains_per_conversation']:.2f}",
            f"{values['row_over_distinct_tokens']:.2f}",
            f"{values['trained_tokens']:,}",
        )
    return table


def _oracle_table(report: AuditReport) -> Table:
    """The comparison of prompts under `as_sent` with an independent rendering, per target."""
    table = Table(title="Prompts under as_sent, compared with Hugging Face rendering", title_justify="left")
    table.add_column("target")
    for name in ("compared", "different"):
        table.add_column(name, justify="right")
    table.add_column("excluded")
    for name, tally in [*report.by_target.items(), ("all", report.oracle)]:
        excluded = ", ".join(f"{reason} {count}" for reason, count in sorted(tally.excluded.items()))
        table.add_row(name, str(tally.compared), str(tally.different), excluded)
    return table


def _summary_lines(report: AuditReport) -> Iterator[str]:
    yield f"oracle: {report.oracle.compared} of {report.oracle.turns} turns compared ({report.oracle.share:.1%})"
    yield f"families with their own tokenizer and template: {', '.join(report.families) or 'none'}"
    if report.skipped:
        listed = ", ".join(f"{name} {count}" for name, count in report.skipped.items())
        yield f"behaviours skipped, with the number of targets that do not support them: {listed}"
    if report.mutations:
        yield f"faults: {', '.join(f'{name} {_caught(caught)}' for name, caught in report.mutations.items())}"


def _caught(caught: bool) -> str:
    return "caught" if caught else "NOT CAUGHT"


def _breakdown_table(title: str, others: str, parts: Mapping[str, BreakdownFigures]) -> Table:
    table = Table()
    table.add_column(title)
    for name in ("conversations", others, "chains", "drifted: exact", "merged", "max |Δlogp|: exact"):
        table.add_column(name, justify="right")
    table.add_column("forks")
    table.add_column("")
    for name, about in parts.items():
        exact = about.builders.get(BuilderName.EXACT, BuilderFigures()).as_json()
        merged = about.builders.get(BuilderName.MERGED, BuilderFigures()).as_json()
        forks = ", ".join(f"{reason} {count}" for reason, count in exact["forks"].items())
        mark = Text(f"✗ {len(about.violations)}", "red") if about.violations else Text("✓", "green")
        table.add_row(
            name,
            str(about.conversations),
            str(len(about.counts)),
            f"{exact['chains_per_conversation']:.2f}",
            str(exact["drifted_tokens"]),
            str(merged["drifted_tokens"]),
            f"{exact['max_abs_dlogp']:.1e}",
            forks,
            mark,
        )
    return table
