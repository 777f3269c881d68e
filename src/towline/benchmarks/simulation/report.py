"""The result of the simulation as a table and as a plot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from towline.errors import ConfigError

_FIGURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "utilisation of slots": lambda one: f"{one['utilisation']:.1%}",
    "  by groups that were trained on": lambda one: f"{one['useful_utilisation']:.1%}",
    "time for all updates (s)": lambda one: f"{one['makespan_seconds']:,.0f}",
    "queueing delay p50 (s)": lambda one: f"{one['queueing_p50_seconds']:,.0f}",
    "queueing delay p99 (s)": lambda one: f"{one['queueing_p99_seconds']:,.0f}",
    "staleness, mean": lambda one: f"{one['mean_staleness']:.2f}",
    "staleness, max": lambda one: f"{one['max_staleness']}",
    "groups dropped as stale": lambda one: f"{one['dropped_groups']:,}",
    "slowest quarter of groups: share of trained ones": lambda one: f"{one['slowest_share']:.1%}",
    "trainer waits": lambda one: f"{one['trainer_waited_share']:.0%}",
    "sessions run": lambda one: f"{one['sessions']:,}",
}


def render(result: dict[str, Any], console: Console) -> None:
    plan, costs = result["plan"], result["decisions"]
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for name in result["collections"]:
        table.add_column(name, justify="right", no_wrap=True)
    for name, formatted in _FIGURES.items():
        table.add_row(name, *(formatted(figures) for figures in result["collections"].values()))
    console.print(table)
    console.print(
        f"{plan['nodes']:,} nodes with {plan['slots']} slots, {plan['updates']} updates of {plan['groups']:,} groups of "
        f"{plan['samples']}, staleness limit {plan['max_staleness']}, {plan['learning_seconds']:,.0f} s per update, "
        f"log-normal durations (median {plan['durations']['median']:g} s, sigma {plan['durations']['sigma']:.2f}, at most "
        f"{plan['durations']['limit']:,.0f} s), seed {plan['seed']}. All times are virtual.\n",
        highlight=False,
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("nodes", "placement", "whole claim"):
        table.add_column(name, justify="right")
    for one in costs["sizes"]:
        table.add_row(f"{one['nodes']:,}", f"{one['placement_us']:.1f} us", f"{one['claim_us']:,.0f} us")
    console.print(table)
    smallest, largest = costs["sizes"][0]["nodes"], costs["sizes"][-1]["nodes"]
    console.print(
        f"CPU time per scheduling decision. From {smallest:,} to {largest:,} nodes: placement "
        f"{costs['placement_ratio']:.2f}x, whole claim {costs['claim_ratio']:.2f}x. SQLite ran in memory, without threads.",
        highlight=False,
    )


def plot(result: dict[str, Any], file: Path) -> None:
    """Write a picture of busy slots over time and of the cost per decision."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'towline[train]'") from error
    plan, costs = result["plan"], result["decisions"]["sizes"]
    figure = Figure(figsize=(11, 4), layout="constrained")
    time_axes, cost_axes = figure.subplots(1, 2, width_ratios=(2, 1))
    for name, one in result["collections"].items():
        seconds, shares = one["busy_slots"]["seconds"], one["busy_slots"]["share"]
        label = f"{name}: {one['utilisation']:.0%} busy, {one['useful_utilisation']:.0%} trained on"
        time_axes.plot([value / 3600 for value in seconds], [100 * share for share in shares], label=label)
    time_axes.set(xlabel="virtual hours", ylabel="busy slots (%)", ylim=(0, 105))
    time_axes.set_title(f"{plan['nodes']:,} nodes, {plan['updates']} updates of {plan['groups']:,} groups")
    time_axes.legend(loc="lower right")
    nodes = [one["nodes"] for one in costs]
    for name, label in (("claim_us", "whole claim"), ("placement_us", "placement")):
        cost_axes.plot(nodes, [one[name] for one in costs], marker="o", label=label)
    cost_axes.set(xscale="log", yscale="log", xlabel="nodes", ylabel="CPU µs per decision", ylim=(1, None))
    cost_axes.legend()
    figure.savefig(file, dpi=120)
