"""`towline images`: prefetch the images of tasks, list what was pulled, and free the space."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from towline.cli import options, terminal
from towline.cli.tasks import load_tasks
from towline.config import Settings
from towline.errors import TowlineError

if TYPE_CHECKING:
    from towline.node.environment_root import EnvironmentRoots
    from towline.schema import Environment, Task

app = typer.Typer(no_args_is_help=True, help="Prefetch, list and prune images (no container engine needed).")


@app.command()
def pull(
    tasks: options.Tasks,
    trust: options.Trust = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Pull the images of tasks and build their Dockerfiles, ahead of their sessions.

    A tag means what its registry says now, until the next pull. Exits with status 1 if an image could not be made.
    """
    console = terminal.console(as_json)
    settings = Settings.load(config)
    loaded = load_tasks(tasks, "", None, [], console, trust=trust, settings=settings)
    results = terminal.run_async(_pull(settings, loaded, console))
    failed = [one for one in results if one["error"]]
    if as_json:
        print(json.dumps({"environments": results}))
    else:
        _show(results, console)
    raise typer.Exit(1 if failed else 0)


@app.command("list")
def list_images(config: options.Config = None, as_json: options.Json = False) -> None:
    """List pulled images with their digests, and the space that they use."""
    console = terminal.console(as_json)

    async def work() -> dict[str, Any]:
        roots, cache = _roots(Settings.load(config))
        images = await asyncio.to_thread(roots.oci.recorded)
        return {"images": images, "store_bytes": await roots.oci.store_bytes(), "root_bytes": cache.used()}

    found = terminal.run_async(work())
    if as_json:
        print(json.dumps(found))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("image", "digest", "pulled"):
        table.add_column(name, overflow="fold")
    for one in found["images"]:
        pulled = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["pulled"]))
        table.add_row(one["reference"], one["digest"], pulled)
    console.print(table)
    sizes = f"store {found['store_bytes'] / 1e6:,.1f} MB, roots {found['root_bytes'] / 1e6:,.1f} MB"
    console.print(sizes, highlight=False)


@app.command()
def prune(
    roots: Annotated[bool, typer.Option("--roots", help="Also remove unused root file systems. Default: off.")] = False,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Remove pulled images and build layers; tags are resolved again afterwards."""
    from towline.sandboxes.images.root_cache import RootCache

    async def work() -> dict[str, Any]:
        made, cache = _roots(Settings.load(config))
        emptied = await made.oci.prune()
        if roots:
            await RootCache(cache.path, 0).shrink()
        return {"pruned": emptied, "root_bytes": cache.used()}

    done = terminal.run_async(work())
    if as_json:
        print(json.dumps(done))
    elif not done["pruned"]:
        terminal.console(False).print("the image store is in use; only tags were forgotten")
    raise typer.Exit(0 if done["pruned"] else 1)


def _roots(settings: Settings) -> tuple[EnvironmentRoots, Any]:
    from towline.node.environment_root import EnvironmentRoots
    from towline.runs.run import harness_installs
    from towline.sandboxes.images.root_cache import RootCache
    from towline.sandboxes.starts import StartLimiter, default_start_limit

    cache = harness_installs(settings).folder.parent
    roots = RootCache(cache / "roots", settings.node.cache_bytes)
    starts = StartLimiter(settings.node.start_limit or default_start_limit(), settings.node.seconds.start)
    return EnvironmentRoots(settings.node, settings.images, cache, roots, starts), roots


async def _pull(settings: Settings, tasks: list[Task], console: Console) -> list[dict[str, Any]]:
    """One result per distinct environment, in order."""
    roots, _ = _roots(settings)
    results = []
    try:
        with console.status("pulling images") as status:
            for key, (environment, names) in _environments(tasks).items():

                def on_line(line: str, key: str = key) -> None:
                    status.update(terminal.escape_markup(f"{key}: {line[:100]}"))

                results.append({"environment": key, "tasks": names, **await _one(roots, environment, on_line)})
    finally:
        roots.close()
    return results


def _environments(tasks: list[Task]) -> dict[str, tuple[Environment, list[str]]]:
    """The distinct images and Dockerfiles of the tasks, each with the tasks that use it."""
    found: dict[str, tuple[Environment, list[str]]] = {}
    for task in tasks:
        key = str(Path(task.environment.build)) if task.environment.build else task.environment.root
        found.setdefault(key, (task.environment, []))[1].append(task.task_id)
    return found


async def _one(roots: EnvironmentRoots, environment: Environment, on_line: Any) -> dict[str, Any]:
    began = time.monotonic()
    try:
        made = await roots.prefetch(environment, on_line)
        error = ""
    except (TowlineError, OSError) as failure:
        made, error = None, str(failure)
    return {
        "needs_image": bool(error) or made is not None,
        "images": dict(made.images) if made else {},
        "root": made.environment.root if made else "",
        "seconds": round(time.monotonic() - began, 3),
        "error": error,
    }


def _show(results: list[dict[str, Any]], console: Console) -> None:
    for one in results:
        if one["error"]:
            terminal.print_error(one["error"])
        elif not one["needs_image"]:
            where = terminal.escape_markup(one["environment"] or "no image")
            console.print(f"{where}: nothing to pull ({len(one['tasks'])} tasks)", highlight=False, soft_wrap=True)
        else:
            console.print(
                f"[green]ready[/] {terminal.escape_markup(one['environment'])} in {one['seconds']:.1f} s",
                highlight=False,
                soft_wrap=True,
            )
            for name, digest in one["images"].items():
                console.print(f"  {name} is {digest}", highlight=False, soft_wrap=True)
