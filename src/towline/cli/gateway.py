"""`towline gateway`: serve a model to agents and record every token."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from towline.cli import common, engines
from towline.config import Settings
from towline.schema import ContextPolicy

if TYPE_CHECKING:
    from towline.gateway.gateway import Gateway
    from towline.tokens.codec import Codec


def gateway(
    model: common.ModelFolder = None,
    engine: common.EngineName = None,
    upstream: common.Upstream = None,
    upstream_model: common.UpstreamModel = None,
    script: common.Script = None,
    host: Annotated[str | None, typer.Option(help="Address of the provider routes, for harnesses.")] = None,
    port: Annotated[int | None, typer.Option(help="Their port; 0 takes a free one. Default 8500.")] = None,
    control_host: Annotated[str | None, typer.Option(help="Address of the control routes.")] = None,
    control_port: Annotated[int | None, typer.Option(help="Their port; 0 takes a free one. Default 8501.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of journal and trajectories. Default ./towline-data.")
    ] = None,
    journal: Annotated[
        str | None, typer.Option(help="`group` survives a machine crash, `os` a killed process, `none` neither.")
    ] = None,
    policy: Annotated[ContextPolicy | None, typer.Option(help="Context policy of new sessions.")] = None,
    temperature: common.Temperature = None,
    max_tokens: common.MaxTokens = None,
    template: Annotated[Path | None, typer.Option(help="Chat template to use instead of the folder's own.")] = None,
    renderer: Annotated[str | None, typer.Option(help="`auto`, `sentinel`, or a family of `renderers`.")] = None,
    log_format: common.LogFormatName = None,
    config: common.Config = None,
    as_json: common.Json = False,
) -> None:
    """Serve a model to agents and record every token.

    Point an agent's base URL at the gateway with a session's key, and read its training rows from the control routes.
    The control key is taken from `TOWLINE_CONTROL_KEY`, else made anew and written to `control.key` in the data folder.
    """
    console = common.console(as_json)
    session = common.session(policy, temperature, max_tokens)
    settings = Settings.load(
        config,
        gateway={
            "host": host,
            "port": port,
            "control_host": control_host,
            "control_port": control_port,
            "data": data,
            "journal": journal,
        },
        model={"folder": model, "template": template, "renderer": renderer},
        engine=engines.given(engine, upstream, upstream_model),
        session=session,
        log={"format": log_format},
    )
    common.log(console, settings.log.format)
    made, codec = engines.make_gateway(settings, console, script)
    common.run(_serve(made, codec, settings, console, as_json))


async def _serve(made: Gateway, codec: Codec, settings: Settings, console: Console, as_json: bool) -> None:
    from towline.gateway.heap import serving_for_long
    from towline.gateway.server import serving

    key, source = common.control_key(settings.gateway.data)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    async with serving(made, key) as running:
        if as_json:
            print(json.dumps({"base_url": running.base_url, "control_url": running.control_url, "control_key": source}))
            sys.stdout.flush()
        else:
            restored = len(made.sessions)
            info = made.engine.info
            console.print(
                f"[bold]Towline gateway[/] · {made.model} · {info.name} ({info.capture}) · template {codec.name}"
            )
            console.print(f"  harnesses  {running.base_url}")
            console.print(f"  control    {running.control_url}   (key in {source})")
            if restored:
                console.print(f"  restored   {restored} open sessions")
        with serving_for_long():
            await stop.wait()
