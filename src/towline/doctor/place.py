"""The machine: sandboxes and their limits, installs, the database, room on the disk."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from towline.config import Settings
from towline.doctor.findings import Finding, Level
from towline.errors import TowlineError
from towline.harnesses.install import Installs
from towline.harnesses.registry import all_harnesses, find_harness
from towline.sandboxes.base import Facts, Runtime, SandboxError, Spec, execute
from towline.sandboxes.registry import make_runtime
from towline.schema import Network, SandboxKind

LIMITS = ("memory_mb", "pids", "cpus", "disk_mb", "seconds")
LEAST_DISK = 5 * 1024**3
LEAST_FILES = 4096


async def sandboxes(settings: Settings) -> list[Finding]:
    """Every runtime is opened, and the one that tasks use by default is made to run a command."""
    found = []
    with tempfile.TemporaryDirectory(prefix="towline-doctor-") as scratch:
        for kind in SandboxKind:
            needed = kind is settings.node.sandbox
            found.append(await _sandbox(kind, Path(scratch) / kind.value, needed=needed))
    return found


async def _sandbox(kind: SandboxKind, data: Path, *, needed: bool) -> Finding:
    absent = Level.BROKEN if needed else Level.NOTE
    name = f"{kind.value} (default)" if needed else kind.value
    try:
        runtime = make_runtime(kind, data)
    except ImportError as error:
        return Finding("sandboxes", name, absent, str(error))
    try:
        await runtime.open()
        if needed:
            await _tried(runtime)
        return _told(name, runtime.facts, needed=needed)
    except (TowlineError, OSError) as error:
        return Finding("sandboxes", name, absent, str(error) or type(error).__name__)
    finally:
        await runtime.close()


async def _tried(runtime: Runtime) -> None:
    networks = runtime.facts.networks
    network = next(one for one in (Network.NONE, Network.GATEWAY, Network.OPEN) if one in networks)
    sandbox = await runtime.create(Spec(network=network))
    try:
        done = await execute(sandbox, ["sh", "-c", "echo ok > here && cat here"], seconds=60)
    finally:
        await sandbox.destroy()
    if not done.ok or done.stdout.strip() != b"ok":
        raise SandboxError(f"it opens, and cannot run a command: exit code {done.code}: {done.text[-300:].strip()}")


def _told(name: str, facts: Facts, *, needed: bool) -> Finding:
    lacking = [limit for limit in LIMITS if limit not in facts.enforced]
    said = [f"version {facts.version}" if facts.version else "works"]
    said.append("isolated" if facts.isolated else "no isolation: what runs there can do what this user can")
    said.append(f"enforces {', '.join(limit for limit in LIMITS if limit in facts.enforced) or 'no limit'}")
    if lacking:
        said.append(f"not {', '.join(lacking)}")
    short = needed and (lacking or not facts.isolated)
    figures = {"isolated": facts.isolated, "enforced": sorted(facts.enforced), "networks": sorted(facts.networks)}
    level = Level.WARNING if short else Level.OK
    return Finding("sandboxes", name, level, "; ".join(said), " ".join(facts.notes), figures)


def harnesses(wanted: Sequence[str], installs: Installs) -> list[Finding]:
    """Those that are wanted must be there; of the others it is told."""
    found, names = [], {}
    for name in wanted:
        try:
            harness = find_harness(name)
        except TowlineError as error:
            found.append(Finding("harnesses", name, Level.BROKEN, str(error)))
            continue
        names[harness.name] = harness
    for harness in {**all_harnesses(), **names}.values():
        if harness.install is None:
            if harness.name in names:
                found.append(Finding("harnesses", harness.name, Level.OK, "needs no install"))
            continue
        if installs.ready(harness):
            said = f"{harness.version} in {installs.place(harness)}"
            found.append(Finding("harnesses", harness.name, Level.OK, said))
        else:
            level = Level.BROKEN if harness.name in names else Level.NOTE
            fix = f"towline harness install {harness.name}"
            found.append(Finding("harnesses", harness.name, level, f"{harness.version} is not installed", fix))
    return found


async def database(settings: Settings) -> Finding:
    """Opened and brought up to date, as the server would; a file that is not there yet is tried in a folder of its own."""
    try:
        from towline.server.store import Store, database_url
    except ImportError as error:
        fix = "pip install 'towline[server]'"
        return Finding("database", "store", Level.NOTE, f"the service cannot run here: {error}", fix)
    data, given = settings.server.data, settings.server.database
    try:
        with tempfile.TemporaryDirectory(prefix=".towline-doctor-", dir=_existing(data)) as scratch:
            there = given or (data / "towline.db").exists()
            url = database_url(given, data if there else Path(scratch))
            store = Store(url)
            await store.open(serving=False)
            await store.close()
    except (TowlineError, OSError) as error:
        fix = "look at server.database and server.data; a password belongs into TOWLINE_SERVER__DATABASE"
        return Finding("database", "store", Level.BROKEN, str(error), fix)
    shown = url.render_as_string(hide_password=True) if there else f"SQLite, to be made in {data}"
    return Finding("database", "store", Level.OK, f"{shown} opens and is up to date")


async def machine(settings: Settings, installs: Installs) -> list[Finding]:
    places = {"data": _existing(settings.server.data), "cache": _existing(installs.folder)}
    found = []
    for name, place in places.items():
        free = (await asyncio.to_thread(shutil.disk_usage, place)).free
        level = Level.OK if free >= LEAST_DISK else Level.WARNING
        fix = "" if level is Level.OK else "make room, or name another folder (server.data, TOWLINE_CACHE)"
        said = f"{free / 1024**3:.1f} GB free at {place}"
        found.append(Finding("machine", f"disk of {name}", level, said, fix, {"free_bytes": free}))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = files == resource.RLIM_INFINITY or files >= LEAST_FILES
    fix = "" if enough else f"ulimit -n {LEAST_FILES} or more before many sessions at once"
    level = Level.OK if enough else Level.WARNING
    found.append(Finding("machine", "open files", level, f"{files} at most", fix, {"limit": files}))
    cores = len(os.sched_getaffinity(0))
    found.append(Finding("machine", "processors", Level.OK, f"{cores} for this process", figures={"cores": cores}))
    return found


def _existing(path: Path) -> Path:
    """The nearest folder above that is there: where a folder of that name would be made."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path
