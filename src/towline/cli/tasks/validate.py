"""`towline tasks validate`: accept a task only if it can be solved, is not free, and gives the same score twice."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from towline.cli import engines, live, options, terminal
from towline.cli.tasks import UNNAMED, parse_band, parse_options, prepare_tasks
from towline.common.files import write_atomically
from towline.errors import ConfigError
from towline.schema import Task
from towline.schema.trust import parse_grants

if TYPE_CHECKING:
    from towline.config import Settings
    from towline.node.finished import FinishedSession
    from towline.runs.validation import TaskVerdict
    from towline.tasks.probes import Probe

app = typer.Typer(no_args_is_help=True, help="Check tasks before a model is trained on them.")


@app.command()
def validate(
    tasks: options.Tasks,
    runs: Annotated[
        int, typer.Option(help="Runs of the solution and of doing nothing; all must score alike.", min=1)
    ] = 2,
    band: Annotated[
        str, typer.Option(help="Accepted pass rates, as LOW:HIGH (0.1:0.9). Default: pass rates are not looked at.")
    ] = "",
    pass_rates: Annotated[
        Path | None,
        typer.Option(help="Pass rates for --band: folder of `towline eval` or `towline train`. Default: measure them."),
    ] = None,
    harness: options.Harness = "",
    trust: options.Trust = None,
    samples: Annotated[int, typer.Option(help="Sessions per task to measure its pass rate.", min=1)] = 8,
    option: options.HarnessOptions = None,
    accepted: Annotated[
        Path | None, typer.Option(help="JSONL file to write the accepted tasks to. Default: none.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: runs/validate-TIME.")] = None,
    sandbox: options.Sandbox = None,
    concurrency: options.Concurrency = None,
    seconds: options.Seconds = None,
    model: options.ModelFolder = None,
    engine: options.EngineName = None,
    upstream: options.Upstream = None,
    upstream_model: options.UpstreamModel = None,
    script: options.Script = None,
    policy: options.Policy = None,
    temperature: options.Temperature = None,
    max_tokens: options.MaxTokens = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Accept tasks that are fit for training; name the reason for each that is not.

    Runs each task's own solution, an agent that does nothing, and known cheats, without a model. With `--band` the task's
    pass rate counts too: from `--pass-rates`, or measured with `--harness` and an engine. Exits with status 1 if a task
    is refused.
    """
    from towline.runs.validation import PassBand, ProbeResult, judge_pass_rate, judge_probes
    from towline.tasks.probes import ProbeKind

    console = terminal.console(as_json)
    wanted = PassBand(*parse_band(band)) if band else None
    out = (out or Path("runs") / time.strftime("validate-%Y%m%d-%H%M%S")).absolute()
    if (out / "probes").exists():
        raise ConfigError(f"{out} already holds a run; choose another --out")
    if wanted and pass_rates is None and not harness:
        raise ConfigError("--band needs pass rates: give --pass-rates, or --harness and an engine to measure them")
    settings = options.local_settings(locals(), out, engine=None if wanted and pass_rates is None else "scripted")
    verdicts, loaded = _load(tasks, harness or UNNAMED, parse_options(option or [], harness), trust or [], settings)
    probes = [probe for verdict, task in loaded for probe in _probes(verdict, task, runs)]
    measure = wanted is not None and pass_rates is None
    known = _known_rates(pass_rates) if pass_rates is not None else {}
    by_id = {verdict.task_id: verdict for verdict, _ in loaded}

    def fit(task_id: str) -> bool:
        """Cheats and models are tried only on tasks that nothing speaks against so far."""
        return by_id[task_id].accepted

    sessions = _Sessions(settings, out, console, script, shown=not as_json)
    first = [(owner, probe) for owner, probe in probes if probe.kind is not ProbeKind.CHEAT]
    for owner, probe, finished in sessions.run([(owner, one.name, one.task) for owner, one in first], "probes"):
        by_id[owner].results.append(ProbeResult.of(probe, finished))
    for verdict, _ in loaded:
        judge_probes(verdict)
    cheats = [(owner, one.name, one.task) for owner, one in probes if one.kind is ProbeKind.CHEAT and fit(owner)]
    for owner, probe, finished in sessions.run(cheats, "cheats"):
        by_id[owner].results.append(ProbeResult.of(probe, finished))
    for owner in dict.fromkeys(owner for owner, _, _ in cheats):
        judge_probes(by_id[owner])
    rewards: dict[str, list[float]] = {}
    for owner, _, finished in sessions.run(
        [(task.task_id, "", _sampled(task, samples)) for _, task in loaded if measure and fit(task.task_id)], "samples"
    ):
        reward = finished.trajectory.reward
        rewards.setdefault(owner, []).extend([reward.score] if reward and reward.score is not None else [])
    for verdict, _ in loaded:
        if wanted is not None and (not measure or verdict.accepted):
            verdict.pass_rate = known.get(verdict.task_id)
            judge_pass_rate(verdict, wanted, rewards.get(verdict.task_id))
    _report(verdicts, loaded, accepted, out, console, as_json)
    raise typer.Exit(0 if verdicts and all(verdict.accepted for verdict in verdicts) else 1)


def _load(
    paths: list[str], harness: str, given: dict[str, object], trust: list[str], settings: Settings
) -> tuple[list[TaskVerdict], list[tuple[TaskVerdict, Task]]]:
    """A verdict for every row, and the tasks that can be probed."""
    from towline.config import SessionSettings
    from towline.node.task_check import task_problems
    from towline.runs.validation import RefusalName, TaskVerdict
    from towline.tasks.each_task import load_each
    from towline.tasks.fields import TaskError

    verdicts, loaded = [], []
    ids: dict[str, str] = {}
    contents: dict[str, str] = {}
    for place, task in load_each(paths, harness=harness, trust=parse_grants(trust), registry=settings.registry):
        if isinstance(task, TaskError):
            verdicts.append(TaskVerdict(place, place))
            verdicts[-1].refuse(RefusalName.UNREADABLE, str(task))
            continue
        if task.harness == harness and given:
            task = task.model_copy(update={"harness_options": {**given, **task.harness_options}})
        verdict = TaskVerdict(task.task_id, place)
        verdicts.append(verdict)
        content = _content(task)
        if task.task_id in ids or content in contents:
            what = "the same id as" if task.task_id in ids else "the same instruction, environment and evaluator as"
            verdict.refuse(RefusalName.DUPLICATE, f"it has {what} {ids.get(task.task_id) or contents[content]}")
            continue
        ids[task.task_id] = contents[content] = place
        checked = task.model_copy(update={"harness": "nothing", "harness_options": {}})
        problem = next(task_problems(checked, SessionSettings()), None)
        if problem is not None:
            verdict.refuse(RefusalName.UNREADABLE, f"{problem[0]}: {problem[1]}")
        elif not task.evaluator:
            verdict.refuse(RefusalName.NOT_SCORED, "it has no evaluator")
        else:
            loaded.append((verdict, task))
    return verdicts, loaded


def _content(task: Task) -> str:
    """A digest of what the agent is told and how it is scored, without blanks and case."""
    said = " ".join(task.instruction.lower().split())
    parts = [said, task.environment.model_dump_json(), json.dumps(task.evaluator, sort_keys=True)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _probes(verdict: TaskVerdict, task: Task, runs: int) -> list[tuple[str, Probe]]:
    from towline.runs.validation import RefusalName
    from towline.tasks.fields import TaskError
    from towline.tasks.probes import probes_of

    try:
        return [(task.task_id, probe) for probe in probes_of(task, runs)]
    except TaskError as error:
        verdict.refuse(RefusalName.NO_ORACLE, str(error))
        return []


class _Sessions:
    """Runs sessions on a node in this process, each set in a folder of its own."""

    def __init__(self, settings: Settings, out: Path, console: Console, script: Path | None, *, shown: bool):
        self.settings = settings
        self.out = out
        self.console = console
        self.script = script
        self.shown = shown

    def run(self, wanted: list[tuple[str, str, Task]], folder: str) -> list[tuple[str, str, FinishedSession]]:
        """Run sessions given as owner, name and task: the same with how each ended."""
        from towline.runs import run as work

        if not wanted:
            return []
        tasks = [task for _, _, task in wanted]
        owners = {task.task_id: (owner, name) for owner, name, task in wanted}
        prepare_tasks(tasks, self.settings, self.console)
        terminal.configure_logging(self.console)
        out = self.out / folder
        out.mkdir(parents=True, exist_ok=True)
        gateway, _ = engines.make_gateway(self.settings, self.console, self.script)
        display = live.SessionsDisplay(sum(task.num_samples for task in tasks), gateway)

        async def run() -> work.RunResults:
            async with work.local_node(gateway, self.settings, out, changed=display.changed) as node:
                running = work.run_tasks(node, tasks, out, display.finished)
                return await live.run_with_display(running, display, out, self.console, live=self.shown, resumes=False)

        results: work.RunResults = terminal.run_async(run())
        return [(*owners[one.session.task_id], one) for one in results.finished]


def _sampled(task: Task, samples: int) -> Task:
    return task.model_copy(update={"num_samples": samples, "min_samples": 0})


def _known_rates(path: Path) -> dict[str, float]:
    """Pass rates by task, from an evaluation or from the store of a training run (its newest policy version)."""
    from towline.runs.eval_report import EvalReport
    from towline.trainers.curriculum.store import FILE, CurriculumStore

    if path.name == FILE or (path / FILE).is_file():
        store = CurriculumStore(path)
        newest = {one.task_id: one.rate for one in store.rates() if one.scored}
        store.close()
        return newest

    report = EvalReport.read(path)
    counts: dict[str, tuple[int, int]] = {}
    for own in report.harnesses.values():
        for task_id, tally in own.items():
            passed, scored = counts.get(task_id, (0, 0))
            counts[task_id] = (passed + tally.passed, scored + tally.n)
    return {task_id: passed / scored for task_id, (passed, scored) in counts.items() if scored}


def _report(
    verdicts: list[TaskVerdict],
    loaded: list[tuple[TaskVerdict, Task]],
    accepted: Path | None,
    out: Path,
    console: Console,
    as_json: bool,
) -> None:
    good = [task for verdict, task in loaded if verdict.accepted]
    if accepted is not None:
        lines = (task.model_dump_json(exclude={"harness"} if task.harness == UNNAMED else None) for task in good)
        write_atomically(accepted, "".join(f"{line}\n" for line in lines).encode())
    refused: dict[str, int] = {}
    for verdict in verdicts:
        for one in verdict.refusals:
            refused[one.name.value] = refused.get(one.name.value, 0) + 1
    if as_json:
        found = {"out": str(out), "tasks": len(verdicts), "accepted": sum(verdict.accepted for verdict in verdicts)}
        print(json.dumps({**found, "refused": refused, "verdicts": [verdict.as_json() for verdict in verdicts]}))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("task", "verdict", "why"):
        table.add_column(name, overflow="fold")
    for verdict in verdicts:
        name = terminal.escape_markup(verdict.task_id)
        if verdict.accepted:
            table.add_row(name, "[green]accepted[/]", "")
        for number, one in enumerate(verdict.refusals):
            detail = terminal.escape_markup(one.detail)
            table.add_row("" if number else name, f"[red]{one.name.value}[/]", detail)
    console.print(table)
    console.print(f"{sum(verdict.accepted for verdict in verdicts)} of {len(verdicts)} tasks accepted", highlight=False)


@app.command()
def rates(
    run: Annotated[Path, typer.Argument(help="Folder of a `towline train` run, or its curriculum.sqlite.")],
    as_json: options.Json = False,
) -> None:
    """Show pass rates by task and policy version, how often each task was chosen, and what the run has used."""
    from towline.trainers.curriculum.store import FILE, CurriculumStore

    if not (run / FILE if run.is_dir() else run).is_file():
        raise ConfigError(f"{run} has no pass rates; they are stored by `towline train --sampler`")
    store = CurriculumStore(run)
    found, chosen, spent = store.rates(), store.chosen(), store.spending()
    store.close()
    if as_json:
        lines = [{**dataclasses.asdict(one), "rate": one.rate} for one in found]
        print(json.dumps({"rates": lines, "chosen": chosen, "spent": dataclasses.asdict(spent)}))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("task", overflow="fold")
    for name in ("version", "groups", "sessions", "pass rate", "mean reward", "no variance", "chosen"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        cells = (one.version, one.groups, one.scored, f"{one.rate:.2f}", f"{one.mean_reward:.3f}", one.zero_variance)
        table.add_row(terminal.escape_markup(one.task_id), *map(str, cells), str(chosen.get(one.task_id, 0)))
    terminal.console(as_json).print(table)
    tokens = spent.prompt_tokens + spent.sampled_tokens
    terminal.console(as_json).print(
        f"{spent.sessions:,} sessions, {tokens:,} tokens, {spent.seconds:,.0f} s", highlight=False
    )
