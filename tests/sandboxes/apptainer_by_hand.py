"""The real Apptainer, in a Debian sid root file system: a suite that is run manually, since no stable Debian has it.

    PYTHONPATH=tests python tests/sandboxes/apptainer_by_hand.py FOLDER

makes the root in FOLDER with mmdebstrap, if it does not exist, and runs the tests below in it as an ordinary user. It needs
root, mmdebstrap, bubblewrap (which only changes the root here, and isolates nothing), busybox-static and a mirror.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.sandboxes import contract
from support.sandboxes.roots_rig import busybox_root, tar_of
from towline.sandboxes.apptainer.runtime import ApptainerRuntime
from towline.sandboxes.base import ChangeKind, PathChange, SandboxError, SandboxSpec, Unsupported
from towline.sandboxes.files import archives
from towline.sandboxes.images.build import build
from towline.sandboxes.images.root_cache import RootCache
from towline.schema import Network, Resources

LIMITED = Resources()
"""No limits: those that cannot be enforced would be refused."""


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        folder = busybox_root(Path(name) / "root")
        yield str(tar_of(folder, Path(name) / "root.tar"))


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[ApptainerRuntime]:
    opened = ApptainerRuntime(tmp_path / "data")
    await opened.open()
    yield opened
    await opened.close()
    assert not list((tmp_path / "data").glob("towline-*"))
    assert contract.processes(str(tmp_path)) == []


@pytest.fixture
def spec(root: str) -> SandboxSpec:
    return SandboxSpec(root=root, resources=LIMITED)


CHECKS = [*contract.CHECKS, *contract.ISOLATION, contract.LIMITS["seconds"]]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: contract.Check, runtime: ApptainerRuntime, spec: SandboxSpec, tmp_path: Path) -> None:
    await check(runtime, spec, tmp_path)


@pytest.mark.parametrize("limit", ["memory_mb", "pids"])
async def test_a_limit_is_enforced_or_refused(
    limit: str, runtime: ApptainerRuntime, spec: SandboxSpec, tmp_path: Path
) -> None:
    print(runtime.facts)
    if limit in runtime.facts.enforced:
        await contract.LIMITS[limit](runtime, spec, tmp_path)
    else:
        with pytest.raises(Unsupported, match=limit):
            await runtime.create(dataclasses.replace(spec, resources=Resources.model_validate({limit: 64})))
        assert any(limit in note for note in runtime.facts.notes)


async def test_layers_environment_and_refused_specs(
    runtime: ApptainerRuntime, spec: SandboxSpec, tmp_path: Path
) -> None:
    layer = tmp_path / "layer"
    (layer / "etc").mkdir(parents=True)
    (layer / "etc/added").write_text("by the layer\n")
    os.mknod(layer / "etc/old", 0o020000, 0)
    async with contract.made(runtime, spec, layers=(layer,), env=(("HOME", "/home/agent"),)) as sandbox:
        odd = 'a,b "c" $x `y` \\n z'
        seen = await contract.sh(sandbox, 'cat /etc/added; printf "%s|%s\\n" "$HOME" "$ODD"', env={"ODD": odd})
        assert seen == f"by the layer\n/home/agent|{odd}\n"
        assert await contract.sh(sandbox, "test ! -e /etc/old && id -u && rm /etc/added") == "0\n"
        assert PathChange("/etc/added", ChangeKind.DELETED) in await sandbox.diff()
        await contract.sh(sandbox, "ln -s /etc /work/link")
        await sandbox.put(archives.pack({"through": b"x"}), "/work/link/deeper")
        assert await contract.sh(sandbox, "cat /etc/deeper/through") == "x"
        assert not os.path.lexists("/etc/deeper")  # noqa: ASYNC240
    for refused in (
        dataclasses.replace(spec, user="agent"),
        dataclasses.replace(spec, root=""),
        dataclasses.replace(spec, resources=Resources(disk_mb=100)),
    ):
        with pytest.raises(Unsupported):
            await runtime.create(refused)
    with pytest.raises(SandboxError, match="no root file system"):
        await runtime.create(dataclasses.replace(spec, root="docker://debian"))
    async with contract.made(runtime, spec, network=Network.OPEN) as sandbox:
        assert sandbox.listener is None


DOCKERFILE = """
FROM debian:12
ENV GREETING=hello
WORKDIR /srv/app
COPY config .
RUN echo "$GREETING" | cat config - > out && rm /etc/old
"""


async def test_a_dockerfile_is_built(runtime: ApptainerRuntime, spec: SandboxSpec, tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "config").write_text("configured\n")
    (context / "Dockerfile").write_text(DOCKERFILE)
    built = await build(runtime, spec.root, context, cache=RootCache(tmp_path / "cache", 1 << 30), resources=LIMITED)
    async with contract.made(runtime, spec, layers=built.layers, workdir=built.workdir) as sandbox:
        assert await contract.sh(sandbox, "cat out; ls /etc/old 2>&1 | grep -c 'No such'") == "configured\nhello\n1\n"


NODE = """
import asyncio, sys
from pathlib import Path
from towline.sandboxes.base import SandboxSpec
from towline.sandboxes.apptainer.runtime import ApptainerRuntime
async def main():
    runtime = ApptainerRuntime(Path(sys.argv[1]))
    await runtime.open()
    sandbox = await runtime.create(SandboxSpec(root=sys.argv[2]))
    process = await sandbox.start(["sh", "-c", "setsid sh -c 'sleep 301; echo' node-that-dies & echo up; sleep 302", "node-that-dies"])
    print((await process.stdout.readline()).decode(), flush=True)
    await process.wait()
asyncio.run(main())
"""


async def test_a_node_that_is_killed_leaves_nothing_running(root: str, tmp_path: Path) -> None:
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NODE, str(tmp_path / "data"), root, stdout=subprocess.PIPE
    )
    assert node.stdout
    assert await node.stdout.readline() == b"up\n"
    assert contract.processes("node-that-dies")
    node.kill()
    await node.wait()
    for _ in range(200):
        if not contract.processes("node-that-dies"):
            break
        await asyncio.sleep(0.05)
    assert not contract.processes("node-that-dies")
    runtime = ApptainerRuntime(tmp_path / "data")
    await runtime.open()
    await runtime.close()
    assert not list((tmp_path / "data").glob("towline-*"))


def main() -> None:
    """Make the root if it does not exist, and run this file in it."""
    folder = Path(sys.argv[1]).resolve()
    packages = "apptainer,ca-certificates,iproute2,busybox-static,libffi8,libbz2-1.0,liblzma5,libsqlite3-0,util-linux"
    if not (folder / "usr/bin/apptainer").exists():
        # The index of a snapshot mirror is signed, but expired.
        old = '--aptopt=Acquire::Check-Valid-Until "false"'
        subprocess.run(["mmdebstrap", "--variant=apt", old, f"--include={packages}", "sid", str(folder)], check=True)
    with open(folder / "etc/passwd", "r+") as users:
        if "agent:" not in users.read():
            users.write("agent:x:1500:1500::/tmp:/bin/sh\n")
    # The interpreter, its packages and the repository, at the same paths as outside.
    here = Path(__file__).resolve().parents[2]
    shown = {str(Path(path).resolve()) for path in (sys.prefix, sys.base_prefix, here)} | {sys.prefix}
    parents = sorted({str(parent) for path in shown for parent in list(Path(path).parents)[:-1]})
    for parent in parents:
        (folder / parent.lstrip("/")).mkdir(parents=True, exist_ok=True)
        (folder / parent.lstrip("/")).chmod(0o755)
    folders = [
        word for parent in parents if parent.startswith("/tmp/") for word in ("--perms", "0755", "--dir", parent)
    ]
    binds = [word for path in sorted(shown) for word in ("--ro-bind", path, path)]
    places = [word for path in ("/proc", "/sys") for word in ("--bind", path, path)]
    command = [
        "bwrap",
        "--bind",
        str(folder),
        "/",
        "--dev-bind",
        "/dev",
        "/dev",
        *places,
        "--tmpfs",
        "/tmp",
        *folders,
        *binds,
    ]
    command += ["--chmod", "1777", "/tmp", "--setenv", "PYTHONPATH", f"{here}/src", "--chdir", str(here), "--"]
    command += ["setpriv", "--reuid=1500", "--regid=1500", "--clear-groups", sys.executable, "-B", "-m", "pytest", "-p"]
    command += ["no:cacheprovider", "-v", "-rA", "-o", f"pythonpath={here}/tests", __file__, *sys.argv[2:]]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
