"""`towline submit`, `status`, `sessions`, `log`, `tail`, `cancel` and `export`: work with a running service."""

from __future__ import annotations

import json
import time
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from towline.cli import options, terminal
from towline.cli.run import early_stop_lines
from towline.cli.tasks import UNNAMED, load_tasks
from towline.client import Client, NotFound
from towline.common.text import ascii_json, visible
from towline.errors import ConfigError
from towline.schema import FailureReason, SessionState, SlowSession, Task, TaskState, unusable_reason

_PATIENCE = 10.0
"""Seconds to wait for a service that does not answer."""
_SHOWN = 20
"""Maximum number of tasks in the live table."""
_SLOWEST = 10
"""Maximum number of slow sessions there."""

Url = Annotated[str | None, typer.Option(envvar="TOWLINE_URL", help="URL of the service. Default: 127.0.0.1:8600.")]
Key = Annotated[
    str | None,
    typer.Option(envvar="TOWLINE_KEY", help="API key; prefer `TOWLINE_KEY` to the command line. Default: none."),
]
Ids = Annotated[list[str], typer.Argument(help="Task ids, as `status` lists them.", metavar="TASK_ID…")]


def submit(
    tasks: options.Tasks,
    harness: options.Harness = "",
    samples: options.OptionalSamples = None,
    option: options.HarnessOptions = None,
    trust: options.Trust = None,
    priority: Annotated[int | None, typer.Option(help="Priority; higher runs first. Default: the task's own.")] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until all tasks have ended. Default: return at once.")
    ] = False,
    url: Url = None,
    key: Key = None,
    as_json: options.Json = False,
) -> None:
    """Submit tasks to a service. Submitting them again is a no-op."""
    console = terminal.console(as_json)
    loaded = load_tasks(tasks, harness, samples, option or [], console, trust=trust)
    if any(task.harness == UNNAMED for task in loaded):
        raise ConfigError("some tasks name no harness; give --harness (see `towline harness list`)")
    if priority is not None:
        loaded = [Task.model_validate(task.__dict__ | {"priority": priority}) for task in loaded]
    with Client(url, key, patience=_PATIENCE) as client:
        accepted = client.submit(loaded)
        ended = [client.wait(one.task_id) for one in accepted] if wait else []
    if as_json:
        print(json.dumps([one.model_dump(mode="json") for one in ended or accepted]))
        return
    new = sum(one.created for one in accepted)
    sessions = sum(one.sessions for one in accepted if one.created)
    console.print(f"{new} tasks submitted, {sessions} sessions; {len(accepted) - new} already existed")
    for status in ended:
        console.print(
            f"  {status.task_id}  {status.state}  {status.usable} of {status.num_samples} usable", markup=False
        )


def status(
    ids: Annotated[
        list[str] | None,
        typer.Argument(help="Tasks to show with their sessions. Default: an overview.", metavar="TASK_ID…"),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print once instead of refreshing. Default: refresh on a terminal.")
    ] = False,
    url: Url = None,
    key: Key = None,
    as_json: options.Json = False,
) -> None:
    """Show what a service is doing, live, or the sessions of tasks."""
    console = terminal.console(as_json)
    with Client(url, key, patience=_PATIENCE) as client:
        if ids:
            _tasks(client, ids, console, as_json)
            return
        if as_json:
            print(json.dumps(_overview(client)))
            return
        if once or not console.is_terminal:
            console.print(_table(client))
            return
        try:
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    began = time.monotonic()
                    live.update(_table(client), refresh=True)
                    # Polling backs off: listing very many tasks is expensive.
                    time.sleep(max(1.0, 5 * (time.monotonic() - began)))
        except KeyboardInterrupt:
            return


def sessions(
    state: Annotated[SessionState | None, typer.Option(help="Only sessions in this state. Default: all.")] = None,
    reason: Annotated[
        FailureReason | None, typer.Option(help="Only sessions that failed for this reason. Default: all.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Only sessions of this task. Default: all tasks.", metavar="TASK_ID")
    ] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of sessions to list, newest tasks first.", min=1)] = 50,
    url: Url = None,
    key: Key = None,
    as_json: options.Json = False,
) -> None:
    """List the sessions of a service and why they failed, one per attempt."""
    with Client(url, key, patience=_PATIENCE) as client:
        found = client.sessions(state, reason, task, limit=limit, newest=True)
    if as_json:
        print(json.dumps([one.model_dump(mode="json") for one in found]))
        return
    console = terminal.console(as_json)
    for one in found:
        line = Text(f"{one.session_id}  ").append(f"{one.state:9}", "red" if one.failure else "")
        line.append(f"  task {visible(one.task_id)}  attempt {one.attempt}", "dim")
        if one.failure:
            line.append(f"  {one.failure}", "bold").append(f" in {one.stage or 'unknown'}", "dim")
        if one.error:
            line.append(f"  {_short(one.error, 200)}")
        console.print(line, soft_wrap=True, highlight=False)


def log(
    session_id: Annotated[str, typer.Argument(help="Session id, as `sessions` and `status` show it.")],
    name: Annotated[str, typer.Option(help="Log file to print.")] = "harness.log",
    tail: Annotated[int | None, typer.Option(help="Print only the last N lines. Default: all.", min=1)] = None,
    url: Url = None,
    key: Key = None,
    as_json: options.Json = False,
) -> None:
    """Print the log of a session's harness: at most its last 1 MiB."""
    with Client(url, key, patience=_PATIENCE) as client:
        text = client.log(session_id, name, tail)
    if as_json:
        print(json.dumps({"session_id": session_id, "name": name, "text": text}))
    else:
        # Escaped, so that agent output cannot move the cursor.
        print("\n".join(map(visible, text.splitlines())))


class EventKind(StrEnum):
    """What an event of the service is about."""

    TASK = "task"
    """A task changed its state."""
    SESSION = "session"
    """A session changed its state."""
    RESULT = "result"
    """A result was published."""
    POLICY = "policy"
    """The policy version changed, or sampling was paused or resumed."""
    BREAKER = "breaker"
    """The circuit breaker of an engine or a sandbox runtime opened or closed."""
    MISSED = "missed"
    """Events were skipped: the service no longer keeps them."""


def tail(
    after: Annotated[int | None, typer.Option(help="Start after this event number. Default: now.")] = None,
    kind: Annotated[
        list[EventKind] | None, typer.Option(help="Only events of this kind. Repeatable. Default: all.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Stop after N events. Default: never.", min=1)] = None,
    url: Url = None,
    key: Key = None,
    as_json: options.Json = False,
) -> None:
    """Print the events of a service as they happen."""
    console, left = terminal.console(False), limit
    with Client(url, key, patience=_PATIENCE) as client:
        try:
            for event in client.events(after):
                if kind and event.kind not in kind:
                    continue
                if as_json:
                    print(ascii_json(event.model_dump_json()), flush=True)
                else:
                    when = time.strftime("%H:%M:%S", time.localtime(event.at))
                    line = Text().append(f"{when} {event.seq:>7} ", "dim").append(f"{event.kind:8}", "bold")
                    body = "  ".join(f"{name}={_short(value)}" for name, value in event.body.items())
                    console.print(line.append(f" {body}", ""), highlight=False, soft_wrap=True)
                if left is not None and (left := left - 1) <= 0:
                    return
        except KeyboardInterrupt:
            return


def cancel(ids: Ids, url: Url = None, key: Key = None, as_json: options.Json = False) -> None:
    """Cancel tasks; their sessions end, and sampled turns are kept."""
    with Client(url, key, patience=_PATIENCE) as client:
        done = [client.cancel(name) for name in ids]
    if as_json:
        print(json.dumps([one.model_dump(mode="json") for one in done]))
        return
    for one in done:
        print(f"{visible(one.task_id)}  {one.state}  {one.finished} of {one.num_samples} had finished")


def _overview(client: Client) -> dict[str, Any]:
    found = client.tasks()
    return {
        "health": client.health(),
        "policy": client.policy().model_dump(mode="json"),
        "nodes": client.nodes(),
        "tasks": {state.value: sum(one.state is state for one in found) for state in TaskState},
        "sessions": {
            "asked": sum(one.num_samples for one in found),
            "finished": sum(one.finished for one in found),
            "usable": sum(one.usable for one in found),
            "cut": sum(one.cut for one in found),
        },
        "slowest": [one.model_dump(mode="json") for one in _slowest(client)],
    }


def _slowest(client: Client) -> list[SlowSession]:
    try:
        return client.stragglers(_SLOWEST)
    except NotFound:  # an older service
        return []


def _tasks(client: Client, ids: list[str], console: Console, as_json: bool) -> None:
    found = [client.task(name) for name in ids]
    if as_json:
        print(json.dumps([one.model_dump(mode="json") for one in found]))
        return
    for one in found:
        console.print(
            f"[bold]{terminal.escape_markup(one.task_id)}[/] {one.state}, {one.usable} usable of {one.num_samples}"
        )
        if one.grace_until is not None:
            console.print(f"In its grace period for another {max(0.0, one.grace_until - time.time()):.0f} s")
        for text in early_stop_lines(one.early_stop):
            console.print(text, highlight=False)
        table = Table("session", "sample", "attempt", "state", "ended", "error", box=None, pad_edge=False)
        for session in one.attempts or one.sessions:
            row = (session.session_id, str(session.sample), str(session.attempt), session.state.value)
            ended = session.failure or session.end_reason or ""
            table.add_row(*map(Text, (*row, str(ended), visible(session.error or ""))))
        console.print(table)


def _table(client: Client) -> RenderableType:
    health, policy, nodes, tasks = client.health(), client.policy(), client.nodes(), client.tasks()
    slowest = _slowest(client)
    states = Counter(one.state for one in tasks)
    asked, finished = sum(one.num_samples for one in tasks), sum(one.finished for one in tasks)
    head = Text().append("policy ", "dim").append(f"version {policy.version}", "bold")
    head.append("  paused" if policy.paused else "", "yellow").append("   tasks ", "dim")
    for state in TaskState:
        head.append(f"{state} ", "dim").append(f"{states[state]}  ", "bold" if states[state] else "dim")
    head.append("  sessions ", "dim").append(f"{finished} of {asked}", "bold")
    if cut := sum(one.cut for one in tasks):
        head.append("  stopped early ", "dim").append(str(cut), "bold")
    parts: list[RenderableType] = [head]
    if health.get("status") != "ok":
        reasons = [str(health["error"])] if health.get("error") else list(map(str, health.get("reasons", [])))
        parts.append(Text(f"{health.get('status')}: {visible('; '.join(reasons))}".rstrip(": "), "bold red"))
    for node in nodes:
        line = Text().append("node ", "dim").append(str(node.get("name", "")), "bold")
        for name, value in node.items():
            if name not in ("name", "sessions") and value not in ("", {}, []):
                line.append(f"  {name} ", "dim").append(_short(value))
        parts.append(line)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("task", "state", "finished", "usable", ""):
        table.add_column(name, overflow="fold")
    # Running tasks first, then the most recently changed.
    order = {TaskState.RUNNING: 0, TaskState.QUEUED: 1}
    for one in sorted(tasks, key=lambda task: (order.get(task.state, 2), -task.updated))[:_SHOWN]:
        bar = ProgressBar(total=max(1, one.num_samples), completed=one.finished, width=20)
        row = (Text(visible(one.task_id)), one.state.value, f"{one.finished}/{one.num_samples}", str(one.usable), bar)
        table.add_row(*row)
    if len(tasks) > _SHOWN:
        table.add_row(f"and {len(tasks) - _SHOWN} more", "", "", "", "")
    return Group(*parts, table, *([_slowest_table(slowest)] if slowest else []))


def _slowest_table(sessions: list[SlowSession]) -> Table:
    """The slowest sessions; stragglers are marked."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("slowest session", "task", "stage", "seconds", "turns", "median", ""):
        table.add_column(name, overflow="fold", justify="right" if name in ("seconds", "turns", "median") else "left")
    for one in sessions:
        median = "-" if one.median_seconds is None else f"{one.median_seconds:.1f}"
        note = f"of {one.compared_with}" if one.compared_with else ""
        table.add_row(
            Text(one.session_id),
            Text(visible(one.task_id)),
            one.state.value,
            f"{one.seconds:.0f}",
            "-" if one.turns is None else str(one.turns),
            median,
            Text(f"straggler: over 3x the median {note}", "bold red") if one.straggler else Text(note, "dim"),
        )
    return table


def _short(value: Any, most: int = 120) -> str:
    """A value on one line, escaped so that text of a harness or a model cannot move the cursor."""
    text = visible(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= most else text[: most - 1] + "…"


class ExportKind(StrEnum):
    """What one record of an export is."""

    TRACES = "traces"
    """A training row."""
    TRAJECTORIES = "trajectories"
    """A whole session: turns, messages and training rows."""


def export(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Tasks to export. Default: all that are done.", metavar="TASK_ID…")
    ] = None,
    out: Annotated[Path, typer.Option(help="Output file: .parquet, .arrow or .jsonl.")] = Path("traces.parquet"),
    what: Annotated[ExportKind, typer.Option(help="One record per training row, or per session.")] = ExportKind.TRACES,
    usable: Annotated[
        bool, typer.Option("--usable", help="Export only sessions that a trainer can learn from. Default: all.")
    ] = False,
    url: Url = None,
    key: Key = None,
    as_json: options.Json = False,
) -> None:
    """Write the trajectories of tasks to a file, without leasing any.

    Nothing is acknowledged: consumers still receive every result. Damaged trajectories are left out and listed at the
    end; the exit status is then 1.
    """
    from towline.runs import export as exports

    console = terminal.console(as_json)
    damaged: dict[str, str] = {}
    with (
        Client(url, key, patience=_PATIENCE) as client,
        exports.open_export(out, whole=what is ExportKind.TRAJECTORIES) as file,
    ):
        names = ids or [one.task_id for one in client.tasks(TaskState.DONE)]
        with terminal.progress_reporter(console, "export") as report:
            for number, name in enumerate(names, 1):
                ended = [one for one in client.task(name).sessions if one.state.terminal]
                fetched = client.fetch([one.session_id for one in ended])
                damaged |= fetched.damaged
                file.add([one for one in fetched.trajectories if not usable or unusable_reason(one) is None])
                report(number, len(names), name)
    fields = {"out": str(out), "tasks": len(names), "sessions": file.sessions, "rows": file.rows, "damaged": damaged}
    if as_json:
        print(json.dumps(fields))
    else:
        console.print(f"{fields['sessions']} sessions of {fields['tasks']} tasks, {fields['rows']} rows, in {out}")
        for session_id, reason in damaged.items():
            console.print(f"damaged, left out: {session_id}: {visible(reason)}", markup=False, soft_wrap=True)
    if damaged:
        raise typer.Exit(1)
