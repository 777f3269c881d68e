"""Cost of a sandbox: start, warm acquire, a command in a live one, and throughput; bubblewrap compared with docker.

Both runtimes get the same root (only a static busybox), the same limits and the same command, in one run on one machine, so
that their ratio is meaningful even where the times are not. Docker is measured if an engine runs or this process may start
one; otherwise the result says why it is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from towline.common.progress import OnProgress
from towline.errors import TowlineError
from towline.sandboxes.base import Runtime, Sandbox, SandboxSpec, execute
from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime
from towline.sandboxes.pool import SandboxPool
from towline.schema import Resources

_LIMITS = Resources(memory_mb=256, pids=64)
_AT_ONCE = 8
_ROWS = {
    "start_ms": "start and first command",
    "warm_ms": "warm acquire and first command",
    "execute_ms": "command in a live sandbox",
    "end_ms": "destroy",
}
_ENGINE_SECONDS = 60


def run(
    repeats: int = 30,
    target: str = "",
    progress: OnProgress = lambda _: None,
    docker: bool = True,
) -> dict[str, Any]:
    """Run the benchmark. `target` is unused: no model takes part."""
    with tempfile.TemporaryDirectory(prefix="towline-bench-") as scratch:
        return asyncio.run(_run(Path(scratch), repeats, progress, docker))


async def _run(scratch: Path, repeats: int, progress: OnProgress, docker: bool) -> dict[str, Any]:
    busybox = shutil.which("busybox")
    root = await asyncio.to_thread(_root, scratch / "root", busybox) if busybox else ""
    command = ["/bin/busybox", "true"] if root else ["true"]
    spec = SandboxSpec(root=str(root), resources=_LIMITS)
    runtimes: dict[str, Any] = {}
    own = BubblewrapRuntime(scratch / "bubblewrap")
    await own.open()
    try:
        runtimes["bubblewrap"] = await _measure(own, _enforced(spec, own), command, repeats, progress)
        host = SandboxSpec(resources=_enforced(spec, own).resources)
        runtimes["bubblewrap, host's root"] = await _measure(own, host, ["true"], repeats, progress)
    finally:
        await own.close()
    missing = "" if docker else "disabled"
    if docker and not root:
        missing = "no busybox for its root: install busybox-static"
    if not missing:
        try:
            async with _engine(scratch) as runtime:
                fewer = max(3, repeats // 6)
                runtimes["docker"] = await _measure(runtime, _enforced(spec, runtime), command, fewer, progress)
        except (TowlineError, OSError) as error:
            missing = str(error)
    result: dict[str, Any] = {
        "repeats": repeats,
        "at_once": _AT_ONCE,
        "rootless": os.geteuid() != 0,
        "runtimes": runtimes,
    }
    if missing:
        result["docker_missing"] = missing
    else:
        first, second = runtimes["bubblewrap"], runtimes["docker"]
        result["ratio"] = {name: second[name]["median"] / first[name]["median"] for name in _ROWS}
        result["ratio"]["per_second"] = first["per_second"] / second["per_second"]
    return result


def _enforced(spec: SandboxSpec, runtime: Runtime) -> SandboxSpec:
    """The spec with only those limits that the runtime enforces on this machine."""
    held = {name: value for name, value in spec.resources if name in runtime.facts.enforced}
    return SandboxSpec(root=spec.root, resources=Resources.model_validate(held))


async def _measure(
    runtime: Runtime, spec: SandboxSpec, command: list[str], repeats: int, progress: OnProgress
) -> dict[str, Any]:
    await runtime.prepare(spec)
    times: dict[str, list[float]] = {name: [] for name in _ROWS}

    async def first(sandbox: Sandbox) -> None:
        done = await execute(sandbox, command)
        if not done.ok:
            raise TowlineError(f"{runtime.name}: {command[0]} exited with {done.code}: {done.text}")

    for number in range(repeats):
        progress(f"{runtime.name}, {number + 1} of {repeats}")
        with _timed(times["start_ms"]):
            sandbox = await runtime.create(spec)
            await first(sandbox)
        for _ in range(3):
            with _timed(times["execute_ms"]):
                await first(sandbox)
        with _timed(times["end_ms"]):
            await sandbox.destroy()
    pool = SandboxPool(runtime, size=4, concurrency=2)
    try:
        for _ in range(repeats):
            pool.warm(spec, 4)
            while pool.ready_count(spec) < 4:  # noqa: ASYNC110 (a wait of the benchmark's own, not of the pool's users)
                await asyncio.sleep(0.005)
            with _timed(times["warm_ms"]):
                sandbox = await pool.acquire(spec)
                await first(sandbox)
            await sandbox.destroy()
    finally:
        await pool.close()
    progress(f"{runtime.name}, {_AT_ONCE} concurrent")
    figures: dict[str, Any] = {name: _summary(values) for name, values in times.items()}
    figures["per_second"] = await _throughput(runtime, spec, first, repeats)
    return figures


async def _throughput(runtime: Runtime, spec: SandboxSpec, first: Callable[[Sandbox], Any], repeats: int) -> float:
    """Sandboxes created, used and destroyed per second, `_AT_ONCE` concurrently."""
    count = max(_AT_ONCE, repeats * 2)
    room = asyncio.Semaphore(_AT_ONCE)

    async def one() -> None:
        async with room:
            sandbox = await runtime.create(spec)
            await first(sandbox)
            await sandbox.destroy()

    begun = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return count / (time.perf_counter() - begun)


@contextlib.contextmanager
def _timed(into: list[float]) -> Any:
    begun = time.perf_counter()
    yield
    into.append((time.perf_counter() - begun) * 1000)


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _root(folder: Path, busybox: str) -> Path:
    for name in ("bin", "etc", "tmp", "root"):
        (folder / name).mkdir(parents=True)
    shutil.copy(busybox, folder / "bin/busybox")
    for name in ("sh", "true", "sleep"):
        (folder / "bin" / name).symlink_to("busybox")
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return folder


@contextlib.asynccontextmanager
async def _engine(scratch: Path) -> AsyncIterator[Runtime]:
    """The docker runtime, on the running engine or on a temporary one."""
    from towline.sandboxes.docker.runtime import DEFAULT_URL, DockerRuntime

    url = os.environ.get("DOCKER_HOST", DEFAULT_URL)
    process = None
    if url == DEFAULT_URL and not os.path.exists(DEFAULT_URL.removeprefix("unix://")):  # noqa: ASYNC240
        dockerd = shutil.which("dockerd")
        if dockerd is None or os.geteuid() != 0:
            raise TowlineError("no docker engine is running, and starting one needs root and dockerd")
        folder = scratch / "engine"
        folder.mkdir()
        url = f"unix://{folder}/docker.sock"
        process = await asyncio.to_thread(_start_engine, dockerd, folder, url)
    runtime = DockerRuntime(scratch / "docker", url=url)
    try:
        await runtime.open()
        yield runtime
    finally:
        await runtime.close()
        if process is not None:
            process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.wait, _ENGINE_SECONDS)
            await asyncio.to_thread(
                subprocess.run, ["umount", f"{scratch}/engine/exec/netns/default"], capture_output=True, check=False
            )


def _start_engine(dockerd: str, folder: Path, url: str) -> subprocess.Popen[bytes]:
    command = [dockerd, "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    command += ["-H", url, "--bridge=none", "--iptables=false", "--ip6tables=false"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    until = time.monotonic() + _ENGINE_SECONDS
    while not (folder / "docker.sock").exists():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            process.wait()
            raise TowlineError(f"dockerd did not start: {(folder / 'log').read_text()[-500:]}")
        time.sleep(0.05)
    return process


def render(result: Mapping[str, Any], console: Console) -> None:
    """Print a result as a table."""
    who = "an ordinary user" if result["rootless"] else "root"
    console.print(f"Sandboxes as {who} in ms: median (minimum) of {result['repeats']}")
    table = Table()
    table.add_column("")
    for name in result["runtimes"]:
        table.add_column(name, justify="right")
    ratio = result.get("ratio")
    if ratio:
        table.add_column("docker / bubblewrap", justify="right")
    for row, title in _ROWS.items():
        cells = [f"{found[row]['median']:.1f} ({found[row]['min']:.1f})" for found in result["runtimes"].values()]
        table.add_row(title, *cells, *([f"{ratio[row]:.0f} to 1"] if ratio else []))
    cells = [f"{found['per_second']:.1f}" for found in result["runtimes"].values()]
    table.add_row(
        f"sandboxes per second, {result['at_once']} concurrent",
        *cells,
        *([f"1 to {ratio['per_second']:.0f}"] if ratio else []),
    )
    console.print(table)
    if "docker_missing" in result:
        console.print(f"docker not measured: {result['docker_missing']}")
