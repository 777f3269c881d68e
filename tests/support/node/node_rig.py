"""A node for tests: the real pipeline, gateway, sandboxes and evaluators; only the model is scripted.

The agent is a program of the standard library that no preset knows, run as `shell`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from towline.config import GatewaySettings, NodeSettings, Settings
from towline.engines.base import Engine
from towline.engines.scripted import Script, ScriptedEngine
from towline.gateway.gateway import Gateway
from towline.gateway.model_routes import ModelRoute
from towline.node.breakers import ProbeBackoff
from towline.node.node import RolloutNode
from towline.runs import run as rollout
from towline.schema import SandboxKind, Session, SessionState, Task
from towline.tokens.codec import ModelCodec

PROGRAM = Path(__file__).parent / "program"


@dataclass
class NodeRig:
    node: RolloutNode
    gateway: Gateway
    engine: Engine
    out: Path
    changes: list[Session] = field(default_factory=list)

    def states(self, session_id: str) -> list[SessionState]:
        return [session.state for session in self.changes if session.session_id == session_id]

    def most_at_once(self, state: SessionState) -> int:
        """The most sessions that were in a state at the same time."""
        now: dict[str, SessionState] = {}
        most = 0
        for session in self.changes:
            now[session.session_id] = session.state
            most = max(most, sum(found is state for found in now.values()))
        return most

    def together(self, one: SessionState, other: SessionState) -> bool:
        """Whether some session was in one state while another was in the other."""
        now: dict[str, SessionState] = {}
        for session in self.changes:
            now[session.session_id] = session.state
            if one in now.values() and other in now.values():
                return True
        return False


@contextlib.asynccontextmanager
async def running_node(
    codec: ModelCodec,
    out: Path,
    script: Script | None = None,
    *,
    sandbox: SandboxKind = SandboxKind.BUBBLEWRAP,
    engine: Engine | None = None,
    stall_seconds: float = 120.0,
    backoff: ProbeBackoff | None = None,
    others: Mapping[str, ModelRoute] | None = None,
    stores_trajectories: bool = True,
    **settings: Any,
) -> AsyncIterator[NodeRig]:
    chosen_engine = engine or ScriptedEngine(codec, script)
    chosen = Settings(
        gateway=GatewaySettings(port=0, control_port=0, data=out, journal="os"),
        node=NodeSettings(sandbox=sandbox, **settings),
    )
    gateway = Gateway(
        chosen_engine, codec, chosen.gateway, model="scripted", stall_seconds=stall_seconds, others=others or {}
    )
    changes: list[Session] = []
    async with rollout.local_node(
        gateway, chosen, out, changed=changes.append, stores_trajectories=stores_trajectories
    ) as node:
        if backoff is not None:
            for status in node.breakers:
                node._components.breakers[status.component].backoff = backoff
        yield NodeRig(node, gateway, chosen_engine, out, changes)


def a_task(behaviour: str = "work", *, program: str = "agent.py", **fields: Any) -> Task:
    """A task for the program, which behaves as it is told."""
    base = {
        "task_id": f"a-task-{behaviour}",
        "instruction": "Write hello to hello.txt.",
        "harness": "shell",
        "harness_options": {"command": f"python3 {{program}}/{program} {behaviour}", "folder": str(PROGRAM)},
    }
    return Task.model_validate(base | fields)


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come to pass")


def processes_named(text: str) -> list[int]:
    """Processes of this machine whose command line holds the text."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                line = Path("/proc", entry, "cmdline").read_bytes()
                if text.encode() in line:
                    found.append(int(entry))
    return found


def first_of(pid: int) -> int:
    """The first process of the PID namespace that a process is in, seen from here."""
    space = os.readlink(f"/proc/{pid}/ns/pid")
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                same = os.readlink(f"/proc/{name}/ns/pid") == space
                numbers = next(
                    line for line in Path("/proc", name, "status").read_text().splitlines() if "NSpid" in line
                )
            except OSError:
                continue
            if same and numbers.split()[-1] == "1":
                return int(name)
    raise AssertionError("there is no first process")


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid
