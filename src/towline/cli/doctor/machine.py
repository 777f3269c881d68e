"""Checks of the machine: sandboxes and their limits, harness installs, the database, disk and open files."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from towline.cli.doctor import Finding, Level
from towline.config import Settings
from towline.errors import TowlineError
from towline.harnesses.install import Installs
from towline.harnesses.registry import all_harnesses, find_harness
from towline.sandboxes.base import Runtime, RuntimeFacts, SandboxError, SandboxSpec, execute
from towline.sandboxes.images.oci.buildah import Buildah
from towline.sandboxes.images.oci.namespace import image_user_mapping
from towline.sandboxes.registry import make_runtime
from towline.schema import ImageBase, Network, SandboxKind

LIMITS = ("memory_mb", "pids", "cpus", "disk_mb", "seconds")
MIN_FREE_BYTES = 5 * 1024**3
MIN_OPEN_FILES = 4096


async def check_sandboxes(settings: Settings) -> list[Finding]:
    """Open every sandbox runtime, and run a command in the default one."""
    found = []
    with tempfile.TemporaryDirectory(prefix="towline-doctor-") as scratch:
        for kind in SandboxKind:
            needed = kind is settings.node.sandbox
            found.append(await _sandbox(kind, Path(scratch) / kind.value, needed=needed))
    return found


async def _sandbox(kind: SandboxKind, data: Path, *, needed: bool) -> Finding:
    unavailable = Level.BROKEN if needed else Level.NOTE
    name = f"{kind.value} (default)" if needed else kind.value
    try:
        runtime = make_runtime(kind, data)
    except ImportError as error:
        return Finding("sandboxes", name, unavailable, str(error))
    try:
        await runtime.open()
        if needed:
            await _run_command(runtime)
        return _to_finding(name, runtime.facts, needed=needed)
    except (TowlineError, OSError) as error:
        return Finding("sandboxes", name, unavailable, str(error) or type(error).__name__)
    finally:
        await runtime.close()


async def _run_command(runtime: Runtime) -> None:
    networks = runtime.facts.networks
    network = next(one for one in (Network.NONE, Network.GATEWAY, Network.OPEN) if one in networks)
    sandbox = await runtime.create(SandboxSpec(network=network))
    try:
        done = await execute(sandbox, ["sh", "-c", "echo ok > here && cat here"], seconds=60)
    finally:
        await sandbox.destroy()
    if not done.ok or done.stdout.strip() != b"ok":
        raise SandboxError(f"it opens but cannot run a command: exit code {done.code}: {done.text[-300:].strip()}")


def _to_finding(name: str, facts: RuntimeFacts, *, needed: bool) -> Finding:
    lacking = [limit for limit in LIMITS if limit not in facts.enforced]
    message = [f"version {facts.version}" if facts.version else "works"]
    message.append("isolated" if facts.isolated else "no isolation: programs in it have all rights of this user")
    message.append(f"enforces {', '.join(limit for limit in LIMITS if limit in facts.enforced) or 'no limit'}")
    if lacking:
        message.append(f"not {', '.join(lacking)}")
    limited = needed and (lacking or not facts.isolated)
    values = {"isolated": facts.isolated, "enforced": sorted(facts.enforced), "networks": sorted(facts.networks)}
    level = Level.WARNING if limited else Level.OK
    return Finding("sandboxes", name, level, "; ".join(message), " ".join(facts.notes), values)


async def check_images(settings: Settings) -> Finding:
    """The programs that pull and build images, and what these settings make of an image name."""
    host = settings.images.base is ImageBase.HOST
    missing = Buildah.missing()
    values = {"base": settings.images.base.value, "missing": missing}
    if missing:
        message = f"images cannot be pulled or built: no {' and no '.join(missing)}"
        fix = f'install {" ".join(missing)}; or map images in `node.bases`, or set `images.base = "host"`'
        return Finding("sandboxes", "images", Level.NOTE, message, fix, values)
    try:
        version = await asyncio.to_thread(_buildah_version)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("sandboxes", "images", Level.NOTE, f"buildah does not run: {error}", "reinstall it", values)
    one_id = image_user_mapping().mapped == 1
    fix = "install `uidmap` and give this user a range in /etc/subuid and /etc/subgid" if one_id else ""
    message = version + ("; images are pulled, but no Dockerfile is built: only one user id" if one_id else "")
    message += '; not used for Dockerfiles: `images.base` is "host"' if host else ""
    return Finding("sandboxes", "images", Level.WARNING if one_id else Level.OK, message, fix, values)


def _buildah_version() -> str:
    done = subprocess.run(["buildah", "--version"], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.split("(")[0].strip()


def check_harnesses(wanted: Sequence[str], installs: Installs) -> list[Finding]:
    """The wanted harnesses must be installed; the others are reported."""
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
            message = f"{harness.version} in {installs.path(harness)}"
            found.append(Finding("harnesses", harness.name, Level.OK, message))
        else:
            level = Level.BROKEN if harness.name in names else Level.NOTE
            fix = f"towline harness install {harness.name}"
            found.append(Finding("harnesses", harness.name, level, f"{harness.version} is not installed", fix))
    return found


async def check_database(settings: Settings) -> Finding:
    """Open and migrate the database as the server would; a SQLite file that does not exist is tried in a scratch folder."""
    try:
        from towline.server.store.database import Store, database_url
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
        fix = "check server.database and server.data; put a password into TOWLINE_SERVER__DATABASE"
        return Finding("database", "store", Level.BROKEN, str(error), fix)
    shown = url.render_as_string(hide_password=True) if there else f"SQLite, to be created in {data}"
    return Finding("database", "store", Level.OK, f"{shown} opens and is up to date")


async def check_machine(settings: Settings, installs: Installs) -> list[Finding]:
    """Free disk space, open files and processors."""
    folders = {"data": _existing(settings.server.data), "cache": _existing(installs.folder)}
    found = []
    for name, folder in folders.items():
        free = (await asyncio.to_thread(shutil.disk_usage, folder)).free
        level = Level.OK if free >= MIN_FREE_BYTES else Level.WARNING
        fix = "" if level is Level.OK else "free some space, or choose another folder (server.data, TOWLINE_CACHE)"
        message = f"{free / 1024**3:.1f} GB free at {folder}"
        found.append(Finding("machine", f"disk of {name}", level, message, fix, {"free_bytes": free}))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = files == resource.RLIM_INFINITY or files >= MIN_OPEN_FILES
    fix = "" if enough else f"run `ulimit -n {MIN_OPEN_FILES}` or more before running many sessions"
    level = Level.OK if enough else Level.WARNING
    found.append(Finding("machine", "open files", level, f"{files} at most", fix, {"limit": files}))
    cores = len(os.sched_getaffinity(0))
    found.append(Finding("machine", "processors", Level.OK, f"{cores} for this process", values={"cores": cores}))
    return found


def _existing(path: Path) -> Path:
    """The nearest existing ancestor: where the folder would be created."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path
