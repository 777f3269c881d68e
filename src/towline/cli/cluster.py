"""`towline cluster`: start Towline with Slurm or Kubernetes, ask how it is, and stop it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from towline.cli import options, terminal
from towline.common.text import ascii_json
from towline.common.untrusted.inert_console import InertConsole
from towline.config import FILE, Settings, named_file
from towline.errors import ConfigError

if TYPE_CHECKING:
    from towline.cluster.launch.inputs import LaunchInputs
    from towline.cluster.launch.launcher import Launcher, LaunchRecord

app = typer.Typer(no_args_is_help=True, help="Start and stop Towline with Slurm or Kubernetes.")

Data = Annotated[Path | None, typer.Option(help="Data folder of the service. Default: ./towline-data.")]
_LOCAL_COMMANDS = {"local": "towline serve", "ray": "towline serve --cluster ADDRESS"}


@app.command()
def up(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script or the manifests, and submit nothing. Default: submit.")
    ] = False,
    data: Data = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Submit the Slurm job or the Kubernetes objects of the `[cluster]` settings."""
    from towline.cluster.launch.launcher import read_record, write_record

    inputs = _inputs(config, data)
    launcher = _launcher(inputs)
    if dry_run:
        text = launcher.render()
        sys.stdout.write(json.dumps({"rendered": text}) + "\n" if as_json else text)
        return
    _check_secrets(inputs.settings)
    earlier = read_record(inputs.state)
    if earlier is not None:
        state = _launcher(inputs, earlier).status(earlier)
        # Objects of Kubernetes are updated in place; a second job would share the data folder with the first.
        if state.active and (earlier.kind == "slurm" or inputs.settings.cluster.kind == "slurm"):
            where = earlier.job_id or earlier.namespace
            raise ConfigError(f"{earlier.kind} {where} is {state.state}; stop it first: towline cluster down")
    record = launcher.up()
    write_record(inputs.state, record)
    if as_json:
        print(json.dumps(record.model_dump()))
    elif record.kind == "slurm":
        print(f"submitted job {record.job_id}; see `towline cluster status`")
    else:
        print(f"applied {record.name} in namespace {record.namespace}; see `towline cluster status`")


@app.command()
def status(data: Data = None, config: options.Config = None, as_json: options.Json = False) -> None:
    """Show the job or the objects, and the URL of the service."""
    inputs, record = _launched(config, data)
    found = _launcher(inputs, record).status(record)
    if as_json:
        print(ascii_json(found.model_dump_json()))
        return
    lines = {
        record.kind: found.job_id or f"{found.namespace}/{found.name}",
        "state": f"{found.state} {found.detail}".strip(),
        "service": found.url or "not listening yet",
        "key": found.key,
        "log": found.log,
    }
    console = InertConsole(highlight=False, markup=False)
    for name, value in lines.items():
        if value:
            console.print(f"{name:<11} {value}", soft_wrap=True)


@app.command()
def down(data: Data = None, config: options.Config = None, as_json: options.Json = False) -> None:
    """Stop what `up` submitted, and wait for its end. Stored data stays."""
    from towline.cluster.launch.launcher import remove_record

    inputs, record = _launched(config, data)
    with terminal.console(as_json).status("stopping"):
        _launcher(inputs, record).down(record)
    remove_record(inputs.state)
    stopped = record.job_id or f"{record.namespace}/{record.name}"
    print(json.dumps({"stopped": stopped}) if as_json else f"stopped {stopped}")


def _inputs(config: Path | None, data: Path | None) -> LaunchInputs:
    from towline.cluster.launch.inputs import LaunchInputs

    settings = Settings.load(config, server={"data": data})
    folder = Path.cwd()
    file = folder / (config or named_file() or FILE)
    return LaunchInputs(settings, folder, file if file.is_file() else None)


def _launched(config: Path | None, data: Path | None) -> tuple[LaunchInputs, LaunchRecord]:
    from towline.cluster.launch.launcher import read_record

    inputs = _inputs(config, data)
    record = read_record(inputs.state)
    if record is None:
        raise ConfigError(f"nothing was submitted from {inputs.data}; start it with: towline cluster up")
    return inputs, record


def _launcher(inputs: LaunchInputs, record: LaunchRecord | None = None) -> Launcher:
    """The launcher of the settings, or of what was submitted."""
    from towline.cluster.launch.kubernetes_commands import KubernetesLauncher
    from towline.cluster.launch.slurm_commands import SlurmLauncher

    kind = record.kind if record else inputs.settings.cluster.kind
    if kind == "slurm":
        return SlurmLauncher(inputs)
    if kind == "kubernetes":
        return KubernetesLauncher(inputs)
    raise ConfigError(f"cluster.kind: {kind!r} has nothing to submit; run: {_LOCAL_COMMANDS[kind]}")


def _check_secrets(settings: Settings) -> None:
    missing = [name for name in settings.cluster.secrets if not os.environ.get(name)]
    if missing:
        raise ConfigError(f"cluster.secrets: set {', '.join(missing)} in the environment first")
