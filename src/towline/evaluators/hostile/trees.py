"""Archives from the agent's sandbox: contents travel to the evaluation, tricks do not.

`carry_archive` rewrites an archive before it is placed anywhere. The promise: after the verifier's own files are added, no
carried path shows, replaces or stands in the way of one of them, and nothing carried makes git run a program. In particular
a symbolic link travels only if it leads, link by link, to something in the same archive that the verifier does not bring, or
to the system's programs and libraries: a link that dangles now could lead to the expected answer later. Devices, pipes and
special permissions are dropped.

What was dropped is returned by name and scored as not done; what looks like a trick is returned as a finding.
"""

from __future__ import annotations

import io
import posixpath
import sys
import tarfile
from collections.abc import Callable, Iterable

from towline.evaluators.hostile.git_files import DROPPED, clean_config, git_folder
from towline.sandboxes.files import archives

SYSTEM = (
    "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/local/bin", "/usr/local/lib",
    "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/dev/null",
)  # fmt: skip
"""Where a link may lead out to: programs and libraries, which a verifier does not bring."""
_MOST_HOPS = 40
MAX_UNPACKED = 50_000
"""Entries of an archive that this machine unpacks for itself: artifacts and logs."""
TEST_CONFIG = ("conftest.py", "pytest.ini", "sitecustomize.py", "usercustomize.py", "pytest_plugins.py")
"""Files that test runners and interpreters load by themselves: an agent's own stay behind, the environment's stay."""
TOOLS = frozenset(
    {"pytest", "_pytest", "pluggy", "unittest2", "nose", "iniconfig", "setuptools", "pkg_resources", "numpy", "pip"}
)
_SHADOWED = frozenset(sys.stdlib_module_names) | TOOLS

Finding = tuple[str, str]
"""A name of `towline.evaluators.suspicion.Cheat`, and what was found."""
KeepName = Callable[[str], bool]


def carry_archive(
    archive: bytes, path: str, brought: tuple[str, ...] = (), keep_git: bool = False, without_git: bool = False
) -> tuple[bytes, list[str], list[Finding], list[str]]:
    """The archive of `path` rewritten; what was left out; findings; and paths that an interpreter or runner may load.

    `brought` are the absolute paths of the verifier's own files. `keep_git`: configuration and hooks travel too.
    `without_git`: no git folder travels at all.
    """
    base = posixpath.normpath(path)
    own = posixpath.basename(base)
    tree = _Tree(archive, base, own)
    ours = _Brought(brought)
    left_out: list[str] = []
    findings: list[Finding] = []
    loaded: list[str] = []
    regular: set[str] = set()
    written = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as source,
        tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in source:
            name = posixpath.normpath(member.name)
            inside = tree.relative(name)
            at = posixpath.join(base, inside) if inside else base
            shown = f"{inside or own}{f' -> {member.linkname}' if member.issym() else ''}"
            info = tarfile.TarInfo(name)
            info.mode, info.mtime, info.type = member.mode & 0o777, int(max(member.mtime, 0)), member.type
            if ours.conflict(at, folder=member.isdir()):
                findings.append(("in_the_way", at))
                continue
            if is_compiled(inside):
                # Compiled code may replace a source that the verifier brings; interpreters write their own.
                if member.isreg() and _is_unchecked(source, member):
                    findings.append(("shadowing_module", shown))
                continue
            if ours.rivalled(at):
                left_out.append(shown)
                findings.append(("shadowing_module", shown))
                continue
            if ours.owns(at) and inside:
                if member.issym():
                    findings.append(("link_to_verifier", shown))
                continue
            content: bytes | None = None
            if inside and not keep_git and (git := git_folder(tree.names, inside)) is not None:
                if without_git:
                    continue
                verdict = _git(git, inside, member, source, findings)
                if verdict is None:
                    continue
                content = verdict or None
            if member.isreg():
                info.type, info.size = tarfile.REGTYPE, member.size if content is None else len(content)
                target.addfile(info, source.extractfile(member) if content is None else io.BytesIO(content))
                regular.add(name)
                if inside and _is_loaded(inside):
                    loaded.append(at)
            elif member.isdir():
                target.addfile(info)
                if inside and posixpath.basename(inside) in _SHADOWED:
                    loaded.append(at)
            elif member.issym() and inside:
                problem = link_problem(tree, inside, ours)
                if problem:
                    left_out.append(shown)
                    findings.append((problem, shown))
                else:
                    info.linkname = member.linkname
                    target.addfile(info)
                    if _is_loaded(inside) or posixpath.basename(inside) in _SHADOWED:
                        loaded.append(at)
            elif member.islnk() and posixpath.normpath(member.linkname) in regular:
                info.linkname = posixpath.normpath(member.linkname)
                target.addfile(info)
                regular.add(name)
            else:
                left_out.append(shown)
                findings.append(("link_out" if member.issym() else "special_file", shown))
    return written.getvalue(), left_out, findings, loaded


def _git(
    git: str, inside: str, member: tarfile.TarInfo, source: tarfile.TarFile, findings: list[Finding]
) -> bytes | None:
    """The new content of a file in a git folder, empty if it stays as it is; `None` if it stays behind."""
    part = inside[len(git) :].lstrip("/") if git else inside
    if not part:
        # `.git` as a file or a link names another folder as the repository.
        if member.isdir():
            return b""
        findings.append(("git_config", f"{inside} leads to another repository"))
        return None
    if part == "hooks" or any(part == name or part.startswith(name) for name in DROPPED):
        if not member.isdir() and not part.endswith(".sample"):
            findings.append(("git_config", inside))
        return None
    if part == "config" or (part.startswith(("modules/", "worktrees/")) and part.endswith("/config")):
        if not member.isreg():
            findings.append(("git_config", f"{inside} is not a file"))
            return None
        taken = source.extractfile(member)
        assert taken is not None  # a regular file has content
        content, suspicious = clean_config(taken.read())
        if suspicious:
            findings.append(("git_config", f"{inside}: {', '.join(suspicious[:5])}"))
        return content
    if "/hooks/" in part and part.startswith(("modules/", "worktrees/")):
        return None
    return b""


def is_compiled(inside: str) -> bool:
    """Whether a path is in Python's cache of compiled code, which interpreters take for the source."""
    return "__pycache__" in inside.split("/")


def _is_unchecked(source: tarfile.TarFile, member: tarfile.TarInfo) -> bool:
    """Whether compiled code says that it is not to be compared with its source."""
    taken = source.extractfile(member)
    header = taken.read(8) if taken is not None else b""
    return len(header) == 8 and header[4:] == b"\1\0\0\0"


def _is_loaded(inside: str) -> bool:
    """Whether an interpreter or a test runner may load the file by its name alone."""
    name = posixpath.basename(inside)
    if name in TEST_CONFIG or name.endswith(".pth"):
        return True
    stem, dot, kind = name.partition(".")
    return bool(dot) and stem in _SHADOWED and (kind == "py" or kind.endswith(("so", "pyc")))


class _Brought:
    """The paths of the verifier's own files."""

    def __init__(self, paths: Iterable[str]):
        self.paths = frozenset(posixpath.normpath(path) for path in paths)
        self.modules = frozenset(path[:-3] for path in self.paths if path.endswith(".py"))
        self.above = {
            "/".join(path.split("/")[:depth]) or "/" for path in self.paths for depth in range(1, path.count("/") + 1)
        }

    def rivalled(self, at: str) -> bool:
        """Whether Python would import the path in place of a module that the verifier brings to the same folder."""
        if not self.modules:
            return False
        parts = at.split("/")
        for depth in range(2, len(parts) + 1):
            stem = "/".join([*parts[: depth - 1], parts[depth - 1].partition(".")[0]])
            here = "/".join(parts[:depth])
            if stem in self.modules and not here.endswith(".py") and here not in self.above and here not in self.paths:
                return depth < len(parts) or here == stem or here.endswith((".so", ".pyc", ".pyd"))
        return False

    def owns(self, at: str) -> bool:
        """Whether the path is one of them, or below one."""
        parts = at.split("/")
        return bool(self.paths) and any("/".join(parts[:depth]) in self.paths for depth in range(2, len(parts) + 1))

    def conflict(self, at: str, *, folder: bool) -> bool:
        """Whether the path makes it impossible to place one: a file above it, or a folder in its place."""
        return (at in self.above and not folder) or (at in self.paths and folder and at not in self.above)

    def touched(self, at: str) -> bool:
        """Whether something of the verifier will be at, above or below the path."""
        return self.owns(at) or at in self.above


class _Tree:
    """The names of an archive, and where its links lead."""

    def __init__(self, archive: bytes, base: str, own: str):
        self.base, self._own = base, own
        # Checks the names; only then is the archive read.
        archives.member_names(archive)
        self.links: dict[str, str] = {}
        self.names: set[str] = set()
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            for member in tar:
                name = self.relative(posixpath.normpath(member.name))
                self.names.add(name)
                if member.issym():
                    self.links[name] = member.linkname

    def relative(self, name: str) -> str:
        return "" if name == self._own else name.removeprefix(f"{self._own}/")

    def resolve(self, link: str) -> tuple[str, list[str]]:
        """The absolute path that a link leads to, and every path on the way; empty if it loops."""
        todo = self.links[link].split("/")
        here = posixpath.join(self.base, posixpath.dirname(link)).rstrip("/")
        if self.links[link].startswith("/"):
            here = ""
        seen: list[str] = []
        hops = 0
        while todo:
            part = todo.pop(0)
            if part in ("", "."):
                continue
            if part == "..":
                here = posixpath.dirname(here).rstrip("/")
                continue
            here = f"{here}/{part}"
            seen.append(here)
            inside = here.removeprefix(f"{self.base}/") if here.startswith(f"{self.base}/") else None
            if inside in self.links:
                hops += 1
                if hops > _MOST_HOPS:
                    return "", seen
                target = self.links[inside]
                todo = [*target.split("/"), *todo]
                here = "" if target.startswith("/") else posixpath.dirname(here)
        return here or "/", seen


def link_problem(tree: _Tree, inside: str, ours: _Brought) -> str:
    """Why a link does not travel: the name of a finding, or an empty string if it does."""
    target, seen = tree.resolve(inside)
    if target and any(ours.owns(path) for path in seen):
        return "link_to_verifier"
    if not target:
        return "link_out"
    if target == tree.base or target.startswith(f"{tree.base}/"):
        name = target[len(tree.base) :].lstrip("/")
        if name not in tree.names and name:
            return "dangling_link"
        return "link_to_verifier" if ours.touched(target) and target != tree.base else ""
    if ours.touched(target):
        return "link_to_verifier"
    return "" if any(target == root or target.startswith(f"{root}/") for root in SYSTEM) else "link_out"


def carried_entries(archive: bytes) -> dict[str, tuple[bytes, int, bool]]:
    """Files and links of an archive, by name relative to its one folder: content or target, mode, whether it is a link.

    The name is empty for a single file.
    """
    found: dict[str, tuple[bytes, int, bool]] = {}
    archives.member_names(archive)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        for member in tar:
            name = posixpath.normpath(member.name).partition("/")[2]
            if member.isreg() or member.islnk():
                source = tar.extractfile(member)
                assert source is not None  # a regular file has content, a hard link has that of its file
                found[name] = (source.read(), member.mode & 0o777, False)
            elif member.issym():
                found[name] = (member.linkname.encode("utf-8", "surrogateescape"), 0o777, True)
    return found


def count_members(archive: bytes) -> int:
    """How many entries an archive has; `ArchiveError` if it is broken or has too many."""
    found = len(archives.member_names(archive))
    if found > MAX_UNPACKED:
        raise archives.ArchiveError(f"{found} entries exceed the limit of {MAX_UNPACKED}")
    return found
