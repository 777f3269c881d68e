"""Small helpers: merging, text, files, sockets and background tasks."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from towline.common.background import BackgroundTasks
from towline.common.files import replace_folder, write_atomically
from towline.common.mappings import deep_merge
from towline.common.sockets import listen, url_of
from towline.common.text import one_line, slug
from towline.errors import ConfigError


def test_deep_merge_merges_mappings_and_replaces_the_rest() -> None:
    base = {"a": {"b": 1, "c": [1]}, "d": 1}
    assert deep_merge(base, {"a": {"c": [2]}, "d": {"e": 1}}) == {"a": {"b": 1, "c": [2]}, "d": {"e": 1}}
    assert base == {"a": {"b": 1, "c": [1]}, "d": 1}


def test_slug_and_one_line() -> None:
    assert slug("../a task: näme!") == "a-task-n-me"
    assert slug("///") == "session"
    assert len(slug("x" * 100)) == 60
    assert one_line("a\n  b\tc", 4) == "a b "


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_folder_replaces_an_older_one(tmp_path: Path) -> None:
    for number in range(2):
        made = tmp_path / "made"
        made.mkdir()
        (made / "number").write_text(str(number))
        replace_folder(made, tmp_path / "place")
    assert (tmp_path / "place" / "number").read_text() == "1"
    assert [each.name for each in tmp_path.iterdir()] == ["place"]


def test_listen_picks_a_free_port_and_reports_a_taken_one() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener, "127.0.0.1") == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen("127.0.0.1", port)


async def test_background_tasks_report_failures_and_end_on_close(caplog: pytest.LogCaptureFixture) -> None:
    tasks = BackgroundTasks()

    async def fail() -> None:
        raise ValueError("broken")

    with caplog.at_level(logging.ERROR):
        with pytest.raises(ValueError, match="broken"):
            await tasks.start(fail(), "failing")
        await asyncio.sleep(0)
    assert "background task failing failed" in caplog.text
    forever = tasks.start(asyncio.Event().wait())
    await tasks.close()
    assert forever.cancelled()
    await asyncio.sleep(0)
    assert len(tasks) == 0
