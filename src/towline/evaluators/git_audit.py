"""What a git repository holds beyond the commit that the agent starts from: the fix is often there, one command away.

Everything in the object store must be reachable from HEAD (or be staged): no other branch or tag further on, no stash, no
reflog, no loose or packed object that is merely unreachable. In a repository of many objects only commits are looked at.
"""

from __future__ import annotations

from towline.evaluators.inside import INSIDE, word
from towline.sandboxes.base import Sandbox, SandboxError, execute

MOST_OBJECTS = 50_000
"""Up to so many, every object is looked at; above, every commit."""
_SECONDS = 120.0
_CURE = (
    "clean it in the environment's set-up: delete other refs and stashes, then `git reflog expire --expire=now --all` and "
    "`git gc --prune=now`"
)
_FIND = (
    f'for path do path="{INSIDE}"; [ -d "$path" ] || continue; '
    'find "$path" -maxdepth 4 -name .git -prune 2>/dev/null; done; true'
)
_AUDIT = r"""
command -v git >/dev/null || { echo "no-git"; exit 0; }
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 LC_ALL=C
g() { git -c safe.directory='*' "$@"; }
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
[ -s "$(g rev-parse --git-path objects/info/alternates)" ] && echo "alternates"
if ! g rev-parse -q --verify 'HEAD^{commit}' >/dev/null; then
  g cat-file --batch-all-objects --batch-check='%(objecttype)' | grep -q commit && echo "no-head"
  exit 0
fi
if [ -n "$1" ]; then
  g merge-base --is-ancestor "$1" HEAD 2>/dev/null || echo "base"
fi
g for-each-ref --format='%(refname)' | while read -r ref; do
  commit=$(g rev-parse -q --verify "$ref^{commit}") || continue
  g merge-base --is-ancestor "$commit" HEAD || echo "ref $ref"
done
g cat-file --batch-all-objects --batch-check='%(objectname) %(objecttype)' >"$dir/all" || exit 1
if [ "$(wc -l <"$dir/all")" -le "$2" ]; then
  g rev-list --objects HEAD | cut -d' ' -f1 >"$dir/given"
  g ls-files -s | cut -d' ' -f2 >>"$dir/given"
  g for-each-ref --format='%(objectname)' >>"$dir/given"
else
  g rev-list HEAD >"$dir/given"
  grep ' commit$' "$dir/all" >"$dir/commits"; mv "$dir/commits" "$dir/all"
fi
awk 'NR == FNR { given[$1] = 1; next } !($1 in given) { print "object " $2 " " $1 }' "$dir/given" "$dir/all"
"""


async def audit_repositories(sandbox: Sandbox, workdir: str, base: str) -> list[str]:
    """What is wrong with the repositories under the working folder."""
    done = await execute(sandbox, ("sh", "-c", _FIND, "sh", word(workdir)), cwd="/", seconds=_SECONDS)
    problems = []
    for found in done.stdout.decode("utf-8", "replace").splitlines():
        repository = found.removesuffix("/.git")
        problems += [f"{repository}: {problem}" for problem in await _audit(sandbox, found, base)]
    return problems


async def _audit(sandbox: Sandbox, git: str, base: str) -> list[str]:
    # A submodule's or a worktree's .git is a file; git finds its way from the folder that it is in.
    command = ("sh", "-c", f'cd "${{3%/.git}}" || exit 1\n{_AUDIT}', "sh", base, str(MOST_OBJECTS), git)
    done = await execute(sandbox, command, cwd="/", seconds=_SECONDS)
    if not done.ok:
        raise SandboxError(f"the leak audit could not look through the repository at {git}: {done.text.strip()[-300:]}")
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    said: list[str] = []
    if "no-git" in lines:
        return ["it has a history that cannot be looked through, since the root has no git: leave .git out"]
    if "base" in lines:
        said.append(f"HEAD does not contain the base commit {base[:12]}")
    if "alternates" in lines:
        said.append("it borrows objects of another repository")
    if "no-head" in lines:
        said.append(f"it holds commits but stands on none of them; {_CURE}")
    refs = [line.removeprefix("ref ") for line in lines if line.startswith("ref ")]
    if refs:
        said.append(f"{_some(refs)} leads beyond HEAD; {_CURE}")
    objects = [line.removeprefix("object ") for line in lines if line.startswith("object ")]
    if objects and not refs:
        kinds = {kind: sum(o.startswith(f"{kind} ") for o in objects) for kind in ("commit", "tree", "blob", "tag")}
        counted = ", ".join(f"{number} {kind}{'s' if number > 1 else ''}" for kind, number in kinds.items() if number)
        said.append(f"{counted} cannot be reached from HEAD and may hold the answer ({objects[0]}); {_CURE}")
    return said


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
