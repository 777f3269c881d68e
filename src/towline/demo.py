"""The demo: a real agent program against a real model, and a proof of what was recorded.

It makes the tiny model if it is not there, serves it with the embedded engine, runs the example agent as a process of its
own, shows the trajectory, and recomputes every recorded logprob with one forward pass over the exported rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from towline import tiny, view
from towline.config import GatewaySettings, SamplingSettings, SessionSettings
from towline.errors import ConfigError
from towline.gateway.gateway import Gateway
from towline.gateway.server import serving
from towline.schema import Trajectory
from towline.tokens.loading import load_codec

BOUND = 1e-4
"""Largest difference of a recorded logprob from that of one forward pass, in float32."""
AGENT = Path(__file__).parents[2] / "examples" / "first_agent" / "agent.py"
_CONTROL_KEY_BYTES = 32


async def run(
    console: Console,
    *,
    folder: Path,
    questions: int = 4,
    seed: int = 0,
    as_json: bool = False,
    model: Path | None = None,
) -> int:
    """Run it all; 0 if the agent ended well and every logprob was found again."""
    if not AGENT.is_file():
        raise ConfigError("the demo runs examples/first_agent/agent.py of the source tree, which is not here")
    with _progress(console) as report:
        served = await asyncio.to_thread(tiny.create, model or tiny.default_folder(), progress=report)
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    code, said, trajectory = await _rollout(served, questions, seed)
    codec = load_codec(served, renderer="sentinel")
    console.rule("the agent, an ordinary program")
    console.print(said.rstrip(), markup=False, highlight=False)
    view.render(trajectory, codec.tokenizer.decode, console=console)
    worst = await asyncio.to_thread(recompute, served, trajectory)
    trajectory.write(folder / "trajectory.arrow")
    (folder / "trajectory.json").write_bytes(trajectory.to_json())
    (folder / "model.json").write_text(json.dumps({"folder": str(served.resolve()), "name": "tiny"}))
    tokens = trajectory.report.trained_tokens
    good = code == 0 and trajectory.error is None and worst < BOUND
    if as_json:
        report_json = trajectory.report.model_dump(mode="json")
        print(json.dumps({"exit_code": code, "max_abs_dlogp": worst, "report": report_json, "ok": good}))
    console.print(
        f"[bold]{'Proven' if worst < BOUND else 'NOT proven'}:[/] one forward pass over the rows gives the logprob of all "
        f"{tokens} trained tokens back; the largest difference is {worst:.1e} (bound {BOUND:g}).",
        highlight=False,
    )
    console.print(f"Written to {folder}. Next: [bold]towline trace {folder / 'trajectory.arrow'}[/]", highlight=False)
    console.print("      the whole proof: [bold]towline audit fidelity[/]", highlight=False)
    return 0 if good else 1


async def _rollout(model: Path, questions: int, seed: int) -> tuple[int, str, Trajectory]:
    """Serve the model, run the agent in a session, and take its trajectory: all over HTTP, as anybody would."""
    from towline.engines.embedded import EmbeddedEngine

    codec = load_codec(model, renderer="sentinel")
    engine = EmbeddedEngine(model, decode=codec.tokenizer.decode, seed=seed, threads=1)
    key = os.urandom(_CONTROL_KEY_BYTES).hex()
    defaults = SessionSettings(sampling=SamplingSettings(max_tokens=64))
    with tempfile.TemporaryDirectory(prefix="towline-demo-") as data:
        settings = GatewaySettings(port=0, control_port=0, data=Path(data))
        async with (
            serving(Gateway(engine, codec, settings, defaults=defaults, model="tiny"), key) as running,
            aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as control,
        ):
            sessions = f"{running.control_url}/v1/sessions"
            session = await _json(control.post(sessions, json={"id": "demo"}))
            code, said = await _agent(session, questions, seed)
            await _json(control.delete(f"{sessions}/demo"))
            async with control.get(f"{sessions}/demo/trajectory") as response:
                trajectory = Trajectory.from_json(await response.read())
    return code, said, trajectory


async def _agent(session: dict[str, Any], questions: int, seed: int) -> tuple[int, str]:
    """The agent as a process of its own: its exit code, and what it printed."""
    told = {
        "OPENAI_BASE_URL": session["base_urls"]["openai"],
        "OPENAI_API_KEY": session["key"],
        "MODEL": "tiny",
        "NO_PROXY": "127.0.0.1",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(AGENT),
        f"--questions={questions}",
        f"--seed={seed}",
        env={**os.environ, **told},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode("utf-8", "replace")


async def _json(call: Any) -> dict[str, Any]:
    async with call as response:
        answer: dict[str, Any] = await response.json()
        if response.status >= 400:
            raise ConfigError(f"the gateway refused: {answer}")
        return answer


def recompute(model: Path, trajectory: Trajectory) -> float:
    """The largest difference between a recorded logprob and that of one forward pass over its row."""
    import torch

    from towline.engines.embedded import load

    decoder = load(model)
    worst = 0.0
    for trace in trajectory.traces:
        ids = torch.from_numpy(np.array(trace.token_ids, np.int64))
        with torch.no_grad():
            logits = decoder(ids[None])[0, :-1] / (trace.temperature or 1.0)
            logprobs = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0].numpy()
        trained = np.asarray(trace.loss_mask[1:], bool)
        worst = max(worst, float(np.abs(logprobs - trace.logprobs[1:])[trained].max(initial=0.0)))
    return worst


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[tiny.Progress]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("making the tiny model (once)", total=None)

        def report(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"making the tiny model (once) {what}")

        yield report
