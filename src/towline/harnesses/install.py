"""Installs: each harness once per machine, pinned, with its own interpreter, mounted read-only in every session.

    <folder>/pi-0.87.1-1f0c…/         what sessions see as /opt/towline/pi
        bin/node, or bin/python3 and lib
        node_modules, or lib/python3.12/site-packages
        install.json                  what it was made from, written last

Invariant: an install's folder appears atomically (one rename) and never changes afterwards; its name contains the harness,
the version and a digest of the recipe, so that another recipe is another folder. No install ever runs in a session.
Concurrent builders, in this process or another, wait for each other; what an interrupted one left is removed by the next,
which finds the interpreter and the package managers' caches filled.
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

from towline.common.files import user_cache_folder
from towline.common.progress import OnProgress
from towline.harnesses.base import INSTALL_ROOT, Harness, InstallError, Npm, PyPI
from towline.harnesses.install_scripts import build_wheels, run_install_scripts
from towline.harnesses.locks import lock_digest, pypi_lock, split_lock
from towline.harnesses.toolchain import (
    PATCHELF,
    SECONDS,
    PythonInfo,
    architecture,
    byte_compile,
    find_python,
    make_node,
    make_python,
    node_version,
    npm,
    npm_locked,
    pip,
    pip_locked,
)
from towline.sandboxes.base import Mount, Sandbox, SandboxError, execute

CACHE_VARIABLE = "TOWLINE_CACHE"
"""The cache folder; installs are in its subfolder `harnesses`."""
LAYOUT = 2
"""Increment when the same recipe produces a different folder."""
PROBE_SECONDS = 60.0
_LOCK_TIMEOUT = 2 * SECONDS
"""Seconds that one install waits for another of the same harness."""

_MARK = "install.json"
_PARTIAL = ".partial-"
_PYTHON_PROBE = "import ssl, zlib, ctypes, hashlib; print('ok')"


def cache_folder() -> Path:
    """The default folder of installs: under `TOWLINE_CACHE`, else in the user's cache."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given).expanduser().absolute() / "harnesses"
    return user_cache_folder("harnesses")


def sandbox_path(harness: Harness) -> str:
    """The path of the harness's install inside every sandbox; empty if it needs none."""
    return f"{INSTALL_ROOT}/{harness.name}" if harness.install is not None else ""


def install_mount(harness: Harness, folder: Path) -> Mount:
    """The mount of an install inside a sandbox."""
    return Mount(folder, sandbox_path(harness))


class Installs:
    """The installs under one folder."""

    def __init__(self, folder: Path | None = None):
        self.folder = (folder or cache_folder()).absolute()
        self._building: dict[Path, asyncio.Lock] = {}

    def path(self, harness: Harness) -> Path:
        """The folder of a harness's install, whether it exists or not."""
        if harness.install is None:
            raise InstallError(f"harness {harness.name} needs no install")
        return self.folder / f"{_safe(harness.name)}-{_safe(harness.version)}-{_digest(harness.install)}"

    def ready(self, harness: Harness) -> bool:
        return harness.install is None or (self.path(harness) / _MARK).is_file()

    async def ensure(self, harness: Harness, on_progress: OnProgress | None = None) -> Path:
        """The install's folder on this machine, built if missing. Raises `InstallError`."""
        path = self.path(harness)
        if self.ready(harness):
            return path
        async with self._building.setdefault(path, asyncio.Lock()):
            await asyncio.to_thread(self._build, harness, path, on_progress or (lambda line: None))
        return path

    def remove(self, harness: Harness) -> bool:
        """Remove an install; whether there was one. No session may be using it."""
        path = self.path(harness)
        if not path.exists():
            return False
        with self._locked(path.name), tempfile.TemporaryDirectory(dir=self.folder, prefix=_PARTIAL) as old:
            path.rename(Path(old) / "old")
        return True

    def _build(self, harness: Harness, path: Path, on_progress: OnProgress) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InstallError(
                f"cannot create {self.folder}: {error.strerror}; set {CACHE_VARIABLE} to a writable folder"
            ) from error
        with self._locked(path.name) as partial:
            if self.ready(harness):
                return
            recipe = harness.install
            if isinstance(recipe, Npm):
                self._build_npm(partial, harness.name, recipe, on_progress)
            elif isinstance(recipe, PyPI):
                self._build_pypi(partial, harness.name, recipe, on_progress)
            _make_readable(partial)
            facts = {"harness": harness.name, "version": harness.version, "recipe": repr(recipe), "layout": LAYOUT}
            (partial / _MARK).write_text(json.dumps(facts, indent=2) + "\n")
            partial.rename(path)
            on_progress(f"{harness.name} {harness.version} is in {path}")

    def _build_npm(self, partial: Path, harness: str, recipe: Npm, on_progress: OnProgress) -> None:
        version = node_version(recipe.node)
        node = self._interpreter(
            f"node-{version}-{architecture()}", lambda folder: make_node(folder, recipe.node, on_progress)
        )
        _link_tree(node, partial)
        on_progress(f"npm install {' '.join(recipe.packages)}")
        if recipe.lock:
            npm_locked(recipe.lock, recipe.packages, partial)
        else:
            (partial / "package.json").write_text('{"private": true}\n')
            npm(["install", "--ignore-scripts", "--save-exact", *recipe.packages], partial, node=partial / "bin")
        if recipe.scripts:
            on_progress("running install scripts in a sandbox")
            run_install_scripts(partial, harness)
        for package in recipe.packages:
            name, _, wanted = package.rpartition("@")
            _check_version(name, wanted, partial / "node_modules" / name / "package.json")
        _make_executable(partial / "node_modules")

    def _build_pypi(self, partial: Path, name: str, recipe: PyPI, on_progress: OnProgress) -> None:
        python = find_python(recipe.python)
        key = hashlib.sha256(f"{python.executable} {PATCHELF} {LAYOUT}".encode()).hexdigest()[:8]
        base = self._interpreter(
            f"python-{python.version}-{architecture()}-{key}", lambda folder: make_python(folder, python, on_progress)
        )
        _link_tree(base, partial)
        packages = partial / "lib" / f"python{python.short}" / "site-packages"
        on_progress(f"pip install {' '.join(recipe.packages)}")
        if recipe.lock:
            wheels, sources = split_lock(pypi_lock(recipe.lock, recipe.packages), recipe.sources)
            pip_locked(python.executable, wheels, packages, partial)
            if sources:
                on_progress("building packages in a sandbox")
                built = build_wheels(python, sources, partial / ".wheels")
                options = ["install", "-q", "--no-compile", "--no-index", "--no-deps", "--target", str(packages)]
                pip(python.executable, [*options, *map(str, built)], partial)
                shutil.rmtree(partial / ".wheels")
        else:
            # Wheels only: building a package would run its code here.
            options = ["install", "-q", "--no-compile", "--only-binary", ":all:", "--target", str(packages)]
            pip(python.executable, [*options, *recipe.packages], partial)
        _move_scripts(packages / "bin", partial / "bin", f"{INSTALL_ROOT}/{name}/bin/python3")
        on_progress("byte-compiling")
        byte_compile(partial, packages)
        _import_probe(partial, python)

    def _interpreter(self, name: str, make: Callable[[Path], None]) -> Path:
        """An interpreter's folder, built once per machine; installs share its files by hard links."""
        path = self.folder / name
        if path.is_dir():
            return path
        with self._locked(name) as partial:
            if not path.is_dir():
                make(partial)
                partial.rename(path)
        return path

    @contextmanager
    def _locked(self, name: str) -> Iterator[Path]:
        """Hold the lock of one folder, which is released when its holder dies; yields an empty folder beside it, removed
        afterwards unless renamed."""
        locks = self.folder / ".locks"
        locks.mkdir(exist_ok=True)
        partial = self.folder / f"{_PARTIAL}{name}"
        with (locks / name).open("w") as lock:
            _acquire(lock.fileno(), name)
            # Whatever is found under the lock is a leftover.
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o755)
            try:
                yield partial
            finally:
                shutil.rmtree(partial, ignore_errors=True)


async def check_libc(sandbox: Sandbox, harness: Harness, install: str) -> str:
    """Run the interpreter of the install, at `install` inside; returns its version. Raises `InstallError` if it cannot run.

    An interpreter brings everything but the C library: in a root with musl, or with a glibc older than that of the
    machine where the install was built, it does not start.
    """
    kind = "node" if isinstance(harness.install, Npm) else "python3"
    program = f"{install}/bin/{kind}"
    done = await execute(sandbox, [program, "--version"], seconds=PROBE_SECONDS)
    if done.ok and kind == "python3":
        # C extension modules are linked separately from the interpreter.
        imported = await execute(sandbox, [program, "-I", "-c", _PYTHON_PROBE], seconds=PROBE_SECONDS)
        done = done if imported.ok else imported
    if done.ok:
        return done.stdout.decode("utf-8", "replace").strip()
    output = " ".join(done.text.split())[-300:]
    libc = await _libc(sandbox)
    missing = re.search(r"loading shared libraries: (\S+?):", output)
    if "musl" in libc:
        why = "the root has musl instead of glibc"
    elif "GLIBC_" in output or "GLIBCXX_" in output:
        why = f"the root's C library is too old ({libc or 'version unknown'})"
    elif missing:
        why = f"the root has no {missing[1]}"
    elif done.timed_out:
        why = f"it did not exit within {PROBE_SECONDS:.0f} s"
    else:
        why = f"it ended with exit code {done.code}"
    raise InstallError(f"{harness.name} cannot run in this root: {program}: {why}{f' ({output})' if output else ''}")


async def _libc(sandbox: Sandbox) -> str:
    """What is known of the root's C library, in one line."""
    command = "ls /lib/ld-musl-* 2>/dev/null; ldd --version 2>&1 | head -n 1"
    try:
        done = await execute(sandbox, ["/bin/sh", "-c", command], seconds=PROBE_SECONDS)
    except SandboxError:
        return ""
    return " ".join(done.stdout.decode("utf-8", "replace").split())


def _acquire(lock: int, name: str) -> None:
    """Wait for a lock by polling, with a timeout: a thread that blocks in the kernel could not be abandoned."""
    deadline = time.monotonic() + _LOCK_TIMEOUT
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise InstallError(f"another process has been installing {name} for {_LOCK_TIMEOUT:.0f} s") from None
            time.sleep(0.1)
        else:
            return


def _digest(recipe: Npm | PyPI) -> str:
    parts = [LAYOUT, architecture(), repr(recipe), lock_digest(recipe.lock)]
    parts.append(node_version(recipe.node) if isinstance(recipe, Npm) else PATCHELF)
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:12]


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]", "_", text) or "_"


def _link_tree(source: Path, target: Path) -> None:
    """The same files in another folder: hard links, or copies where the file system does not support them."""

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
        raise InstallError(f"npm installed {name} {found} instead of {wanted}")


def _make_executable(folder: Path) -> None:
    """Make programs executable now: their package would do so when it first runs, too late in a read-only mount."""
    for file in _files(folder):
        if file.suffix not in (".node", ".js", ".so", ".json", ".ts", ".map"):
            with file.open("rb") as content:
                program = content.read(4) == b"\x7fELF"
            if program:
                file.chmod(0o755)


def _make_readable(folder: Path) -> None:
    """Let every user read an install, whatever the umask: a sandbox runs as another user."""
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


def _move_scripts(source: Path, target: Path, interpreter: str) -> None:
    """Move the packages' programs to `target`, run by the interpreter at its path inside a sandbox."""
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


def _import_probe(partial: Path, python: PythonInfo) -> None:
    """Check that the copied interpreter runs and sees only its own packages."""
    code = f"{_PYTHON_PROBE}; import sys; print('\\n'.join(sys.path))"
    done = subprocess.run(
        # Without `site`: a package's .pth file would run its code here.
        [str(partial / "bin" / "python3"), "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        env={},
        check=False,
        timeout=300,
    )
    if done.returncode:
        raise InstallError(f"the copy of {python.executable} does not run: {' '.join(done.stderr.split())[-400:]}")
    outside = [path for path in done.stdout.splitlines()[1:] if path and not Path(path).is_relative_to(partial)]
    if outside or str(partial) not in done.stdout:
        raise InstallError(
            f"the copy of {python.executable} looks for modules in {outside}; use a Python from pyenv or uv"
        )
