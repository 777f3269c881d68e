"""The leak audit: what would give the answer away before the agent runs, and what it changed of the verifier's afterwards.

Before RUN, in the prepared sandbox: paths that must not be there yet (`Evaluator.leaks`), files that are the verifier's or
the solution's under any name, and git repositories that hold more than the commit the agent starts from. Any finding fails
the session with its reason. After RUN, files that the tests stand on and the agent changed are told in the notes.

A task whose environment has to hold what looks like a leak says so: `metadata = {"leak_audit": false}`.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol, runtime_checkable

from towline.evaluators.base import Evaluator
from towline.evaluators.fingerprints import fingerprints, found_inside, hashes_of
from towline.evaluators.git_audit import audit_repositories
from towline.evaluators.inside import existing
from towline.sandboxes.base import ChangeKind, Sandbox, SandboxError
from towline.schema import Task

SYSTEM = (
    "/usr/bin/*",
    "/usr/local/bin/*",
    "/usr/sbin/*",
    "/bin/*",
    "/sbin/*",
    "/usr/lib/python3*/*",
    "/usr/local/lib/python3*/*",
    "/etc/ld.so.preload",
    "/etc/profile",
    "/etc/bash.bashrc",
    "/tests",
    "/tests/*",
    "/logs/verifier/*",
)
"""What every verifier stands on: programs, Python's library, and what a shell reads when it starts."""
_NAMED = 8
_MOST_REMEMBERED = 4096
_MOST_HASHED = 2000


@runtime_checkable
class KeepsSecrets(Protocol):
    """An evaluator with files that must not be in the agent's sandbox, whatever their names are there."""

    def secrets(self) -> tuple[Path, ...]: ...


@runtime_checkable
class KnowsBase(Protocol):
    """An evaluator that knows the commit the agent starts from."""

    @property
    def base(self) -> str: ...


@runtime_checkable
class ReliesOnFiles(Protocol):
    """An evaluator whose tests stand on files of the working folder: patterns relative to it."""

    def relies_on(self) -> tuple[str, ...]: ...


Seen = Mapping[str, tuple[ChangeKind, str]]
"""Changed paths that a verifier relies on, each with how it changed and a hash of what is there."""
_before: OrderedDict[str, Seen] = OrderedDict()
"""What had changed in a sandbox when its agent started, by the sandbox's id: the set-up's doing, not the agent's."""


async def before_run(sandbox: Sandbox, task: Task, evaluator: Evaluator) -> list[str]:
    """What in the prepared sandbox would give the answer away; each finding says what to do."""
    await _remember(sandbox, task, evaluator)
    if task.metadata.get("leak_audit") is False:
        return []
    problems = []
    hidden = list(evaluator.leaks())
    if hidden:
        problems += [f"{path} is there before the agent has run" for path in await existing(sandbox, hidden)]
    if isinstance(evaluator, KeepsSecrets):
        known = await asyncio.to_thread(fingerprints, evaluator.secrets(), task.environment.build)
        problems += [
            f"{path} is the verifier's or the solution's {secret}: do not copy it into the environment"
            for path, secret in await found_inside(sandbox, known, _searched(task))
        ]
    base = evaluator.base if isinstance(evaluator, KnowsBase) else ""
    problems += await audit_repositories(sandbox, task.environment.workdir, base)
    return problems


async def after_run(sandbox: Sandbox, task: Task, evaluator: Evaluator) -> list[str]:
    """Files that the verifier relies on and the agent changed. For a person: the evaluation stands on none of them unless
    the task asks to be judged in the agent's own sandbox."""
    before = _before.pop(sandbox.id, {})
    try:
        after = await _relied_on(sandbox, task, evaluator)
    except SandboxError as error:
        return [f"what the agent changed could not be looked at: {error}"]
    touched = {
        path: ChangeKind.CHANGED if path in before else seen[0]
        for path, seen in after.items()
        if before.get(path) != seen
    }
    touched |= {path: ChangeKind.DELETED for path in before if path not in after}
    if not touched:
        return []
    named = ", ".join(f"{path} ({kind})" for path, kind in sorted(touched.items())[:_NAMED])
    more = f" and {len(touched) - _NAMED} more" if len(touched) > _NAMED else ""
    return [f"the agent changed what the verifier relies on: {named}{more}"]


def _searched(task: Task) -> Sequence[str]:
    """Where a copy would be within the agent's easy reach."""
    return list(dict.fromkeys([task.environment.workdir, "/root", "/home", "/opt", "/tmp", "/srv", "/mnt"]))


async def _relied_on(sandbox: Sandbox, task: Task, evaluator: Evaluator) -> Seen:
    """What is not as the root had it, of the paths that the verifier relies on."""
    patterns = list(SYSTEM)
    if isinstance(evaluator, ReliesOnFiles):
        # A pattern is relative to the repository, which commonly is the working folder.
        patterns += [posixpath.join(task.environment.workdir, pattern) for pattern in evaluator.relies_on()]
    changes = {
        change.path: change.kind
        for change in await sandbox.diff()
        if any(fnmatchcase(change.path, pattern) for pattern in patterns)
    }
    there = [path for path, kind in changes.items() if kind is not ChangeKind.DELETED]
    hashes = await hashes_of(sandbox, there[:_MOST_HASHED])
    return {path: (kind, hashes.get(path, "")) for path, kind in changes.items()}


async def _remember(sandbox: Sandbox, task: Task, evaluator: Evaluator) -> None:
    try:
        _before[sandbox.id] = await _relied_on(sandbox, task, evaluator)
    except SandboxError:
        return
    # A session that ends before its audit leaves its entry; there are never many.
    while len(_before) > _MOST_REMEMBERED:
        _before.popitem(last=False)
