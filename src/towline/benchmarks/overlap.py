"""Engine utilisation with overlapping session stages, compared with running stage by stage.

Both sides run the same sessions on the same node code, with real sandboxes: each session is set up (a command of some tenths
of a second), runs an agent of a few turns against an engine with simulated latency, and is evaluated (a command of the same
kind). Overlapped, every stage has its own workers and sandboxes are warmed ahead. Stage by stage, a batch of sessions
finishes one stage before the next begins, as in a loop of `init all, run all, evaluate all`.

The engine's utilisation is the time with at least one turn to sample over the total time until the last session was
evaluated. No absolute times are compared.
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

from towline import assets
from towline.config import GatewaySettings, NodeSettings, Settings
from towline.conversation import Request, ToolCall
from towline.engines.base import Sample, SampleRequest
from towline.engines.scripted import Say, ScriptedEngine
from towline.gateway.gateway import Gateway
from towline.runs import run as rollout
from towline.schema import SandboxKind, Task
from towline.tokens.loading import load_codec

TURNS = 6
LATENCY = 0.15
"""Seconds of simulated inference per turn."""
SETUP_SECONDS = EVALUATE_SECONDS = 0.4
"""Seconds that a session's setup and its verifier wait."""
SESSIONS = 16
WORKERS = 4
"""Sessions that run at the same time."""
_PROGRAM = Path(__file__).with_name("agent_program.py")


class MeteredEngine(ScriptedEngine):
    """A scripted engine that measures the time in which it has work."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.busy = 0.0
        self._in_flight = 0
        self._since = 0.0

    async def sample(self, request: SampleRequest) -> Sample:
        if self._in_flight == 0:
            self._since = time.perf_counter()
        self._in_flight += 1
        try:
            return await super().sample(request)
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
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
            "environment": {"setup": [f"sleep {SETUP_SECONDS}"]},
            "evaluator": {"kind": "command", "command": f"sleep {EVALUATE_SECONDS}"},
            "num_samples": samples,
        }
    )


async def _run_batches(folder: Path, target: str, node: NodeSettings, batches: Sequence[int]) -> dict[str, float]:
    codec = load_codec(assets.folder() / "tokenizers" / target)
    engine = MeteredEngine(codec, _script)
    settings = Settings(gateway=GatewaySettings(port=0, control_port=0, data=folder, journal="os"), node=node)
    gateway = Gateway(engine, codec, settings.gateway, model="scripted")
    async with rollout.local_node(gateway, settings, folder) as running:
        # Not measured: the first session finds cold caches.
        await rollout.run_group(running, _task(1))
        engine.busy = 0.0
        began = time.perf_counter()
        rewards = 0.0
        for size in batches:
            for one in await rollout.run_group(running, _task(size)):
                reward = one.trajectory.reward
                rewards += (reward.score or 0.0) if reward is not None else 0.0
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "busy": engine.busy, "share": engine.busy / seconds, "scored": rewards}


def run(
    target: str = "qwen3",
    progress: Callable[[str], None] = lambda _: None,
    *,
    sessions: int = SESSIONS,
    sandbox: SandboxKind = SandboxKind.BUBBLEWRAP,
) -> dict[str, Any]:
    """Run both sides, one after the other."""
    sides = {
        "stage by stage": (
            # Every stage has room for the whole batch, and the next batch waits for the whole of this one.
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
    figures: dict[str, Any] = {}
    for name, (settings, batches) in sides.items():
        progress(name)
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = asyncio.run(_run_batches(Path(folder), target, settings, batches))
    gain = figures["overlapped"]["share"] / figures["stage by stage"]["share"]
    return {
        "sessions": sessions,
        "workers": WORKERS,
        "turns": TURNS,
        "latency": LATENCY,
        "sides": figures,
        "ratio": gain,
        "within": {
            "every session scored": all(side["scored"] == sessions // WORKERS * WORKERS for side in figures.values()),
            "overlapping keeps the engine busier": gain > 1.0,
        },
    }


def render(result: Mapping[str, Any], console: Console) -> None:
    table = Table(
        title=f"{result['sessions']} sessions, {result['workers']} concurrent, {result['turns']} turns of "
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
    console.print(f"engine utilisation, overlapped vs stage by stage: {result['ratio']:.2f}x")
