"""Programs that stand in for Slurm's and Kubernetes' own: each records its arguments, its input and some of its variables."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROGRAM = """\
#!{python}
import json, os, sys
from pathlib import Path
call = {{"program": {name!r}, "arguments": sys.argv[1:], "variables": {{k: os.environ[k] for k in {variables!r} if k in os.environ}}}}
if {reads!r}:
    call["input"] = sys.stdin.read()
with open({log!r}, "a") as log:
    log.write(json.dumps(call) + "\\n")
{code}
"""


@dataclass(frozen=True)
class StandIns:
    """A folder of programs for `PATH`."""

    folder: Path

    def add(self, name: str, code: str = "", *, reads: bool = False, variables: tuple[str, ...] = ()) -> None:
        """A program that records its call and then runs `code`, in which `call` is what was recorded."""
        (self.folder / "bin").mkdir(parents=True, exist_ok=True)
        path = self.folder / "bin" / name
        values = {"python": sys.executable, "name": name, "variables": variables, "reads": reads, "code": code}
        path.write_text(_PROGRAM.format(log=str(self.folder / "calls"), **values))
        path.chmod(0o755)

    @property
    def path(self) -> str:
        """The variable `PATH` with these programs and the system's."""
        return f"{self.folder / 'bin'}:/usr/bin:/bin"

    def calls(self, program: str = "") -> list[dict[str, Any]]:
        """What was called, in order."""
        try:
            lines = (self.folder / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in lines]
        return [call for call in found if program in ("", call["program"])]
