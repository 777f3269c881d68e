"""`towline tenants`: the tenants of a service, their weights and limits."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from towline.cli import options, terminal
from towline.config import Settings

if TYPE_CHECKING:
    from towline.server.tenants import Tenants

app = typer.Typer(no_args_is_help=True, help="Manage the tenants of a service, running or not.")
Data = Annotated[Path | None, typer.Option(help="Data folder of the service. Default: ./towline-data.")]


@app.command("list")
def list_tenants(data: Data = None, config: options.Config = None, as_json: options.Json = False) -> None:
    """List the tenants with their weights, limits that differ from the defaults, keys and waiting sessions."""
    found = _with_tenants(config, data, lambda tenants: tenants.list())
    if as_json:
        print(json.dumps([one.model_dump(mode="json") for one in found]))
        return
    table = Table("tenant", "weight", "keys", "waiting", "files", "limits", box=None)
    for one in found:
        limits = ", ".join(f"{name}={value}" for name, value in sorted(one.limits.items()))
        table.add_row(one.name, f"{one.weight:g}", str(one.keys), str(one.waiting), str(one.file_bytes), limits)
    Console().print(table)


@app.command("set")
def set_tenant(
    name: Annotated[str, typer.Argument(help="Name of the tenant; a new one is created.")],
    weight: Annotated[
        float | None, typer.Option(help="Part of the session slots, relative to others. Default: unchanged.")
    ] = None,
    max_queued: Annotated[
        int | None, typer.Option(help="Most waiting sessions; short for --limit queued=N. Default: unchanged.")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE, NAME=none or NAME=default; see docs/configuration.md. Repeatable."),
    ] = None,
    data: Data = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Set the weight and the limits of a tenant; a running service applies them within seconds."""
    limits: dict[str, Any] = {} if max_queued is None else {"queued": max_queued}
    cleared: set[str] = set()
    for given in limit or []:
        key, separator, value = given.partition("=")
        if not separator:
            raise typer.BadParameter(f"{given!r} is not NAME=VALUE", param_hint="--limit")
        if value == "default":
            cleared.add(key)
        else:
            limits[key] = None if value == "none" else _number(key, value)

    async def act(tenants: Tenants) -> Any:
        await tenants.set(name, weight, limits, dict.fromkeys(cleared))
        return next(one for one in await tenants.list() if one.name == name)

    found = _with_tenants(config, data, act)
    if as_json:
        print(found.model_dump_json())
    else:
        shown = ", ".join(f"{key}={value}" for key, value in sorted(found.limits.items())) or "the defaults"
        print(f"tenant {found.name}: weight {found.weight:g}, limits {shown}")


def _number(name: str, value: str) -> float:
    try:
        return int(value) if value.lstrip("-").isdecimal() else float(value)
    except ValueError as error:
        raise typer.BadParameter(f"{name}={value}: not a number", param_hint="--limit") from error


def _with_tenants(config: Path | None, data: Path | None, act: Callable[[Tenants], Awaitable[Any]]) -> Any:
    """Call `act` with the tenants of a store that is open for this command."""
    from towline.server.service import open_store
    from towline.server.tenants import Tenants

    async def work() -> Any:
        settings = Settings.load(config, server={"data": data}).server
        store = await open_store(settings)
        try:
            return await act(Tenants(store, settings, settings.queue))
        finally:
            await store.close()

    return terminal.run_async(work())
