"""Files known by their content: whether a copy of a secret file is in a sandbox, under whatever name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from towline.evaluators.inside import INSIDE, word
from towline.sandboxes.base import Sandbox, SandboxError, execute

_LEAST = 24
"""Bytes; shorter files are alike by chance."""
_MOST_FILES = 500
_SECONDS = 120.0

Fingerprint = tuple[int, str]
"""Size and SHA-256."""


def fingerprints(folders: Iterable[Path], context: str) -> dict[Fingerprint, str]:
    """The files of the folders, by what is in them.

    A file that the environment's own build folder (`context`) has too is shared on purpose, if it is data: a script of the
    verifier's or the solution's never is.
    """
    shared = {_fingerprint(path) for path in _files([Path(context)])} if context else set()
    found: dict[Fingerprint, str] = {}
    for path in _files(folders):
        mark = _fingerprint(path)
        script = path.suffix in (".sh", ".py") or "expected" in path.name
        if mark[0] >= _LEAST and (script or mark not in shared):
            found.setdefault(mark, f"{path.parent.name}/{path.name}")
    return found


async def found_inside(
    sandbox: Sandbox, known: Mapping[Fingerprint, str], folders: Sequence[str]
) -> list[tuple[str, str]]:
    """Files inside with the content of known ones: path and whose content it is."""
    if not known:
        return []
    sizes = " -o ".join(f"-size {size}c" for size in sorted({size for size, _ in known}))
    # The shell's own test, since not every root has xargs; a folder that is not there is nothing.
    script = (
        f'for path do path="{INSIDE}"; [ -d "$path" ] || continue; '
        rf"find \"$path\" -xdev -type f \( {sizes} \) -exec sha256sum {{}} + 2>/dev/null; done; true"
    ).replace('\\"', '"')
    done = await execute(sandbox, ("sh", "-c", script, "sh", *map(word, folders)), cwd="/", seconds=_SECONDS)
    if not done.ok:
        raise SandboxError(f"the leak audit could not look through {', '.join(folders)}: {done.text.strip()[-300:]}")
    by_hash = {digest: name for (_, digest), name in known.items()}
    lines = (line.partition("  ") for line in done.stdout.decode("utf-8", "replace").splitlines())
    return [(path, by_hash[digest]) for digest, _, path in lines if digest in by_hash]


async def hashes_of(sandbox: Sandbox, paths: Sequence[str]) -> dict[str, str]:
    """SHA-256 of regular files inside, by path; what is none has none."""
    found: dict[str, str] = {}
    script = f'for path do given=${{path#.}}; path="{INSIDE}"; [ -f "$path" ] && [ ! -L "$path" ] || continue; '
    script += 'sum=$(sha256sum <"$path") && printf "%s  %s\\n" "${sum%% *}" "$given"; done; true'
    for start in range(0, len(paths), 500):
        command = ("sh", "-c", script, "sh", *map(word, paths[start : start + 500]))
        done = await execute(sandbox, command, cwd="/", seconds=_SECONDS)
        lines = (line.partition("  ") for line in done.stdout.decode("utf-8", "replace").splitlines())
        found |= {path: digest for digest, _, path in lines}
    return found


def _files(folders: Iterable[Path]) -> list[Path]:
    found = [path for folder in folders if folder.is_dir() for path in sorted(folder.rglob("*"))]
    return [path for path in found if path.is_file() and not path.is_symlink()][:_MOST_FILES]


def _fingerprint(path: Path) -> Fingerprint:
    with open(path, "rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
