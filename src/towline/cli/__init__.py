"""The command line. Each command is a few lines of wiring; the work is in the module it calls.

Every command has `--json` for programs, and says what is wrong in one line, without a traceback, when the cause is the
user's to mend.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from towline.cli import (
    common,
    doctor,
    evaluate,
    gateway,
    generate,
    harness,
    proofs,
    run,
    serve,
    service,
    store,
    trace,
    train,
)
from towline.errors import TowlineError

app = typer.Typer(
    name="towline",
    help="Any agent harness, unchanged, as a reinforcement-learning environment with token-exact trajectories.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command()(run.run)
app.command("eval")(evaluate.evaluate)
app.command()(generate.generate)
app.command()(train.train)
app.command()(trace.trace)
app.add_typer(harness.app, name="harness")
app.command()(doctor.doctor)
app.add_typer(serve.app, name="serve")
app.add_typer(store.app, name="store")
for command in (service.submit, service.status, service.sessions, service.log, service.tail, service.cancel):
    app.command()(command)
app.command()(service.export)
app.command()(gateway.gateway)
app.add_typer(proofs.audit_app, name="audit")
app.add_typer(proofs.bench_app, name="bench")
app.command()(proofs.demo)
app.command()(proofs.tiny)


def main() -> None:
    """The `towline` command."""
    try:
        app()
    except BrokenPipeError:
        # Whoever read our output has gone.
        sys.stderr.close()
        sys.exit(1)
    except (TowlineError, OSError) as error:
        said = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
        Console(stderr=True).print(f"[bold red]towline:[/] {common.plain(said)}", highlight=False)
        sys.exit(1)
