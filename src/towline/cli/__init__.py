"""The command line: one file per command or command group, each a few lines of wiring.

Every command has `--json` for programs. Errors that the user can fix are printed in one line, without a traceback.
"""

from __future__ import annotations

import sys

import typer

from towline.cli import (
    audit,
    bench,
    cluster,
    demo,
    eval,
    gateway,
    generate,
    run,
    service,
    store,
    terminal,
    trace,
    train,
)
from towline.cli import service as export
from towline.cli.doctor import command as doctor
from towline.cli.installs import harness, images
from towline.cli.serve import command as serve
from towline.cli.serve import node_host, nodes, tenants
from towline.cli.tasks import validate
from towline.errors import TowlineError

app = typer.Typer(
    name="towline",
    help="Any agent harness, unchanged, as an RL environment with exact tokens.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command()(run.run)
app.command("eval")(eval.evaluate)
app.command()(generate.generate)
app.command()(train.train)
app.command()(trace.trace)
app.add_typer(validate.app, name="tasks")
app.add_typer(harness.app, name="harness")
app.add_typer(images.app, name="images")
app.command()(doctor.doctor)
app.add_typer(serve.app, name="serve")
app.command("node-host", hidden=True)(node_host.node_host)
app.add_typer(nodes.app, name="nodes")
app.add_typer(tenants.app, name="tenants")
app.add_typer(store.app, name="store")
app.add_typer(cluster.app, name="cluster")
for command in (service.submit, service.status, service.sessions, service.log, service.tail, service.cancel):
    app.command()(command)
app.command()(export.export)
app.command()(gateway.gateway)
app.add_typer(audit.app, name="audit")
app.add_typer(bench.app, name="bench")
app.command()(demo.demo)
app.command()(demo.tiny)


def main() -> None:
    """The `towline` command."""
    try:
        app()
    except BrokenPipeError:
        # The reader of our output has closed the pipe.
        sys.stderr.close()
        sys.exit(1)
    except (TowlineError, OSError) as error:
        if isinstance(error, OSError) and error.filename:
            terminal.print_error(f"{error.strerror}: {error.filename}")
        else:
            terminal.print_error(str(error))
        sys.exit(1)
