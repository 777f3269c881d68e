"""Options that several commands share, and the settings that they override."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from towline.cli import engines
from towline.config import LogOutput, Settings
from towline.schema import ContextPolicy, SandboxKind

# Tasks and their sessions
Tasks = Annotated[
    list[str],
    typer.Argument(help="Harbor task folders (or folders of them), or JSONL files of tasks.", metavar="TASK…"),
]
Samples = Annotated[int, typer.Option(help="Sessions per task.", min=1)]
OptionalSamples = Annotated[int | None, typer.Option(help="Sessions per task. Default: what the task says.", min=1)]
Harness = Annotated[
    str, typer.Option(help="Harness for tasks that name none; see `towline harness list`. Default: none.")
]
RequiredHarness = Annotated[
    str, typer.Option("--harness", help="Harness for tasks that name none; see `towline harness list`.")
]
HarnessOptions = Annotated[
    list[str] | None,
    typer.Option("--option", help="Harness option, `name=value`; values may be JSON. Repeatable. Default: none."),
]
Trust = Annotated[
    list[str] | None,
    typer.Option(help="What task files may use of this machine: paths,env,process,… or all. Default: none."),
]
Sandbox = Annotated[
    SandboxKind | None, typer.Option(help="Default sandbox for tasks that set none. Default: bubblewrap.")
]
Concurrency = Annotated[int | None, typer.Option(help="Sessions that run at the same time. Default: 16.", min=1)]
Seconds = Annotated[float | None, typer.Option(help="Run timeout, in seconds, for tasks that set none. Default: 1800.")]
MaxFailed = Annotated[
    float,
    typer.Option(help="Maximum share of infrastructure failures; above it, exit with status 1.", min=0, max=1),
]

# Engine, model and sampling
ModelFolder = Annotated[
    Path | None,
    typer.Option("--model", help="Model folder (Hugging Face layout) or GGUF file. Default: a tiny model."),
]
EngineName = Annotated[
    str | None,
    typer.Option("--engine", help="embedded, smollm2, llamacpp, vllm, sglang, openai, scripted. Default: embedded."),
]
Upstream = Annotated[
    list[str] | None,
    typer.Option(help="Server URL for vllm, sglang and openai. Repeatable: replicas. Default: none."),
]
UpstreamModel = Annotated[
    str | None, typer.Option(help="Name of the model at that server. Default: what the server lists.")
]
Script = Annotated[
    Path | None,
    typer.Option("--script", help="Replies of `--engine scripted`: a .py or .json file. Default: built in."),
]
Policy = Annotated[
    ContextPolicy | None, typer.Option(help="How history enters the prompt (docs/exactness.md). Default: retain.")
]
Temperature = Annotated[
    float | None, typer.Option(help="Temperature of every turn. Default: what the harness asks for.")
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Maximum tokens per turn. Default: what the harness asks for.", min=1)
]

# Files and output
Config = Annotated[Path | None, typer.Option(help="Settings file. Default: ./towline.toml if it exists.")]
LogFormatName = Annotated[
    LogOutput | None,
    typer.Option("--log-format", help="`text`, or `json` for one object per line. Default: text."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON. Default: human-readable text.")]


def session_overrides(
    policy: ContextPolicy | None, temperature: float | None, max_tokens: int | None
) -> dict[str, Any]:
    """The `session` section that the options of a command override."""
    return {"policy": policy, "sampling": {"temperature": temperature, "max_tokens": max_tokens}}


def local_settings(
    given: Mapping[str, Any], out: Path, *, engine: str | None = None, journal: str | None = None
) -> Settings:
    """Settings of a gateway and a node in this process that write to `out`; `given` are the command's options by name.

    A command that resumes from a ledger needs no journal: it runs a session that a crash cut short from its start.
    """
    seconds = given["seconds"]
    return Settings.load(
        given["config"],
        gateway={"port": 0, "control_port": 0, "data": out, "journal": journal},
        model={"folder": given["model"]},
        engine=engines.engine_overrides(given["engine"] or engine, given["upstream"], given["upstream_model"]),
        session=session_overrides(given["policy"], given["temperature"], given["max_tokens"]),
        node={
            "sandbox": given["sandbox"],
            "run_workers": given["concurrency"],
            "seconds": {"run": seconds} if seconds is not None else None,
        },
    )
