"""Attacks by other users of the machine: what they can read in a data folder, and in what is written there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.security.attack import attack, without
from support.server.server_rig import rig, task
from towline.cli import terminal
from towline.common.files import write_atomically
from towline.common.private_files import PRIVATE_UMASK, secure_folder
from towline.common.redaction import StreamRedactor, redact_value
from towline.gateway.without_keys import without_keys
from towline.node.harness_run import HarnessLog
from towline.schema import SessionState, Trajectory

KEY = "tl-" + "Ab3_-" * 8 + "xyz"
API_KEY = "tlk-" + "k" * 43


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def _readable(folder: Path) -> list[str]:
    """What another user could reach and read."""
    if not folder.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH):
        return []
    return [path.name for path in folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o044]


@attack("49", guard=without(("towline.server.service.secure_folder", lambda path: path.mkdir(exist_ok=True))))
@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
@pytest.mark.parametrize("mask", [0o022, 0o002, 0])
async def test_others_read_the_data_folder(tmp_path: Path, existing: bool, mask: int) -> Any:
    data = tmp_path / "data"
    with umask(mask):
        if existing:
            data.mkdir(mode=0o755)
            (data / "towline.log").write_text("old")
        async with rig(data) as r:
            await r.caller.submit(task("t"))
            await r.caller.take(1)
            return await asyncio.to_thread(_readable, data)


@attack("49", guard=without(("towline.server.service.secure_folder", lambda path: path.mkdir(exist_ok=True))))
async def test_files_of_the_data_folder_are_open_to_others(tmp_path: Path) -> Any:
    """Their own modes too: a folder may be copied, or its mode changed later."""
    data = tmp_path / "data"
    with umask(0o022):
        async with rig(data) as r:
            await r.caller.submit(task("t"))
            await r.caller.take(1)
            return [path.name for path in data.iterdir() if path.stat().st_mode & 0o077]


def test_an_existing_folder_is_tightened_and_stays_usable(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir(mode=0o755)
    (tmp_path / "file").write_text("x")
    (tmp_path / "program").touch(0o755)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.write_text("x")
    outside.chmod(0o644)
    (tmp_path / "link").symlink_to(outside)
    tmp_path.chmod(0o755)
    secure_folder(tmp_path)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"sub": 0o700, "file": 0o600, "program": 0o700, "link": 0o644}
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_segments_and_logs_are_private(tmp_path: Path) -> None:
    with umask(0o022):
        write_atomically(tmp_path / "segment", b"x", mode=0o600)
        log = HarnessLog(tmp_path / "harness.log", 1000)
        log.close()
        write_atomically(tmp_path / "public", b"x")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"segment": 0o600, "harness.log": 0o600, "public": 0o644}
    assert PRIVATE_UMASK == 0o077


# Keys in what is written


class _Process:
    """A harness that prints these pieces."""

    def __init__(self, *pieces: bytes):
        self.stdout, self.stderr = asyncio.StreamReader(), asyncio.StreamReader()
        for piece in pieces:
            self.stdout.feed_data(piece)
        self._rest = pieces
        self.stdout.feed_eof()
        self.stderr.feed_eof()


@attack("50", guard=without(("towline.common.redaction.redact_bytes", lambda data: data)))
@pytest.mark.parametrize(
    "text",
    [
        f"OPENAI_API_KEY={KEY}\n",
        f"http://127.0.0.1:8500/s/{KEY}/v1/chat",
        f'{{"key": "{KEY}"}}',
        f"Bearer {KEY}",
        f"{KEY}",
        f"?key={KEY}&x=1",
        f"{API_KEY} {KEY}",
        f"tl-{KEY}",
    ],
)
async def test_the_log_of_a_harness_has_its_key(tmp_path: Path, text: str) -> Any:
    log = HarnessLog(tmp_path / "harness.log", 10_000)
    await log.follow(_Process(text.encode()))  # type: ignore[arg-type]
    log.close()
    written = (tmp_path / "harness.log").read_text()
    return KEY[3:] in written or API_KEY[4:] in written


@attack("50", guard=without(("towline.common.redaction.redact_bytes", lambda data: data)))
@pytest.mark.parametrize("size", [1, 2, 3, 7, 40, 46])
def test_a_key_that_is_printed_in_pieces(size: int) -> Any:
    data = f"first {KEY} second {API_KEY}\nlast tl-".encode()
    redactor = StreamRedactor()
    out = b"".join(redactor.feed(data[start : start + size]) for start in range(0, len(data), size)) + redactor.close()
    assert out.startswith(b"first ") and out.endswith(b"\nlast tl-") and b" second " in out  # noqa: PT018
    return KEY[3:].encode() in out or API_KEY[4:].encode() in out


@attack("50", guard=without(("towline.cli.terminal.redact", lambda text: text)))
@pytest.mark.parametrize("style", ["text", "json"])
def test_the_log_of_a_server_has_a_key(style: str) -> Any:
    inner = terminal.JsonFormatter() if style == "json" else logging.Formatter("%(message)s")
    record = logging.LogRecord("towline", logging.ERROR, "", 0, "POST /s/%s/v1 failed", (KEY,), None)
    return KEY in terminal.RedactingFormatter(inner).format(record)


@attack("50", guard=without(("towline.common.redaction.redact", lambda text: text)))
@pytest.mark.parametrize(
    "value",
    [
        {"content": f"env: {KEY}"},
        {"tool_calls": [{"arguments": {"command": f"curl -H 'Authorization: Bearer {KEY}'"}}]},
        {"content": [{"type": "text", "text": KEY}]},
        {KEY: 1},
    ],
)
def test_messages_have_a_key(value: dict[str, Any]) -> Any:
    return KEY in repr(redact_value(value))


@attack("50", guard=without(("towline.gateway.without_keys.redact", lambda text: text)))
def test_the_error_of_a_trajectory_has_a_key() -> Any:
    made = Trajectory(session_id="s", group_id="g", state=SessionState.FAILED, error=f"call with {KEY} failed")
    return KEY in (without_keys(made).error or "")


def test_text_without_keys_is_the_same_object() -> None:
    value = {"a": ["tl-short", {"b": "title tl-" + "x" * 60}], "n": 1, "none": None}
    assert redact_value(value) is value
