"""What nodes that were killed leave behind: the next one removes all of it before it goes on, however slowly it ends."""

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

from towline.sandboxes import holding, leftovers
from towline.sandboxes.process import ProcessRuntime

PACKAGES = Path(leftovers.__file__).parents[2]
PATIENCE = 60


def run(program: str, *arguments: object, mark: str = "/nowhere") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(PACKAGES), "PATH": f"{os.environ['PATH']}:{mark}"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


NODE = """
    import os, sys, time
    from pathlib import Path
    from towline.sandboxes import leftovers
    made = leftovers.Instance.make(Path(sys.argv[1]))
    if os.fork() == 0:
        time.sleep(float(sys.argv[2]))  # a child that has not become its own program yet
        os._exit(0)
    print(made.folder, flush=True)
    time.sleep(600)
"""


def test_a_lock_that_a_child_of_a_killed_node_still_holds_is_waited_for(tmp_path: Path) -> None:
    node = run(NODE, tmp_path, 3.0)
    assert node.stdout is not None
    folder = Path(node.stdout.readline().strip())
    # While the node lives, nothing of it is touched, and nobody waits for it.
    assert leftovers.reap(tmp_path) == []
    assert folder.is_dir()
    node.send_signal(signal.SIGKILL)
    node.wait(PATIENCE)
    with (folder / "node").open("rb+") as lock:
        assert not holding.take(lock.fileno()), "the child holds it"
    assert leftovers.reap(tmp_path) == [f"removed what an earlier keeper left in {folder.name}"]
    assert not folder.exists()


@pytest.mark.parametrize("files", [(), ("node",), ("lock",), ("node", "groups.json")])
def test_a_folder_that_a_killed_node_did_not_finish_is_removed_at_once(tmp_path: Path, files: tuple[str, ...]) -> None:
    folder = tmp_path / "keeper-0123456789ab"
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    assert leftovers.reap(tmp_path) == [f"removed what an earlier node began in {folder.name}"]
    assert not folder.exists()


def test_folders_that_are_being_made_are_left_alone(tmp_path: Path) -> None:
    """Many nodes begin while another reaps again and again: each keeps its folder."""
    nodes = [run(NODE, tmp_path, 0.0) for _ in range(3)]
    until = time.monotonic() + PATIENCE
    while len(list(tmp_path.glob("keeper-*"))) < 3:
        assert leftovers.reap(tmp_path) == []
        assert time.monotonic() < until
    for node in nodes:
        assert node.stdout is not None
        assert Path(node.stdout.readline().strip()).is_dir()
        assert leftovers.reap(tmp_path) == []
    for node in nodes:
        node.kill()
        node.wait(PATIENCE)
    leftovers.reap(tmp_path)
    assert not list(tmp_path.glob("keeper-*"))


def test_a_keeper_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_PATIENCE", 0.2)
    made = leftovers.Instance.make(tmp_path)
    # Its command is a keeper's, and it hears nothing.
    stuck = f"if 0: {leftovers.START_KEEPER!r}\nimport time\nprint(flush=True); time.sleep(600)"
    source = stuck.replace(repr(leftovers.START_KEEPER), f'"""{leftovers.START_KEEPER}"""')
    keeper = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, pass_fds=[made.lock])
    other = subprocess.Popen(["sleep", "600"], pass_fds=[made.lock])
    assert keeper.stdout is not None
    keeper.stdout.readline()
    os.close(made.lock)
    os.close(made.node)
    try:
        notes = leftovers.reap(tmp_path)
        assert keeper.wait(PATIENCE) == -signal.SIGKILL
        assert other.poll() is None, "only keepers are killed"
        assert notes == [f"the keeper of {made.folder.name} does not end, although its node is gone"]
    finally:
        other.kill()
        other.wait(PATIENCE)
        keeper.kill()
    assert leftovers.reap(tmp_path) == [f"removed what an earlier keeper left in {made.folder.name}"]


@pytest.mark.parametrize("content", [b"", b"{", b"3", b"[3, null]", b'["/sys/fs/cgroup/not-ours"]', b"\xff"])
def test_a_damaged_list_of_groups_stops_nothing(tmp_path: Path, content: bytes) -> None:
    made = leftovers.Instance.make(tmp_path)
    (made.folder / "groups.json").write_bytes(content)
    os.close(made.lock)
    os.close(made.node)
    assert leftovers.reap(tmp_path) == [f"removed what an earlier keeper left in {made.folder.name}"]


PROCESSES = """
    import asyncio, os, sys
    from pathlib import Path
    from towline.sandboxes.base import Spec
    from towline.sandboxes.process import ProcessRuntime
    from towline.schema import Network

    async def main():
        runtime = ProcessRuntime(Path(sys.argv[1]))
        await runtime.open()
        sandbox = await runtime.create(Spec(network=Network.OPEN))
        await sandbox.start(["sh", "-c", "trap '' TERM; sleep 600 & sleep 600"])
        print(sandbox._keeper.pid, flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


def test_the_next_node_waits_for_process_sandboxes_to_end(tmp_path: Path) -> None:
    node = run(PROCESSES, tmp_path)
    assert node.stdout is not None
    keeper = int(node.stdout.readline())
    os.kill(keeper, signal.SIGSTOP)  # a machine so busy that it does not come to anything
    node.kill()
    node.wait(PATIENCE)
    waking = subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {keeper}"])
    asyncio.run(opened_and_closed(ProcessRuntime(tmp_path)))
    assert waking.wait(PATIENCE) == 0
    assert not holding._began(keeper), "it has ended before the next node began"
    assert not list(tmp_path.glob("sandbox-*"))


async def opened_and_closed(runtime: ProcessRuntime) -> None:
    await runtime.open()
    await runtime.close()


SANDBOXES = """
    import asyncio, sys
    from pathlib import Path
    from towline.sandboxes.base import Spec
    from towline.sandboxes.bubblewrap import BubblewrapRuntime

    async def main():
        runtime = BubblewrapRuntime(Path(sys.argv[1]))
        print("begins", flush=True)
        await runtime.open()
        print("open", flush=True)
        while True:
            made = await asyncio.gather(*(runtime.create(Spec()) for _ in range(4)))
            await asyncio.gather(*(one.start(["sleep", "600"]) for one in made))
            await asyncio.gather(*(one.destroy() for one in made[:3]))

    asyncio.run(main())
"""


def test_nothing_is_left_of_nodes_that_are_killed_at_any_moment(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
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
        notes = leftovers.reap(tmp_path)
        assert not list(tmp_path.glob("keeper-*")), notes
        assert not [note for note in notes if "would not go" in note or "does not end" in note]
        names = {f"towline-{name.removeprefix('keeper-')}" for name in folders}
        assert not [path for path, below, _ in os.walk("/sys/fs/cgroup") for name in names & set(below)], notes
        assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
        assert marked(mark) == [], notes


def marked(mark: str) -> list[str]:
    """Processes of a node: their variables say so."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{entry}/environ").read_bytes() and holding._began(int(entry)):
                found.append(f"{entry} {Path(f'/proc/{entry}/cmdline').read_bytes()!r}")
    return found


def test_a_list_is_what_was_recorded(tmp_path: Path) -> None:
    made = leftovers.Instance.make(tmp_path)
    made.record(["/sys/fs/cgroup/x"])
    assert json.loads((made.folder / "groups.json").read_text()) == ["/sys/fs/cgroup/x"]
    made.remove()
    assert not made.folder.exists()
