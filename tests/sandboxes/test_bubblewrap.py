"""Bubblewrap sandboxes at their real boundaries: the contract, over the host's root and over one of busybox alone.

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
from collections.abc import AsyncIterator
from pathlib import Path

import contract
import pytest
from roots_rig import busybox_root, tar_of
from sandbox_leftovers import Traces, began, state

from towline.sandboxes import archives, leftovers
from towline.sandboxes.base import Change, ChangeKind, Mount, SandboxError, Spec, Unsupported, execute
from towline.sandboxes.bubblewrap import BubblewrapRuntime
from towline.schema import Network, Resources

ROOT = os.geteuid() == 0


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[BubblewrapRuntime]:
    opened = BubblewrapRuntime(tmp_path / "data")
    await opened.open()
    traces = Traces(tmp_path / "data")
    traces.look(opened)
    yield opened
    traces.look(opened)
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
    await check(runtime, Spec(root=root if place == "busybox" else ""), tmp_path)


@pytest.mark.parametrize("limit", contract.LIMITS)
async def test_limits_hold_or_are_refused(limit: str, runtime: BubblewrapRuntime, root: str, tmp_path: Path) -> None:
    spec = Spec(root=root, resources=Resources(disk_mb=64))
    if limit in runtime.facts.enforced:
        await contract.LIMITS[limit](runtime, spec, tmp_path)
        return
    assert not ROOT or limit not in ("memory_mb", "pids", "disk_mb", "seconds"), "root enforces all of these"
    with pytest.raises(Unsupported, match=limit):
        await runtime.create(Spec(resources=Resources.model_validate({limit: 99})))
    await (await runtime.create(Spec())).destroy()  # the node's own defaults are waived, and the facts say so
    assert any(limit.split("_")[0] in note for note in runtime.facts.notes)


async def test_layers_lie_over_a_root_from_a_tar_and_the_diff_names_what_changed(
    runtime: BubblewrapRuntime, root: str, tmp_path: Path
) -> None:
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    for folder, text in ((lower, "lower"), (upper, "upper")):
        (folder / "etc").mkdir(parents=True)
        (folder / "etc/both").write_text(text)
        (folder / f"etc/{text}").write_text(text)
        (folder / "full/of").mkdir(parents=True)
        (folder / f"full/of/{text}").write_text(text)
    spec = Spec(
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
    async with contract.made(runtime, Spec(layers=(upper,))) as sandbox:
        assert await contract.sh(sandbox, "cat /usr/share/towline-test/file; echo x > /usr/share/mine") == "below"
        assert await sandbox.diff() == [Change("/usr/share/mine", ChangeKind.ADDED)]


async def test_users_are_the_roots_own_where_there_are_ids_for_them(runtime: BubblewrapRuntime, root: str) -> None:
    several = ROOT or not any("one user id" in note for note in runtime.facts.notes)
    if not several:
        with pytest.raises(SandboxError, match="subuid"):
            await runtime.create(Spec(root=root, user="agent"))
        async with contract.made(runtime, Spec(root=root)) as sandbox:
            with pytest.raises(Unsupported, match="subuid"):
                await execute(sandbox, ["true"], user="agent", seconds=20)
            assert not (await execute(sandbox, ["chown", "agent", "/work"])).ok
        return
    async with contract.made(runtime, Spec(root=root, user="agent", workdir="/home/agent/work")) as sandbox:
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


async def test_hostile_insides_do_not_mislead_the_node(runtime: BubblewrapRuntime, root: str) -> None:
    """Links, pipes and lies planted inside lead nowhere, and nothing hangs."""
    async with contract.made(runtime, Spec(root=root)) as sandbox:
        await contract.sh(sandbox, "ln -s /etc in; mkfifo pipe; ln -s / all; rm /etc/passwd; mkfifo /etc/passwd")
        await sandbox.put(archives.pack({"planted": b"x"}), "/work/in")
        assert await contract.sh(sandbox, "cat /etc/planted") == "x"
        names = archives.names(await sandbox.get("/work"))
        assert sorted(names) == ["work", "work/all", "work/in"], "links as links, pipes not at all"
        assert (await execute(sandbox, ["echo", "well"], seconds=20)).stdout == b"well\n"
        with pytest.raises(SandboxError):
            await execute(sandbox, ["true"], user="agent", seconds=20)
        with pytest.raises(SandboxError, match="cannot be started"):
            await execute(sandbox, ["id"], cwd="/no/such/folder")
        with pytest.raises(SandboxError):
            await sandbox.put(b"this is not a tar", "/work/broken")
        # Names that try to leave, and a link that the archive itself brings.
        hostile = archives.pack({"a": b"x"}).replace(b"a\0", b"/\0", 1)
        with pytest.raises(SandboxError):
            await sandbox.put(hostile, "/work/out")
        large = await execute(sandbox, ["sh", "-c", "echo $#"] + ["sh"] + ["x" * 1000] * 300)
        assert large.stdout == b"300\n"
        await execute(sandbox, ["sh", "-c", "kill -9 1; kill -9 -1"])
        assert await contract.sh(sandbox, "echo lives") == "lives\n", "init cannot be killed from inside"


async def test_many_at_once_and_a_cancelled_one(runtime: BubblewrapRuntime) -> None:
    making = [asyncio.create_task(runtime.create(Spec())) for _ in range(8)]
    await asyncio.sleep(0.01)
    making[0].cancel()
    made = [
        sandbox
        for sandbox in await asyncio.gather(*making, return_exceptions=True)
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


async def test_a_lost_keeper_is_replaced(tmp_path: Path) -> None:
    runtime = BubblewrapRuntime(tmp_path / "data")
    await runtime.open()
    traces = Traces(tmp_path / "data")
    sandbox = await runtime.create(Spec())
    process = await sandbox.start(["sleep", "60"])
    traces.look(runtime)
    assert runtime._keeper is not None
    runtime._keeper.kill()
    assert await asyncio.wait_for(process.wait(), 20) == 137
    with pytest.raises(SandboxError, match="ended"):
        await execute(sandbox, ["true"])
    assert not sandbox.alive
    await sandbox.destroy()
    made = await asyncio.gather(*(runtime.create(Spec()) for _ in range(3)))
    assert (await execute(made[0], ["echo", "again"])).stdout == b"again\n"
    await runtime.close()
    assert traces.left() == []


_NODE = """
import asyncio, json, sys
from pathlib import Path
from towline.sandboxes.base import Spec
from towline.sandboxes.bubblewrap import BubblewrapRuntime
async def main():
    runtime = BubblewrapRuntime(Path(sys.argv[1]))
    await runtime.open()
    sandbox = await runtime.create(Spec())
    await sandbox.start(["sh", "-c", "(exec 9<>/proc/1/fd/0; sleep 300) & setsid sleep 300 & sleep 300"])
    print(json.dumps(runtime._keeper.pid), flush=True)
    await asyncio.sleep(300)
asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["node", "keeper", "both"])
async def test_sandboxes_end_with_their_node_and_the_next_one_removes_what_is_left(victim: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    node = _start_node(data)
    assert node.stdout is not None
    try:
        keeper = json.loads(node.stdout.readline())
        traces = Traces(data)
        runtime = BubblewrapRuntime(data)
        runtime._keeper = type("Keeper", (), {"pid": keeper})()  # type: ignore[assignment]
        for _ in range(100):
            traces.look(runtime)
            if len(traces.processes) >= 5:
                break
            await asyncio.sleep(0.05)
        assert len(traces.processes) >= 5, "keeper, spawner, bubblewrap, init and the commands"
        if victim in ("keeper", "both"):
            os.kill(keeper, signal.SIGKILL)
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
    await after.open()  # a keeper that outlived its node is waited for
    assert any("earlier keeper" in note for note in after.facts.notes)
    await after.close()
    assert traces.left() == []


def _start_node(data: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _NODE, str(data)], stdout=subprocess.PIPE)


async def _all_end(processes: dict[int, str]) -> None:
    for _ in range(200):
        left = []
        for pid, time in processes.items():
            try:
                if began(pid) == time and state(pid) != "Z":
                    left.append(pid)
            except OSError:
                continue
        if not left:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"still alive: {left}")


async def test_what_cannot_be_made_says_why_and_leaves_nothing(runtime: BubblewrapRuntime, tmp_path: Path) -> None:
    wrong = [
        (Spec(root=str(tmp_path / "no")), "no"),
        (Spec(root="/"), "host"),
        (Spec(layers=(tmp_path / "no",)), "not a folder"),
        (Spec(mounts=(Mount(tmp_path / "no", "/x"),)), "does not exist"),
        (Spec(mounts=(Mount(tmp_path, "/"),)), "place to mount"),
        (Spec(user="nobody-knows"), "no user"),
        (Spec(workdir="/etc/passwd/x"), "passwd"),
    ]
    for spec, reason in wrong:
        with pytest.raises(SandboxError, match=reason):
            await runtime.create(spec)
    closed = BubblewrapRuntime(tmp_path / "other")
    with pytest.raises(SandboxError, match="not open"):
        await closed.create(Spec())


async def test_open_network_is_the_hosts_and_none_is_nothing(runtime: BubblewrapRuntime) -> None:
    async with contract.made(runtime, Spec(network=Network.OPEN)) as sandbox:
        assert sandbox.listener is None
        inside = await contract.sh(sandbox, "readlink /proc/self/ns/net; cat /etc/resolv.conf")
        assert inside.startswith(os.readlink("/proc/self/ns/net"))
        assert inside.endswith(await asyncio.to_thread(Path("/etc/resolv.conf").read_text))
    async with contract.made(runtime, Spec(network=Network.NONE)) as sandbox:
        assert not (await contract.sh(sandbox, "readlink /proc/self/ns/net")).startswith(
            os.readlink("/proc/self/ns/net")
        )


async def test_a_close_that_is_cancelled_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = BubblewrapRuntime(tmp_path)
    await runtime.open()
    remove, entered, go_on, removed = leftovers.Instance.remove, threading.Event(), threading.Event(), threading.Event()

    calls: list[leftovers.Instance] = []

    def slowly(instance: leftovers.Instance) -> None:
        calls.append(instance)
        entered.set()
        go_on.wait(60)
        remove(instance)
        removed.set()

    monkeypatch.setattr(leftovers.Instance, "remove", slowly)
    closing = asyncio.ensure_future(runtime.close())
    await asyncio.to_thread(entered.wait, 60)
    closing.cancel()
    await asyncio.wait([closing])
    go_on.set()
    await runtime.close()
    assert await asyncio.to_thread(removed.wait, 60)
    assert len(calls) == 1, "its descriptors may be another's by the second time"
    assert not await asyncio.to_thread(lambda: list(tmp_path.glob("keeper-*")))
