"""Docker sandboxes against a real engine that the tests start."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.sandboxes import contract
from support.sandboxes.dockerd_rig import dockerd
from support.sandboxes.roots_rig import busybox_root, tar_of
from towline.sandboxes import linux
from towline.sandboxes.base import (
    ChangeKind,
    PathChange,
    SandboxError,
    SandboxHealth,
    SandboxSpec,
    Unsupported,
    execute,
    sandbox_health,
)
from towline.sandboxes.docker.runtime import DockerRuntime
from towline.sandboxes.files import archives
from towline.schema import Network, Resources

LIMITS = Resources(memory_mb=256, pids=64)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # Short, since the length of a socket's path is limited.
    with tempfile.TemporaryDirectory(prefix="towline-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[str]:
    with dockerd(folder) as url:
        yield url


def left_on(engine: str) -> str:
    """Containers and volumes that still exist."""
    listed = (["docker", "-H", engine, *what] for what in (["ps", "-aq"], ["volume", "ls", "-q"]))
    return "".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in listed)


@pytest.fixture(scope="module")
def root(folder: Path) -> str:
    return str(tar_of(busybox_root(folder / "root"), folder / "root.tar"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(engine: str, folder: Path) -> AsyncIterator[DockerRuntime]:
    opened = DockerRuntime(folder / "node", url=engine)
    await opened.open()
    yield opened
    await opened.close()
    assert left_on(engine) == ""
    assert sorted(path.name for path in (folder / "node").iterdir()) == ["lock", "node-id"]


@pytest.fixture
def spec(root: str) -> SandboxSpec:
    return SandboxSpec(root=root, resources=LIMITS)


CHECKS = [*contract.CHECKS, *contract.ISOLATION, *(contract.LIMITS[name] for name in ("memory_mb", "pids", "seconds"))]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: contract.Check, runtime: DockerRuntime, spec: SandboxSpec, tmp_path: Path) -> None:
    await check(runtime, spec, tmp_path)


async def test_facts_and_refused_specs(runtime: DockerRuntime, spec: SandboxSpec, tmp_path: Path) -> None:
    facts = runtime.facts
    assert facts.isolated
    assert facts.enforced >= {"memory_mb", "pids", "cpus", "seconds"}
    assert facts.networks == {Network.NONE, Network.GATEWAY}
    assert any("bridge" in note for note in facts.notes)
    refused = [dataclasses.replace(spec, network=Network.OPEN), dataclasses.replace(spec, root="")]
    if "disk_mb" not in facts.enforced:
        assert any("disk_mb" in note for note in facts.notes)
        refused.append(dataclasses.replace(spec, resources=Resources(disk_mb=100)))
    for changed in refused:
        with pytest.raises(Unsupported):
            await runtime.prepare(changed)
    with pytest.raises(SandboxError, match="docker load"):
        await runtime.prepare(dataclasses.replace(spec, root="localhost:1/no/such-image:1"))
    with pytest.raises(SandboxError, match="no root file system"):
        await runtime.prepare(dataclasses.replace(spec, root=str(tmp_path / "missing.tar")))
    with pytest.raises(SandboxError, match="no user"):
        await runtime.create(dataclasses.replace(spec, user="nobody-knows"))


async def test_users_layers_and_deletions(runtime: DockerRuntime, root: str, spec: SandboxSpec, tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    (layer / "opt").mkdir(parents=True)
    (layer / "opt/added").write_text("by the layer\n")
    changed = dataclasses.replace(spec, layers=(layer,), user="agent", workdir="/home/agent/deep/work")
    async with contract.made(runtime, changed) as sandbox:
        await sandbox.put(archives.pack({"mine": b"x"}), "/home/agent/new/folder")
        said = await contract.sh(sandbox, "id -un; pwd; cat /opt/added; stat -c %U . ../../new/folder/mine; touch ok")
        assert said.split("\n")[:5] == ["agent", "/home/agent/deep/work", "by the layer", "agent", "agent"]
        assert await contract.sh(sandbox, "id -u", user="root") == "0\n"
        await contract.sh(sandbox, "rm /etc/old; echo more >> /etc/passwd", user="0")
        changes = await sandbox.diff()
        assert PathChange("/etc/old", ChangeKind.DELETED) in changes
        assert PathChange("/etc/passwd", ChangeKind.CHANGED) in changes
        assert not {"/etc", "/.towline-init", "/home", "/dev"} & {change.path for change in changes}
    os.mknod(layer / "opt/gone", 0o020000, 0)
    os.utime(layer)
    with pytest.raises(Unsupported, match="deletes opt/gone"):
        await runtime.prepare(changed)


async def test_an_empty_image(runtime: DockerRuntime, tmp_path: Path) -> None:
    (tmp_path / "root/only").mkdir(parents=True)
    async with contract.made(runtime, SandboxSpec(root=str(tmp_path / "root"), resources=LIMITS)) as sandbox:
        await sandbox.put(archives.pack({"a": b"1"}), "/work")
        assert archives.member_names(await sandbox.get("/work")) == ["work", "work/a"]
        await sandbox.kill()
        assert archives.read_file(await sandbox.get("/work/a"), "a") == b"1"


async def test_capabilities_and_symlinks_that_lead_out(
    runtime: DockerRuntime, spec: SandboxSpec, tmp_path: Path
) -> None:
    async with contract.made(runtime, spec) as sandbox:
        status = await contract.sh(sandbox, "grep CapBnd /proc/self/status")
        assert int(status.split()[1], 16) == sum(1 << number for number in linux.CAPABILITIES.values())
        await contract.sh(sandbox, f"ln -s {tmp_path} /work/out; ln -s / /work/root")
        with pytest.raises(SandboxError):
            await sandbox.put(archives.pack({"through": b"x"}), "/work/out/deeper")
        await contract.sh(sandbox, f"mkdir -p {tmp_path}")
        await sandbox.put(archives.pack({"through": b"x"}), "/work/out/deeper")
        assert await contract.sh(sandbox, f"cat {tmp_path}/deeper/through") == "x", "a symlink leads to a folder inside"
        assert os.listdir(tmp_path) == []
        assert not archives.member_names(await sandbox.get("/work/root/etc"))[0].startswith("/")
        with pytest.raises(SandboxError):
            await sandbox.get("/work/root/no/such")


async def test_without_root_a_kill_restarts_the_container(
    runtime: DockerRuntime, spec: SandboxSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with contract.made(runtime, spec) as sandbox:
        monkeypatch.setattr(sandbox, "_local", False)
        running = await sandbox.start(["sh", "-c", "echo kept > file; echo up; sleep 600"])
        assert await running.stdout.readline() == b"up\n"
        await sandbox.kill()
        assert await running.wait() == 137
        assert await contract.sh(sandbox, "cat file") == "kept\n"
        assert (await execute(sandbox, ["sleep", "60"], seconds=0.2)).timed_out


NODE = """
import asyncio, sys
from pathlib import Path
from towline.sandboxes.base import Mount, SandboxSpec
from towline.sandboxes.docker.runtime import DockerRuntime
async def main():
    runtime = DockerRuntime(Path(sys.argv[1]), url=sys.argv[2])
    await runtime.open()
    sandbox = await runtime.create(SandboxSpec(root=sys.argv[3], mounts=(Mount(Path(sys.argv[1]), "/opt/x", writable=True),)))
    process = await sandbox.start(["sh", "-c", "setsid sleep 301 & echo up; sleep 302", "node-that-dies"])
    print((await process.stdout.readline()).decode(), flush=True)
    await process.wait()
asyncio.run(main())
"""


async def test_a_killed_node_leaves_nothing_running(engine: str, root: str, folder: Path) -> None:
    data = folder / "dying"
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NODE, str(data), engine, root, stdout=subprocess.PIPE
    )
    assert node.stdout
    assert await node.stdout.readline() == b"up\n"
    assert contract.processes("node-that-dies")
    os.kill(node.pid, signal.SIGKILL)
    await node.wait()
    for _ in range(200):
        if not contract.processes("node-that-dies"):
            break
        await asyncio.sleep(0.05)
    assert not contract.processes("node-that-dies"), "the container ends with its attached connection"
    runtime = DockerRuntime(data, url=engine)
    await runtime.open()
    await runtime.close()
    assert (left_on(engine), list(data.glob("towline-*"))) == ("", [])


@pytest.mark.parametrize("how", ["rm", "kill"])
async def test_a_container_that_is_killed_from_outside_is_reported(
    how: str, engine: str, runtime: DockerRuntime, spec: SandboxSpec
) -> None:
    sandbox = await runtime.create(spec)
    process = await sandbox.start(("sleep", "1000"))
    assert await sandbox_health(sandbox, killed=False) == SandboxHealth()
    command = ["docker", "-H", engine, how, *(["-f"] if how == "rm" else []), sandbox.container]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    assert await asyncio.wait_for(process.wait(), 60) == 137
    assert (await sandbox_health(sandbox, killed=True)).ended
    await sandbox.destroy()
    assert not (await sandbox_health(sandbox, killed=False)).ended, "the node itself destroyed it"
