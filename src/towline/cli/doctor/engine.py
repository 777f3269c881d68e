"""Checks of the engine and the chat template: capture level, continuation, re-tokenization and prefix caching.

The last two are measured, not assumed. A small agent talks to the gateway for several turns with tools, as a harness
would; the prompts that the model saw are compared with a fresh rendering of the same messages, and the engine reports how
much of each prompt was a cache hit.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np

from towline.cli.doctor import Finding, Level
from towline.engines.base import CaptureLevel, EngineInfo
from towline.errors import TowlineError
from towline.gateway.gateway import Gateway
from towline.gateway.server import serve_gateway
from towline.schema import EndReason, Trajectory
from towline.tokens.codec import ModelCodec
from towline.tokens.templates.self_check import CALLS_AS_TEXT_WARNING

QUESTIONS = (
    "Look at the files in src/ and tell me which one is the largest.",
    "Rename the function `näme` in it, and run the tests.",
    'What does `print("a\\tb  c")` write?  Use the tool.',
)
ROUNDS = 3
"""Maximum number of model calls per question."""
LONGEST = 96
"""Maximum number of tokens per turn."""
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
    CaptureLevel.TOKENS: (Level.OK, "token ids in and out: training rows hold exactly what was sampled", ""),
    CaptureLevel.LOGPROBS: (
        Level.WARNING,
        "returns logprobs but no token ids: rows are stitched afterwards",
        "use an engine that takes and returns token ids: `--engine vllm`, `sglang`, `llamacpp` or `embedded`",
    ),
    CaptureLevel.TEXT: (
        Level.WARNING,
        "returns text only: rows are re-tokenized and have no logprobs, so they suit supervised training only",
        "use an engine that returns token ids and logprobs",
    ),
}


def check_template(codec: ModelCodec) -> list[Finding]:
    """Whether turns can be continued in place, and tool calls parsed."""
    check = getattr(codec, "check", None)
    if check is None:
        message = "rendered by the chat server; nothing to check here"
        return [Finding("template", codec.name, Level.NOTE, message)]
    problems = [
        Finding(
            "template",
            codec.name,
            Level.WARNING,
            problem,
            "such turns fork; choose another template with `towline gateway --template FILE`",
        )
        for problem in check.problems
    ]
    if codec.calls_as_text:
        fix = "set `model.format` to a format of docs/exactness.md, or use another template"
        problems.append(Finding("template", codec.name, Level.WARNING, CALLS_AS_TEXT_WARNING, fix))
    before = [name for name, can in check.continues.items() if can]
    if not problems:
        message = f"turns continue in place before {', '.join(before)} messages"
        return [Finding("template", codec.name, Level.OK, message, values={"tool_calls": check.tool_calls})]
    return problems


async def check_engine(gateway: Gateway, codec: ModelCodec, kind: str = "engine") -> list[Finding]:
    """Serve the model, talk to it, and check what was captured. `kind` names an engine that cannot be reached."""
    key = secrets.token_urlsafe(32)
    try:
        async with serve_gateway(gateway, key) as running:
            info = gateway.engine.info
            found = [capture_finding(info, gateway.model)]
            opened = await gateway.create({"id": f"doctor-{secrets.token_hex(4)}"})
            rejected = await _talk(running.base_url, opened.key, gateway.model)
            trajectory = await gateway.seal(opened.session.id, EndReason.EXITED)
    except (TowlineError, OSError, aiohttp.ClientError, TimeoutError) as error:
        fix = "start the server, or check --upstream and --upstream-model" if kind in _SERVERS else ""
        return [Finding("engine", kind, Level.BROKEN, str(error) or type(error).__name__, fix)]
    if rejected:
        return [*found, Finding("engine", "a conversation", Level.BROKEN, rejected)]
    return [
        *found,
        conversation_finding(trajectory),
        retokenization_finding(trajectory),
        caching_finding(trajectory, info),
    ]


def capture_finding(info: EngineInfo, model: str) -> Finding:
    """The engine and its capture level."""
    level, message, fix = _CAPTURE[info.capture]
    values = {
        "capture": info.capture.value,
        "context": info.context,
        "vocabulary": info.vocabulary,
        "details": info.details,
    }
    parts = [f"{model}; capture level {info.capture}: {message}"]
    parts += [f"{name} {info.details[name]}" for name in ("server", "route", "logprobs") if name in info.details]
    return Finding("engine", info.name, level, "; ".join(parts), fix, values)


def conversation_finding(trajectory: Trajectory) -> Finding:
    """Whether the conversation stayed one branch."""
    report = trajectory.report
    values = {
        "turns": report.turns,
        "chains": report.chains,
        "forks": report.forks,
        "malformed": report.malformed_calls,
    }
    message = f"{report.turns} turns in {report.chains} rows, {report.trained_tokens} trained tokens"
    forks = ", ".join(f"{reason} {count}" for reason, count in report.forks.items())
    if trajectory.error:
        return Finding("engine", "a conversation", Level.BROKEN, trajectory.error, values=values)
    if forks:
        fix = "see docs/exactness.md for the meaning of each reason"
        return Finding("engine", "a conversation", Level.WARNING, f"{message}; it forked: {forks}", fix, values)
    return Finding("engine", "a conversation", Level.OK, message, values=values)


def retokenization_finding(trajectory: Trajectory) -> Finding:
    """How much of the context a plain server would have rendered differently."""
    share = trajectory.report.plain_difference
    if share is None:
        message = "not measured: the engine does not report what the model saw"
        return Finding("engine", "re-tokenisation skew", Level.NOTE, message)
    seen = int(np.sum([turn.prompt_length for turn in trajectory.turns])) if trajectory.turns else 0
    message = (
        f"a plain server would render {share:.2%} of the context differently; the gateway keeps the original tokens"
    )
    report = trajectory.report
    values = {
        "plain_difference": share,
        "plain_different": report.plain_different,
        "plain_different_turns": report.plain_different_turns,
        "context_tokens": seen,
    }
    return Finding("engine", "re-tokenisation skew", Level.OK, message, values=values)


def caching_finding(trajectory: Trajectory, info: EngineInfo) -> Finding:
    """How much of each prompt was a cache hit, compared with what the previous turn left in the cache."""
    reported = info.details.get("prefix_caching", "unknown")
    turns = {turn.id: turn for turn in trajectory.turns}
    cached = [turn.cached_tokens for turn in trajectory.turns]
    prompts = [turn.prompt_length for turn in trajectory.turns]
    before = [turns[turn.parent] for turn in trajectory.turns if turn.parent is not None]
    reusable = sum(turn.prompt_length + len(turn.sampled) for turn in before)
    reused = sum(turn.cached_tokens for turn in trajectory.turns if turn.parent is not None)
    values = {"told": reported, "cached": cached, "prompts": prompts, "reusable": reusable, "reused": reused}
    each = ", ".join(f"{had} of {length}" for had, length in zip(cached, prompts, strict=True))
    level, fix = Level.OK, ""
    if reused:
        message = f"on: {reused / reusable:.0%} of the reusable tokens were cache hits"
    elif not before:
        level, message = Level.NOTE, "not measured: no turn continued another"
    elif reported == "unknown":
        level, message = Level.NOTE, "the engine reports nothing about a cache"
    elif reported == "on" and info.details.get("cached_tokens", "").startswith("not reported"):
        level, fix = Level.WARNING, "start the server with --enable-prompt-tokens-details to measure cache hits"
        message = "on, but the server does not report cache hits"
    else:
        level, fix = (
            Level.WARNING,
            "enable the server's prefix cache: without it every turn recomputes the whole session",
        )
        message = "off" if reported == "off" else "reported as on, but there was no cache hit"
    return Finding("engine", "prefix caching", level, f"{message}; cached tokens per prompt: {each}", fix, values)


async def _talk(base_url: str, key: str, model: str) -> str:
    """Act as a small agent for a few turns; returns the error of a rejected request, or nothing."""
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
                messages.append({"role": "user", "content": "Continue without it."})
    return ""
