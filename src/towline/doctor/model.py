"""The engine and the template: what is captured, whether turns can be continued, and what a plain server would change.

The last is measured, not assumed: a small agent talks to the gateway for a few turns with tools, as a harness would, and
the prompts that the model really saw are compared with what rendering the same messages anew gives.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np

from towline.doctor.findings import Finding, Level
from towline.engines.base import Capture
from towline.errors import TowlineError
from towline.gateway.gateway import Gateway
from towline.gateway.server import serving
from towline.schema import EndReason, Trajectory
from towline.tokens.codec import Codec

QUESTIONS = (
    "Look at the files in src/ and tell me which one is the largest.",
    "Rename the function `näme` in it, and run the tests.",
    'What does `print("a\\tb  c")` write?  Use the tool.',
)
ROUNDS = 3
"""Model calls that a question may take."""
LONGEST = 256
RESULT = "src/app.py 4,096 bytes\n"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
_CAPTURE = {
    Capture.TOKENS: (Level.OK, "token ids in and out: what is trained is what was sampled", ""),
    Capture.LOGPROBS: (
        Level.WARNING,
        "gives logprobs and no token ids: rows are stitched after the fact",
        "serve the model with an engine that returns token ids (vLLM's `return_token_ids`), or with `--engine embedded`",
    ),
    Capture.TEXT: (
        Level.WARNING,
        "gives text alone: rows are re-tokenised and carry no logprobs, so only supervised training can use them",
        "serve the model with an engine that returns logprobs and token ids",
    ),
}


def template(codec: Codec) -> list[Finding]:
    check = getattr(codec, "check", None)
    if check is None:
        said = "rendered by the chat server itself; nothing to check here"
        return [Finding("template", codec.name, Level.NOTE, said)]
    problems = [
        Finding(
            "template", codec.name, Level.WARNING, problem, "such turns fork; `--template FILE` takes another template"
        )
        for problem in check.problems
    ]
    before = [name for name, can in check.continues.items() if can]
    if not problems:
        said = f"turns are continued in place before {', '.join(before)} messages"
        return [Finding("template", codec.name, Level.OK, said, figures={"tool_calls": check.tool_calls})]
    return problems


async def engine(gateway: Gateway, codec: Codec) -> list[Finding]:
    """Serve, talk, and look at what was captured."""
    key = secrets.token_urlsafe(32)
    name = gateway.engine.info.name
    try:
        async with serving(gateway, key) as running:
            info = gateway.engine.info
            level, said, fix = _CAPTURE[info.capture]
            found = [
                Finding(
                    "engine",
                    info.name,
                    level,
                    f"{gateway.model}: {said}",
                    fix,
                    {"capture": info.capture.value, "context": info.context, "vocabulary": info.vocabulary},
                )
            ]
            opened = await gateway.create({"id": f"doctor-{secrets.token_hex(4)}"})
            refused = await _talk(running.base_url, opened.key, gateway.model)
            trajectory = await gateway.seal(opened.session.id, EndReason.EXITED)
    except (TowlineError, OSError, aiohttp.ClientError, TimeoutError) as error:
        fix = "start the chat server, or look at --upstream and --upstream-model" if name == "openai" else ""
        return [Finding("engine", name, Level.BROKEN, str(error) or type(error).__name__, fix)]
    if refused:
        return [*found, Finding("engine", "a conversation", Level.BROKEN, refused)]
    return [*found, conversation(trajectory), skew(trajectory)]


def conversation(trajectory: Trajectory) -> Finding:
    report = trajectory.report
    figures = {
        "turns": report.turns,
        "chains": report.chains,
        "forks": report.forks,
        "malformed": report.malformed_calls,
    }
    said = f"{report.turns} turns in {report.chains} rows, {report.trained_tokens} tokens to train"
    forks = ", ".join(f"{reason} {count}" for reason, count in report.forks.items())
    if trajectory.error:
        return Finding("engine", "a conversation", Level.BROKEN, trajectory.error, figures=figures)
    if forks:
        fix = "docs/exactness.md says what each reason means"
        return Finding("engine", "a conversation", Level.WARNING, f"{said}; it forked: {forks}", fix, figures)
    return Finding("engine", "a conversation", Level.OK, said, figures=figures)


def skew(trajectory: Trajectory) -> Finding:
    """What re-tokenising would have cost."""
    share = trajectory.report.plain_difference
    if share is None:
        said = "not measured: the engine does not tell what the model saw"
        return Finding("engine", "re-tokenisation skew", Level.NOTE, said)
    seen = int(np.sum([turn.prompt_length for turn in trajectory.turns])) if trajectory.turns else 0
    said = f"a plain server would have rendered {share:.2%} of the context differently; the gateway keeps it as it was"
    figures = {"plain_difference": share, "context_tokens": seen}
    return Finding("engine", "re-tokenisation skew", Level.OK, said, figures=figures)


async def _talk(base_url: str, key: str, model: str) -> str:
    """Be a small agent for a few turns; what was refused, if anything was."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are a careful coding agent."}]
    headers = {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=600)) as http:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            for _ in range(ROUNDS):
                body = {"model": model, "messages": messages, "tools": [TOOL], "max_tokens": LONGEST}
                async with http.post(f"{base_url}/v1/chat/completions", json=body) as response:
                    answer = await response.json(content_type=None)
                if response.status != 200:
                    return f"the gateway answered {response.status}: {str(answer)[:300]}"
                message = answer["choices"][0]["message"]
                messages.append(message)
                calls: Sequence[dict[str, Any]] = message.get("tool_calls") or ()
                messages += [
                    {"role": "tool", "tool_call_id": one["id"], "content": "src/app.py 4,096 bytes\n"} for one in calls
                ]
                if not calls:
                    break
            if messages[-1]["role"] == "tool":
                messages.append({"role": "user", "content": "Go on without it."})
    return ""
