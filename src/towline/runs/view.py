"""A trajectory in the terminal: its summary, the tree of turns, and the tokens of each row coloured by role.

Text from a harness, a model or a file is untrusted. It is escaped by `visible` and put into `Text` objects, which have no
markup, so that no byte of it can move the cursor, hide text or reorder a line.

Colour is never the only sign: each span of tokens has a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import exp
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from towline.common.text import visible
from towline.common.untrusted.inert_console import InertConsole
from towline.schema import FidelityReport, Reward, RewardStatus, Trace, Trajectory, Turn, TurnRole

Decode: TypeAlias = Callable[[Sequence[int]], str]
Ids: TypeAlias = npt.NDArray[np.int32]

CONTEXT, MASKED = "dim", "yellow"
SHADES: tuple[tuple[float, str, str], ...] = (
    (0.5, "green", "likely, p ≥ 0.5"),
    (0.1, "bright_green", "p ≥ 0.1"),
    (0.01, "bold bright_green", "p ≥ 0.01"),
    (0.0, "bold underline bright_green", "rare"),
)
"""Styles of a trained token by its probability, from likely to rare."""

ROLE_STYLES = {
    TurnRole.MAIN: "bold",
    TurnRole.SUBAGENT: "bold cyan",
    TurnRole.COMPACTION: "bold magenta",
    TurnRole.SIDE: "blue",
    TurnRole.DISCARDED: "dim",
}

SHOWN_TOKENS = 48
"""Tokens shown at either end of a long span."""
SHOWN_TURNS = 4
"""Turns shown at either end of a long chain without branches."""
SHOWN_SPANS = 16
"""Spans shown at either end of a long row."""
DEPTH = 6
"""Levels of nesting before a branch is drawn at the margin, with the number of the turn it left."""


def render(
    trajectory: Trajectory,
    decode: Decode | None = None,
    *,
    width: int | None = None,
    full: bool = False,
    console: Console | None = None,
) -> None:
    """Print the trajectory. Without `decode` tokens are shown as ids; `full` shortens nothing."""
    console = console or InertConsole()
    parts: list[RenderableType] = [header(trajectory), fidelity_panel(trajectory.report)]
    parts.append(turn_tree(trajectory, full=full))
    if trajectory.traces:
        parts.append(legend())
    parts.extend(trace_view(trace, decode, full=full) for trace in trajectory.traces)
    for part in parts:
        console.print(part, width=width)


def header(trajectory: Trajectory) -> Panel:
    """The session, how it ended, and its reward."""
    ending = str(trajectory.state) + (f" ({trajectory.end_reason})" if trajectory.end_reason else "")
    rows = {
        "group": trajectory.group_id,
        "state": ending,
        "policy": trajectory.context_policy,
        "builder": trajectory.builder,
        "trained": ", ".join(trajectory.trained_roles),
        "engine": trajectory.engine,
        "template": trajectory.template,
        "timings": "  ".join(f"{name} {seconds:.1f} s" for name, seconds in trajectory.timings.items()),
    }
    grid = _grid()
    for name, value in rows.items():
        if value:
            grid.add_row(Text(name, "dim"), Text(visible(value)))
    grid.add_row(Text("reward", "dim"), _reward(trajectory.reward))
    for found in trajectory.reward.suspicion if trajectory.reward is not None else ():
        grid.add_row(Text("suspicion", "dim"), Text(visible(f"{found.name}: {found.detail}"), "magenta"))
    if trajectory.error:
        grid.add_row(Text("error", "dim"), Text(visible(trajectory.error), "red"))
    for note in trajectory.metadata.get("notes", []):
        grid.add_row(Text("note", "dim"), Text(visible(str(note)), "yellow"))
    return Panel(grid, title=Text(f"session {visible(trajectory.session_id)}", "bold"), title_align="left")


def _reward(reward: Reward | None) -> Text:
    if reward is None:
        return Text("none", "dim")
    if reward.status is not RewardStatus.SCORED:
        return Text(f"{reward.status}: {visible(reward.error or 'no reason given')}", "red")
    text = Text(f"{reward.value:g}", "bold")
    for name, value in reward.components.items():
        text.append(f"  {visible(name)} {value:g}", "not bold")
    if reward.evaluator:
        text.append(f"  by {visible(reward.evaluator)}", "dim not bold")
    if reward.cause:
        text.append(f"  the agent caused its evaluation to fail: {visible(reward.cause)}", "yellow not bold")
    return text


def fidelity_panel(report: FidelityReport) -> Panel:
    """The numbers of a fidelity report."""
    forks = ", ".join(f"{visible(reason)} {count}" for reason, count in sorted(report.forks.items())) or "none"
    difference = "not measured" if report.plain_difference is None else f"{report.plain_difference:.1%} of context"
    if report.plain_different:
        difference += f", in {report.plain_different:,} turns,"
    rows: dict[str, str] = {
        "conversations": f"{report.conversations:,}   turns {report.turns:,}   chains {report.chains:,}",
        "forks": forks,
        "forced closes": f"{report.forced_closes:,}",
        "row tokens": f"{report.row_tokens:,} ÷ {report.distinct_tokens:,} distinct = {report.row_over_distinct:.2f}",
        "trained": f"{report.trained_tokens:,}   main {report.main_tokens:,}   discarded {report.discarded_tokens:,}",
        "not trained": ", ".join(f"{visible(why)} {n:,}" for why, n in sorted(report.untrained_tokens.items()))
        or "none",
        "plain server": f"{difference} would differ" if report.plain_difference is not None else difference,
        "special text": f"{report.special_text:,}   malformed calls {report.malformed_calls:,}",
        **({"calls as text": f"{report.calls_as_text:,} turns"} if report.calls_as_text else {}),
        **({"mixed cache": f"{report.mixed_cache:,} tokens after a push of weights"} if report.mixed_cache else {}),
    }
    grid = _grid()
    for name, value in rows.items():
        grid.add_row(Text(name, "dim"), Text(value))
    return Panel(grid, title=Text("fidelity", "bold"), title_align="left")


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def turn_tree(trajectory: Trajectory, *, full: bool = False) -> Tree:
    """The forest of turns. A chain of continuations stays on one level; a branch hangs under the turn it left."""
    children: dict[str | None, list[Turn]] = {}
    for turn in trajectory.turns:
        children.setdefault(turn.parent, []).append(turn)
    numbers = {turn.id: turn.index for turn in trajectory.turns}
    tree = Tree(Text(f"{len(trajectory.turns):,} turns", "bold"))
    # Chains still to draw, the next one last: first turn, parent branch, depth.
    waiting = [(turn, tree, 0) for turn in reversed(children.get(None, []))]
    while waiting:
        turn, branch, depth = waiting.pop()
        chain = _chain(turn, children)
        folded = set() if full else _folded(chain, children)
        detached = depth == 0 and turn.parent is not None
        if depth == 0:
            branch = tree.add(Text(f"{turn.role} conversation, turns {len(chain):,}", "dim"))
        branches: list[tuple[Turn, Tree, int]] = []
        for position, member in enumerate(chain):
            if position in folded:
                if position - 1 not in folded:
                    hidden = next(p for p in range(position, len(chain) + 1) if p not in folded) - position
                    branch.add(Text(f"… {hidden:,} plain turns …", "dim"))
                continue
            label = _turn_label(member, numbers, detached=detached and member is turn)
            node = branch.add(label)
            following = chain[position + 1] if position + 1 < len(chain) else None
            hanging, level = (node, depth + 1) if depth < DEPTH else (tree, 0)
            others = (child for child in children.get(member.id, []) if child is not following)
            branches.extend((child, hanging, level) for child in others)
        waiting.extend(reversed(branches))
    return tree


def _chain(turn: Turn, children: dict[str | None, list[Turn]]) -> list[Turn]:
    """The turn and the turns that continue it without a fork."""
    chain = [turn]
    while True:
        plain = (child for child in children.get(chain[-1].id, []) if child.reason is None and child.role is turn.role)
        following = next(plain, None)
        if following is None:
            return chain
        chain.append(following)


def _folded(chain: Sequence[Turn], children: dict[str | None, list[Turn]]) -> set[int]:
    """The positions of turns that may be folded: those inside long runs of plain continuations."""
    folded: set[int] = set()
    start = 0
    for position in range(len(chain) + 1):
        turn = chain[position] if position < len(chain) else None
        if turn is not None and len(children.get(turn.id, [])) == 1 and not (turn.forced_close or turn.flags):
            continue
        if position - start > 2 * SHOWN_TURNS + 1:
            folded.update(range(start + SHOWN_TURNS, position - SHOWN_TURNS))
        start = position + 1
    return folded


def _turn_label(turn: Turn, numbers: dict[str, int], *, detached: bool) -> Text:
    text = Text(f"#{turn.index} {turn.role}", ROLE_STYLES[turn.role])
    plain = "not bold not dim default"

    def add(part: str, style: str = plain) -> None:
        text.append("  ").append(visible(part), style)

    if turn.reason is not None:
        add(f"⑂ {turn.reason}", "not bold red")
    if turn.role_reason:
        add(f"[{turn.role_reason}]", "not bold dim")
    if detached and turn.parent is not None:
        add(f"on #{numbers[turn.parent]}", "not bold red")
    if turn.origin is not None and turn.origin != turn.parent:
        add(f"from #{numbers[turn.origin]}" + (" (inferred)" if turn.origin_inferred else ""), "not bold red")
    add(" ".join(filter(None, (turn.dialect, turn.model))) or "-")
    add(f"prompt {turn.prompt_length:,} (+{len(turn.suffix):,})")
    add(f"sampled {len(turn.sampled):,}", "not bold not dim green")
    add(turn.finish)
    if len(turn.sampled):
        low, high = int(turn.versions.min()), int(turn.versions.max())
        add(f"v{low}" if low == high else f"v{low}-{high}")
        add(f"logp {float(turn.logprobs.mean(dtype=np.float64)):.3f}")
    for name, value, default in (
        ("temperature", turn.temperature, 1.0),
        ("top-p", turn.top_p, 1.0),
        ("top-k", turn.top_k, 0),
    ):
        if value != default:
            add(f"{name} {value:g}")
    if turn.forced_close:
        add("forced close", "not bold yellow")
    if not turn.delivered:
        add("not delivered", "not bold yellow")
    if turn.untrained:
        add(f"not trained: {turn.untrained}" + (f" ({turn.engine})" if turn.engine else ""))
    for flag in turn.flags:
        add(flag, "not bold yellow")
    if turn.difference:
        was, sent = (str(turn.difference.get(side, "")) for side in ("was", "sent"))
        add(f"message {turn.difference.get('message')}: {was!r} became {sent!r}", "not bold dim")
    return text


def legend() -> Text:
    """The meaning of the colours."""
    text = Text().append("legend  ", "bold").append("prompt", CONTEXT).append("  sampled and trained: ")
    for _, style, meaning in SHADES:
        text.append(meaning, style).append("  ")
    return text.append("sampled, not trained in this row", MASKED)


def trace_view(trace: Trace, decode: Decode | None = None, *, full: bool = False) -> Group:
    """One row: a heading, then its spans of context and of sampled tokens."""
    facts = [
        f"{len(trace.token_ids):,} tokens",
        f"{trace.trained_tokens:,} trained",
        f"reward {'none' if trace.reward is None else format(trace.reward, 'g')}",
        f"finish {trace.finish_reason or '-'}",
    ]
    if trace.trained_temperatures not in ([], [1.0]):
        facts.append(f"temperature {', '.join(f'{value:g}' for value in trace.trained_temperatures)}")
    if trace.fork_reason:
        facts.append(f"fork {trace.fork_reason}")
    if trace.parent_trace:
        facts.append(f"parent {trace.parent_trace}")
    if trace.truncated:
        facts.append("truncated")
    title = Text(f"row {visible(trace.trace_id)} · {trace.role}", "bold")
    grid = _grid()
    spans = list(_spans(trace))
    mixed = len({one.temperature for one in trace.sampling}) > 1
    hidden = [] if full or len(spans) <= 2 * SHOWN_SPANS + 1 else spans[SHOWN_SPANS:-SHOWN_SPANS]
    for position, (turn, trained, start, end) in enumerate(spans):
        if hidden and position == SHOWN_SPANS:
            count = hidden[-1][3] - hidden[0][2]
            grid.add_row(Text("…", "dim"), Text(f"{len(hidden):,} spans, {count:,} tokens", "italic dim"))
        if hidden and SHOWN_SPANS <= position < len(spans) - SHOWN_SPANS:
            continue
        label = "prompt" if turn < 0 else f"#{turn} trained" if trained else f"#{turn} masked"
        if turn >= 0 and mixed:
            label += f" at {trace.temperatures[start]:g}"
        style = CONTEXT if turn < 0 else "green" if trained else MASKED
        ids, logprobs = trace.token_ids[start:end], trace.logprobs[start:end]
        shade = logprobs if trained else None
        grid.add_row(Text(f"{label} {end - start:,}", style), _span_text(ids, shade, style, decode, full))
    return Group(Rule(title, align="left", style="dim"), Text(visible("  ".join(facts))), grid)


def _spans(trace: Trace) -> Iterator[tuple[int, bool, int, int]]:
    """Spans of one turn and one mask: `(turn index or -1, trained, start, end)`."""
    changes = (np.diff(trace.turn_ids) != 0) | (np.diff(trace.loss_mask) != 0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(trace.token_ids)]
    for start, end in pairwise(bounds):
        yield int(trace.turn_ids[start]), bool(trace.loss_mask[start]), start, end


def _span_text(
    ids: Ids, logprobs: npt.NDArray[np.float32] | None, style: str, decode: Decode | None, full: bool
) -> Text:
    """The tokens of a span, without the middle of a long one."""
    count = len(ids)
    parts = [slice(0, count)]
    if not full and count > 2 * SHOWN_TOKENS + SHOWN_TOKENS // 2:
        parts = [slice(0, SHOWN_TOKENS), slice(count - SHOWN_TOKENS, count)]
    text = Text()
    for number, part in enumerate(parts):
        if number:
            text.append(f" … {count - 2 * SHOWN_TOKENS:,} tokens … ", "italic dim")
        if logprobs is None:
            whole = " ".join(map(str, ids[part].tolist())) if decode is None else decode(ids[part].tolist())
            text.append(visible(whole, lines=True), style)
            continue
        for piece, logprob in _pieces(ids[part].tolist(), logprobs[part].tolist(), decode):
            text.append(visible(piece, lines=True), _shade(logprob))
    return text


def _pieces(ids: list[int], logprobs: list[float], decode: Decode | None) -> Iterator[tuple[str, float]]:
    """The text of each token with its logprob; tokens that share a character are one piece with the lowest logprob."""
    if decode is None:
        yield from ((f"{id} ", logprob) for id, logprob in zip(ids, logprobs, strict=True))
        return
    # Decoded after the tokens before it, a piece keeps the leading space that some tokenizers strip.
    before = done = 0
    for end in range(1, len(ids) + 1):
        known = decode(ids[before:done])
        text = decode(ids[before:end])
        if text.endswith("\ufffd") and end < len(ids) and end - done < 8:
            continue
        yield text[len(known) :], min(logprobs[done:end])
        before, done = done, end


def _shade(logprob: float) -> str:
    probability = exp(min(logprob, 0.0))
    return next(style for least, style, _ in SHADES if probability >= least)
