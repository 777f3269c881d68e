"""`towline audit`: prove token fidelity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from towline.cli import options, terminal

app = typer.Typer(no_args_is_help=True, help="Prove token fidelity.")


@app.command("fidelity")
def audit_fidelity(
    out: Annotated[Path, typer.Option(help="Output folder of rows (Arrow), models and the report.")] = Path(
        "runs/audit"
    ),
    conversations: Annotated[int, typer.Option(help="Conversations to play.", min=1)] = 400,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer or model folder to audit. Default: all known families.")
    ] = None,
    template: Annotated[
        Path | None, typer.Option(help="Chat template file to audit. Default: all known templates.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of scripts and models.")] = 0,
    mutations: Annotated[bool, typer.Option(help="Check that injected faults are caught.")] = True,
    as_json: options.Json = False,
) -> None:
    """Check prompts against an oracle, and logprobs by a forward pass.

    Plays every harness behaviour through the gateway. Exits with status 1 if anything differs.
    """
    from towline import audit

    console = terminal.console(as_json)
    options = audit.AuditOptions(
        out=out,
        conversations=conversations,
        tokenizer=tokenizer,
        template=template,
        seed=seed,
        mutations=mutations,
    )
    with terminal.progress_reporter(console, "audit") as report:
        result = terminal.run_async(audit.run(options, report))
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        audit.render(result, console)
    raise typer.Exit(0 if result.ok else 1)
