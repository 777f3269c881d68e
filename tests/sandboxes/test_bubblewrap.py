"""Bubblewrap sandboxes: the contract, over the host's root and over one with only busybox.

Run by root these are root's sandboxes; `test_bubblewrap_rootless.py` runs this file again as an ordinary user, with and
without subordinate ids.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.node.node_rig import until
from support.sandboxes import contract
from support.sandboxes.roots_rig import busybox_root, tar_of
from support.sandboxes.sandbox_leftovers import Traces
from towline.sandboxes import wire
from towline.sandboxes.base import ChangeKind, Mount, PathChange, SandboxError, SandboxSpec, Unsupported, execute
from towline.sandboxes.bubblewrap import reaper
from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime
from towline.sandboxes.egress import EgressRules
from towline.sandboxes.files import archives, folders
from towline.schema import Network, Resources

ROOT = os.geteuid() == 0


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[BubblewrapRuntime]:
    opened = BubblewrapRuntime(tmp_path / "data")
    await opened.open()
    traces = Traces(tmp_path / "data")
    traces.record(opened)
    yield opened
    traces.record(opened)
    await opened.close()
    assert traces.left() == []


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(busybox_root(tmp_path / "busybox"))


@pytest.mark.parametrize("check", contract.CHECKS + contract.ISOLATION, ids=lambda check: check.__name__)
@pytest.mark.parametrize("place", ["host", "busybox"])
async def test_contract(
    check: contract.Check, place: str, root: str, runtime: BubblewrapRuntime, tmp_path: Path
) -> None:
    await check(runtime, SandboxSpec(root=root if place == "busybox" else ""), tmp_path)


@pytest.mark.parametrize("limit", contract.LIMITS)
async def test_limits_hold_or_are_refused(limit: str, runtime: BubblewrapRuntime, root: str, tmp_path: Path) -> None:
    spec = SandboxSpec(root=root, resources=Resources(disk_mb=64))
    if limit in runtime.facts.enforced:
        await contract.LIMITS[limit](runtime, spec, tmp_path)
        return
    assert not ROOT or limit not in ("memory_mb", "pids", "disk_mb", "seconds"), "root enforces all of these"
    with pytest.raises(Unsupported, match=limit):
        await runtime.create(SandboxSpec(resources=Resources.model_validate({limit: 99})))
    await (await runtime.create(SandboxSpec())).destroy()  # the node's own defaults are waived, and named in the facts
    assert any(limit.split("_")[0] in note for note in runtime.facts.notes)


async def test_layers_over_a_root_from_a_tar_and_the_diff(
    runtime: BubblewrapRuntime, root: str, tmp_path: Path
) -> None:
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    for folder, text in ((lower, "lower"), (upper, "upper")):
        (folder / "etc").mkdir(parents=True)
        (folder / "etc/both").write_text(text)
        (folder / f"etc/{text}").write_text(text)
        (folder / "full/of").mkdir(parents=True)
        (folder / f"full/of/{text}").write_text(text)
    spec = SandboxSpec(
        root=str(tar_of(Path(root), tmp_path / "root.tar")),
        layers=(lower, upper),
        mounts=(Mount(lower / "etc/both", "/opt/deep/one"),),
    )
    await runtime.prepare(spec)
    async with contract.made(runtime, spec) as sandbox:
        assert await contract.sh(
            sandbox, "cat /etc/both /etc/lower /etc/upper /etc/old /opt/deep/one; ls /full/of"
        ) == ("upperlowerupperold\nlowerlower\nupper\n")
        assert await sandbox.diff() == []
        await contract.sh(
            sandbox,
            "echo new > /etc/old; rm /etc/both; rm -r /full; mkdir -p /full/of; echo x > /full/of/upper; "
            "ln -s /etc/passwd link; chmod 700 /home/agent; mkdir -p a/b; touch -d 2001-01-01 /etc/lower",
        )
        changes = {change.path: change.kind for change in await sandbox.diff()}
    assert changes == {
        "/etc/both": ChangeKind.DELETED,
        "/etc/old": ChangeKind.CHANGED,
        "/etc/lower": ChangeKind.CHANGED,
        "/full/of/lower": ChangeKind.DELETED,
        "/full/of/upper": ChangeKind.CHANGED,
        "/home/agent": ChangeKind.CHANGED,
        "/work/a": ChangeKind.ADDED,
        "/work/a/b": ChangeKind.ADDED,
        "/work/link": ChangeKind.ADDED,
    }
    assert (upper / "etc/both").read_text() == "upper"
    # Over the host's root, a layer reaches below /usr as well.
    (upper / "usr/share/towline-test").mkdir(parents=True)
    (upper / "usr/share/towline-test/file").write_text("below")
    async with contract.made(runtime, SandboxSpec(layers=(upper,))) as sandbox:
        assert await contract.sh(sandbox, "cat /usr/share/towline-test/file; echo x > /usr/share/mine") == "below"
        assert await sandbox.diff() == [PathChange("/usr/share/mine", ChangeKind.ADDED)]


async def test_users_of_the_root_where_there_are_ids_for_them(runtime: BubblewrapRuntime, root: str) -> None:
    several = ROOT or not any("one user id" in note for note in runtime.facts.notes)
    if not several:
        with pytest.raises(SandboxError, match="subuid"):
            await runtime.create(SandboxSpec(root=root, user="agent"))
        async with contract.made(runtime, SandboxSpec(root=root)) as sandbox:
            with pytest.raises(Unsupported, match="subuid"):
                await execute(sandbox, ["true"], user="agent", seconds=20)
            assert not (await execute(sandbox, ["chown", "agent", "/work"])).ok
        return
    async with contract.made(runtime, SandboxSpec(root=root, user="agent", workdir="/home/agent/work")) as sandbox:
        await sandbox.put(archives.pack({"mine": b"x"}), "/home/agent/in")
        script = "id -u; id -g; echo $HOME $USER; pwd; touch made; stat -c %U . made /home/agent/in/mine; echo x > /dev/stdout"
        seen = await contract.sh(sandbox, script)
        assert seen == "1000\n1000\n/home/agent agent\n/home/agent/work\nagent\nagent\nagent\nx\n"
        assert not (await execute(sandbox, ["touch", "/etc/mine"])).ok
        assert (await execute(sandbox, ["sh", "-c", "grep CapEff /proc/self/status"])).text.split()[1] == "0" * 16
        assert await contract.sh(sandbox, "touch f; chown 1000:1000 f; stat -c %u f", user="root") == "1000\n"
        assert await contract.sh(sandbox, "id -u", user="4321:1000") == "4321\n"
        with pytest.raises(Unsupported, match="no user"):
            await execute(sandbox, ["id"], user="nobody-knows")


async def test_hostile_files_inside_do_not_mislead_the_node(runtime: BubblewrapRuntime, root: str) -> None:
    """Symlinks, pipes and fake files planted inside lead nowhere, and nothing hangs."""
    async with contract.made(runtime, SandboxSpec(root=root)) as sandbox:
        await contract.sh(sandbox, "ln -s /etc in; mkfifo pipe; ln -s / all; rm /etc/passwd; mkfifo /etc/passwd")
        await sandbox.put(archives.pack({"planted": b"x"}), "/work/in")
        assert await contract.sh(sandbox, "cat /etc/planted") == "x"
        names = archives.member_names(await sandbox.get("/work"))
        assert sorted(names) == ["work", "work/all", "work/in"], "symlinks as symlinks, pipes not at all"
        assert (await execute(sandbox, ["echo", "well"], seconds=20)).stdout == b"well\n"
        with pytest.raises(SandboxError):
            await execute(sandbox, ["true"], user="agent", seconds=20)
        with pytest.raises(SandboxError, match="cannot start"):
            await execute(sandbox, ["id"], cwd="/no/such/folder")
        with pytest.raises(SandboxError):
            await sandbox.put(b"this is not a tar", "/work/broken")
        # Names that try to leave.
        hostile = archives.pack({"a": b"x"}).replace(b"a\0", b"/\0", 1)
        with pytest.raises(SandboxError):
            await sandbox.put(hostile, "/work/out")
        large = await execute(sandbox, ["sh", "-c", "echo $#"] + ["sh"] + ["x" * 1000] * 300)
        assert large.stdout == b"300\n"
        await execute(sandbox, ["sh", "-c", "kill -9 1; kill -9 -1"])
        assert await contract.sh(sandbox, "echo lives") == "lives\n", "init cannot be killed from inside"


async def test_many_sandboxes_at_once_and_a_cancelled_one(
    runtime: BubblewrapRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runtime._channel is not None
    send, sent = runtime._channel._send, asyncio.Event()

    def send_and_tell(message: wire.Message, descriptors: Sequence[int]) -> None:
        send(message, descriptors)
        sent.set()

    monkeypatch.setattr(runtime._channel, "_send", send_and_tell)
    creating = [asyncio.create_task(runtime.create(SandboxSpec())) for _ in range(8)]
    await sent.wait()
    creating[0].cancel()
    made = [
        sandbox
        for sandbox in await asyncio.gather(*creating, return_exceptions=True)
        if not isinstance(sandbox, BaseException)
    ]
    assert len(made) == 7
    done = await asyncio.gather(
        *(execute(sandbox, ["sh", "-c", f"echo {index} > f; cat f"]) for index, sandbox in enumerate(made))
    )
    assert [run.stdout for run in done] == [b"%d\n" % index for index in range(7)]
    many = await asyncio.gather(
        *(execute(made[0], ["sh", "-c", f"echo {number}; exit {number}"]) for number in range(30))
    )
    assert [(run.code, run.stdout) for run in many] == [(number, b"%d\n" % number) for number in range(30)]
    await asyncio.gather(*(sandbox.destroy() for sandbox in made[:5]))
    with pytest.raises(SandboxError):
        await execute(made[0], ["true"])


async def test_a_lost_supervisor_is_replaced(tmp_path: Path) -> None:
    runtime = BubblewrapRuntime(tmp_path / "data")
    await runtime.open()
    traces = Traces(tmp_path / "data")
    sandbox = await runtime.create(SandboxSpec())
    process = await sandbox.start(["sleep", "60"])
    traces.record(runtime)
    assert runtime._supervisor is not None
    runtime._supervisor.kill()
    assert await asyncio.wait_for(process.wait(), 20) == 137
    with pytest.raises(SandboxError, match="ended"):
        await execute(sandbox, ["true"])
    assert not sandbox.alive
    await sandbox.destroy()
    made = await asyncio.gather(*(runtime.create(SandboxSpec()) for _ in range(3)))
    assert (await execute(made[0], ["echo", "again"])).stdout == b"again\n"
    await runtime.close()
    assert traces.left() == []


async def test_a_command_ends_with_a_supervisor_that_dies_as_the_command_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the sandbox is handled before the answer to `start`."""
    runtime = BubblewrapRuntime(tmp_path / "data")
    await runtime.open()
    sandbox = await runtime.create(SandboxSpec())
    request = sandbox._spawner.request

    async def late(message: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        answer = await request(message, descriptors)
        assert runtime._supervisor is not None
        runtime._supervisor.kill()
        await until(lambda: not sandbox.alive)
        return answer

    monkeypatch.setattr(sandbox._spawner, "request", late)
    try:
        process = await sandbox.start(["sleep", "60"])
        assert await asyncio.wait_for(process.wait(), 30) == 137
    finally:
        await runtime.close()


_NODE = """
import asyncio, json, sys
from pathlib import Path
from typing import Any
from towline.sandboxes import wire
from towline.sandboxes.base import SandboxSpec
from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime
async def main():
    runtime = BubblewrapRuntime(Path(sys.argv[1]))
    await runtime.open()
    sandbox = await runtime.create(SandboxSpec())
    await sandbox.start(["sh", "-c", "(exec 9<>/proc/1/fd/0; sleep 300) & setsid sleep 300 & sleep 300"])
    print(json.dumps(runtime._supervisor.pid), flush=True)
    await asyncio.sleep(300)
asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["node", "supervisor", "both"])
async def test_sandboxes_end_with_their_node_and_the_next_one_removes_leftovers(victim: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    node = _start_node(data)
    assert node.stdout is not None
    try:
        supervisor = json.loads(node.stdout.readline())
        traces = Traces(data)
        runtime = BubblewrapRuntime(data)
        runtime._supervisor = type("Supervisor", (), {"pid": supervisor})()  # type: ignore[assignment]
        for _ in range(100):
            traces.record(runtime)
            if len(traces.processes) >= 5:
                break
            await asyncio.sleep(0.05)
        assert len(traces.processes) >= 5, "supervisor, spawner, bubblewrap, init and the commands"
        if victim in ("supervisor", "both"):
            os.kill(supervisor, signal.SIGKILL)
        if victim in ("node", "both"):
            node.kill()
            node.wait()
        if victim != "node":
            await _all_end({pid: time for pid, time in traces.processes.items() if pid != node.pid})
    finally:
        node.kill()
        node.wait()
        node.stdout.close()
    after = BubblewrapRuntime(data)
    await after.open()  # waits for a supervisor that outlived its node
    assert any("earlier supervisor" in note for note in after.facts.notes)
    await after.close()
    assert traces.left() == []


def _start_node(data: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _NODE, str(data)], stdout=subprocess.PIPE)


async def _all_end(processes: dict[int, str]) -> None:
    for _ in range(200):
        left = []
        for pid, time in processes.items():
            if folders.start_time(pid) == time:
                left.append(pid)
        if not left:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"still alive: {left}")


async def test_invalid_specs_fail_with_a_reason_and_leave_nothing(runtime: BubblewrapRuntime, tmp_path: Path) -> None:
    wrong = [
        (SandboxSpec(root=str(tmp_path / "no")), "no"),
        (SandboxSpec(root="/"), "host"),
        (SandboxSpec(layers=(tmp_path / "no",)), "not a folder"),
        (SandboxSpec(mounts=(Mount(tmp_path / "no", "/x"),)), "does not exist"),
        (SandboxSpec(mounts=(Mount(tmp_path, "/"),)), "cannot mount"),
        (SandboxSpec(user="nobody-knows"), "no user"),
        (SandboxSpec(workdir="/etc/passwd/x"), "passwd"),
    ]
    for spec, reason in wrong:
        with pytest.raises(SandboxError, match=reason):
            await runtime.create(spec)
    closed = BubblewrapRuntime(tmp_path / "other")
    with pytest.raises(SandboxError, match="not open"):
        await closed.create(SandboxSpec())


async def test_networks_are_isolated_unless_the_operator_shares_the_hosts(
    runtime: BubblewrapRuntime, tmp_path: Path
) -> None:
    ours = os.readlink("/proc/self/ns/net")
    async with contract.made(runtime, SandboxSpec(network=Network.OPEN)) as sandbox:
        assert sandbox.listener is not None, "the gateway is reached as with network `gateway`"
        inside = await contract.sh(sandbox, "readlink /proc/self/ns/net; cat /etc/resolv.conf; echo $https_proxy")
        assert not inside.startswith(ours)
        assert inside.splitlines()[1:] == ["http://127.0.0.1:8580"], "names are resolved by the proxy"
    shared = BubblewrapRuntime(tmp_path / "shared", egress=EgressRules(unfiltered=True))
    await shared.open()
    try:
        async with contract.made(shared, SandboxSpec(network=Network.OPEN)) as sandbox:
            assert sandbox.listener is None
            inside = await contract.sh(sandbox, "readlink /proc/self/ns/net; cat /etc/resolv.conf")
            assert inside.startswith(ours)
            assert inside.endswith(await asyncio.to_thread(Path("/etc/resolv.conf").read_text))
    finally:
        await shared.close()
    async with contract.made(runtime, SandboxSpec(network=Network.NONE)) as sandbox:
        assert not (await contract.sh(sandbox, "readlink /proc/self/ns/net")).startswith(
            os.readlink("/proc/self/ns/net")
        )


async def test_a_cancelled_close_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = BubblewrapRuntime(tmp_path)
    await runtime.open()
    remove, entered, proceed, removed = (
        reaper.SupervisorFolder.remove,
        threading.Event(),
        threading.Event(),
        threading.Event(),
    )

    calls: list[reaper.SupervisorFolder] = []

    def slow_remove(folder: reaper.SupervisorFolder) -> None:
        calls.append(folder)
        entered.set()
        proceed.wait(60)
        remove(folder)
        removed.set()

    monkeypatch.setattr(reaper.SupervisorFolder, "remove", slow_remove)
    closing = asyncio.ensure_future(runtime.close())
    await asyncio.to_thread(entered.wait, 60)
    closing.cancel()
    await asyncio.wait([closing])
    proceed.set()
    await runtime.close()
    assert await asyncio.to_thread(removed.wait, 60)
    assert len(calls) == 1, "its descriptors may have been reused by the second call"
    assert not await asyncio.to_thread(lambda: list(tmp_path.glob("keeper-*")))
