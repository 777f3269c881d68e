"""Installs for real: npm and pip on packages made here, with the interpreters that `towline harness install` left.

What they make must run in a root that has neither Node nor Python, and be made once however many ask.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from support.sandboxes.bare_root import CPLUSPLUS, make_bare_root
from towline.harnesses.base import Harness, InstallError, Launch, Npm, PyPI
from towline.harnesses.install import Installs, cache_folder, check_libc, install_mount, sandbox_path
from towline.harnesses.toolchain import find_python
from towline.sandboxes.base import SandboxSpec, execute
from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime

CACHE = cache_folder()
"""Found at collection, before the user's cache folder is hidden."""


@pytest.fixture
def installs(tmp_path: Path) -> Installs:
    """An empty folder of installs that has the interpreters already: they are fetched, and tests reach no network."""
    made = Installs(tmp_path / "installs")
    made.folder.mkdir()
    for pattern in ("node-*", "python-3.12*"):
        found = sorted(CACHE.glob(pattern))
        assert found, f"no {pattern} in {CACHE}; run: towline harness install pi hermes"
        for place in found:
            (made.folder / place.name).symlink_to(place)
    return made


def npm_harness(folder: Path, version: str = "1.2.3") -> Harness:
    """A program on npm that tells its version, its Node and whether its install script ran."""
    source = folder / "package"
    source.mkdir(parents=True, exist_ok=True)
    package = {
        "name": "greeter",
        "version": version,
        "bin": {"greet": "greet.js"},
        "scripts": {"postinstall": "echo yes > ran"},
    }
    (source / "package.json").write_text(json.dumps(package))
    (source / "greet.js").write_text(
        "const fs = require('fs');\n"
        f"console.log('hello {version}', process.execPath, fs.existsSync(__dirname + '/ran'));\n"
    )
    packed = folder / f"greeter-{version}.tgz"
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(source, "package")
    return Harness("greeter", "greets", lambda place: Launch(()), Npm((f"greeter@file:{packed}",)), version)


def pypi_harness(folder: Path) -> Harness:
    """A program on PyPI with a command of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "greeter-1.0-py3-none-any.whl"
    facts = "greeter-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("greeter.py", "import sys, ssl, sqlite3\ndef main():\n    print('hello', sys.executable)\n")
        archive.writestr(f"{facts}/METADATA", "Metadata-Version: 2.1\nName: greeter\nVersion: 1.0\n")
        archive.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{facts}/entry_points.txt", "[console_scripts]\ngreet = greeter:main\n")
        archive.writestr(f"{facts}/RECORD", "")
    return Harness("pygreeter", "greets", lambda place: Launch(()), PyPI((f"greeter @ file://{wheel}",)), "1.0")


async def test_installs_run_where_there_is_no_node_and_no_python(tmp_path: Path, installs: Installs) -> None:
    greeter, pygreeter = npm_harness(tmp_path / "npm"), pypi_harness(tmp_path / "pypi")
    scripted = replace(greeter, name="scripted", install=replace(greeter.install, scripts=True))
    said: list[str] = []
    all_three = (greeter, scripted, pygreeter)
    places = {harness.name: await installs.ensure(harness, said.append) for harness in all_three}
    assert any(line.startswith("npm install") for line in said)
    for harness in all_three:
        place = places[harness.name]
        assert place.parent == installs.folder
        assert place.name.startswith(f"{harness.name}-{harness.version}-"), "the folder names what is in it"
    compiled = places["pygreeter"] / "lib/python3.12/site-packages/__pycache__/greeter.cpython-312.pyc"
    assert compiled.is_file(), "byte-compiled once, for mounts that nobody can write to"

    root = make_bare_root(tmp_path / "root", places["greeter"] / "bin" / "node")
    spec = SandboxSpec(
        root=str(root), mounts=tuple(install_mount(harness, places[harness.name]) for harness in all_three)
    )
    runtime = BubblewrapRuntime(tmp_path / "sandboxes")
    await runtime.open()
    try:
        sandbox = await runtime.create(spec)
        for name in ("node", "python3", "python"):
            assert (await execute(sandbox, ["sh", "-c", f"command -v {name}"])).code != 0, f"the root has {name}"
        assert (await check_libc(sandbox, greeter, sandbox_path(greeter))).startswith("v24.")
        assert (await check_libc(sandbox, pygreeter, sandbox_path(pygreeter))).startswith("Python 3.12.")
        for harness, ran in ((greeter, "false"), (scripted, "true")):
            at = sandbox_path(harness)
            done = await execute(sandbox, [f"{at}/bin/node", f"{at}/node_modules/greeter/greet.js"])
            assert done.text == f"hello 1.2.3 {at}/bin/node {ran}\n"
        done = await execute(sandbox, ["/opt/towline/pygreeter/bin/greet"])
        assert done.text == "hello /opt/towline/pygreeter/bin/python3\n"
        # The programs that a harness starts see nothing of its interpreter.
        done = await execute(
            sandbox, ["sh", "-c", "/opt/towline/pygreeter/bin/python3 -c 'import os; os.system(\"env\")'"]
        )
        assert "LD_LIBRARY_PATH" not in done.text
        assert "PYTHON" not in done.text
        done = await execute(sandbox, ["sh", "-c", f"echo x > {sandbox_path(greeter)}/new"])
        assert done.code != 0
    finally:
        await runtime.close()
    assert not (places["greeter"] / "new").exists()


async def test_a_root_that_cannot_run_an_install_is_reported_in_one_line(tmp_path: Path, installs: Installs) -> None:
    greeter = npm_harness(tmp_path / "npm")
    place = await installs.ensure(greeter)
    root = make_bare_root(tmp_path / "root", place / "bin" / "node", without=CPLUSPLUS)
    runtime = BubblewrapRuntime(tmp_path / "sandboxes")
    await runtime.open()
    try:
        sandbox = await runtime.create(SandboxSpec(root=str(root), mounts=(install_mount(greeter, place),)))
        with pytest.raises(InstallError, match=r"greeter cannot run in this root: .*no libstdc\+\+\.so\.6") as caught:
            await check_libc(sandbox, greeter, sandbox_path(greeter))
        assert "\n" not in str(caught.value)
        (root / "lib").mkdir(exist_ok=True)
        (root / "lib" / "ld-musl-x86_64.so.1").write_text("")
        sandbox = await runtime.create(SandboxSpec(root=str(root), mounts=(install_mount(greeter, place),)))
        with pytest.raises(InstallError, match="musl instead of glibc"):
            await check_libc(sandbox, greeter, sandbox_path(greeter))
    finally:
        await runtime.close()


async def test_many_at_once_make_one_install(tmp_path: Path, installs: Installs) -> None:
    greeter = npm_harness(tmp_path / "npm")
    said: list[str] = []
    code = (
        "import asyncio, pathlib, test_install as t\n"
        "from towline.harnesses.install import Installs\n"
        f"made = Installs(pathlib.Path({str(installs.folder)!r}))\n"
        f"harness = t.npm_harness(pathlib.Path({str(tmp_path / 'other')!r}))\n"
        f"harness = t.replace(harness, install=t.Npm(('greeter@file:{tmp_path}/npm/greeter-1.2.3.tgz',)))\n"
        "print(asyncio.run(made.ensure(harness, lambda line: print('said', line))))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    places = await asyncio.gather(*(installs.ensure(greeter, said.append) for _ in range(20)))
    out, errors = await other.communicate()
    assert other.returncode == 0, errors.decode()
    *told, last = out.decode().splitlines()
    assert {str(place) for place in places} == {last}
    installed = [line for line in [*said, *told] if "npm install" in line]
    assert len(installed) == 1, "one of the two processes made it, once"


async def test_what_an_interrupted_install_left_is_cleared_away(tmp_path: Path, installs: Installs) -> None:
    greeter = npm_harness(tmp_path / "npm")
    place = installs.path(greeter)
    left = installs.folder / f".partial-{place.name}"
    (left / "node_modules").mkdir(parents=True)
    (left / "node_modules" / "half").write_text("")
    assert not installs.ready(greeter)
    assert await installs.ensure(greeter) == place
    assert installs.ready(greeter)
    assert not left.exists()
    assert not (place / "node_modules" / "half").exists()

    newer = npm_harness(tmp_path / "npm2", "1.2.4")
    assert await installs.ensure(newer) != place, "another version is another folder"
    assert installs.ready(greeter), "and leaves the first as it was"
    assert installs.remove(greeter)
    assert not installs.ready(greeter)
    assert not installs.remove(greeter)
    assert installs.ready(newer)


async def test_failures_name_what_is_wrong_and_leave_nothing(
    tmp_path: Path, installs: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    greeter = npm_harness(tmp_path / "npm")
    missing = replace(greeter, install=Npm((f"greeter@file:{tmp_path}/nothing.tgz",)))
    monkeypatch.setattr("towline.harnesses.toolchain.time.sleep", lambda seconds: None)
    with pytest.raises(InstallError, match="npm failed with exit status"):
        await installs.ensure(missing)
    with pytest.raises(InstallError, match=r"Python 2\.9 was not found"):
        await installs.ensure(Harness("old", "", greeter.launch, PyPI(("x==1",), python="2.9"), "1"))
    with pytest.raises(InstallError, match="no Node 3 is pinned"):
        await installs.ensure(Harness("old", "", greeter.launch, Npm(("x@1.0.0",), node="3"), "1"))
    with pytest.raises(InstallError, match="needs no install"):
        await installs.ensure(Harness("plain", "", greeter.launch))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("towline.harnesses.toolchain.util.find_spec", lambda name: None)
    with pytest.raises(InstallError, match="npm was not found"):
        await installs.ensure(greeter)
    assert [
        path.name for path in installs.folder.iterdir() if path.name.startswith((".partial", "greeter", "old"))
    ] == []


async def test_a_network_that_fails_is_tried_again_a_few_times(
    tmp_path: Path, installs: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    greeter = npm_harness(tmp_path / "npm")
    real, shim, count = shutil.which("npm"), tmp_path / "bin" / "npm", tmp_path / "count"
    shim.parent.mkdir()
    monkeypatch.setenv("PATH", f"{shim.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("towline.harnesses.toolchain.time.sleep", lambda seconds: None)

    def failing(times: int, reason: str) -> None:
        count.write_text("")
        fail = f"test $(wc -c < {count}) -gt {times} || {{ echo npm error {reason} >&2; exit 1; }}"
        shim.write_text(f'#!/bin/sh\nprintf x >> {count}\n{fail}\nexec {real} "$@"\n')
        shim.chmod(0o755)

    failing(9, "ECONNRESET")
    with pytest.raises(InstallError, match="npm failed with exit status 1: npm error ECONNRESET"):
        await installs.ensure(greeter)
    assert count.read_text() == "xxx"
    failing(9, "code E404")
    with pytest.raises(InstallError, match="E404"):
        await installs.ensure(greeter)
    assert count.read_text() == "x", "a package that is not there will not be there a second later"
    failing(2, "ECONNRESET")
    assert await installs.ensure(greeter) == installs.path(greeter)


def test_an_interpreter_is_found_by_its_version() -> None:
    found = find_python("3.12")
    assert found.short == "3.12"
    assert (found.stdlib / "os.py").is_file()
    done = subprocess.run(
        [found.executable, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True
    )
    assert done.stdout == "(3, 12)\n"
