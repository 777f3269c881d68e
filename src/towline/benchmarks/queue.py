"""What a session costs the server, with few and with many in the queue.

The real service on SQLite with its defaults (WAL, every commit synced); sessions are run by the fake runner, which ends
each at once with a small trajectory, so that what is measured is the server alone. Each size is a process of its own: the
queue is filled while the policy is paused, then a fixed number of sessions is run, leased and acknowledged while the rest
wait behind them. CPU is what the kernel charged to the process, all threads; memory is what it kept. If a session cost
more with ten times as many behind it, it would show here.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from towline.benchmarks.fake_runner import FakeRunner
from towline.config import ServerSettings
from towline.engines.base import PauseMode
from towline.errors import TowlineError
from towline.schema import Task, Unit
from towline.server.auth import ANYBODY
from towline.server.results import Wish
from towline.server.service import Service

SAMPLES = 10
"""Sessions a task."""
RUN = 500
"""Sessions that are run at each size, or half of the queue if that is less."""
_FIGURES = ("memory_bytes", "submit_ms", "run_ms", "deliver_ms")


def run(sizes: Sequence[int] = (1_000, 10_000), *, report: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Figures a session at each number of queued sessions, and how they grow from the smallest to the largest."""
    found = []
    for size in sizes:
        if report is not None:
            report(f"{size} queued")
        done = subprocess.run(
            [sys.executable, "-m", "towline.benchmarks.queue", str(size)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise TowlineError(f"the server with {size} queued sessions failed: {done.stderr[-2000:]}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    growth = {name: found[-1][name] / found[0][name] if found[0][name] else None for name in _FIGURES}
    return {"runner": "fake", "database": "sqlite", "sizes": found, "growth": growth}


def render(result: dict[str, Any], console: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in (
        "queued",
        "memory kept",
        "CPU to submit",
        "CPU to schedule and store",
        "CPU to lease and ack",
        "sessions/s",
    ):
        table.add_column(name, justify="right")
    for size in result["sizes"]:
        table.add_row(
            f"{size['queued']:,}",
            f"{size['memory_bytes']:,.0f} B",
            f"{size['submit_ms']:.3f} ms",
            f"{size['run_ms']:.2f} ms",
            f"{size['deliver_ms']:.3f} ms",
            f"{size['sessions_a_second']:,.0f}",
        )
    console.print(table)
    growth = result["growth"]
    console.print(
        "CPU and memory of one session, run by the fake runner, on SQLite. From the smallest queue to the largest, "
        f"scheduling and storing a session costs {growth['run_ms']:.2f} times as much.",
        highlight=False,
    )


async def _measure(queued: int, folder: Path) -> dict[str, Any]:
    service = Service(ServerSettings(data=folder, stop_seconds=0), FakeRunner())
    await service.open()
    try:
        # The first of everything costs more than the rest: imports, prepared statements, connections.
        await _submit(service, "warm", 40)
        await _deliver(service, 40)
        await service.policy.pause(PauseMode.ABORT, None)
        memory = _memory()
        cpu = time.process_time()
        await _submit(service, "task", queued)
        submitting = time.process_time() - cpu
        kept = _memory() - memory
        cpu, wall = time.process_time(), time.perf_counter()
        await service.policy.resume(None)
        count = min(RUN, queued // 2)
        while (ended := queued - service.scheduler.waiting - len(service.scheduler.flights)) < count:
            await service.signals.results.wait(service.signals.results.count, 1.0)
        running, seconds = time.process_time() - cpu, time.perf_counter() - wall
        await service.policy.pause(PauseMode.ABORT, None)
        await asyncio.gather(*service.scheduler.flights.values())
        cpu = time.process_time()
        await _deliver(service, count)
        delivering = time.process_time() - cpu
    finally:
        await service.close()
    return {
        "queued": queued,
        "memory_bytes": max(0, kept) / queued,
        "submit_ms": submitting / queued * 1000,
        "run_ms": running / ended * 1000,
        "deliver_ms": delivering / count * 1000,
        "sessions_a_second": ended / seconds,
    }


async def _submit(service: Service, name: str, sessions: int) -> None:
    tasks = [
        Task(task_id=f"{name}-{number}", instruction="x", harness="fake", num_samples=SAMPLES)
        for number in range(sessions // SAMPLES)
    ]
    for start in range(0, len(tasks), 50):
        await service.submit(tasks[start : start + 50], ANYBODY, many=True)


async def _deliver(service: Service, count: int) -> None:
    while count > 0:
        found = await service.lease(Wish("bench", Unit.SESSION, min(16, count), 600.0), 30.0)
        await service.ack("bench", [one.result_id for one in found.results])
        count -= len(found.results)


def _memory() -> int:
    """Bytes that the process keeps."""
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _main(queued: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(_measure(queued, Path(folder)))))


if __name__ == "__main__":
    _main(int(sys.argv[1]))
