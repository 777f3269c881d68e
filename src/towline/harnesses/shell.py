"""Any other program: a command, and what it needs to find the gateway, from one line of configuration.

    {"harness": "shell", "harness_options": {"command": "{python} {program}/agent.py", "folder": "my_agent"}}

The variables that the SDKs of OpenAI, Anthropic and Google read are set, so most programs need nothing else. Where a
program wants a flag or a file instead, these names are filled in, and no other brace is touched:

    {base_url}         the gateway's root, for Anthropic- and Google-style clients
    {openai_base_url}  the same with /v1, for OpenAI-style ones
    {key} {model} {instruction} {workdir} {home} {session}
    {program}          where the option `folder` is shown
    {install}          where the option `packages` is installed; {python} is its interpreter, else `python3`

In a command that is a string, and run by `sh`, a name becomes a quoted variable of the environment (`{key}` is
`"${TOWLINE_KEY}"`): whatever an instruction holds, it is one word to the shell. In a list, in `env` and in `files` it
becomes the text itself, or with `{instruction:json}` a JSON string, which is what YAML and TOML files take too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from towline.errors import ConfigError
from towline.harnesses.base import INSTALLS, Harness, Launch, Place, PyPI

PROGRAM = f"{INSTALLS}/program"
"""Where the option `folder` is shown inside the sandbox."""
INSTRUCTION_FILE = ".towline/instruction.txt"
"""In the program's home: the instruction, for programs that would rather read a file."""
_LONGEST = 100_000
"""Bytes of an instruction that is a word or a variable; Linux takes none of more than 128 KiB."""
_NAMES = "base_url|openai_base_url|key|model|instruction|workdir|home|session|program|install|python"
_NAME = re.compile(r"\{(" + _NAMES + r")(:json)?\}")
_SHELL = re.compile(r"""\\.|'|"|\{(?:""" + _NAMES + r")\}", re.DOTALL)
_EXACT = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w,.-]+\])?==[\w.!+-]+")


def launch(place: Place) -> Launch:
    options = place.options
    values = _values(place)
    env, files = _strings("env", options["env"]), _strings("files", options["files"])
    variables = {f"TOWLINE_{name.upper()}": value for name, value in values.items()}
    if not _is_a_word(place.instruction):
        del variables["TOWLINE_INSTRUCTION"]
        if "{instruction}" in str([options["command"], list(env.values())]):
            raise ConfigError(
                f"harness shell: an instruction of more than {_LONGEST} bytes cannot be a word of a command; "
                f"have the program read {{home}}/{INSTRUCTION_FILE}"
            )
    return Launch(
        command=_command(options["command"], values),
        env={**_for_sdks(place), **variables, **{name: _filled(value, values) for name, value in env.items()}},
        files={
            f"{place.home}/{INSTRUCTION_FILE}": place.instruction,
            **{_absolute(_filled(path, values), place.home): _filled(text, values) for path, text in files.items()},
        },
        stdin=place.instruction if options["stdin"] else "",
    )


def configure(options: Mapping[str, Any]) -> dict[str, Any]:
    """An install of the packages that the program imports, and the folder that it is in."""
    changes: dict[str, Any] = {"resumes": bool(options["resumes"])}
    if packages := options["packages"]:
        for package in packages:
            if not isinstance(package, str) or not _EXACT.fullmatch(package):
                raise ConfigError(f"harness shell: packages are exact, as in name==1.2.3, unlike {package!r}")
        changes["install"] = PyPI(tuple(packages), str(options["python"]))
    if options["folder"]:
        folder = Path(options["folder"]).expanduser().absolute()
        if not folder.is_dir():
            raise ConfigError(f"harness shell: there is no folder {folder}")
        changes["mounts"] = {PROGRAM: folder}
    return changes


def _values(place: Place) -> dict[str, str]:
    return {
        "base_url": place.base_url,
        "openai_base_url": f"{place.base_url}/v1",
        "key": place.key,
        "model": place.model,
        "instruction": place.instruction,
        "workdir": place.workdir,
        "home": place.home,
        "session": place.session,
        "program": PROGRAM,
        "install": place.install,
        "python": f"{place.install}/bin/python3" if place.install else "python3",
    }


def _for_sdks(place: Place) -> dict[str, str]:
    """What SDKs and most agent programs look for."""
    openai = f"{place.base_url}/v1"
    return {
        "OPENAI_BASE_URL": openai,
        "OPENAI_API_BASE": openai,
        "OPENAI_API_KEY": place.key,
        "OPENAI_MODEL": place.model,
        "ANTHROPIC_BASE_URL": place.base_url,
        "ANTHROPIC_API_KEY": place.key,
        "ANTHROPIC_MODEL": place.model,
        "GOOGLE_GEMINI_BASE_URL": place.base_url,
        "GEMINI_API_KEY": place.key,
        "GEMINI_MODEL": place.model,
        "MODEL": place.model,
        "TOWLINE_RESUME": "1" if place.resume else "",
    }


def _command(command: Any, values: Mapping[str, str]) -> tuple[str, ...]:
    if isinstance(command, str) and command.strip():
        return ("sh", "-c", _for_shell(command))
    if isinstance(command, list) and command and all(isinstance(word, str) for word in command):
        return tuple(_filled(word, values) for word in command)
    raise ConfigError("harness shell needs the option command: a string for sh, or a list of strings")


def _filled(text: str, values: Mapping[str, str]) -> str:
    return _NAME.sub(lambda match: json.dumps(values[match[1]]) if match[2] else values[match[1]], text)


def _for_shell(command: str) -> str:
    """The command with names as variables, quoted as the quotes around them ask."""
    quote = ""

    def replace(match: re.Match[str]) -> str:
        nonlocal quote
        token = match[0]
        if token.startswith("\\"):
            # Between single quotes a backslash is one, and what follows it may end them.
            quote = "" if quote == "'" and token == "\\'" else quote
        elif token in "'\"":
            quote = "" if quote == token else quote or token
        else:
            variable = f"${{TOWLINE_{token[1:-1].upper()}}}"
            return {"": f'"{variable}"', '"': variable, "'": f"'\"{variable}\"'"}[quote]
        return token

    return _SHELL.sub(replace, command)


def _is_a_word(instruction: str) -> bool:
    return len(instruction.encode("utf-8", "surrogateescape")) <= _LONGEST and "\x00" not in instruction


def _strings(what: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(part, str) for pair in value.items() for part in pair):
        raise ConfigError(f"harness shell: {what} is a table of strings")
    return dict(value)


def _absolute(path: str, home: str) -> str:
    """A relative path is one in the program's home."""
    return path if path.startswith("/") else f"{home}/{path.removeprefix('~/')}"


HARNESS = Harness(
    name="shell",
    summary="any other program: a command with its environment and files",
    launch=launch,
    configure=configure,
    dialects=("chat", "responses", "messages", "google"),
    options={
        "command": "",
        "env": {},
        "files": {},
        "folder": "",
        "packages": [],
        "python": "3.12",
        "stdin": False,
        "resumes": False,
    },
)
"""Options: `folder` on the node's machine is shown read-only as {program}; `packages` of PyPI, exact, are installed once
with a `python` of that version and shared by all sessions; `stdin` sends the instruction there too; `resumes` says that a
second start goes on with the conversation, with `TOWLINE_RESUME` set."""
