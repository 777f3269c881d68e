"""The demo's first part: one session, shown, and a proof of what was recorded.

It serves the tiny model with the embedded engine, runs the example agent as a process of its own, shows the trajectory,
and recomputes every recorded logprob with one forward pass over the exported rows.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.text import Text

from towline import view
from towline.config import GatewaySettings, SamplingSettings, SessionSettings
from towline.demo.agent import AGENT
from towline.errors import ConfigError, EngineError
from towline.gateway.gateway import Gateway
from towline.gateway.server import serving
from towline.schema import Trajectory
from towline.tiny import registry
from towline.tokens.loading import load_codec

if TYPE_CHECKING:
    from towline.tokens.template import SentinelCodec

BOUND = 1e-4
"""Largest difference of a recorded logprob from that of one forward pass, in float32."""
LONGEST_TURN = 64
"""Tokens; a call takes 16 and an answer 2."""
AGENT_SECONDS = 300.0
"""When the agent is given up on."""


async def show(console: Console, *, model: Path, folder: Path, questions: int, seed: int) -> dict[str, Any]:
    """Run one session and write its trajectory to `folder`; what was found, with `problems` that should not be."""
    codec = load_codec(model, renderer="sentinel")
    instance = registry.draw(Random(f"demo {seed}"), questions=questions)
    code, said, trajectory = await _rollout(model, codec, instance, seed)
    worst = await asyncio.to_thread(recompute, model, [trajectory])
    await asyncio.to_thread(_write, folder, model, trajectory)

    console.rule("the agent, an ordinary program")
    console.print(Text(view.visible(said.rstrip(), lines=True).replace("↵\n", "\n")))
    console.rule("what was recorded")
    view.render(trajectory, codec.tokenizer.decode, console=console)
    console.rule("proof")
    problems = _problems(code, worst, trajectory)
    right = sum(score.success for score in registry.grade(instance, trajectory.turns))
    _conclude(console, folder, trajectory, worst, right, questions, problems)
    return {
        "problems": problems,
        "exit_code": code,
        "questions": questions,
        "right": right,
        "max_abs_dlogp": worst,
        "report": trajectory.report.model_dump(mode="json"),
        "trajectory": str(folder / "trajectory.arrow"),
    }


async def _rollout(
    model: Path, codec: SentinelCodec, instance: registry.Instance, seed: int
) -> tuple[int, str, Trajectory]:
    """Serve the model, run the agent in a session, and take its trajectory: all over HTTP, as anybody would."""
    try:
        from towline.engines.embedded import EmbeddedEngine
    except ImportError as error:
        raise ConfigError("the demo needs torch: pip install 'towline[torch]'") from error
    engine = EmbeddedEngine(model, decode=codec.tokenizer.decode, seed=seed, threads=1)
    key = secrets.token_urlsafe(32)
    defaults = SessionSettings(sampling=SamplingSettings(max_tokens=LONGEST_TURN))
    with tempfile.TemporaryDirectory(prefix="towline-demo-") as scratch:
        given = Path(scratch) / "registry.json"
        given.write_text(instance.to_json(), encoding="utf-8")
        settings = GatewaySettings(port=0, control_port=0, data=Path(scratch) / "data")
        async with (
            serving(Gateway(engine, codec, settings, defaults=defaults, model="tiny"), key) as running,
            aiohttp.ClientSession(running.control_url, headers={"authorization": f"Bearer {key}"}) as control,
        ):
            session = json.loads(await _call(control, "POST", "/v1/sessions"))
            path = f"/v1/sessions/{session['id']}"
            code, said = await _agent(["--registry", str(given)], session)
            await _call(control, "DELETE", path)
            return code, said, Trajectory.from_json(await _call(control, "GET", f"{path}/trajectory"))


async def _call(control: aiohttp.ClientSession, method: str, path: str) -> bytes:
    async with control.request(method, path) as response:
        body = await response.read()
        if response.status >= 400:
            raise EngineError(f"{method} {path} was refused with {response.status}: {body.decode('utf-8', 'replace')}")
        return body


async def _agent(arguments: Sequence[str], session: dict[str, Any]) -> tuple[int, str]:
    """The agent as a process of its own, told only where its model is: its exit code, and what it printed."""
    told = {"OPENAI_BASE_URL": session["base_urls"]["openai"], "OPENAI_API_KEY": session["key"], "MODEL": "tiny"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(AGENT),
        *arguments,
        env={**os.environ, **told},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), AGENT_SECONDS)
    except TimeoutError as error:
        raise EngineError(f"the agent did not end within {AGENT_SECONDS:g} seconds") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode("utf-8", "replace")


def recompute(model: Path, trajectories: Sequence[Trajectory]) -> float:
    """The largest difference between a recorded logprob and that of one forward pass over its row."""
    import torch

    from towline.engines.embedded import load

    decoder = load(model)
    worst = 0.0
    for trace in (trace for trajectory in trajectories for trace in trajectory.traces):
        ids = torch.from_numpy(np.array(trace.token_ids, np.int64))
        with torch.no_grad():
            logits = decoder(ids[None])[0, :-1] / torch.tensor(trace.logit_divisors[1:, None])
            logprobs = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0].numpy()
        sampled = np.asarray(trace.turn_ids[1:] >= 0)
        worst = max(worst, float(np.abs(logprobs - trace.logprobs[1:])[sampled].max(initial=0.0)))
    return worst


def _problems(code: int, worst: float, trajectory: Trajectory) -> list[str]:
    """What is not as it should be."""
    report = trajectory.report
    checks = {
        f"the agent ended with exit code {code}": code == 0,
        f"the trajectory has an error: {trajectory.error}": trajectory.error is None,
        "no token was recorded to train on": report.trained_tokens > 0,
        f"one conversation gave {report.chains} chains": report.chains == 1,
        f"a recorded logprob is {worst:.1e} off": worst < BOUND,
    }
    return [problem for problem, fine in checks.items() if not fine]


def _write(folder: Path, model: Path, trajectory: Trajectory) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    trajectory.write(folder / "trajectory.arrow")
    trajectory.write(folder / "trajectory.json")
    # What `towline trace` decodes tokens with.
    (folder / "model.json").write_text(json.dumps({"folder": str(model.resolve()), "name": "tiny"}), encoding="utf-8")


def _conclude(
    console: Console,
    folder: Path,
    trajectory: Trajectory,
    worst: float,
    right: int,
    questions: int,
    problems: Sequence[str],
) -> None:
    """What it comes to, and what to do next."""
    lines = [
        Text(f"max |Δlogp| {worst:.1e}", "bold green" if worst < BOUND else "bold red").append(
            f" (bound {BOUND:g}): one forward pass over the rows gives back the logprobs of all "
            f"{trajectory.report.trained_tokens:,} sampled tokens.",
            "not bold default",
        ),
        Text(
            f"{right} of {questions} questions right. This model has learned the format only: "
            f"about {registry.CHANCE:.0%} is what chance gives."
        ),
        *(Text(f"Off: {problem}", "bold red") for problem in problems),
        Text(f"Written to {folder}; `towline trace {folder / 'trajectory.arrow'}` shows it again."),
    ]
    for line in lines:
        console.print(line, soft_wrap=True)
