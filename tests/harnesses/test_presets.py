"""Every preset as data: what it says of itself holds, and the launch it makes is whole.

That the programs run is what tests/e2e shows; here is what a new preset gets wrong first.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import pytest

from towline.config import SessionSettings
from towline.conversation import Message
from towline.errors import ConfigError
from towline.harnesses.base import DIALECTS, Harness, LaunchContext, Npm, PyPI
from towline.harnesses.registry import all_harnesses, find_harness
from towline.tokens.graph import fingerprint

KEY = "tl-a-key-that-is-secret"
INSTRUCTION = "--do 'this' unmistakable thing\nin two lines"
PRESETS = [harness for name, harness in all_harnesses().items() if name not in ("shell", "nothing", "oracle")]
"""Those of real programs."""


def place(harness: Harness, **changes: Any) -> LaunchContext:
    given: dict[str, Any] = {
        "base_url": "http://127.0.0.1:8500",
        "key": KEY,
        "model": "a/model",
        "instruction": INSTRUCTION,
        "install": f"/opt/towline/{harness.name}",
    }
    return harness.resolve(LaunchContext(**given | changes))


def test_the_presets_are_all_there() -> None:
    expected = {"codex", "claude_code", "qwen_code", "pi", "gemini_cli", "opencode"}
    expected |= {"openclaw", "hermes", "mini_swe_agent", "openhands_sdk", "shell"}
    assert expected <= set(all_harnesses())
    assert find_harness("claude-code") is find_harness("claude_code")
    with pytest.raises(ConfigError, match=r"unknown harness 'cladue'; available: .*claude_code"):
        find_harness("cladue")


def test_a_custom_harness_is_named_by_its_module() -> None:
    assert find_harness("towline.harnesses.pi:HARNESS") is find_harness("pi")
    with pytest.raises(ConfigError, match="cannot be imported"):
        find_harness("no.such.module:HARNESS")
    with pytest.raises(ConfigError, match="is not a Harness"):
        find_harness("towline.harnesses.pi:VERSION")


@pytest.mark.parametrize("harness", PRESETS, ids=lambda harness: harness.name)
def test_a_preset_is_pinned_and_says_what_it_speaks(harness: Harness) -> None:
    assert harness.summary
    assert set(harness.dialects) <= set(DIALECTS)
    assert "dialect" in harness.options if len(harness.dialects) > 1 else True
    assert isinstance(harness.install, Npm | PyPI)
    pattern = r"(@[\w.-]+/)?[\w.-]+@\d+\.\d+\.\d+\S*" if isinstance(harness.install, Npm) else r"[\w.\[\]-]+==[\w.]+"
    assert all(re.fullmatch(pattern, package) for package in harness.install.packages), harness.install.packages
    assert any(package.endswith(harness.version) for package in harness.install.packages)
    SessionSettings.model_validate(harness.settings)
    with pytest.raises(ConfigError, match="has no option 'colour'"):
        place(harness, options={"colour": "red"})


LAUNCHES = [
    pytest.param(harness, dialect, resume, id=f"{harness.name}-{dialect}{'-resumed' * resume}")
    for harness in PRESETS
    for dialect in harness.dialects
    for resume in ((False, True) if harness.resumes else (False,))
]


@pytest.mark.parametrize(("harness", "dialect", "resume"), LAUNCHES)
def test_a_launch_is_whole(harness: Harness, dialect: str, resume: bool) -> None:
    options = {"dialect": dialect} if "dialect" in harness.options else {}
    launch = harness.launch(place(harness, options=options, resume=resume))
    everything = json.dumps([launch.command, dict(launch.env), dict(launch.files), launch.stdin])
    assert launch.command[0].startswith(f"/opt/towline/{harness.name}/"), "its own program, not one of the root's"
    assert KEY not in " ".join(launch.command), "a command is seen by every process"
    assert "127.0.0.1:8500" in everything
    assert KEY in everything
    assert "a/model" in everything
    assert "unmistakable thing" in everything
    for path, text in launch.files.items():
        assert path.startswith("/home/agent/"), "everything it writes is in its own home"
        if path.endswith(".json"):
            json.loads(text)
        elif path.endswith(".toml"):
            tomllib.loads(text)


def test_options_reach_the_programs() -> None:
    codex = find_harness("codex")
    (config,) = codex.launch(place(codex, options={"compact_at": 999, "effort": "high"})).files.values()
    values = tomllib.loads(config)
    assert values["model_auto_compact_token_limit"] == 999
    assert values["model_reasoning_effort"] == "high"
    assert values["model_providers"]["towline"]["wire_api"] == "responses"
    claude = find_harness("claude_code")
    env = claude.launch(place(claude, context=50_000)).env
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "50000"
    assert env["CLAUDE_ENABLE_STREAM_WATCHDOG"] == "0"
    opencode = find_harness("opencode")
    changes = {"provider": {"towline": {"options": {"timeout": 5}}}}
    launch = opencode.launch(place(opencode, options={"config": changes, "args": ["--agent", "plan"]}))
    (config,) = launch.files.values()
    assert json.loads(config)["provider"]["towline"]["options"] == {
        "baseURL": "http://127.0.0.1:8500/v1",
        "apiKey": KEY,
        "timeout": 5,
    }
    assert launch.command[-2:] == ("--agent", "plan")
    pi = find_harness("pi")
    with pytest.raises(ConfigError, match="speaks chat, responses, messages, google, not 'morse'"):
        place(pi, options={"dialect": "morse"})


def test_claude_codes_billing_header_is_noise() -> None:
    """The fingerprint of its system prompt ignores the header line, and nothing else."""
    settings = SessionSettings.model_validate(find_harness("claude_code").settings)
    noise = [re.compile(pattern) for pattern in settings.noise]

    def of(text: str) -> bytes:
        return fingerprint.of(Message("system", text), noise)

    header = "x-anthropic-billing-header: cc_version=2.1.325.{}; cc_entrypoint=cli; cch={};"
    prompt = "You are Claude Code.\nDo what is asked."
    first, second = (f"{header.format(*values)}\n{prompt}" for values in (("a1f", "00000"), ("b2e", "4c1d9")))
    assert of(first) == of(second) == of(prompt)
    assert of(f"{first} Now.") != of(first)
    assert of(f"Read about x-anthropic-billing-header: {prompt}") != of(f"Read about {prompt}")
    assert fingerprint.of(Message("system", first)) != fingerprint.of(Message("system", second))
