"""How busy the engine is when the stages of sessions overlap, beside the same work done stage by stage.

Both sides run the same sessions on the same node code, with real sandboxes: each session is furnished (a set-up command of
some tenths of a second), runs an agent of a few turns against an engine of simulated latency, and is judged (a command
of the same kind). Overlapped, every stage has its own workers and sandboxes are warmed ahead. Stage by stage, a batch of
sessions goes through one stage before the next begins, as a loop of `init all, run all, judge all` would do it.

The engine's busy share is the time in which it had at least one turn to sample, over all the time until the last session
was judged. No absolute time is compared.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from towline import assets, rollout
from towline.config import GatewaySettings, NodeSettings, Settings
from towline.conversation import Request, ToolCall
from towline.engines.base import Sample, SampleRequest
from towline.engines.scripted import Say, ScriptedEngine
from towline.gateway.gateway import Gateway
from towline.schema import SandboxKind, Task
from towline.tokens.loading import load_codec

TURNS = 6
LATENCY = 0.15
"""Seconds of simulated inference a turn."""
SET_UP = JUDGE = 0.4
"""Seconds that the set-up and the verifier of a session wait for something."""
SESSIONS = 16
WORKERS = 4
"""Sessions that run at the same time."""
_PROGRAM = Path(__file__).with_name("agent_program.py")


class Metered(ScriptedEngine):
    """A scripted engine that knows when it had work."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.busy = 0.0
        self._flights = 0
        self._since = 0.0

    async def sample(self, request: SampleRequest) -> Sample:
        if self._flights == 0:
            self._since = time.perf_counter()
        self._flights += 1
        try:
            return await super().sample(request)
        finally:
            self._flights -= 1
            if self._flights == 0:
                self.busy += time.perf_counter() - self._since


def _script(request: Request) -> Say:
    step = sum(message.role == "assistant" for message in request.messages)
    if step + 1 >= TURNS:
        return Say("Done.", delay=LATENCY)
    return Say("", None, [ToolCall("", "bash", {"command": f"echo {step}"})], delay=LATENCY)


def _task(samples: int) -> Task:
    return Task.model_validate(
        {
            "task_id": "overlap",
            "instruction": "Count.",
            "harness": "shell",
            "harness_options": {"command": "python3 {program}/agent_program.py", "folder": str(_PROGRAM.parent)},
            "environment": {"setup": [f"sleep {SET_UP}"]},
            "evaluator": {"kind": "command", "command": f"sleep {JUDGE}"},
            "num_samples": samples,
        }
    )


async def _play(folder: Path, target: str, node: NodeSettings, batches: Sequence[int]) -> dict[str, float]:
    codec = load_codec(assets.folder() / "tokenizers" / target)
    engine = Metered(codec, _script)
    settings = Settings(gateway=GatewaySettings(port=0, control_port=0, data=folder, journal="os"), node=node)
    gateway = Gateway(engine, codec, settings.gateway, model="scripted")
    async with rollout.node_on(gateway, settings, folder) as running:
        # The first session finds everything cold; it is not what is measured.
        await running.run_group(_task(1))
        engine.busy = 0.0
        began = time.perf_counter()
        rewards = 0.0
        for size in batches:
            for one in await running.run_group(_task(size)):
                reward = one.trajectory.reward
                rewards += (reward.score or 0.0) if reward is not None else 0.0
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "busy": engine.busy, "share": engine.busy / seconds, "scored": rewards}


def run(
    target: str = "qwen3",
    progress: Callable[[str], None] | None = None,
    *,
    sessions: int = SESSIONS,
    sandbox: SandboxKind = SandboxKind.BUBBLEWRAP,
) -> dict[str, Any]:
    """Both sides, one after the other."""
    say = progress or (lambda step: None)
    sides = {
        "stage by stage": (
            # Every stage has room for the whole batch, and the next batch waits for the last of this one.
            NodeSettings(
                sandbox=sandbox, run_workers=WORKERS, init_workers=WORKERS, evaluate_workers=WORKERS, ahead=0, warm=0
            ),
            [WORKERS] * (sessions // WORKERS),
        ),
        "overlapped": (
            NodeSettings(
                sandbox=sandbox,
                run_workers=WORKERS,
                init_workers=WORKERS,
                evaluate_workers=WORKERS,
                ahead=WORKERS,
                warm=2,
            ),
            [sessions // WORKERS * WORKERS],
        ),
    }
    found: dict[str, Any] = {}
    for name, (settings, batches) in sides.items():
        say(name)
        with tempfile.TemporaryDirectory() as folder:
            found[name] = asyncio.run(_play(Path(folder), target, settings, batches))
    gain = found["overlapped"]["share"] / found["stage by stage"]["share"]
    return {
        "sessions": sessions,
        "workers": WORKERS,
        "turns": TURNS,
        "latency": LATENCY,
        "sides": found,
        "ratio": gain,
        "within": {
            "every session scored": all(side["scored"] == sessions // WORKERS * WORKERS for side in found.values()),
            "overlapping keeps the engine busier": gain > 1.0,
        },
    }


def render(result: Mapping[str, Any], console: Console) -> None:
    table = Table(
        title=f"{result['sessions']} sessions, {result['workers']} at a time, {result['turns']} turns of "
        f"{result['latency'] * 1000:.0f} ms each",
        box=None,
        header_style="bold",
        title_justify="left",
    )
    for name in ("", "engine busy", "seconds"):
        table.add_column(name, justify="left" if not name else "right")
    for name, side in result["sides"].items():
        table.add_row(name, f"{side['share']:.0%}", f"{side['seconds']:.1f}")
    console.print(table)
    console.print(f"overlapped over stage by stage: {result['ratio']:.2f}")
