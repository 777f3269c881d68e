"""What git would act on in a carried tree: configuration, hooks, attributes, pointers to other repositories.

A repository's configuration runs programs (`core.fsmonitor`, filters, aliases, hooks). Files of a git folder that do so stay
behind; `config` is rewritten from a short list of harmless keys, so that the repository still opens.
"""

from __future__ import annotations

import re

DROPPED = (
    "hooks/",
    "info/attributes",
    "config.worktree",
    "objects/info/alternates",
    "commondir",
    "gitdir",
    "rr-cache/",
)
"""Parts of a git folder that stay behind."""
_KEPT = {
    "core": {
        "repositoryformatversion",
        "filemode",
        "bare",
        "ignorecase",
        "symlinks",
        "precomposeunicode",
        "logallrefupdates",
    },
    "extensions": {"objectformat", "refstorage"},
    "user": {"name", "email"},
    "init": {"defaultbranch"},
}
_HARMLESS = {"remote", "branch", "gc", "pack", "color", "push", "pull", "fetch", "advice", "commit", "submodule", "lfs"}
"""Sections that stay behind without being suspicious."""
_SECTION = re.compile(r"\[\s*([A-Za-z0-9.-]{1,64})[^\]\n]{0,512}\]")
_KEY = re.compile(r"([A-Za-z][A-Za-z0-9-]{0,64})\s*=?\s*(.*)")
MAX_CONFIG = 64 * 1024
"""Longest configuration that is read, in bytes."""


def git_folder(names: set[str], path: str) -> str | None:
    """The git folder that a path is in: named `.git`, or with a repository's own files. Empty for the top itself."""
    parts = path.split("/")
    for depth in range(len(parts)):
        if parts[depth] == ".git":
            return "/".join(parts[: depth + 1])
    for depth in range(len(parts)):
        folder = "/".join(parts[:depth])
        prefix = f"{folder}/" if folder else ""
        if f"{prefix}HEAD" in names and f"{prefix}objects" in names and f"{prefix}refs" in names:
            return folder
    return None


def clean_config(data: bytes) -> tuple[bytes, list[str]]:
    """The configuration with harmless keys only, and the suspicious keys that it had."""
    kept: list[str] = []
    suspicious: list[str] = []
    section = ""
    text = data[:MAX_CONFIG].decode("utf-8", "replace")
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip()
        if opened := _SECTION.match(line):
            section = opened[1].lower()
            line = line[opened.end() :].strip()
            if section in _KEPT:
                kept.append(f"[{section}]")
        if not line or line[0] in "#;":
            continue
        key = _KEY.fullmatch(line)
        name = key[1].lower() if key else ""
        if key and name in _KEPT.get(section, ()) and re.fullmatch(r"[\w .@+-]{0,200}", key[2]):
            kept.append(f"\t{name} = {key[2] or 'true'}")
        elif section not in _HARMLESS:
            suspicious.append(f"{section}.{name or '?'}"[:80])
    return ("\n".join(kept) + "\n").encode(), suspicious
