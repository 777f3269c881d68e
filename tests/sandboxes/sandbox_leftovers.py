"""What a bubblewrap runtime could leave on a machine that others use too: its processes, groups, mounts and folders."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from towline.sandboxes.bubblewrap import BubblewrapRuntime


@dataclass
class Traces:
    """Taken while a runtime is open; asked again when it is closed."""

    data: Path
    groups: list[str] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)
    """Pids with the time each began, so that a pid used again is another one."""

    def look(self, runtime: BubblewrapRuntime) -> None:
        keeper = runtime._keeper
        assert keeper is not None
        todo = [keeper.pid]
        while todo:
            pid = todo.pop()
            with suppress(OSError):
                self.processes[pid] = began(pid)
                for children in Path(f"/proc/{pid}/task").glob("*/children"):
                    todo += map(int, children.read_text().split())
        for listed in self.data.glob("keeper-*/groups.json"):
            self.groups += json.loads(listed.read_text())

    def left(self) -> list[str]:
        """What is still there, when processes that are about to go have had a moment."""
        for _ in range(40):
            if not self._now():
                return []
            time.sleep(0.05)
        return self._now()

    def _now(self) -> list[str]:
        found = [f"group {group}" for group in self.groups if Path(group).exists()]
        for pid, start in self.processes.items():
            with suppress(OSError):
                if began(pid) == start and state(pid) != "Z":
                    found.append(f"process {pid} {Path(f'/proc/{pid}/cmdline').read_bytes()!r}")
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found += [f"mount {line}" for line in mounts if str(self.data) in line]
        found += [f"folder {path}" for path in self.data.iterdir() if path.name != "roots"]
        return found


def began(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
