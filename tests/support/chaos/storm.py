"""A storm: thousands of short sessions while parts of the deployment fail by a schedule, and then the calm after it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from support.chaos import consumer, processes
from support.chaos.deployment import Deployment, SmallDisk
from support.chaos.echo_engine import StormProxy
from support.chaos.invariants import SAMPLES, Leftovers, Report, check_store
from support.chaos.schedule import ENGINE_FAULTS, PlannedFault, planned
from support.server.postgres import Postgres

PROGRAM = Path(__file__).parent / "program"
_BATCH = 25
_CALM_SECONDS = 300.0
"""Longest time without another acknowledged result after the storm."""
_JUMP = 3600.0


def chaos_task(number: int, sandboxes: Sequence[str]) -> dict[str, Any]:
    on_error = "retry" if number % 3 == 0 else "lie"
    return {
        "task_id": f"task/{number}",
        "instruction": f"task {number} begin",
        "harness": "shell",
        "harness_options": {
            "command": f"{{python}} {{program}}/agent.py {2 + number % 3} {on_error}",
            "folder": str(PROGRAM),
        },
        "environment": {"sandbox": sandboxes[number % len(sandboxes)]},
        # A reward only for what must never be scored: see the exit codes of the agent.
        "evaluator": {"kind": "completed", "codes": [3, 4]},
        "num_samples": SAMPLES,
        "max_attempts": 1000,
        "timeouts": {"run": 300.0},
    }


@dataclass
class Storm:
    deployment: Deployment
    proxy: StormProxy
    folder: Path
    """Journals of the consumers, and the file that moves the clock."""
    data: Path
    database: str
    seed: int
    sessions: int
    faults: Sequence[str]
    seconds: float
    """The storm ends after this time, or when nearly all sessions have ended."""
    sandboxes: Sequence[str] = ("bubblewrap", "process")
    stretch: float = 1.0
    """Factor of all pauses and durations: parts that take longer to start need a slower storm."""
    hosts: Path | None = None
    """The folder with the data of all node hosts, if it is not below `data`."""
    disk: SmallDisk | None = None
    postgres: Postgres | None = None
    write: Callable[[str], None] = print
    counts: Counter[str] = field(default_factory=Counter)
    longest_silence: float = 0.0
    """Seconds for which the server was up and running, and did not answer a status call."""
    _consumers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _disturbed: float = 0.0

    @property
    def tasks(self) -> int:
        return self.sessions // SAMPLES

    @property
    def clock(self) -> Path:
        return self.folder / "clock"

    def journal(self, unit: str) -> list[dict[str, Any]]:
        return consumer.read_journal(self.folder / f"{unit}.jsonl")

    def acked(self, unit: str) -> int:
        return len({name for one in self.journal(unit) if one["what"] == "acked" for name in one["ids"]})

    async def run(self, decode: Callable[[Sequence[int]], str]) -> Report:
        """Rage, calm down, check."""
        began = time.monotonic()
        processes.adopt_orphans()
        disk = str(self.disk.folder) if self.disk is not None else ""
        before = set(processes.descendants(os.getpid()))
        leftovers = Leftovers(self.hosts or self.data, before=before, disk=disk)
        await self.deployment.start()
        watching = [asyncio.create_task(self._watch(leftovers)), asyncio.create_task(self._submit())]
        try:
            for unit in ("session", "group"):
                self._start_consumer(unit)
            await self._rage()
            stormed = time.monotonic() - began
            await self._calm()
            await watching[1]
        finally:
            for one in watching:
                one.cancel()
            self._end_consumers()
            await self._all_off()
        report = Report()
        await self.deployment.stop()
        await self._settle(leftovers, report)
        # One more start: what the last crash left is collected.
        await self.deployment.start()
        await self.deployment.stop()
        units = {"sessions": self.journal("session"), "groups": self.journal("group")}
        await check_store(report, self.data, self.database, tasks=self.tasks, decode=decode, **units)
        report.figures["faults"] = f"{sum(self.counts.values())}: {dict(sorted(self.counts.items()))}"
        report.figures["failed model calls"] = dict(self.proxy.injected)
        report.figures["server starts"] = self.deployment.starts
        report.figures["longest silence of the API"] = f"{self.longest_silence:.1f} s"
        report.figures["seconds"] = f"{stormed:.0f} of storm, {time.monotonic() - began:.0f} in all"
        return report

    # Work

    async def _submit(self) -> None:
        """Submit all tasks; a call without an answer is repeated."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
            for first in range(0, self.tasks, _BATCH):
                some = range(first, min(self.tasks, first + _BATCH))
                body = [chaos_task(number, self.sandboxes) for number in some]
                while True:
                    try:
                        async with http.post(self.deployment.url + "/v1/tasks", json=body) as answer:
                            assert answer.status in (200, 503), await answer.text()
                            if answer.status == 200:
                                break
                    except (aiohttp.ClientError, OSError, TimeoutError):
                        pass
                    await asyncio.sleep(0.3)

    def _start_consumer(self, unit: str) -> None:
        command = [sys.executable, consumer.__file__, self.deployment.url, str(self.folder / f"{unit}.jsonl"), unit]
        self._consumers[unit] = subprocess.Popen(command)

    def _end_consumers(self) -> None:
        for process in self._consumers.values():
            process.kill()
            process.wait(60)

    async def _watch(self, leftovers: Leftovers) -> None:
        """Note the control groups of sandboxes, and whether the API answers."""
        answered = time.monotonic()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
            while True:
                await asyncio.sleep(0.5)
                await asyncio.to_thread(leftovers.watch)
                try:
                    async with http.get(self.deployment.url + "/v1/status") as answer:
                        await answer.read()
                    answered = time.monotonic()
                except aiohttp.ClientConnectorError:
                    answered = time.monotonic()  # it is not up
                except (aiohttp.ClientError, OSError, TimeoutError):
                    since = max(answered, self._disturbed)
                    self.longest_silence = max(self.longest_silence, time.monotonic() - since)

    # Faults

    async def _rage(self) -> None:
        until = time.monotonic() + self.seconds
        for fault in planned(self.seed, self.faults, self.stretch):
            await asyncio.sleep(fault.pause)
            acked = self.acked("session")
            if time.monotonic() > until or acked >= self.sessions * 0.95:
                return
            self.write(
                f"{fault.number:>4} {fault.name} {fault.seconds:.1f} s, choice {fault.choice:.3f}; {acked} acked"
            )
            act: Callable[[PlannedFault], Awaitable[None]] = getattr(self, f"_{fault.name}")
            await act(fault)
            self.counts[fault.name] += 1

    async def _calm(self) -> None:
        await self._all_off()
        self.write(f"calm: {self.acked('session')} of {self.sessions} acked")
        wanted = {"session": self.tasks * SAMPLES, "group": self.tasks}
        best, since = -1, time.monotonic()
        while any(self.acked(unit) < count for unit, count in wanted.items()):
            done = sum(map(self.acked, wanted))
            if done > best:
                best, since = done, time.monotonic()
            told = {unit: self.acked(unit) for unit in wanted}
            assert time.monotonic() - since < _CALM_SECONDS, f"no progress after the storm: {told} of {wanted}"
            await asyncio.sleep(0.5)

    async def _settle(self, leftovers: Leftovers, report: Report) -> None:
        for _ in range(100):  # what was killed may take a moment to be gone
            leftovers.check(report, self._allowed(), self.deployment.mount_tables())
            if not report.broken:
                return
            await asyncio.sleep(0.1)

    def _allowed(self) -> list[int]:
        database = [self.postgres.pid] if self.postgres is not None and self.postgres.pid is not None else []
        below = processes.descendants(*database) if database else []
        return [*database, *below, *self.deployment.others()]

    async def _all_off(self) -> None:
        self.proxy.set_fault("")
        self.clock.write_text("0")
        if self.disk is not None:
            self.disk.free()

    def _victim(self, fault: PlannedFault, among: Sequence[int]) -> Iterator[int]:
        if among:
            yield among[int(fault.choice * len(among))]

    async def _kill_server(self, fault: PlannedFault) -> None:
        await self._end_server(fault, signal.SIGKILL)

    async def _restart_server(self, fault: PlannedFault) -> None:
        await self._end_server(fault, signal.SIGTERM)

    async def _end_server(self, fault: PlannedFault, how: signal.Signals) -> None:
        """Mostly the next fault comes once the server is back: a storm in which it never is tests little else."""
        for pid in self.deployment.server():
            processes.send(pid, how)
        if fault.choice < 0.75:
            await asyncio.sleep(0.5)
            await self.deployment.serving(120.0)

    async def _kill_host(self, fault: PlannedFault) -> None:
        for pid in self._victim(fault, self.deployment.hosts()):
            processes.send(pid, signal.SIGKILL)

    async def _kill_supervisor(self, fault: PlannedFault) -> None:
        for pid in self._victim(fault, self.deployment.supervisors()):
            processes.send(pid, signal.SIGKILL)

    async def _kill_trainer(self, fault: PlannedFault) -> None:
        unit = fault.pick(sorted(self._consumers))
        self._consumers[unit].kill()
        await asyncio.to_thread(self._consumers[unit].wait, 60)
        self._start_consumer(unit)

    async def _stop_host(self, fault: PlannedFault) -> None:
        for pid in self._victim(fault, self.deployment.hosts()):
            await self._stopped(pid, fault.seconds)

    async def _stop_server(self, fault: PlannedFault) -> None:
        for pid in self.deployment.server():
            await self._stopped(pid, fault.seconds)
            self._disturbed = time.monotonic()

    async def _stop_database(self, fault: PlannedFault) -> None:
        if self.postgres is not None and self.postgres.pid is not None:
            backends = [
                pid for pid in processes.descendants(self.postgres.pid) if "towline" in processes.command_line(pid)
            ]
            for pid in self._victim(fault, backends):
                await self._stopped(pid, fault.seconds)

    async def _stopped(self, pid: int, seconds: float) -> None:
        processes.send(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            processes.send(pid, signal.SIGCONT)

    async def _restart_database(self, fault: PlannedFault) -> None:
        if self.postgres is not None:
            await asyncio.to_thread(self.postgres.stop, signal.SIGKILL)
            await asyncio.sleep(fault.seconds / 2)
            await asyncio.to_thread(self.postgres.start)

    async def _full_disk(self, fault: PlannedFault) -> None:
        if self.disk is not None and self.disk.mounted:
            await asyncio.to_thread(self.disk.fill)
            await asyncio.sleep(fault.seconds)
            self.disk.free()

    async def _clock_jump(self, fault: PlannedFault) -> None:
        self.clock.write_text(f"{(2 * fault.choice - 1) * _JUMP:.0f}")

    async def _engine(self, fault: PlannedFault) -> None:
        self.proxy.set_fault(fault.pick(ENGINE_FAULTS))
        await asyncio.sleep(fault.seconds)
        self.proxy.set_fault("")

    async def _cut_network(self, fault: PlannedFault) -> None:
        await self._done_by_deployment(fault)

    async def _kill_node(self, fault: PlannedFault) -> None:
        await self._done_by_deployment(fault)

    async def _kill_raylet(self, fault: PlannedFault) -> None:
        await self._done_by_deployment(fault)

    async def _done_by_deployment(self, fault: PlannedFault) -> None:
        act: Callable[[float, float], Awaitable[None]] = getattr(self.deployment, fault.name)
        await act(fault.choice, fault.seconds)
