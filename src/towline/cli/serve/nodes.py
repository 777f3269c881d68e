"""`towline nodes`: the nodes of a running service; `towline nodes drain` and `undrain`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from towline.cli import options, terminal
from towline.cli.service import Key, Url
from towline.client import Client

app = typer.Typer(invoke_without_command=True, help="List the nodes of a service, or drain them.")
Name = Annotated[str, typer.Argument(help="Name of the node, as `towline nodes` lists it.")]
_PATIENCE = 10.0
"""Seconds to wait for a service that does not answer."""


@app.callback()
def nodes(context: typer.Context, url: Url = None, key: Key = None, as_json: options.Json = False) -> None:
    """List the nodes that run sessions."""
    if context.invoked_subcommand is None:
        with Client(url, key, patience=_PATIENCE) as client:
            _show(client.nodes(), as_json)


@app.command()
def drain(name: Name, url: Url = None, key: Key = None, as_json: options.Json = False) -> None:
    """Give a node no new sessions; those that run there end as usual."""
    with Client(url, key, patience=_PATIENCE) as client:
        _show(client.drain_node(name), as_json)


@app.command()
def undrain(name: Name, url: Url = None, key: Key = None, as_json: options.Json = False) -> None:
    """Let a drained node take sessions again."""
    with Client(url, key, patience=_PATIENCE) as client:
        _show(client.undrain_node(name), as_json)


def _show(found: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    table = Table("node", "sessions", "capacity", "host", "pid", "state", box=None, pad_edge=False)
    for one in found:
        sessions = str(len(one.get("sessions") or ()))
        state = one.get("unusable") or "usable"
        row = (one.get("name"), sessions, one.get("capacity"), one.get("host"), one.get("pid"), state)
        table.add_row(*(Text("" if value is None else str(value)) for value in row))
    terminal.console(False).print(table)
