"""The demo's first part: one session, its trajectory, and a proof of what was recorded.

It serves the tiny model with the embedded engine, runs the example agent as a separate process, shows the trajectory, and
recomputes every recorded logprob with one forward pass over the exported rows.
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

from towline.common.text import visible
from towline.config import GatewaySettings, SamplingSettings, SessionSettings
from towline.demo import registry
from towline.demo.registry import EXAMPLE_AGENT
from towline.errors import ConfigError, EngineError
from towline.gateway.gateway import Gateway
from towline.gateway.server import serve_gateway
from towline.runs import view
from towline.schema import Trajectory
from towline.tokens.loading import load_codec

if TYPE_CHECKING:
    from towline.tokens.templates.sentinel import SentinelCodec

LOGPROB_BOUND = 1e-4
"""Bound on the difference between a recorded logprob and that of one forward pass, in float32."""
MAX_TURN_TOKENS = 64
"""A call takes 16 tokens and an answer 2."""
AGENT_SECONDS = 300.0
"""Timeout of the agent."""


async def run_session(console: Console, *, model: Path, folder: Path, questions: int, seed: int) -> dict[str, Any]:
    """Run one session, show it, and write its trajectory to `folder`. `problems` in the result lists failed checks."""
    codec = load_codec(model, renderer="sentinel")
    instance = registry.draw_instance(Random(f"demo {seed}"), questions=questions)
    code, output, trajectory = await _rollout(model, codec, instance, seed)
    worst = await asyncio.to_thread(recompute, model, [trajectory])
    await asyncio.to_thread(_write, folder, model, trajectory)

    console.rule("output of the agent, an ordinary program")
    console.print(Text(visible(output.rstrip(), lines=True).replace("↵\n", "\n")))
    console.rule("the recorded trajectory")
    view.render(trajectory, codec.tokenizer.decode, console=console)
    console.rule("proof")
    problems = _problems(code, worst, trajectory)
    right = sum(score.success for score in registry.score_session(instance, trajectory.turns))
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
    model: Path, codec: SentinelCodec, instance: registry.RegistryInstance, seed: int
) -> tuple[int, str, Trajectory]:
    """Serve the model, run the agent in a session, and fetch its trajectory, all over the public HTTP API."""
    try:
        from towline.engines.embedded import EmbeddedEngine
    except ImportError as error:
        raise ConfigError("the demo needs torch: pip install 'towline[torch]'") from error
    engine = EmbeddedEngine(model, decode=codec.tokenizer.decode, seed=seed, threads=1)
    key = secrets.token_urlsafe(32)
    defaults = SessionSettings(sampling=SamplingSettings(max_tokens=MAX_TURN_TOKENS))
    with tempfile.TemporaryDirectory(prefix="towline-demo-") as scratch:
        registry_file = Path(scratch) / "registry.json"
        registry_file.write_text(instance.to_json(), encoding="utf-8")
        settings = GatewaySettings(port=0, control_port=0, data=Path(scratch) / "data")
        async with (
            serve_gateway(Gateway(engine, codec, settings, defaults=defaults, model="tiny"), key) as running,
            aiohttp.ClientSession(running.control_url, headers={"authorization": f"Bearer {key}"}) as control,
        ):
            session = json.loads(await _call(control, "POST", "/v1/sessions"))
            path = f"/v1/sessions/{session['id']}"
            code, output = await _agent(["--registry", str(registry_file)], session)
            await _call(control, "DELETE", path)
            return code, output, Trajectory.from_json(await _call(control, "GET", f"{path}/trajectory"))


async def _call(control: aiohttp.ClientSession, method: str, path: str) -> bytes:
    async with control.request(method, path) as response:
        body = await response.read()
        if response.status >= 400:
            raise EngineError(
                f"{method} {path} failed with status {response.status}: {body.decode('utf-8', 'replace')}"
            )
        return body


async def _agent(arguments: Sequence[str], session: dict[str, Any]) -> tuple[int, str]:
    """Run the agent as a process that knows only its model endpoint; its exit code and output."""
    endpoint = {"OPENAI_BASE_URL": session["base_urls"]["openai"], "OPENAI_API_KEY": session["key"], "MODEL": "tiny"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLE_AGENT),
        *arguments,
        env={**os.environ, **endpoint},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), AGENT_SECONDS)
    except TimeoutError as error:
        raise EngineError(f"the agent did not finish within {AGENT_SECONDS:g} seconds") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode("utf-8", "replace")


def recompute(model: Path, trajectories: Sequence[Trajectory]) -> float:
    """The largest difference between a recorded logprob and that of one forward pass over its row."""
    import torch

    from towline.engines.embedded import load_decoder

    decoder = load_decoder(model)
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
    """The checks that failed."""
    report = trajectory.report
    checks = {
        f"the agent exited with code {code}": code == 0,
        f"the trajectory has an error: {trajectory.error}": trajectory.error is None,
        "the trajectory has no trained tokens": report.trained_tokens > 0,
        f"one conversation has {report.chains} chains": report.chains == 1,
        f"a recorded logprob is off by {worst:.1e}": worst < LOGPROB_BOUND,
    }
    return [problem for problem, fine in checks.items() if not fine]


def _write(folder: Path, model: Path, trajectory: Trajectory) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    trajectory.write(folder / "trajectory.arrow")
    trajectory.write(folder / "trajectory.json")
    # `towline trace` decodes tokens with this model.
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
    """Print the outcome and the next command."""
    lines = [
        Text(f"max |Δlogp| {worst:.1e}", "bold green" if worst < LOGPROB_BOUND else "bold red").append(
            f" (bound {LOGPROB_BOUND:g}): one forward pass over the rows reproduces the logprobs of all "
            f"{trajectory.report.trained_tokens:,} sampled tokens.",
            "not bold default",
        ),
        Text(
            f"{right} of {questions} questions right. This model has learned only the format; "
            f"chance level is about {registry.CHANCE:.0%}."
        ),
        *(Text(f"Failed: {problem}", "bold red") for problem in problems),
        Text(f"Written to {folder}; `towline trace {folder / 'trajectory.arrow'}` shows it again."),
    ]
    for line in lines:
        console.print(line, soft_wrap=True)
