"""What a bubblewrap runtime could leave on a shared machine: processes, groups, mounts and folders."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime
from towline.sandboxes.files import folders


@dataclass
class Traces:
    """Recorded while a runtime is open; checked when it is closed."""

    data: Path
    groups: list[str] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)
    """Pids with their start times, so that a reused pid is not mistaken."""

    def record(self, runtime: BubblewrapRuntime) -> None:
        supervisor = runtime._supervisor
        assert supervisor is not None
        todo = [supervisor.pid]
        while todo:
            pid = todo.pop()
            with suppress(OSError):
                if started := folders.start_time(pid):
                    self.processes[pid] = started
                for children in Path(f"/proc/{pid}/task").glob("*/children"):
                    todo += map(int, children.read_text().split())
        for listed in self.data.glob("keeper-*/groups.json"):
            self.groups += json.loads(listed.read_text())

    def left(self) -> list[str]:
        """What is still there after a grace period for exiting processes."""
        for _ in range(40):
            if not self._now():
                return []
            time.sleep(0.05)
        return self._now()

    def _now(self) -> list[str]:
        found = [f"group {group}" for group in self.groups if Path(group).exists()]
        for pid, start in self.processes.items():
            with suppress(OSError):
                if folders.start_time(pid) == start:
                    found.append(f"process {pid} {Path(f'/proc/{pid}/cmdline').read_bytes()!r}")
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found += [f"mount {line}" for line in mounts if str(self.data) in line]
        found += [f"folder {path}" for path in self.data.iterdir() if path.name != "roots"]
        return found
