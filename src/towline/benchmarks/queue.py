"""Cost of a session in the server, with a short and a long queue.

The real service on SQLite with its defaults (WAL, every commit synced) runs twice. With the fake runner, which ends each
session at once with a small trajectory, the figures are the server's alone. With the real node, sandboxes, gateway, journal
and the scripted engine, they are everything that the service's process does for a session, without the processes in the
sandbox.

Each size runs in its own process: the queue is filled while the policy is paused, then a fixed number of sessions runs while
the rest wait; with the fake runner they are also leased and acknowledged. CPU time is that of all threads of the process as
charged by the kernel; memory is what the process kept. A cost per session that grows with the queue would show here.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from towline import assets
from towline.benchmarks.fake_runner import FakeRunner
from towline.cluster.local import NodeRunner
from towline.cluster.runner import Runner
from towline.config import GatewaySettings, NodeSettings, ServerSettings, Settings
from towline.engines.base import PauseMode
from towline.engines.scripted import Say, ScriptedEngine
from towline.errors import TowlineError
from towline.gateway.gateway import Gateway
from towline.runs import run as rollout
from towline.schema import Task, Unit
from towline.server.api.auth import ANONYMOUS
from towline.server.delivery.leases import LeaseRequest
from towline.server.service import Service
from towline.tokens.loading import load_codec

SAMPLES = 10
"""Sessions per task."""
RUN = {"fake": 500, "node": 100}
"""Sessions run at each size; at most half of the queue."""
_FIGURES = ("memory_bytes", "submit_ms", "run_ms")
_SECONDS = 1200
"""Timeout of one size."""
_PROGRAM = Path(__file__).with_name("agent_program.py")


def run(sizes: Sequence[int] = (1_000, 10_000), *, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Per-session figures at each queue size, by runner, and their growth from smallest to largest."""
    return {"database": "sqlite", "runners": {runner: _run_sizes(runner, sizes, progress) for runner in RUN}}


def _run_sizes(runner: str, sizes: Sequence[int], progress: Callable[[str], None]) -> dict[str, Any]:
    figures = []
    for size in sizes:
        progress(f"{size} queued, {_TITLES[runner]}")
        done = subprocess.run(
            [sys.executable, "-m", "towline.benchmarks.queue", runner, str(size)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
        if done.returncode:
            raise TowlineError(f"the server with {size} queued sessions failed: {done.stderr[-2000:]}")
        figures.append(json.loads(done.stdout.splitlines()[-1]))
    growth = {name: figures[-1][name] / figures[0][name] if figures[0][name] else None for name in _FIGURES}
    return {"sizes": figures, "growth": growth}


_TITLES = {"fake": "server alone", "node": "with node, sandboxes and scripted engine"}


def render(result: dict[str, Any], console: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for name in (
        "queued",
        "memory kept",
        "CPU to submit",
        "CPU to run and store",
        "CPU to lease and ack",
        "sessions/s",
    ):
        table.add_column(name, justify="right")
    for runner, figures in result["runners"].items():
        for size in figures["sizes"]:
            delivering = size["deliver_ms"]
            table.add_row(
                _TITLES[runner],
                f"{size['queued']:,}",
                f"{size['memory_bytes']:,.0f} B",
                f"{size['submit_ms']:.3f} ms",
                f"{size['run_ms']:.2f} ms",
                "" if delivering is None else f"{delivering:.3f} ms",
                f"{size['sessions_a_second']:,.1f}",
            )
    console.print(table)
    grown = ", ".join(f"{one['growth']['run_ms']:.2f}x ({_TITLES[name]})" for name, one in result["runners"].items())
    console.print(
        "CPU time and memory of the service's process per session, on SQLite. Growth of the cost to run and store a "
        f"session, from the smallest queue to the largest: {grown}.",
        highlight=False,
    )


@asynccontextmanager
async def _runner(kind: str, folder: Path) -> AsyncIterator[Runner]:
    if kind == "fake":
        yield FakeRunner()
        return
    codec = load_codec(assets.folder() / "tokenizers" / "qwen3")
    settings = Settings(gateway=GatewaySettings(port=0, control_port=0, data=folder), node=NodeSettings(run_workers=8))
    engine = ScriptedEngine(codec, lambda request: Say("Done."))
    gateway = Gateway(engine, codec, settings.gateway, model="scripted")
    async with rollout.local_node(gateway, settings, folder, stores_trajectories=False) as node:
        yield NodeRunner(node)


async def _measure(kind: str, queued: int, folder: Path) -> dict[str, Any]:
    async with _runner(kind, folder / "node") as runner:
        service = Service(ServerSettings(data=folder, stop_seconds=0, trust_tasks=True), runner)
        await service.open()
        try:
            return await _figures(service, kind, queued)
        finally:
            await service.close()


async def _figures(service: Service, kind: str, queued: int) -> dict[str, Any]:
    # Warm-up: imports, prepared statements, connections.
    await _submit(service, kind, "warm", 40)
    await _deliver(service, 40)
    await service.policy.pause(PauseMode.ABORT, None)
    memory = _memory()
    cpu = time.process_time()
    await _submit(service, kind, "task", queued)
    submitting = time.process_time() - cpu
    kept = _memory() - memory
    cpu, wall = time.process_time(), time.perf_counter()
    await service.policy.resume(None)
    count = min(RUN[kind], queued // 2)
    while (ended := queued - service.scheduler.waiting - len(service.scheduler.active)) < count:
        await service.signals.results.wait(service.signals.results.count, 1.0)
    running, seconds = time.process_time() - cpu, time.perf_counter() - wall
    delivering: float | None = None
    if kind == "fake":
        # Nothing else runs then. A real session would block until the policy is resumed.
        await service.policy.pause(PauseMode.ABORT, None)
        await asyncio.gather(*service.scheduler.active.values())
        cpu = time.process_time()
        await _deliver(service, count)
        delivering = (time.process_time() - cpu) / count * 1000
    return {
        "queued": queued,
        "memory_bytes": max(0, kept) / queued,
        "submit_ms": submitting / queued * 1000,
        "run_ms": running / ended * 1000,
        "deliver_ms": delivering,
        "sessions_a_second": ended / seconds,
    }


async def _submit(service: Service, kind: str, name: str, sessions: int) -> None:
    real = {"command": f"python3 -S -E {{program}}/{_PROGRAM.name}", "folder": str(_PROGRAM.parent)}
    tasks = [
        Task(
            task_id=f"{name}-{number}",
            instruction="x",
            harness="fake" if kind == "fake" else "shell",
            harness_options={} if kind == "fake" else real,
            num_samples=SAMPLES,
        )
        for number in range(sessions // SAMPLES)
    ]
    for start in range(0, len(tasks), 50):
        await service.submit(tasks[start : start + 50], ANONYMOUS, many=True)


async def _deliver(service: Service, count: int) -> None:
    while count > 0:
        found = await service.lease(LeaseRequest("bench", Unit.SESSION, min(16, count), 600.0), 30.0)
        await service.ack("bench", [one.result_id for one in found.results])
        count -= len(found.results)


def _memory() -> int:
    """Resident memory of this process in bytes."""
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _main(kind: str, queued: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(_measure(kind, queued, Path(folder)))))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
