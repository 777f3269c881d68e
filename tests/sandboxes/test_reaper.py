"""What nodes that were killed leave behind: the next one removes all of it before it goes on, however slowly it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from towline.sandboxes import holding, leftovers
from towline.sandboxes.process import ProcessRuntime

PACKAGES = Path(leftovers.__file__).parents[2]
PATIENCE = 60


def run(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(PACKAGES)}
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


def test_a_list_is_what_was_recorded(tmp_path: Path) -> None:
    made = leftovers.Instance.make(tmp_path)
    made.record(["/sys/fs/cgroup/x"])
    assert json.loads((made.folder / "groups.json").read_text()) == ["/sys/fs/cgroup/x"]
    made.remove()
    assert not made.folder.exists()
