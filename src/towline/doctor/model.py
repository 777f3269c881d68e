"""The engine and the template: what is captured, whether turns can be continued, what a plain server would change, and
what comes from the engine's cache.

The last two are measured, not assumed: a small agent talks to the gateway for three turns and more with tools, as a
harness would; the prompts that the model really saw are compared with what rendering the same messages anew gives, and the
engine says how much of each prompt it had.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np

from towline.doctor.findings import Finding, Level
from towline.engines.base import Capture, EngineInfo
from towline.errors import TowlineError
from towline.gateway.gateway import Gateway
from towline.gateway.server import serving
from towline.schema import EndReason, Trajectory
from towline.tokens.codec import Codec
from towline.tokens.selfcheck import CALLS_AS_TEXT

QUESTIONS = (
    "Look at the files in src/ and tell me which one is the largest.",
    "Rename the function `näme` in it, and run the tests.",
    'What does `print("a\\tb  c")` write?  Use the tool.',
)
ROUNDS = 3
"""Model calls that a question may take."""
LONGEST = 96
"""Tokens a turn."""
RESULT = "src/app.py 4,096 bytes\n"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
_SERVERS = ("vllm", "sglang", "openai")
_CAPTURE = {
    Capture.TOKENS: (Level.OK, "token ids in and out: what is trained is what was sampled", ""),
    Capture.LOGPROBS: (
        Level.WARNING,
        "gives logprobs and no token ids: rows are stitched after the fact",
        "serve the model with an engine that takes and returns token ids: `--engine vllm`, `sglang`, `llamacpp`, `embedded`",
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
    if codec.calls_as_text:
        fix = "set `model.format` if it writes calls in a format of docs/exactness.md, or take another template"
        problems.append(Finding("template", codec.name, Level.WARNING, CALLS_AS_TEXT, fix))
    before = [name for name, can in check.continues.items() if can]
    if not problems:
        said = f"turns are continued in place before {', '.join(before)} messages"
        return [Finding("template", codec.name, Level.OK, said, figures={"tool_calls": check.tool_calls})]
    return problems


async def engine(gateway: Gateway, codec: Codec, kind: str = "engine") -> list[Finding]:
    """Serve, talk, and look at what was captured. `kind` names an engine that does not get as far as to say what it is."""
    key = secrets.token_urlsafe(32)
    try:
        async with serving(gateway, key) as running:
            info = gateway.engine.info
            found = [capture(info, gateway.model)]
            opened = await gateway.create({"id": f"doctor-{secrets.token_hex(4)}"})
            refused = await _talk(running.base_url, opened.key, gateway.model)
            trajectory = await gateway.seal(opened.session.id, EndReason.EXITED)
    except (TowlineError, OSError, aiohttp.ClientError, TimeoutError) as error:
        fix = "start the server, or look at --upstream and --upstream-model" if kind in _SERVERS else ""
        return [Finding("engine", kind, Level.BROKEN, str(error) or type(error).__name__, fix)]
    if refused:
        return [*found, Finding("engine", "a conversation", Level.BROKEN, refused)]
    return [*found, conversation(trajectory), skew(trajectory), caching(trajectory, info)]


def capture(info: EngineInfo, model: str) -> Finding:
    """What the engine is, and how much of a turn it tells."""
    level, said, fix = _CAPTURE[info.capture]
    figures = {
        "capture": info.capture.value,
        "context": info.context,
        "vocabulary": info.vocabulary,
        "details": info.details,
    }
    words = [f"{model}; capture level {info.capture}: {said}"]
    words += [f"{name} {info.details[name]}" for name in ("server", "route", "logprobs") if name in info.details]
    return Finding("engine", info.name, level, "; ".join(words), fix, figures)


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
    report = trajectory.report
    figures = {
        "plain_difference": share,
        "plain_different": report.plain_different,
        "plain_different_turns": report.plain_different_turns,
        "context_tokens": seen,
    }
    return Finding("engine", "re-tokenisation skew", Level.OK, said, figures=figures)


def caching(trajectory: Trajectory, info: EngineInfo) -> Finding:
    """How much of each prompt the engine had, against what the turn before had left there."""
    told = info.details.get("prefix_caching", "unknown")
    turns = {turn.id: turn for turn in trajectory.turns}
    cached = [turn.cached_tokens for turn in trajectory.turns]
    prompts = [turn.prompt_length for turn in trajectory.turns]
    before = [turns[turn.parent] for turn in trajectory.turns if turn.parent is not None]
    reusable = sum(turn.prompt_length + len(turn.sampled) for turn in before)
    reused = sum(turn.cached_tokens for turn in trajectory.turns if turn.parent is not None)
    figures = {"told": told, "cached": cached, "prompts": prompts, "reusable": reusable, "reused": reused}
    each = ", ".join(f"{had} of {length}" for had, length in zip(cached, prompts, strict=True))
    level, fix = Level.OK, ""
    if reused:
        said = f"on: {reused / reusable:.0%} of what the turns before left was used again"
    elif not before:
        level, said = Level.NOTE, "not measured: no turn continued another"
    elif told == "unknown":
        level, said = Level.NOTE, "the engine tells nothing of a cache"
    elif told == "on" and info.details.get("cached_tokens", "").startswith("not told"):
        level, fix = Level.WARNING, "start the server with --enable-prompt-tokens-details, and its hits can be measured"
        said = "on, but the server does not tell what each prompt had of it"
    else:
        level, fix = (
            Level.WARNING,
            "start the server with its prefix cache on: a long session pays for it at every turn",
        )
        said = "off" if told == "off" else "said to be on, and nothing was used again"
    return Finding("engine", "prefix caching", level, f"{said}; cached tokens of the prompts: {each}", fix, figures)


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
                messages += [{"role": "tool", "tool_call_id": one["id"], "content": RESULT} for one in calls]
                if not calls:
                    break
            if messages[-1]["role"] == "tool":
                messages.append({"role": "user", "content": "Go on without it."})
    return ""
