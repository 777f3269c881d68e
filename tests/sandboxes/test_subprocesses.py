"""The event loop closes every pipe exactly once: a file that a thread opens meanwhile stays open."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import uvloop

from towline.sandboxes.subprocesses import pipe_for_loop

ROUNDS = 20_000


async def _open_and_close() -> None:
    loop = asyncio.get_running_loop()
    for _ in range(ROUNDS):
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        transport, _protocol = await loop.connect_read_pipe(asyncio.Protocol, pipe_for_loop(loop, ours, "rb"))
        os.close(theirs)
        transport.close()
        await asyncio.sleep(0)


def _write_files(folder: Path, name: int, stop: threading.Event, lost: list[OSError]) -> None:
    path = folder / str(name)
    while not stop.is_set():
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
            os.write(descriptor, b"x")
            os.close(descriptor)
        except OSError as error:
            lost.append(error)


def test_no_file_of_another_thread_is_closed(tmp_path: Path) -> None:
    uvloop.run(asyncio.sleep(0))  # it keeps its own pipe from its first run on
    before = len(os.listdir("/proc/self/fd"))
    stop, lost = threading.Event(), list[OSError]()
    threads = [threading.Thread(target=_write_files, args=(tmp_path, n, stop, lost)) for n in range(4)]
    for thread in threads:
        thread.start()
    try:
        uvloop.run(_open_and_close())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert lost == []
    assert len(os.listdir("/proc/self/fd")) <= before
