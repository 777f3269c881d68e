"""What an image of a published data set must not show to the agent: its tests, and git history beyond the start.

These images hold the answer: the fix is a commit further on, hidden tests and a gold patch lie beside the repository.
`conceal` removes all of it from the agent's sandbox, and only there: the evaluation gets the image as published. It leaves
the reference `START_REF`, the work tree exactly as the image has it, uncommitted files included, so that the agent's change
is measured from there and applies to the same image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from towline.evaluators.sandbox_io import INSIDE_PATH, path_argument
from towline.sandboxes.base import Sandbox, SandboxError, execute
from towline.schema import Task

START_REF = "refs/towline/start"
"""The work tree that the agent starts from, as a commit in the agent's repository."""
MAX_OBJECTS = 50_000
"""Up to this many objects, all of them are counted; above, the commits."""
_SECONDS = 600.0
_REMOVE = f'for path do path="{INSIDE_PATH}"; rm -rf "$path"; done'
_SEAL = r"""
set -e
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 LC_ALL=C
export GIT_AUTHOR_NAME=towline GIT_AUTHOR_EMAIL=towline@localhost GIT_AUTHOR_DATE='2000-01-01T00:00:00Z'
export GIT_COMMITTER_NAME=towline GIT_COMMITTER_EMAIL=towline@localhost GIT_COMMITTER_DATE='2000-01-01T00:00:00Z'
g() { git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false -c gc.auto=0 "$@"; }
dir=$(g rev-parse --git-dir)
g rev-parse -q --verify 'HEAD^{commit}' >/dev/null
if [ "$2" = single ]; then
  g update-ref HEAD "$(g commit-tree -m start 'HEAD^{tree}')"
fi
for remote in $(g remote); do g remote remove "$remote" || g config --remove-section "remote.$remote"; done
rm -rf "$dir/refs/remotes"
g for-each-ref --no-merged HEAD --format='delete %(refname)' | g update-ref --no-deref --stdin
g reflog expire --expire=now --expire-unreachable=now --all
rm -rf "$dir/logs" "$dir/worktrees" "$dir/FETCH_HEAD" "$dir/ORIG_HEAD" "$dir/MERGE_HEAD" "$dir/CHERRY_PICK_HEAD"
export GIT_INDEX_FILE="$dir/towline-start"
rm -f "$GIT_INDEX_FILE"
g read-tree HEAD
g add -A . >/dev/null 2>&1
tree=$(g write-tree)
unset GIT_INDEX_FILE
rm -f "$dir/towline-start"
if [ "$tree" = "$(g rev-parse 'HEAD^{tree}')" ]; then start=$(g rev-parse HEAD); else
  start=$(g commit-tree -p HEAD -m start "$tree")
fi
g update-ref "$1" "$start"
objects=$(g cat-file --batch-all-objects --unordered --batch-check='%(objecttype)')
if [ "$(printf '%s\n' "$objects" | wc -l)" -le "$3" ]; then
  stored=$(printf '%s\n' "$objects" | wc -l)
  known=$(g rev-list --objects --all HEAD | wc -l)
else
  stored=$(printf '%s\n' "$objects" | grep -c '^commit$' || true)
  known=$(g rev-list --count --all HEAD)
fi
if [ "$known" != "$stored" ]; then
  g repack -a -d -q
  g prune --expire=now
fi
"""


@runtime_checkable
class Conceals(Protocol):
    """An evaluator of images that hold the answer."""

    @property
    def concealed_history(self) -> str:
        """`beyond` HEAD, or all but the start (`single`); empty: the history is left as it is."""
        ...

    def withheld(self) -> tuple[str, ...]:
        """Paths that only the evaluation may see."""
        ...

    def repository(self, task: Task) -> str: ...


async def conceal(sandbox: Sandbox, task: Task, evaluator: object) -> None:
    """Remove from the agent's sandbox what the evaluator conceals; `SandboxError` if that fails."""
    if not isinstance(evaluator, Conceals):
        return
    if evaluator.withheld():
        await _remove(sandbox, evaluator.withheld())
    if evaluator.concealed_history:
        repository = evaluator.repository(task)
        command = ("sh", "-c", _SEAL, "sh", START_REF, evaluator.concealed_history, str(MAX_OBJECTS))
        done = await execute(sandbox, command, cwd=repository, seconds=_SECONDS)
        if not done.ok:
            raise SandboxError(
                f"the git history of {repository} cannot be concealed from the agent: {done.text.strip()[-300:]}"
            )


async def _remove(sandbox: Sandbox, paths: Sequence[str]) -> None:
    done = await execute(sandbox, ("sh", "-c", _REMOVE, "sh", *map(path_argument, paths)), cwd="/", seconds=_SECONDS)
    if not done.ok:
        raise SandboxError(f"{', '.join(paths)} cannot be removed from the agent's sandbox: {done.text.strip()[-300:]}")
