"""`towline serve`: the rollout service and its node hosts. `towline serve keys`: its API keys."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from towline.cli import engines, options, terminal
from towline.cli.serve.hosts import host_provider
from towline.common.private_files import PRIVATE_UMASK
from towline.common.sockets import is_loopback
from towline.config import ServerSettings, Settings
from towline.schema import DEFAULT_TENANT, Role

if TYPE_CHECKING:
    from towline.server.api.auth import KeyStore

app = typer.Typer(invoke_without_command=True, help="Serve rollouts over HTTP, or manage the keys of the service.")
keys_app = typer.Typer(no_args_is_help=True, help="Manage the API keys of a service, running or not.")
app.add_typer(keys_app, name="keys")

_START_SECONDS = 600.0
"""How long the server waits for an engine that its trainer may start later."""

Data = Annotated[Path | None, typer.Option(help="Data folder (database, trajectories). Default: ./towline-data.")]


@app.callback()
def serve(
    context: typer.Context,
    host: Annotated[
        str | None, typer.Option(help="Bind address; use TLS for any but loopback. Default: 127.0.0.1.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 picks a free one. Default: 8600.")] = None,
    data: Data = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Serve without keys; on loopback only. Default: requests need a key.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="With --no-auth: trust every local user's tasks. Default: untrusted.")
    ] = False,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate chain (PEM): serve HTTPS. Default: plain HTTP.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key (PEM) of --tls-cert. Default: none.")] = None,
    model: options.ModelFolder = None,
    engine: options.EngineName = None,
    upstream: options.Upstream = None,
    upstream_model: options.UpstreamModel = None,
    script: options.Script = None,
    sandbox: options.Sandbox = None,
    concurrency: options.Concurrency = None,
    policy: options.Policy = None,
    temperature: options.Temperature = None,
    max_tokens: options.MaxTokens = None,
    nodes: Annotated[
        int | None, typer.Option(help="Node host processes; --concurrency is per node. Default: 1.", min=1)
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Where nodes run: auto, ray://HOST:PORT, slurm:FILE or local:N. Default: local.")
    ] = None,
    log_format: options.LogFormatName = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Serve rollouts: API and scheduler in this process, nodes with their gateways in processes of their own.

    Without options it serves the tiny model on the embedded engine. Set `TOWLINE_SERVER__DATABASE` to store in
    PostgreSQL. Ctrl-C stops it: running sessions end, or run again at the next start. A second Ctrl-C exits at once;
    nothing that was acknowledged is lost.
    """
    if context.invoked_subcommand is not None:
        return
    console = terminal.console(as_json)
    settings = Settings.load(
        config,
        server={
            "host": host,
            "port": port,
            "data": data,
            "nodes": nodes,
            "auth": False if no_auth else None,
            "trust_tasks": True if trust else None,
            "tls_cert": tls_cert,
            "tls_key": tls_key,
        },
        model={"folder": model},
        engine=engines.engine_overrides(engine, upstream, upstream_model),
        session=options.session_overrides(policy, temperature, max_tokens),
        node={"sandbox": sandbox, "run_workers": concurrency},
        log={"format": log_format},
        cluster={"address": cluster},
    )
    terminal.configure_logging(console, settings.log.format)
    os.umask(PRIVATE_UMASK)
    terminal.run_async(_serve(settings, console, as_json, script))


async def _serve(settings: Settings, console: Console, as_json: bool, script: Path | None) -> None:
    from towline.cluster.fleet import Fleet
    from towline.cluster.ray.hosts import resolve_upstreams
    from towline.common.gc_tuning import gc_tuning
    from towline.server.api.app import serving

    if settings.engine.start_seconds is None:
        waits = settings.engine.model_copy(update={"start_seconds": _START_SECONDS})
        settings = settings.model_copy(update={"engine": waits})
    settings = await resolve_upstreams(settings)
    fleet = Fleet(
        host_provider(settings, script),
        sandbox=settings.node.sandbox,
        shared_engine=settings.engine.kind in engines.REMOTE,
        lost_seconds=settings.server.lost_seconds,
    )
    stop, started = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set() or not started.is_set():
            # As safe as a crash: the next server recovers everything, and sandboxes end with this process.
            os._exit(130)
        stop.set()

    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, on_signal)
    async with serving(settings.server, fleet, settings.registry) as running:
        started.set()
        problems = running.service.problems
        if as_json:
            fields = {
                "url": running.url,
                "keys": settings.server.auth,
                "data": str(settings.server.data),
                "problems": problems,
                "key_file": str(running.key_file) if running.key_file else None,
            }
            print(json.dumps(fields), flush=True)
        else:
            facts = fleet.facts()
            console.print(f"[bold]Towline[/] · {facts['model']} · {facts['engine']} ({facts['capture']})")
            console.print(f"  service    {running.url}   (API: {running.url}/docs)")
            console.print(f"  keys       {_keys(settings.server, running.key_file)}", highlight=False, soft_wrap=True)
            for problem in problems:
                line = (
                    Text("  missing    ").append(problem, "bold red").append("; the queue is held until it is usable")
                )
                console.print(line, soft_wrap=True)
            waiting = running.service.scheduler.waiting
            if waiting:
                console.print(f"  queued     {waiting} sessions of earlier runs")
        with gc_tuning():
            await stop.wait()
        if not as_json:
            console.print(
                f"stopping; sessions have {settings.server.stop_seconds:g} seconds to end (Ctrl-C again exits at once)"
            )


def _keys(settings: ServerSettings, key_file: Path | None) -> str:
    """What clients need to know about keys."""
    if not settings.auth:
        return "[bold red]none: every program on this machine has full access[/]"
    found = f"required; {terminal.escape_markup(str(key_file))} has the admin key" if key_file else "required"
    local = is_loopback(settings.host)
    exposed = "" if local or settings.tls_cert else "; [bold red]they travel unencrypted: set --tls-cert[/]"
    return f"{found}{', which clients of this user find by themselves' if key_file and local else ''}{exposed}"


# Keys


@keys_app.command("create")
def create_key(
    role: Annotated[list[Role], typer.Option(help="Role of the key. Repeatable.")],
    name: Annotated[str, typer.Option(help="Label of the key. Default: none.")] = "",
    tenant: Annotated[str, typer.Option(help="Tenant that the key belongs to.")] = DEFAULT_TENANT,
    data: Data = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Create a key and print it; it is not shown again."""
    made = _with_keys(config, data, lambda keys: keys.create(name, role, tenant))
    print(made.model_dump_json() if as_json else made.key)


@keys_app.command("list")
def list_keys(data: Data = None, config: options.Config = None, as_json: options.Json = False) -> None:
    """List the keys without their secrets."""
    found = _with_keys(config, data, lambda keys: keys.list())
    if as_json:
        print(json.dumps([key.model_dump(mode="json") for key in found]))
        return
    table = Table("id", "tenant", "name", "roles", "created", box=None)
    for key in found:
        name = terminal.escape_markup(key.name)
        table.add_row(key.key_id, key.tenant, name, ", ".join(key.roles), time.ctime(key.created))
    terminal.console(False).print(table)


@keys_app.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="Key id, as `list` shows it.")],
    data: Data = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Revoke a key; a running server applies it within seconds."""
    _with_keys(config, data, lambda keys: keys.revoke(key_id, keep_one=False))
    print(json.dumps({"revoked": key_id}) if as_json else f"revoked {key_id}")


def _with_keys(config: Path | None, data: Path | None, act: Callable[[KeyStore], Awaitable[Any]]) -> Any:
    """Call `act` with the keys of a store that is open for this command."""
    from towline.server.api.auth import KeyStore
    from towline.server.service import open_store

    async def work() -> Any:
        store = await open_store(Settings.load(config, server={"data": data}).server)
        try:
            return await act(KeyStore(store))
        finally:
            await store.close()

    return terminal.run_async(work())
