"""Process sandboxes: no isolation, honest facts, refused specs, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.sandboxes import contract
from towline.sandboxes.base import Mount, SandboxError, SandboxSpec, Unsupported, execute
from towline.sandboxes.files import archives
from towline.sandboxes.process.runtime import ProcessRuntime
from towline.schema import Network, Resources

SPEC = SandboxSpec(network=Network.OPEN)


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[ProcessRuntime]:
    opened = ProcessRuntime(tmp_path / "data")
    await opened.open()
    yield opened
    await opened.close()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["lock"], "nothing is left"


@pytest.mark.parametrize("check", [*contract.CHECKS, contract.LIMITS["seconds"]], ids=lambda check: check.__name__)
async def test_contract(check: contract.Check, runtime: ProcessRuntime, tmp_path: Path) -> None:
    await check(runtime, SPEC, tmp_path)


async def test_facts_and_refused_specs(runtime: ProcessRuntime, tmp_path: Path) -> None:
    assert not runtime.facts.isolated
    assert runtime.facts.enforced == {"seconds"}
    assert any("no isolation" in note for note in runtime.facts.notes)
    refused = [
        SandboxSpec(network=Network.NONE),
        SandboxSpec(network=Network.OPEN, root=str(tmp_path)),
        SandboxSpec(network=Network.OPEN, layers=(tmp_path,)),
        SandboxSpec(network=Network.OPEN, user="other"),
        SandboxSpec(network=Network.OPEN, resources=Resources(memory_mb=100)),
    ]
    for spec in refused:
        with pytest.raises(Unsupported):
            await runtime.prepare(spec)
        with pytest.raises(Unsupported):
            await runtime.create(spec)
    with pytest.raises(SandboxError, match="cannot mount"):
        await runtime.create(SandboxSpec(network=Network.OPEN, mounts=(Mount(tmp_path / "no", "/x"),)))
    with pytest.raises(SandboxError, match="in use by another node"):
        await ProcessRuntime(tmp_path / "data").open()


async def test_inside_paths_are_mapped_to_the_sandboxs_folder(runtime: ProcessRuntime) -> None:
    async with contract.made(runtime, SPEC, network=Network.GATEWAY) as sandbox:
        assert sandbox.listener is None
        await sandbox.put(archives.pack({".config/x": b"mine"}), "/home/agent")
        script = 'cat "$HOME/.config/x" "$TOWLINE_ROOT/home/agent/.config/x"; echo " $PATH"; pwd'
        output = (
            await contract.sh(sandbox, script, env={"HOME": "/home/agent", "PATH": "/home/agent:/usr/bin:/bin"})
        ).splitlines()
        root = sandbox.outside("/")  # type: ignore[attr-defined]
        assert output == [f"minemine {root}/home/agent:/usr/bin:/bin", f"{root}/work"]
        assert (await execute(sandbox, ["cat", "/home/agent/.config/x"])).stdout == b"mine"
        assert (await execute(sandbox, ["cat", "/proc/self/comm"])).stdout == b"cat\n", (
            "the host's, since the sandbox has none"
        )
        assert (await contract.sh(sandbox, "pwd", cwd="/../../home/agent")) == f"{root}/home/agent\n"


NODE = """
import asyncio, sys
from pathlib import Path
from towline.sandboxes.base import SandboxSpec
from towline.sandboxes.process.runtime import ProcessRuntime
from towline.schema import Network
async def main():
    runtime = ProcessRuntime(Path(sys.argv[1]))
    await runtime.open()
    sandbox = await runtime.create(SandboxSpec(network=Network.OPEN))
    process = await sandbox.start(["sh", "-c", "setsid sh -c 'sleep 300; echo' node-that-dies & echo up; sleep 300"])
    print((await process.stdout.readline()).decode(), flush=True)
    await process.wait()
asyncio.run(main())
"""


async def test_a_killed_node_leaves_no_process_and_the_next_one_removes_its_folders(tmp_path: Path) -> None:
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NODE, str(tmp_path / "data"), stdout=subprocess.PIPE
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
    assert not contract.processes("node-that-dies")
    assert list((tmp_path / "data").glob("sandbox-*"))
    runtime = ProcessRuntime(tmp_path / "data")
    await runtime.open()
    await runtime.close()
    assert not list((tmp_path / "data").glob("sandbox-*"))


NICED = """
import asyncio, os, sys
from pathlib import Path
from towline.sandboxes.base import SandboxSpec, execute
from towline.sandboxes.process.runtime import ProcessRuntime
from towline.schema import Network

async def main():
    runtime = ProcessRuntime(Path(sys.argv[1]))
    await runtime.open()
    sandbox = await runtime.create(SandboxSpec(network=Network.OPEN))
    print((await execute(sandbox, ["cat", "/proc/self/autogroup"])).stdout.decode())
    await sandbox.destroy()
    await runtime.close()

os.nice(4)
asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel does not group by session")
@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel limits the rate of changes by others than root")
async def test_commands_have_the_priority_of_their_node_in_sessions_of_their_own(tmp_path: Path) -> None:
    """Between sessions the kernel looks at the nice value of their groups, which a new session does not inherit."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NICED, str(tmp_path / "niced"), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert out.decode().split()[1:] == ["nice", "4"]
