"""Process sandboxes: they isolate nothing, say so, refuse what they cannot do, and still leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import contract
import pytest

from towline.sandboxes import archives
from towline.sandboxes.base import Mount, SandboxError, Spec, Unsupported, execute
from towline.sandboxes.process import ProcessRuntime
from towline.schema import Network, Resources

SPEC = Spec(network=Network.OPEN)


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


async def test_it_says_what_it_is_and_refuses_what_it_cannot_do(runtime: ProcessRuntime, tmp_path: Path) -> None:
    assert not runtime.facts.isolated
    assert runtime.facts.enforced == {"seconds"}
    assert any("no isolation" in note for note in runtime.facts.notes)
    refused = [
        Spec(network=Network.NONE),
        Spec(network=Network.OPEN, root=str(tmp_path)),
        Spec(network=Network.OPEN, layers=(tmp_path,)),
        Spec(network=Network.OPEN, user="somebody"),
        Spec(network=Network.OPEN, resources=Resources(memory_mb=100)),
    ]
    for spec in refused:
        with pytest.raises(Unsupported):
            await runtime.prepare(spec)
        with pytest.raises(Unsupported):
            await runtime.create(spec)
    with pytest.raises(SandboxError, match="nothing to mount"):
        await runtime.create(Spec(network=Network.OPEN, mounts=(Mount(tmp_path / "no", "/x"),)))
    with pytest.raises(SandboxError, match="in use by another node"):
        await ProcessRuntime(tmp_path / "data").open()


async def test_inside_paths_mean_the_sandboxs_own_folder(runtime: ProcessRuntime) -> None:
    async with contract.made(runtime, SPEC, network=Network.GATEWAY) as sandbox:
        assert sandbox.listener is None
        await sandbox.put(archives.pack({".config/x": b"mine"}), "/home/agent")
        script = 'cat "$HOME/.config/x" "$TOWLINE_ROOT/home/agent/.config/x"; echo " $PATH"; pwd'
        said = (
            await contract.sh(sandbox, script, env={"HOME": "/home/agent", "PATH": "/home/agent:/usr/bin:/bin"})
        ).splitlines()
        root = sandbox.outside("/")  # type: ignore[attr-defined]
        assert said == [f"minemine {root}/home/agent:/usr/bin:/bin", f"{root}/work"]
        assert (await execute(sandbox, ["cat", "/home/agent/.config/x"])).stdout == b"mine"
        assert (await execute(sandbox, ["cat", "/proc/self/comm"])).stdout == b"cat\n", (
            "the host's, since it is not here"
        )
        assert (await contract.sh(sandbox, "pwd", cwd="/../../home/agent")) == f"{root}/home/agent\n"


NODE = """
import asyncio, sys
from pathlib import Path
from towline.sandboxes.base import Spec
from towline.sandboxes.process import ProcessRuntime
from towline.schema import Network
async def main():
    runtime = ProcessRuntime(Path(sys.argv[1]))
    await runtime.open()
    sandbox = await runtime.create(Spec(network=Network.OPEN))
    process = await sandbox.start(["sh", "-c", "setsid sh -c 'sleep 300; echo' node-that-dies & echo up; sleep 300"])
    print((await process.stdout.readline()).decode(), flush=True)
    await process.wait()
asyncio.run(main())
"""


async def test_a_node_that_is_killed_leaves_no_process_and_the_next_one_its_folders(tmp_path: Path) -> None:
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
