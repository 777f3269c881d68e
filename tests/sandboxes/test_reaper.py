"""Leftovers of killed nodes: the next node removes all of them before it continues, however slowly they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

import towline
from support.seeds import chosen_seed
from towline.sandboxes.bubblewrap import reaper
from towline.sandboxes.files import folders
from towline.sandboxes.process.runtime import ProcessRuntime

PACKAGES = Path(towline.__file__).parents[1]
PATIENCE = 60


def run(program: str, *arguments: object, mark: str = "/nowhere") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(PACKAGES), "PATH": f"{os.environ['PATH']}:{mark}"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


NODE = """
    import os, sys, time
    from pathlib import Path
    from towline.sandboxes.bubblewrap import reaper
    made = reaper.SupervisorFolder.make(Path(sys.argv[1]))
    if os.fork() == 0:
        time.sleep(float(sys.argv[2]))  # a child that has not become its own program yet
        os._exit(0)
    print(made.folder, flush=True)
    time.sleep(600)
"""


def test_waits_for_a_lock_that_a_child_of_a_killed_node_still_holds(tmp_path: Path) -> None:
    node = run(NODE, tmp_path, 3.0)
    assert node.stdout is not None
    folder = Path(node.stdout.readline().strip())
    # While the node lives, nothing of it is touched or waited for.
    assert reaper.reap(tmp_path) == []
    assert folder.is_dir()
    node.send_signal(signal.SIGKILL)
    node.wait(PATIENCE)
    with (folder / "node").open("rb+") as lock:
        assert not folders.try_lock(lock.fileno()), "the child holds it"
    assert reaper.reap(tmp_path) == [f"removed leftovers of an earlier supervisor in {folder.name}"]
    assert not folder.exists()


@pytest.mark.parametrize("files", [(), ("node",), ("lock",), ("node", "groups.json")])
def test_an_unfinished_folder_of_a_killed_node_is_removed(tmp_path: Path, files: tuple[str, ...]) -> None:
    folder = tmp_path / "keeper-0123456789ab"
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    assert reaper.reap(tmp_path) == [f"removed the unfinished folder {folder.name} of an earlier node"]
    assert not folder.exists()


def test_folders_that_are_being_created_are_left_alone(tmp_path: Path) -> None:
    """Several nodes start while another one reaps continuously: each keeps its folder."""
    nodes = [run(NODE, tmp_path, 0.0) for _ in range(3)]
    until = time.monotonic() + PATIENCE
    while len(list(tmp_path.glob("keeper-*"))) < 3:
        assert reaper.reap(tmp_path) == []
        assert time.monotonic() < until
    for node in nodes:
        assert node.stdout is not None
        assert Path(node.stdout.readline().strip()).is_dir()
        assert reaper.reap(tmp_path) == []
    for node in nodes:
        node.kill()
        node.wait(PATIENCE)
    reaper.reap(tmp_path)
    assert not list(tmp_path.glob("keeper-*"))


@pytest.mark.parametrize(
    "program",
    [reaper.SUPERVISOR_PROGRAM, "from towline.sandboxes.keeper import main; main(int(sys.argv[2]))"],
    ids=["this version", "another version"],
)
def test_a_supervisor_that_does_not_exit_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(reaper, "_EXIT_TIMEOUT", 0.2)
    made = reaper.SupervisorFolder.make(tmp_path)
    # Its command line is a supervisor's, and it never exits.
    source = f'"""{program}"""\nimport time\nprint(flush=True); time.sleep(600)'
    supervisor = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, pass_fds=[made.lock])
    other = subprocess.Popen(["sleep", "600"], pass_fds=[made.lock])
    assert supervisor.stdout is not None
    supervisor.stdout.readline()
    os.close(made.lock)
    os.close(made.node)
    try:
        notes = reaper.reap(tmp_path)
        assert supervisor.wait(PATIENCE) == -signal.SIGKILL
        assert other.poll() is None, "only supervisors are killed"
        assert notes == [f"the supervisor of {made.folder.name} does not exit, although its node is gone"]
    finally:
        other.kill()
        other.wait(PATIENCE)
        supervisor.kill()
    assert reaper.reap(tmp_path) == [f"removed leftovers of an earlier supervisor in {made.folder.name}"]


@pytest.mark.parametrize("content", [b"", b"{", b"3", b"[3, null]", b'["/sys/fs/cgroup/not-ours"]', b"\xff"])
def test_a_damaged_group_list_does_not_stop_the_reaper(tmp_path: Path, content: bytes) -> None:
    made = reaper.SupervisorFolder.make(tmp_path)
    (made.folder / "groups.json").write_bytes(content)
    os.close(made.lock)
    os.close(made.node)
    assert reaper.reap(tmp_path) == [f"removed leftovers of an earlier supervisor in {made.folder.name}"]


PROCESSES = """
    import asyncio, os, sys
    from pathlib import Path
    from towline.sandboxes.base import SandboxSpec
    from towline.sandboxes.process.runtime import ProcessRuntime
    from towline.schema import Network

    async def main():
        runtime = ProcessRuntime(Path(sys.argv[1]))
        await runtime.open()
        sandbox = await runtime.create(SandboxSpec(network=Network.OPEN))
        await sandbox.start(["sh", "-c", "trap '' TERM; sleep 600 & sleep 600"])
        print(sandbox._supervisor.pid, flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


def test_the_next_node_waits_for_process_sandboxes_to_end(tmp_path: Path) -> None:
    node = run(PROCESSES, tmp_path)
    assert node.stdout is not None
    supervisor = int(node.stdout.readline())
    os.kill(supervisor, signal.SIGSTOP)  # as if the machine were too busy to run it
    node.kill()
    node.wait(PATIENCE)
    waking = subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {supervisor}"])
    asyncio.run(opened_and_closed(ProcessRuntime(tmp_path)))
    assert waking.wait(PATIENCE) == 0
    assert not folders.start_time(supervisor), "it has exited before the next node started"
    assert not list(tmp_path.glob("sandbox-*"))


async def opened_and_closed(runtime: ProcessRuntime) -> None:
    await runtime.open()
    await runtime.close()


SANDBOXES = """
    import asyncio, sys
    from pathlib import Path
    from towline.sandboxes.base import SandboxSpec
    from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime

    async def main():
        runtime = BubblewrapRuntime(Path(sys.argv[1]))
        print("begins", flush=True)
        await runtime.open()
        print("open", flush=True)
        while True:
            made = await asyncio.gather(*(runtime.create(SandboxSpec()) for _ in range(4)))
            await asyncio.gather(*(one.start(["sleep", "600"]) for one in made))
            await asyncio.gather(*(one.destroy() for one in made[:3]))

    asyncio.run(main())
"""


def test_nothing_is_left_of_nodes_killed_at_any_moment(tmp_path: Path) -> None:
    chance = random.Random(chosen_seed())
    mark = f"/nowhere-{uuid.uuid4().hex}"
    for number in range(int(os.environ.get("TOWLINE_KILLS", "4"))):
        node = run(SANDBOXES, tmp_path, mark=mark)
        assert node.stdout is not None
        for _ in range(1 + number % 2):
            assert node.stdout.readline()
        time.sleep(chance.uniform(0.0, 0.8))
        folders = {path.name for path in tmp_path.glob("keeper-*")}
        node.kill()
        node.wait(PATIENCE)
        folders |= {path.name for path in tmp_path.glob("keeper-*")}
        notes = reaper.reap(tmp_path)
        assert not list(tmp_path.glob("keeper-*")), notes
        assert not [note for note in notes if "could not be removed" in note or "does not exit" in note]
        names = {f"towline-{name.removeprefix('keeper-')}" for name in folders}
        assert not [path for path, below, _ in os.walk("/sys/fs/cgroup") for name in names & set(below)], notes
        assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
        assert marked(mark) == [], notes


def marked(mark: str) -> list[str]:
    """Processes of a node, by a mark in their environment."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{entry}/environ").read_bytes() and folders.start_time(int(entry)):
                found.append(f"{entry} {Path(f'/proc/{entry}/cmdline').read_bytes()!r}")
    return found


def test_groups_are_recorded(tmp_path: Path) -> None:
    made = reaper.SupervisorFolder.make(tmp_path)
    made.record(["/sys/fs/cgroup/x"])
    assert json.loads((made.folder / "groups.json").read_text()) == ["/sys/fs/cgroup/x"]
    made.remove()
    assert not made.folder.exists()
