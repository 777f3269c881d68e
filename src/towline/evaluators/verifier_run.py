"""Runs a verifier's command so that the code under test cannot speak for it.

The command runs under a small shell that gets a random word on its stdin, prints it when the command itself has ended, and
exits with the command's code: what a daemon of the agent prints later is not part of the output. Python programs of the
verifier take modules from the system first, and are watched (`inside/`): an exit that the code under test made is a failure,
and is reported. The record of that is on a descriptor, not at a path.

What this cannot do: code under test that runs in the same process as its tests can change that process. Verifiers that start
it as a program of its own, and compare what it prints, do not have that problem.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from towline.evaluators.base import EvalInputs
from towline.evaluators.sandbox_io import LOGGED_BYTES
from towline.sandboxes.base import CommandResult, Sandbox, SandboxError, execute
from towline.sandboxes.files import archives

INSIDE = Path(__file__).with_name("inside")
FOLDER = "/towline-verifier"
_FILES = ("sitecustomize.py", "towline_run.py", "towline_pytest.py")
_LEDGER = "ledger"
_MOST_LEDGER = 1024 * 1024
_SCRIPT = f"""
read -r word
folder="${{TOWLINE_ROOT-}}{FOLDER}"
export PYTHONPATH="$folder${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONSAFEPATH=1
export PYTEST_PLUGINS="towline_pytest${{PYTEST_PLUGINS:+,$PYTEST_PLUGINS}}"
: >"$folder/record" && exec 9<>"$folder/record" && rm "$folder/record" || exit 125
"$@" </dev/null
code=$?
printf '\\n%s\\n' "$word"
cat /proc/$$/fd/9 >"$folder/{_LEDGER}"
exit $code
"""
UNSET = (
    "LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "BASH_ENV", "ENV", "PERL5LIB",
    "NODE_OPTIONS", "RUBYOPT", "GIT_DIR",
)  # fmt: skip
"""Variables that make programs load code; empty in a sandbox that the agent used."""


@dataclass(slots=True)
class VerifierRun:
    """A verifier's command that has ended."""

    result: CommandResult
    """Its output is what it printed until it ended itself."""
    findings: list[tuple[str, str]] = field(default_factory=list)
    """For the suspicion report."""
    cut: str = ""
    """How the code under test ended a program of the verifier. What was printed then is nobody's word."""


async def run_verifier(
    sandbox: Sandbox,
    command: Sequence[str],
    *,
    inputs: EvalInputs,
    brought: Sequence[str] = (),
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    user: str = "",
    seconds: float | None = None,
    shared: Sequence[str] = (),
) -> VerifierRun:
    """Run a command over the agent's work, and keep its output with the session.

    `shared` are the folders of the agent's work if the sandbox is the agent's own.
    """
    carried = list(inputs.archives) or list(shared)
    config = {"carried": [*carried], "brought": [*brought], "native": [*inputs.native]}
    files: dict[str, bytes | Path] = {name: INSIDE / name for name in _FILES}
    files["config.json"] = json.dumps(config).encode()
    name = FOLDER.lstrip("/")
    modes = {f"{name}/{file}": 0o644 for file in files}
    packed = await asyncio.to_thread(
        archives.pack, {f"{name}/{file}": data for file, data in files.items()}, modes=modes
    )
    await sandbox.put(archives.pack_folder_entry(name, 0o777), "/")
    await sandbox.put(packed, "/")
    word = secrets.token_hex(16)
    given = {**dict.fromkeys(UNSET, ""), **(env or {})} if shared else env
    wrapped = ("sh", "-c", _SCRIPT, "sh", *command)
    done = await execute(
        sandbox, wrapped, stdin=f"{word}\n".encode(), env=given, cwd=cwd, user=user or None, seconds=seconds
    )
    done.stdout, _, later = done.stdout.partition(f"\n{word}\n".encode())
    if log is not None:
        end = f"\n[timed out after {seconds:g} s]\n" if done.timed_out else f"\n[exit code {done.code}]\n"
        text = done.stdout[-LOGGED_BYTES:] + done.stderr[-LOGGED_BYTES:] + end.encode()
        await asyncio.to_thread(log.write_bytes, text)
    run = VerifierRun(done)
    if later.strip():
        run.findings.append(("forged_output", "something was printed after the verifier had ended"))
    if not done.timed_out:
        _read_ledger(run, await _ledger(sandbox))
    return run


async def _ledger(sandbox: Sandbox) -> str:
    try:
        archive = await sandbox.get(f"{FOLDER}/{_LEDGER}", max_bytes=_MOST_LEDGER)
        return archives.read_file(archive, _LEDGER, max_bytes=_MOST_LEDGER).decode("utf-8", "replace")
    except (SandboxError, archives.ArchiveError):
        return ""


def _read_ledger(run: VerifierRun, text: str) -> None:
    """Programs that the code under test ended, and programs that began and whose end nothing tells."""
    began: dict[str, str] = {}
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        mark, _, detail = rest.partition(" ")
        if word == "began":
            began[mark] = detail
        elif word == "ended":
            began.pop(mark, None)
        elif word == "cut":
            began.pop(mark, None)
            run.cut = run.cut or detail.strip()
            run.findings.append(("early_exit", detail.strip()))
    for detail in began.values():
        run.cut = run.cut or f"{detail}: its end is unknown"
        run.findings.append(("early_exit", f"{detail}: its end is unknown"))
