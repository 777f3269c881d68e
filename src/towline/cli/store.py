"""`towline store`: verify the trajectories of a service, or move its database or its trajectories elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from towline.cli import common
from towline.config import ServerSettings, Settings
from towline.errors import ConfigError

if TYPE_CHECKING:
    from towline.server.segments import Segments
    from towline.server.store import Store

app = typer.Typer(no_args_is_help=True, help="Verify or move what a service has stored.")
_SHOWN = 20
"""Damaged trajectories that are listed for people."""

Data = Annotated[Path | None, typer.Option(help="Data folder of the service. Default ./towline-data.")]
Database = Annotated[
    str | None,
    typer.Option(
        help="New database: postgresql://user@host/name or sqlite:///FILE. Prefer the variable for passwords.",
        envvar="TOWLINE_TO_DATABASE",
        show_envvar=True,
    ),
]
Location = Annotated[str | None, typer.Option(help="New location of trajectories: a folder, or any URL of fsspec.")]


@app.command()
def verify(data: Data = None, config: common.Config = None, as_json: common.Json = False) -> None:
    """Check the hash of every stored trajectory. Exit status 1 if any is damaged.

    A running service is not disturbed. Damaged trajectories stay where they are; consumers get their sessions flagged.
    """
    from towline.server import maintenance

    console = common.console(as_json)
    settings = Settings.load(config, server={"data": data}).server

    async def work() -> Any:
        async with _opened(settings, serving=False) as (store, segments):
            with common.reporting(console, "verifying") as report:
                return await maintenance.verify(store, segments, report)

    found = common.run(work())
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        console.print(f"{found.sessions} trajectories in {found.segments} segments, {found.orphans} orphaned files")
        for session_id, reason in list(found.damaged.items())[:_SHOWN]:
            console.print(f"[red]damaged[/] {common.plain(session_id)}: {common.plain(reason)}", soft_wrap=True)
        console.print(f"{len(found.damaged)} damaged" if found.damaged else "all whole")
    raise typer.Exit(1 if found.damaged else 0)


@app.command()
def move(
    to_database: Database = None,
    to_segments: Location = None,
    data: Data = None,
    config: common.Config = None,
    as_json: common.Json = False,
) -> None:
    """Move the store to another database, its trajectories to another location, or both.

    Stop the service first. Everything is copied and checked before the store switches over, and nothing is removed from
    where it was; consumers, leases and keys move along. Run it again if it was interrupted. Afterwards set
    `server.database` and `server.segments` to the new places.
    """
    from towline.server import maintenance
    from towline.server.segments import Segments
    from towline.server.store import Store, database_url

    if to_database is None and to_segments is None:
        raise ConfigError("say where to: --to-database URL, --to-segments LOCATION, or both")
    console = common.console(as_json)
    settings = Settings.load(config, server={"data": data}).server
    told: dict[str, Any] = {}

    async def work() -> None:
        async with _opened(settings, serving=True) as (store, segments):
            with common.reporting(console, "moving") as report:
                if to_segments is not None:
                    target = Segments(to_segments)
                    found = await maintenance.move_segments(store, segments, target, report)
                    told["segments"] = {"to": target.location.name, **found.as_json()}
                if to_database is not None:
                    database = Store(database_url(to_database, settings.data))
                    if database.url == store.url:
                        raise ConfigError("the store is in that database already")
                    await database.open()
                    try:
                        rows = await maintenance.move_database(store, database, report)
                    finally:
                        await database.close()
                    told["database"] = {"to": database.shown, "rows": sum(rows.values())}

    common.run(work())
    if as_json:
        print(json.dumps(told))
        return
    out = Console()
    if "segments" in told:
        out.print(
            f"trajectories of {told['segments']['sessions']} sessions are in {told['segments']['to']}: set server.segments",
            soft_wrap=True,
        )
    if "database" in told:
        out.print(
            f"{told['database']['rows']} rows are in {told['database']['to']}: set server.database", soft_wrap=True
        )


@contextlib.asynccontextmanager
async def _opened(settings: ServerSettings, *, serving: bool) -> AsyncIterator[tuple[Store, Segments]]:
    """The store of a data folder and its segments; with `serving`, nothing else may use it meanwhile."""
    from towline.server import ownership
    from towline.server.segments import Segments
    from towline.server.store import Store, database_url

    url = database_url(settings.database, settings.data)
    if url.get_backend_name() == "sqlite" and not await asyncio.to_thread(Path(str(url.database)).is_file):
        raise ConfigError(f"there is no store in {settings.data}: {url.database} does not exist")
    store, segments = Store(url), Segments(settings.segments or settings.data / "segments")
    await store.open(serving=serving)
    try:
        async with store.read() as tx:
            recorded = await ownership.get(tx, ownership.LOCATION)
        yield store, Segments(recorded) if recorded is not None else segments
    finally:
        await store.close()
