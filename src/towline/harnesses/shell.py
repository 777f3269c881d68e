"""Any other program: a command, and what it needs to find the gateway, from one line of configuration.

    {"harness": "shell", "harness_options": {"command": "{python} {program}/agent.py", "folder": "my_agent"}}

The variables that the SDKs of OpenAI, Anthropic and Google read are set, so most programs need nothing else. Where a
program needs a flag or a file instead, these names are filled in, and no other brace is touched:

    {base_url}         the gateway's root, for Anthropic- and Google-style clients
    {openai_base_url}  the same with /v1, for OpenAI-style ones
    {key} {model} {instruction} {workdir} {home} {session}
    {program}          where the option `folder` is mounted
    {install}          where the option `packages` is installed; {python} is its interpreter, else `python3`

In a command that is a string, and run by `sh`, a name becomes a quoted environment variable (`{key}` is
`"${TOWLINE_KEY}"`): whatever an instruction contains, it is one word to the shell. In a list, in `env` and in `files` it
becomes the text itself, or with `{instruction:json}` a JSON string, which is valid in YAML and TOML files too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from towline.errors import ConfigError
from towline.harnesses.base import INSTALL_ROOT, Harness, Launch, LaunchContext, PyPI

PROGRAM = f"{INSTALL_ROOT}/program"
"""Where the option `folder` is mounted inside the sandbox."""
INSTRUCTION_FILE = ".towline/instruction.txt"
"""In the program's home: the instruction, for programs that read a file."""
_MAX_BYTES = 100_000
"""Maximum number of bytes of an instruction as an argument or a variable; Linux allows at most 128 KiB."""
_NAMES = "base_url|openai_base_url|key|model|instruction|workdir|home|session|program|install|python"
_NAME = re.compile(r"\{(" + _NAMES + r")(:json)?\}")
_SHELL = re.compile(r"""\\.|'|"|\{(?:""" + _NAMES + r")\}", re.DOTALL)
_EXACT = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w,.-]+\])?==[\w.!+-]+")


def launch(ctx: LaunchContext) -> Launch:
    options = ctx.options
    values = _values(ctx)
    env, files = _strings("env", options["env"]), _strings("files", options["files"])
    variables = {f"TOWLINE_{name.upper()}": value for name, value in values.items()}
    if not _fits_argument(ctx.instruction):
        del variables["TOWLINE_INSTRUCTION"]
        if "{instruction}" in str([options["command"], list(env.values())]):
            raise ConfigError(
                f"harness shell: an instruction of more than {_MAX_BYTES} bytes cannot be a command-line argument; "
                f"let the program read {{home}}/{INSTRUCTION_FILE}"
            )
    return Launch(
        command=_command(options["command"], values),
        env={**_sdk_variables(ctx), **variables, **{name: _fill(value, values) for name, value in env.items()}},
        files={
            f"{ctx.home}/{INSTRUCTION_FILE}": ctx.instruction,
            **{_absolute(_fill(path, values), ctx.home): _fill(text, values) for path, text in files.items()},
        },
        stdin=ctx.instruction if options["stdin"] else "",
    )


def configure(options: Mapping[str, Any]) -> dict[str, Any]:
    """The install of the packages that the program imports, and the mount of its folder."""
    changes: dict[str, Any] = {"resumes": bool(options["resumes"])}
    if packages := options["packages"]:
        for package in packages:
            if not isinstance(package, str) or not _EXACT.fullmatch(package):
                raise ConfigError(f"harness shell: packages must be exact, as in name==1.2.3, not {package!r}")
        changes["install"] = PyPI(tuple(packages), str(options["python"]))
    if options["folder"]:
        folder = Path(options["folder"]).expanduser().absolute()
        if not folder.is_dir():
            raise ConfigError(f"harness shell: the folder {folder} does not exist")
        changes["mounts"] = {PROGRAM: folder}
    return changes


def _values(ctx: LaunchContext) -> dict[str, str]:
    return {
        "base_url": ctx.base_url,
        "openai_base_url": f"{ctx.base_url}/v1",
        "key": ctx.key,
        "model": ctx.model,
        "instruction": ctx.instruction,
        "workdir": ctx.workdir,
        "home": ctx.home,
        "session": ctx.session,
        "program": PROGRAM,
        "install": ctx.install,
        "python": f"{ctx.install}/bin/python3" if ctx.install else "python3",
    }


def _sdk_variables(ctx: LaunchContext) -> dict[str, str]:
    """The variables that SDKs and most agent programs read."""
    openai = f"{ctx.base_url}/v1"
    return {
        "OPENAI_BASE_URL": openai,
        "OPENAI_API_BASE": openai,
        "OPENAI_API_KEY": ctx.key,
        "OPENAI_MODEL": ctx.model,
        "ANTHROPIC_BASE_URL": ctx.base_url,
        "ANTHROPIC_API_KEY": ctx.key,
        "ANTHROPIC_MODEL": ctx.model,
        "GOOGLE_GEMINI_BASE_URL": ctx.base_url,
        "GEMINI_API_KEY": ctx.key,
        "GEMINI_MODEL": ctx.model,
        "MODEL": ctx.model,
        "TOWLINE_RESUME": "1" if ctx.resume else "",
    }


def _command(command: Any, values: Mapping[str, str]) -> tuple[str, ...]:
    if isinstance(command, str) and command.strip():
        return ("sh", "-c", _to_shell(command))
    if isinstance(command, list) and command and all(isinstance(word, str) for word in command):
        return tuple(_fill(word, values) for word in command)
    raise ConfigError("harness shell needs the option command: a string for sh, or a list of strings")


def _fill(text: str, values: Mapping[str, str]) -> str:
    return _NAME.sub(lambda match: json.dumps(values[match[1]]) if match[2] else values[match[1]], text)


def _to_shell(command: str) -> str:
    """The command with names as variables, quoted according to the quotes around them."""
    quote = ""

    def replace(match: re.Match[str]) -> str:
        nonlocal quote
        token = match[0]
        if token.startswith("\\"):
            # Between single quotes a backslash is literal, and a quote after it ends them.
            quote = "" if quote == "'" and token == "\\'" else quote
        elif token in "'\"":
            quote = "" if quote == token else quote or token
        else:
            variable = f"${{TOWLINE_{token[1:-1].upper()}}}"
            return {"": f'"{variable}"', '"': variable, "'": f"'\"{variable}\"'"}[quote]
        return token

    return _SHELL.sub(replace, command)


def _fits_argument(instruction: str) -> bool:
    return len(instruction.encode("utf-8", "surrogateescape")) <= _MAX_BYTES and "\x00" not in instruction


def _strings(what: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(part, str) for pair in value.items() for part in pair):
        raise ConfigError(f"harness shell: {what} must be a table of strings")
    return dict(value)


def _absolute(path: str, home: str) -> str:
    """A relative path is relative to the program's home."""
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
"""Options: `folder` on the node's machine is mounted read-only as {program}; `packages` of PyPI, exact, are installed once
with a `python` of that version and shared by all sessions; `stdin` sends the instruction there too; `resumes` says that a
second start continues the conversation, with `TOWLINE_RESUME` set."""
