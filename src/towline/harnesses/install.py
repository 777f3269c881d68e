"""Installs: each harness once a machine, pinned, with its own interpreter, shown read-only to every session.

    <folder>/pi-0.87.1-1f0c…/         what sessions see as /opt/towline/pi
        bin/node, or bin/python3 and lib
        node_modules, or lib/python3.12/site-packages
        install.json                  what it was made from, written last

Invariant: an install's folder appears by one rename, whole, and never changes afterwards; its name holds the harness,
the version and a digest of the recipe, so that another recipe is another folder. No install ever runs in a session.
Builders at the same time, in this process or another, wait for each other; what an interrupted one left is removed by
the next, which finds the interpreter and the package managers' caches filled.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from towline.harnesses.base import INSTALLS, Harness, Npm, PyPI
from towline.harnesses.commands import SECONDS, InstallError, npm, pip
from towline.harnesses.interpreters import (
    PATCHELF,
    Python,
    architecture,
    byte_compile,
    find_python,
    make_node,
    make_python,
    node_version,
)
from towline.sandboxes.base import Mount, Sandbox, SandboxError, execute

VARIABLE = "TOWLINE_CACHE"
"""Names the folder that installs are under, in a folder `harnesses`."""
LAYOUT = 1
"""Goes up when the same recipe would make another folder."""
PROBE_SECONDS = 60.0
_PATIENCE = 2 * SECONDS
"""Seconds that one install waits for another of the same."""

_MARK = "install.json"
_PARTIAL = ".partial-"
_PYTHON_PROBE = "import ssl, zlib, ctypes, hashlib; print('ok')"

Say = Callable[[str], None]


def cache_folder() -> Path:
    """Where installs are unless a caller says otherwise: under `TOWLINE_CACHE`, else in the user's cache."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser().absolute() / "harnesses"
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a relative path is to be ignored.
    return (base if base.is_absolute() else Path.home() / ".cache") / "towline" / "harnesses"


def inside(harness: Harness) -> str:
    """Where the harness's install is inside every sandbox; empty for one that needs none."""
    return f"{INSTALLS}/{harness.name}" if harness.install is not None else ""


def mount(harness: Harness, folder: Path) -> Mount:
    """How the install is shown inside a sandbox."""
    return Mount(folder, inside(harness))


class Installs:
    """The installs under one folder."""

    def __init__(self, folder: Path | None = None):
        self.folder = (folder or cache_folder()).absolute()
        self._building: dict[Path, asyncio.Lock] = {}

    def place(self, harness: Harness) -> Path:
        """The folder of a harness's install, whether it is there or not."""
        if harness.install is None:
            raise InstallError(f"harness {harness.name} needs no install")
        return self.folder / f"{_safe(harness.name)}-{_safe(harness.version)}-{_digest(harness.install)}"

    def ready(self, harness: Harness) -> bool:
        return harness.install is None or (self.place(harness) / _MARK).is_file()

    async def ensure(self, harness: Harness, progress: Say | None = None) -> Path:
        """The install's folder on this machine, made if it is not there. Raises `InstallError`."""
        place = self.place(harness)
        if self.ready(harness):
            return place
        async with self._building.setdefault(place, asyncio.Lock()):
            await asyncio.to_thread(self._make, harness, place, progress or (lambda line: None))
        return place

    def remove(self, harness: Harness) -> bool:
        """Take an install away; whether there was one. No session may be using it."""
        place = self.place(harness)
        if not place.exists():
            return False
        with self._alone(place.name), tempfile.TemporaryDirectory(dir=self.folder, prefix=_PARTIAL) as old:
            place.rename(Path(old) / "old")
        return True

    def _make(self, harness: Harness, place: Path, say: Say) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InstallError(f"cannot make {self.folder}: {error.strerror}; set {VARIABLE} to a folder") from error
        with self._alone(place.name) as made:
            if self.ready(harness):
                return
            recipe = harness.install
            if isinstance(recipe, Npm):
                self._make_npm(made, recipe, say)
            elif isinstance(recipe, PyPI):
                self._make_pypi(made, harness.name, recipe, say)
            _open_to_all(made)
            facts = {"harness": harness.name, "version": harness.version, "recipe": repr(recipe), "layout": LAYOUT}
            (made / _MARK).write_text(json.dumps(facts, indent=2) + "\n")
            made.rename(place)
            say(f"{harness.name} {harness.version} is in {place}")

    def _make_npm(self, made: Path, recipe: Npm, say: Say) -> None:
        version = node_version(recipe.node)
        node = self._interpreter(f"node-{version}-{architecture()}", lambda folder: make_node(folder, recipe.node, say))
        _link_tree(node, made)
        (made / "package.json").write_text('{"private": true}\n')
        say(f"npm install {' '.join(recipe.packages)}")
        scripts = [] if recipe.scripts else ["--ignore-scripts"]
        npm(["install", *scripts, "--save-exact", *recipe.packages], made, node=made / "bin")
        for package in recipe.packages:
            name, _, wanted = package.rpartition("@")
            _check_version(name, wanted, made / "node_modules" / name / "package.json")
        _let_run(made / "node_modules")

    def _make_pypi(self, made: Path, name: str, recipe: PyPI, say: Say) -> None:
        python = find_python(recipe.python)
        key = hashlib.sha256(f"{python.executable} {PATCHELF} {LAYOUT}".encode()).hexdigest()[:8]
        base = self._interpreter(
            f"python-{python.version}-{architecture()}-{key}", lambda folder: make_python(folder, python, say)
        )
        _link_tree(base, made)
        packages = made / "lib" / f"python{python.short}" / "site-packages"
        say(f"pip install {' '.join(recipe.packages)}")
        pip(python.executable, ["install", "-q", "--no-compile", "--target", str(packages), *recipe.packages], made)
        _scripts(packages / "bin", made / "bin", f"{INSTALLS}/{name}/bin/python3")
        say("byte-compiling")
        byte_compile(made, packages)
        _import_probe(made, python)

    def _interpreter(self, name: str, make: Callable[[Path], None]) -> Path:
        """An interpreter's folder, made once for all installs on this machine, which share its files by hard links."""
        place = self.folder / name
        if place.is_dir():
            return place
        with self._alone(name) as made:
            if not place.is_dir():
                make(made)
                made.rename(place)
        return place

    @contextmanager
    def _alone(self, name: str) -> Iterator[Path]:
        """Hold the lock of one folder, which ends with its holder; an empty folder beside it, gone unless renamed."""
        locks = self.folder / ".locks"
        locks.mkdir(exist_ok=True)
        made = self.folder / f"{_PARTIAL}{name}"
        with (locks / name).open("w") as lock:
            _take(lock.fileno(), name)
            # Found under the lock, it belongs to nobody.
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir(mode=0o755)
            try:
                yield made
            finally:
                shutil.rmtree(made, ignore_errors=True)


async def check_libc(sandbox: Sandbox, harness: Harness, install: str) -> str:
    """Run the interpreter of the install, at `install` inside; its version. Raises `InstallError` if it cannot run there.

    An interpreter brings everything but the C library: in a root with musl, or with a glibc older than the machine's
    that the install was made on, it does not start.
    """
    kind = "node" if isinstance(harness.install, Npm) else "python3"
    program = f"{install}/bin/{kind}"
    done = await execute(sandbox, [program, "--version"], seconds=PROBE_SECONDS)
    if done.ok and kind == "python3":
        # Modules in C are linked apart from the interpreter.
        imported = await execute(sandbox, [program, "-I", "-c", _PYTHON_PROBE], seconds=PROBE_SECONDS)
        done = done if imported.ok else imported
    if done.ok:
        return done.stdout.decode("utf-8", "replace").strip()
    said = " ".join(done.text.split())[-300:]
    libc = await _libc(sandbox)
    missing = re.search(r"loading shared libraries: (\S+?):", said)
    if "musl" in libc:
        why = "the root has musl instead of glibc"
    elif "GLIBC_" in said or "GLIBCXX_" in said:
        why = f"the root's C library is too old ({libc or 'version unknown'})"
    elif missing:
        why = f"the root has no {missing[1]}"
    elif done.timed_out:
        why = f"it did not end within {PROBE_SECONDS:.0f} s"
    else:
        why = f"it ended with exit code {done.code}"
    raise InstallError(f"{harness.name} cannot run in this root: {program}: {why}{f' ({said})' if said else ''}")


async def _libc(sandbox: Sandbox) -> str:
    """What can be told of the root's C library, in one line."""
    look = "ls /lib/ld-musl-* 2>/dev/null; ldd --version 2>&1 | head -n 1"
    try:
        done = await execute(sandbox, ["/bin/sh", "-c", look], seconds=PROBE_SECONDS)
    except SandboxError:
        return ""
    return " ".join(done.stdout.decode("utf-8", "replace").split())


def _take(lock: int, name: str) -> None:
    """Wait for a lock, but not for ever: a thread that waits in the kernel could not even be given up."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise InstallError(f"{name} has been installed by another process for {_PATIENCE:.0f} s") from None
            time.sleep(0.1)
        else:
            return


def _digest(recipe: Npm | PyPI) -> str:
    parts = [LAYOUT, architecture(), repr(recipe)]
    parts.append(node_version(recipe.node) if isinstance(recipe, Npm) else PATCHELF)
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:12]


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]", "_", text) or "_"


def _link_tree(source: Path, target: Path) -> None:
    """The same files under another folder: hard links, or copies where the file system has none."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other, follow_symlinks=False)
        except OSError:
            shutil.copy2(one, other, follow_symlinks=False)

    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, copy_function=link)


def _check_version(name: str, wanted: str, manifest: Path) -> None:
    try:
        found = json.loads(manifest.read_text("utf-8")).get("version")
    except (OSError, ValueError) as error:
        raise InstallError(f"npm installed no {name}: {error}") from error
    if re.fullmatch(r"\d+\.\d+\.\d+\S*", wanted) and found != wanted:
        raise InstallError(f"npm installed {name} {found} where {wanted} was asked for")


def _let_run(folder: Path) -> None:
    """Make programs executable that their package would when it first runs, which is too late in a read-only mount."""
    for file in _files(folder):
        if file.suffix not in (".node", ".js", ".so", ".json", ".ts", ".map"):
            with file.open("rb") as content:
                program = content.read(4) == b"\x7fELF"
            if program:
                file.chmod(0o755)


def _open_to_all(folder: Path) -> None:
    """Let every user read an install, whatever the umask was: a sandbox runs as somebody else."""
    for file in _files(folder):
        mode = file.stat().st_mode & 0o777
        wanted = mode | (0o555 if mode & 0o100 else 0o444)
        if wanted != mode:
            file.chmod(wanted)
    for parent, _, _ in os.walk(folder):
        os.chmod(parent, 0o755)


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (file for name in names if not (file := Path(parent, name)).is_symlink())


def _scripts(source: Path, target: Path, interpreter: str) -> None:
    """Programs of packages, to be run by the interpreter at its place inside a sandbox."""
    if not source.is_dir():
        return
    for file in sorted(source.iterdir()):
        data = file.read_bytes()
        head, _, rest = data.partition(b"\n")
        if head.startswith(b"#!") and b"python" in head:
            data = f"#!{interpreter}\n".encode() + rest
        (target / file.name).write_bytes(data)
        (target / file.name).chmod(0o755)
    shutil.rmtree(source)


def _import_probe(made: Path, python: Python) -> None:
    """The copied interpreter runs, sees its own packages, and nothing of the machine's."""
    code = f"{_PYTHON_PROBE}; import sys; print('\\n'.join(sys.path))"
    done = subprocess.run(
        [str(made / "bin" / "python3"), "-I", "-c", code],
        capture_output=True,
        text=True,
        env={},
        check=False,
        timeout=300,
    )
    if done.returncode:
        raise InstallError(f"the copy of {python.executable} does not run: {' '.join(done.stderr.split())[-400:]}")
    outside = [path for path in done.stdout.splitlines()[1:] if path and not Path(path).is_relative_to(made)]
    if outside or str(made) not in done.stdout:
        raise InstallError(
            f"the copy of {python.executable} looks for modules in {outside}; use a Python of pyenv or uv"
        )
