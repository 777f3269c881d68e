"""Files that untrusted data names: found below their folder, and through no link, whatever the path looks like."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.common.untrusted.data_files import DataFolder, UnsafePath, plain_parts


def test_files_and_folders_below(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file.txt").write_text("text")
    folder = DataFolder(tmp_path)
    assert folder.find("./a//b/file.txt") == tmp_path / "a" / "b" / "file.txt"
    assert folder.find(".") == tmp_path
    assert folder.read_text("a/b/file.txt") == "text"
    assert folder.is_file("a/b/file.txt")
    assert folder.is_folder("a/b")
    assert not folder.is_file("a/b")
    assert not folder.is_file("a/none")
    assert not folder.is_file("a/b/file.txt/none")
    with pytest.raises(FileNotFoundError):
        folder.find("none")
    with pytest.raises(UnsafePath, match="more than 3 bytes"):
        folder.read_bytes("a/b/file.txt", 3)


@pytest.mark.parametrize("links", [False, True])
def test_links_are_followed_only_if_they_are_trusted(tmp_path: Path, links: bool) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("text")
    data = tmp_path / "data"
    data.mkdir()
    (data / "folder").symlink_to("../outside")
    (data / "file").symlink_to("../outside/file")
    (data / "own").symlink_to("folder")
    (tmp_path / "named").symlink_to("data")  # the folder itself is the user's word
    folder = DataFolder(tmp_path / "named", links=links)
    for name in ("file", "folder/file", "own/file"):
        if links:
            assert folder.read_text(name) == "text"
            assert folder.is_file(name)
            continue
        for call in (folder.find, folder.read_text, folder.is_file):
            with pytest.raises(UnsafePath, match="symbolic link"):
                call(name)


def test_only_files_that_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for folder in (DataFolder(tmp_path), DataFolder(tmp_path, links=True)):
        with pytest.raises(UnsafePath):
            folder.read_text("pipe")
    with pytest.raises(UnsafePath):
        DataFolder(Path("/dev"), links=True).read_text("zero")


@given(st.text(st.sampled_from("ab./~\\ :\u200b\uff0e\u2024\x00\n"), max_size=12))
def test_no_plain_path_leaves_its_folder(path: str) -> None:
    try:
        parts = plain_parts(path)
    except UnsafePath:
        return
    assert ".." not in {part.strip() for part in parts}
    assert os.path.normpath(os.path.join("/folder", *parts)).startswith("/folder")
