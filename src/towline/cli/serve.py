"""`towline serve`: rollouts as a service, in one process. `towline serve keys`: who may call it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from towline.cli import common, engines
from towline.config import Settings
from towline.schema import ContextPolicy, Role, SandboxKind

if TYPE_CHECKING:
    from towline.gateway.gateway import Gateway

app = typer.Typer(invoke_without_command=True, help="Serve rollouts: submit tasks over HTTP, lease their trajectories.")
keys_app = typer.Typer(no_args_is_help=True, help="Keys of the service. Changes reach a running server at once.")
app.add_typer(keys_app, name="keys")

Data = Annotated[Path | None, typer.Option(help="Folder of the store and the trajectories. Default ./towline-data.")]


@app.callback()
def serve(
    context: typer.Context,
    host: Annotated[str | None, typer.Option(help="Address. Anything but loopback needs a key first.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. Default 8600.")] = None,
    data: Data = None,
    model: common.ModelFolder = None,
    engine: common.EngineName = None,
    upstream: common.Upstream = None,
    upstream_model: common.UpstreamModel = None,
    script: common.Script = None,
    sandbox: Annotated[SandboxKind | None, typer.Option(help="Where tasks run that do not say.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Sessions that run at the same time.", min=1)] = None,
    policy: Annotated[ContextPolicy | None, typer.Option(help="Context policy of the sessions.")] = None,
    temperature: common.Temperature = None,
    max_tokens: common.MaxTokens = None,
    log_format: common.LogFormatName = None,
    config: common.Config = None,
    as_json: common.Json = False,
) -> None:
    """Serve rollouts: API, scheduler, node and gateway in one process.

    With no option it serves the tiny model on the embedded engine. A store on PostgreSQL is named by
    `TOWLINE_SERVER__DATABASE`. Stop it with Ctrl-C: sessions under way end, or are kept and run again at the next start.
    A second Ctrl-C leaves at once, and loses nothing either.
    """
    if context.invoked_subcommand is not None:
        return
    console = common.console(as_json)
    settings = _settings(
        config,
        server={"host": host, "port": port, "data": data},
        model={"folder": model},
        engine=engines.given(engine, upstream, upstream_model),
        session=common.session(policy, temperature, max_tokens),
        node={"sandbox": sandbox, "run_workers": concurrency},
        log={"format": log_format},
    )
    common.log(console, settings.log.format)
    # The engine computes in a thread of its own beside a busy loop: it is not to wait long for its turn.
    sys.setswitchinterval(0.0005)
    gateway, _ = engines.make_gateway(settings, console, script)
    common.run(_serve(gateway, settings, console, as_json))


def _settings(config: Path | None, **overrides: dict[str, Any]) -> Settings:
    """Harnesses reach the gateway inside this process, so it takes free ports; everything is in one data folder."""
    settings = Settings.load(config, **overrides)
    gateway = settings.gateway.model_copy(update={"port": 0, "control_port": 0, "data": settings.server.data})
    return settings.model_copy(update={"gateway": gateway})


async def _serve(gateway: Gateway, settings: Settings, console: Console, as_json: bool) -> None:
    from towline import rollout
    from towline.engines.pool import Pool
    from towline.gateway.heap import serving_for_long
    from towline.server.local import NodeRunner
    from towline.server.serving import serving

    stop = asyncio.Event()

    def asked() -> None:
        if stop.is_set():
            # As safe as any crash: the next server finds everything, and sandboxes end with this process.
            os._exit(130)
        stop.set()

    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, asked)
    async with (
        rollout.node_on(gateway, settings, settings.server.data) as node,
        serving(settings.server, NodeRunner(node)) as running,
    ):
        if isinstance(gateway.engine, Pool):
            running.service.metrics.registry.register(gateway.engine)
        keyed = await running.service.keys.exist()
        problems = running.service.problems
        if as_json:
            told = {"url": running.url, "keys": keyed, "data": str(settings.server.data), "problems": problems}
            print(json.dumps(told), flush=True)
        else:
            info = gateway.engine.info
            console.print(f"[bold]Towline[/] · {gateway.model} · {info.name} ({info.capture})")
            console.print(f"  service    {running.url}   (its API: {running.url}/docs)")
            console.print(f"  keys       {'needed' if keyed else 'none: whoever reaches this machine may call'}")
            for problem in problems:
                line = Text("  missing    ").append(problem, "bold red").append("; the queue is held until it works")
                console.print(line, soft_wrap=True)
            waiting = running.service.scheduler.waiting
            if waiting:
                console.print(f"  waiting    {waiting} sessions from before")
        with serving_for_long():
            await stop.wait()
        if not as_json:
            console.print(
                f"stopping; sessions have {settings.server.stop_seconds:g} seconds to end (Ctrl-C again leaves at once)"
            )


# Keys


@keys_app.command("create")
def create_key(
    role: Annotated[list[Role], typer.Option(help="What it may do. Repeatable.")],
    name: Annotated[str, typer.Option(help="What it is for.")] = "",
    data: Data = None,
    config: common.Config = None,
    as_json: common.Json = False,
) -> None:
    """Make a key and print it: it is not shown again."""

    async def work() -> Any:
        async with _Keys(config, data) as keys:
            return await keys.create(name, role)

    made = common.run(work())
    print(made.model_dump_json() if as_json else made.key)


@keys_app.command("list")
def list_keys(data: Data = None, config: common.Config = None, as_json: common.Json = False) -> None:
    """Show the keys, without their secrets."""

    async def work() -> Any:
        async with _Keys(config, data) as keys:
            return await keys.list()

    found = common.run(work())
    if as_json:
        print(json.dumps([key.model_dump(mode="json") for key in found]))
        return
    table = Table("id", "name", "roles", "made", box=None)
    for key in found:
        table.add_row(key.key_id, common.plain(key.name), ", ".join(key.roles), time.ctime(key.created))
    Console().print(table)


@keys_app.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="As `list` shows it.")],
    data: Data = None,
    config: common.Config = None,
    as_json: common.Json = False,
) -> None:
    """Take a key back. A running server knows within seconds."""

    async def work() -> None:
        async with _Keys(config, data) as keys:
            await keys.revoke(key_id, keep_one=False)

    common.run(work())
    print(json.dumps({"revoked": key_id}) if as_json else f"revoked {key_id}")


class _Keys:
    """The keys of a store, for one command."""

    def __init__(self, config: Path | None, data: Path | None):
        self.settings = Settings.load(config, server={"data": data}).server

    async def __aenter__(self) -> Any:
        from towline.server.auth import Keys
        from towline.server.service import open_store

        self.store = await open_store(self.settings)
        return Keys(self.store)

    async def __aexit__(self, *error: object) -> None:
        await self.store.close()
