"""`towline store`: verify the stored trajectories of a service, or move its database or trajectories."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from towline.cli import options, terminal
from towline.config import ServerSettings, Settings
from towline.errors import ConfigError

if TYPE_CHECKING:
    from towline.cluster.segments import Segments
    from towline.server.store.database import Store

app = typer.Typer(no_args_is_help=True, help="Verify or move the stored data of a service.")
_SHOWN = 20
"""Maximum number of damaged trajectories that are listed."""

Data = Annotated[Path | None, typer.Option(help="Data folder of the service. Default: ./towline-data.")]
Database = Annotated[
    str | None,
    typer.Option(
        help="New database: postgresql://user@host/name or sqlite:///FILE. Default: keep.",
        envvar="TOWLINE_TO_DATABASE",
        show_envvar=True,
    ),
]
Location = Annotated[
    str | None, typer.Option(help="New location of trajectories: a folder or an fsspec URL. Default: keep.")
]


@app.command()
def verify(data: Data = None, config: options.Config = None, as_json: options.Json = False) -> None:
    """Check the hash of every stored trajectory.

    Works beside a running service. Damaged trajectories stay in place, and consumers get their sessions flagged as
    damaged. Exits with status 1 if any is damaged.
    """
    from towline.server.store import maintenance

    console = terminal.console(as_json)
    settings = Settings.load(config, server={"data": data}).server

    async def work() -> Any:
        async with _opened(settings, serving=False) as (store, segments):
            with terminal.progress_reporter(console, "verifying") as report:
                return await maintenance.verify(store, segments, report)

    found = terminal.run_async(work())
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        console.print(f"{found.sessions} trajectories in {found.segments} segments, {found.orphans} orphaned files")
        for session_id, reason in list(found.damaged.items())[:_SHOWN]:
            console.print(
                f"[red]damaged[/] {terminal.escape_markup(session_id)}: {terminal.escape_markup(reason)}",
                soft_wrap=True,
            )
        console.print(f"{len(found.damaged)} damaged" if found.damaged else "all intact")
    raise typer.Exit(1 if found.damaged else 0)


@app.command()
def move(
    to_database: Database = None,
    to_segments: Location = None,
    data: Data = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Move the database, the trajectories, or both, of a stopped service.

    Everything is copied and verified before the store switches over, and nothing is deleted at the old place; consumers,
    leases and keys move too. Run it again if it was interrupted. Afterwards set `server.database` and `server.segments`.
    """
    from towline.cluster.segments import Segments
    from towline.server.store import maintenance
    from towline.server.store.database import Store, database_url

    if to_database is None and to_segments is None:
        raise ConfigError("no target; give --to-database URL, --to-segments LOCATION, or both")
    console = terminal.console(as_json)
    settings = Settings.load(config, server={"data": data}).server
    moved: dict[str, Any] = {}

    async def work() -> None:
        async with _opened(settings, serving=True) as (store, segments):
            with terminal.progress_reporter(console, "moving") as report:
                if to_segments is not None:
                    target = Segments(to_segments)
                    found = await maintenance.move_segments(store, segments, target, report)
                    moved["segments"] = {"to": target.location.name, **found.as_json()}
                if to_database is not None:
                    database = Store(database_url(to_database, settings.data))
                    if database.url == store.url:
                        raise ConfigError("the store already uses that database; give another --to-database")
                    await database.open()
                    try:
                        rows = await maintenance.move_database(store, database, report)
                    finally:
                        await database.close()
                    moved["database"] = {"to": database.display_url, "rows": sum(rows.values())}

    terminal.run_async(work())
    if as_json:
        print(json.dumps(moved))
        return
    out = terminal.console(False)
    if "segments" in moved:
        out.print(
            f"{moved['segments']['sessions']} trajectories are in {moved['segments']['to']}: set server.segments",
            soft_wrap=True,
        )
    if "database" in moved:
        out.print(
            f"{moved['database']['rows']} rows are in {moved['database']['to']}: set server.database", soft_wrap=True
        )


@contextlib.asynccontextmanager
async def _opened(settings: ServerSettings, *, serving: bool) -> AsyncIterator[tuple[Store, Segments]]:
    """The store of a data folder and its segments; with `serving`, for exclusive use."""
    from towline.cluster.segments import Segments
    from towline.server.store import ownership
    from towline.server.store.database import Store, database_url
    from towline.server.store.tables import get_meta

    url = database_url(settings.database, settings.data)
    if url.get_backend_name() == "sqlite" and not await asyncio.to_thread(Path(str(url.database)).is_file):
        raise ConfigError(f"no store in {settings.data}: {url.database} does not exist; check --data")
    store, segments = Store(url), Segments(settings.segments or settings.data / "segments")
    await store.open(serving=serving)
    try:
        async with store.read() as tx:
            recorded = await get_meta(tx, ownership.LOCATION)
        yield store, Segments(recorded) if recorded is not None else segments
    finally:
        await store.close()
