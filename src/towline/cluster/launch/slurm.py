"""The Slurm job: a pure function from settings to a script.

Every expression of the template is quoted for the shell, unless it is a `Verbatim`: lines that are shell code by their
meaning (`cluster.slurm.setup`) and words that were quoted one by one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2

from towline.cluster.launch.inputs import LaunchInputs, engine_kind, engine_model
from towline.errors import ConfigError

_TEMPLATE = "job.sh.jinja"


class Verbatim(str):
    """Text that enters the script as it is."""

    __slots__ = ()


def render_job(inputs: LaunchInputs) -> str:
    """The batch script of a Slurm job with the server, its nodes and its model servers."""
    settings, cluster = inputs.settings, inputs.settings.cluster
    engine = cluster.engine
    config = ["--config", str(inputs.config)] if inputs.config else []
    values: dict[str, Any] = {
        "job_options": [Verbatim(_quoted_option(option)) for option in _job_options(inputs)],
        "setup": [Verbatim(line) for line in cluster.slurm.setup],
        "state": str(inputs.state),
        "data": str(inputs.data),
        "program": _words(cluster.program),
        "config_option": _words(config, leading=True),
        "port_option": _words(["--port", str(settings.server.port)], leading=True),
        "serve_arguments": _words(cluster.arguments, leading=True),
        "interface": cluster.slurm.interface,
        "ray": cluster.slurm.with_ray,
        "several": cluster.slurm.nodes > 1,
        "ray_program": _words(cluster.ray_program),
        "engine": engine is not None,
    }
    if engine is not None:
        values |= {
            "engine_options": [Verbatim(_quoted_option(option)) for option in _engine_options(inputs)],
            "engine_command": _words([*engine.command, engine_model(settings)]),
            "engine_arguments": _words(engine.arguments, leading=True),
            "engine_port": str(engine.port),
            "engine_kind": engine_kind(settings),
            "key_variable": Verbatim(_variable(settings.engine.key_variable)),
        }
    return _environment().get_template(_TEMPLATE).render(values)


def _job_options(inputs: LaunchInputs) -> list[str]:
    slurm = inputs.settings.cluster.slurm
    # Slurm replaces `%j` and the like in file names.
    log = str(inputs.state).replace("%", "%%") + "/job-%j.log"
    return [
        f"--job-name={inputs.settings.cluster.name}",
        f"--chdir={inputs.folder}",
        f"--output={log}",
        "--open-mode=append",
        *_resources(slurm.nodes, slurm.cpus_per_task, slurm.gpus, slurm.memory),
        *_shared_options(inputs, slurm.partition),
        # The death of one node costs its own sessions, not the job.
        "--no-kill",
        # A job that Slurm starts again while its first run still lives would share the data folder with it.
        "--no-requeue",
        "--signal=B:TERM@60",
        *slurm.options,
    ]


def _engine_options(inputs: LaunchInputs) -> list[str]:
    cluster = inputs.settings.cluster
    engine = cluster.engine
    assert engine is not None
    memory = (engine.memory or "").removesuffix("i").removesuffix("B")
    return [
        *_resources(engine.replicas, engine.cpus_per_task, engine.gpus, memory),
        *_shared_options(inputs, engine.partition or cluster.slurm.partition),
    ]


def _resources(nodes: int, cpus: int | None, gpus: int, memory: str) -> list[str]:
    options = [f"--nodes={nodes}", "--ntasks-per-node=1"]
    options += [f"--cpus-per-task={cpus}"] if cpus else []
    options += [f"--gpus-per-node={gpus}"] if gpus else []
    return options + ([f"--mem={memory}"] if memory else [])


def _shared_options(inputs: LaunchInputs, partition: str) -> list[str]:
    slurm = inputs.settings.cluster.slurm
    given = {"partition": partition, "account": slurm.account, "qos": slurm.qos, "time": slurm.time}
    return [f"--{name}={value}" for name, value in given.items() if value]


def _quoted_option(option: str) -> str:
    """An option as an `#SBATCH` line has it: sbatch knows both kinds of quotes, and `#` begins a comment."""
    return shlex.quote(option)


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(f"engine.key_variable: {name!r} is not the name of an environment variable")
    return name


def _words(words: Iterable[str], *, leading: bool = False) -> Verbatim:
    """Words of a command, each quoted; with `leading`, each after a blank."""
    quoted = [shlex.quote(word) for word in words]
    return Verbatim("".join(f" {word}" for word in quoted) if leading else " ".join(quoted))


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        finalize=_quoted,
        undefined=jinja2.StrictUndefined,
        # Bash has `{#` in `${#list[@]}`.
        comment_start_string="{##",
        comment_end_string="##}",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def _quoted(value: object) -> str:
    if isinstance(value, Verbatim):
        return str(value)
    assert isinstance(value, str), f"a script holds text, not {value!r}"
    return shlex.quote(value)
