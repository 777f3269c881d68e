"""`towline gateway`: serve a model to harnesses and record every token."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from towline.cli import engines, options, terminal
from towline.config import Settings

if TYPE_CHECKING:
    from towline.gateway.gateway import Gateway
    from towline.tokens.codec import ModelCodec


def gateway(
    model: options.ModelFolder = None,
    engine: options.EngineName = None,
    upstream: options.Upstream = None,
    upstream_model: options.UpstreamModel = None,
    script: options.Script = None,
    host: Annotated[
        str | None, typer.Option(help="Address of the provider routes for harnesses. Default: 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the provider routes; 0 picks a free one. Default: 8500.")
    ] = None,
    control_host: Annotated[str | None, typer.Option(help="Address of the control routes. Default: 127.0.0.1.")] = None,
    control_port: Annotated[
        int | None, typer.Option(help="Port of the control routes; 0 picks a free one. Default: 8501.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of journal and trajectories. Default: ./towline-data.")
    ] = None,
    journal: Annotated[
        str | None,
        typer.Option(help="Journal durability: group (power loss), os (process kill), none. Default: group."),
    ] = None,
    policy: options.Policy = None,
    temperature: options.Temperature = None,
    max_tokens: options.MaxTokens = None,
    template: Annotated[Path | None, typer.Option(help="Chat template file. Default: the model folder's own.")] = None,
    renderer: Annotated[
        str | None, typer.Option(help="`auto`, `sentinel`, or a family of `renderers`. Default: auto.")
    ] = None,
    log_format: options.LogFormatName = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Serve a model to harnesses and record every token.

    Point a harness at the gateway's base URL with the key of a session, and read the training rows from the control
    routes. The control key is `TOWLINE_CONTROL_KEY`, or a new one in `control.key` in the data folder.
    """
    console = terminal.console(as_json)
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
        engine=engines.engine_overrides(engine, upstream, upstream_model),
        session=options.session_overrides(policy, temperature, max_tokens),
        log={"format": log_format},
    )
    terminal.configure_logging(console, settings.log.format)
    made, codec = engines.make_gateway(settings, console, script)
    terminal.run_async(_serve(made, codec, settings, console, as_json))


async def _serve(made: Gateway, codec: ModelCodec, settings: Settings, console: Console, as_json: bool) -> None:
    from towline.common.gc_tuning import gc_tuning
    from towline.gateway.server import serve_gateway

    key, source = _control_key(settings.gateway.data)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    async with serve_gateway(made, key) as running:
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
        with gc_tuning():
            await stop.wait()


def _control_key(data: Path) -> tuple[str, str]:
    """The control key and where it came from; a new one is readable by its owner alone."""
    given = os.environ.get("TOWLINE_CONTROL_KEY", "")
    if given:
        return given, "TOWLINE_CONTROL_KEY"
    path = data / "control.key"
    key = "tlc-" + secrets.token_urlsafe(32)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key + "\n")
    return key, str(path)
