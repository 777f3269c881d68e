"""The `shell` harness: what is filled in, and that an instruction is never more than text, to `sh` as to a file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from towline.errors import ConfigError
from towline.harnesses.base import Launch, LaunchContext, PyPI
from towline.harnesses.shell import HARNESS, INSTRUCTION_FILE, PROGRAM

HOSTILE = "$(touch /tmp/harm) `id` \"q\" 'q' \\ ; exit 3 #\n{key} ${HOME} * ~ %s\\n é日"
ONE_ARGUMENT = (
    "printf %s {instruction}",
    'printf %s "{instruction}"',
    "printf %s '{instruction}'",
    'printf %s "it\'s"{instruction}',
    "printf %s \\'{instruction}",
    "printf %s 'a\\'{instruction}",
    'printf %s "a\\"{instruction}\\""',
    "printf %s 'say \"{instruction}\"'",
)


def place(options: Mapping[str, Any], instruction: str = "Do it.", **fields: Any) -> LaunchContext:
    known = {"base_url": "http://127.0.0.1:8500", "key": "secret-key", "model": "m/1", "install": ""}
    return HARNESS.resolve(LaunchContext(**known | {"instruction": instruction, "options": options, **fields}))


def launched(options: Mapping[str, Any], instruction: str = "Do it.", **fields: Any) -> Launch:
    return HARNESS.launch(place(options, instruction, **fields))


def printed(launch: Launch) -> str:
    """What the command really prints, with nothing but the launch's environment."""
    env = {"PATH": "/usr/bin:/bin", **launch.env}
    return subprocess.run(launch.command, env=env, capture_output=True, check=True, timeout=30).stdout.decode()


@pytest.mark.parametrize("command", ONE_ARGUMENT)
def test_one_word_in_any_quotes(command: str) -> None:
    expected = printed(launched({"command": command.replace("{instruction}", "@")}))
    assert "@" in expected
    assert printed(launched({"command": command}, HOSTILE)) == expected.replace("@", HOSTILE)


@given(st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])), st.sampled_from(ONE_ARGUMENT[:3]))
@example("", ONE_ARGUMENT[0])
@example("{key}{instruction}", ONE_ARGUMENT[2])
def test_any_instruction_is_one_word(instruction: str, command: str) -> None:
    assert printed(launched({"command": command + "; printf ' %s' $#"}, instruction)) == instruction + " 0"
    assert (
        printed(launched({"command": ["printf", "%s|%s", "{instruction}", "end"]}, instruction)) == instruction + "|end"
    )


def test_names_are_filled_and_other_braces_stay() -> None:
    launch = launched(
        {
            "command": [
                "{python}",
                "{program}/agent.py",
                "--url={base_url}",
                "{ key }",
                "{unknown}",
                "{{model}}",
                "${HOME}",
            ],
            "env": {"TASK": "{instruction}", "BRACES": "{}{a}{workdir}"},
            "files": {
                "agent/config.json": '{"model": {model:json}, "task": {instruction:json}, "api": {"key": "{key}"}}',
                "~/.rc": "{openai_base_url} {session}",
                "/etc/agent.toml": "home = {home:json}",
            },
        },
        HOSTILE,
        install="/opt/towline/shell",
        session="s-1",
    )
    words = ["/opt/towline/shell/bin/python3", f"{PROGRAM}/agent.py", "--url=http://127.0.0.1:8500"]
    assert list(launch.command) == [*words, "{ key }", "{unknown}", "{m/1}", "${HOME}"]
    assert launch.env["TASK"] == HOSTILE
    assert launch.env["BRACES"] == "{}{a}/work"
    assert launch.env["OPENAI_BASE_URL"] == launch.env["TOWLINE_OPENAI_BASE_URL"] == "http://127.0.0.1:8500/v1"
    assert launch.env["ANTHROPIC_BASE_URL"] == launch.env["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:8500"
    assert {launch.env[f"{name}_API_KEY"] for name in ("OPENAI", "ANTHROPIC", "GEMINI")} == {"secret-key"}
    assert launch.files["/home/agent/.rc"] == "http://127.0.0.1:8500/v1 s-1"
    assert launch.files["/etc/agent.toml"] == 'home = "/home/agent"'
    assert launch.files[f"/home/agent/{INSTRUCTION_FILE}"] == HOSTILE
    made = json.loads(launch.files["/home/agent/agent/config.json"])
    assert made == {"model": "m/1", "task": HOSTILE, "api": {"key": "secret-key"}}


def test_a_secret_is_in_no_command_line_of_the_shell() -> None:
    launch = launched({"command": "agent --key {key} --task {instruction}"})
    assert not any("secret-key" in word or "Do it." in word for word in launch.command)


def test_resume_and_stdin() -> None:
    options = {"command": "cat", "stdin": True, "resumes": True}
    assert HARNESS.configured(options).resumes
    assert launched(options).stdin == "Do it."
    assert not launched(options).env["TOWLINE_RESUME"]
    assert launched(options, resume=True).env["TOWLINE_RESUME"] == "1"


def test_a_long_instruction_is_in_the_file_only() -> None:
    long = "x" * 200_000
    launch = launched({"command": f"cat {{home}}/{INSTRUCTION_FILE}"}, long)
    assert launch.files[f"/home/agent/{INSTRUCTION_FILE}"] == long
    assert max(map(len, [*launch.env.values(), *launch.command])) < 100_000
    for options in ({"command": "agent {instruction}"}, {"command": "agent", "env": {"TASK": "{instruction}"}}):
        with pytest.raises(ConfigError, match=INSTRUCTION_FILE):
            launched(options, long)


def test_folder_and_packages(tmp_path: Path) -> None:
    options = {"command": "x", "folder": str(tmp_path), "packages": ["openai==3.49.0", "a.b-c[d,e]==1.0rc1"]}
    harness = HARNESS.configured(options)
    assert harness.mounts == {PROGRAM: tmp_path}
    assert harness.install == PyPI(("openai==3.49.0", "a.b-c[d,e]==1.0rc1"), "3.12")
    plain = HARNESS.configured({"command": "x"})
    assert (plain.install, dict(plain.mounts), plain.resumes) == (None, {}, False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs the option command"),
        ({"command": []}, "needs the option command"),
        ({"command": ["a", 1]}, "needs the option command"),
        ({"command": "x", "env": {"A": 1}}, "env must be a table of strings"),
        ({"command": "x", "files": ["a"]}, "files must be a table of strings"),
        ({"command": "x", "folder": "/nowhere/at/all"}, "the folder /nowhere/at/all does not exist"),
        ({"command": "x", "packages": ["openai"]}, "packages must be exact"),
        ({"command": "x", "packages": ["openai==1; import os"]}, "packages must be exact"),
        ({"command": "x", "packages": ["--index-url=http://x"]}, "packages must be exact"),
        ({"command": "x", "packges": []}, "has no option 'packges'; it has: command"),
    ],
)
def test_what_is_refused(options: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HARNESS.configured(options).launch(place(options))
