"""Archives: packed files unpack unchanged, and no archive, however made, touches anything outside its folder."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.sandboxes.files import archives
from towline.sandboxes.files.archives import ArchiveError

_NAMES = st.text(st.characters(exclude_characters="/\x00", exclude_categories=["Cs"]), min_size=1, max_size=30).filter(
    lambda name: name not in (".", "..") and len(name.encode()) <= 200
)
_PATHS = st.lists(_NAMES, min_size=1, max_size=4).map("/".join)


@given(st.dictionaries(_PATHS, st.binary(max_size=2000), max_size=8))
def test_pack_and_unpack_round_trip(files: dict[str, bytes]) -> None:
    whole = [name for name in files if not any(other.startswith(name + "/") for other in files)]
    wanted = {name: files[name] for name in whole}
    packed = archives.pack(wanted, modes=dict.fromkeys(wanted, 0o750))
    assert packed == archives.pack(wanted, modes=dict.fromkeys(wanted, 0o750)), "equal content packs to equal bytes"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "made" / "for it"
        assert archives.unpack(packed, folder) == []
        found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert found == wanted
        assert all(stat.S_IMODE((folder / path).stat().st_mode) == 0o750 for path in wanted)
        again = archives.pack_folder(folder)
        for path, content in wanted.items():
            assert archives.read_file(again, path) == content


_LINKS = st.sampled_from(
    [
        "a",
        "b",
        "a/b",
        "..",
        "../..",
        "../outside",
        "../../outside",
        "a/../..",
        "a/../../outside",
        ".",
        "./a",
        "/",
        "/etc",
        "b/..",
        "a/b/c",
        "../a",
        "a/./../b",
        "../folder/a",
    ]
)
_PLACES = st.sampled_from(
    ["a", "b", "a/b", "a/b/c", "b/c", "c", "a/c", "../outside/x", "/outside", "a/../../outside/x"]
)
_MEMBERS = st.lists(
    st.tuples(st.sampled_from(["file", "folder", "symlink", "hardlink", "device", "pipe"]), _PLACES, _LINKS),
    max_size=10,
)
_KINDS = {
    "file": tarfile.REGTYPE,
    "folder": tarfile.DIRTYPE,
    "symlink": tarfile.SYMTYPE,
    "hardlink": tarfile.LNKTYPE,
    "device": tarfile.CHRTYPE,
    "pipe": tarfile.FIFOTYPE,
}


def tar_of(members: list[tuple[str, str, str]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for kind, name, link in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = _KINDS[kind], link, 0o6777
            if kind == "file":
                member.size = 4
            tar.addfile(member, io.BytesIO(b"evil") if kind == "file" else None)
    return buffer.getvalue()


@given(_MEMBERS)
def test_nothing_leaves_the_folder(members: list[tuple[str, str, str]]) -> None:
    """For any order of files, folders and links: nothing outside changes, and nothing inside leads there."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name).resolve()
        folder, outside = base / "folder", base / "outside"
        outside.mkdir()
        (outside / "x").write_text("mine")
        folder.mkdir()
        with suppress(ArchiveError):
            archives.unpack(tar_of(members), folder)
        assert {path.name for path in base.iterdir()} == {"folder", "outside"}
        assert [path.name for path in outside.iterdir()] == ["x"]
        assert (outside / "x").read_text() == "mine"
        for path in folder.rglob("*"):
            mode = path.lstat().st_mode
            assert stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
            if not stat.S_ISLNK(mode):
                assert not mode & (stat.S_ISUID | stat.S_ISGID), "setuid and setgid are dropped"
            assert not os.path.exists(path) or path.resolve() == folder or folder in path.resolve().parents
        for path in (
            Path(root) / entry
            for root, folders, files in os.walk(folder, followlinks=False)
            for entry in folders + files
        ):
            try:
                assert folder == path.resolve() or folder in path.resolve().parents
            except (OSError, RuntimeError):  # a symlink to itself
                continue


def test_symlinks_of_the_archive_are_never_followed_and_older_ones_only_with_follow(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "bin").symlink_to("real")
    with pytest.raises(ArchiveError, match="cannot be a folder"):
        archives.unpack(archives.pack({"bin/tool": b"x"}), tmp_path)
    archives.unpack(archives.pack({"bin/tool": b"x"}), tmp_path, follow=True)
    assert (tmp_path / "real/tool").read_bytes() == b"x"
    hostile = tar_of([("symlink", "real/way", "/tmp"), ("file", "bin/way/planted", "")])
    with pytest.raises(ArchiveError, match="cannot be a folder"):
        archives.unpack(hostile, tmp_path, follow=True, links="any")


def test_sizes_and_entry_counts_are_limited(tmp_path: Path) -> None:
    archive = archives.pack({"a": bytes(1000), "b": bytes(1000)})
    with pytest.raises(ArchiveError, match="more than 1999 bytes"):
        archives.unpack(archive, tmp_path / "small", max_bytes=1999)
    archives.unpack(archive, tmp_path / "fits", max_bytes=2000)
    with pytest.raises(ArchiveError, match="more than 1 entries"):
        archives.unpack(archive, tmp_path / "few", max_entries=1)
    with pytest.raises(ArchiveError, match="more than the limit of 10"):
        archives.read_file(archive, "a", max_bytes=10)
    with pytest.raises(ArchiveError, match="more than one file"):
        archives.read_file(archive, "")
    compressed = io.BytesIO()
    with tarfile.open(fileobj=compressed, mode="w:gz") as tar:
        bomb = tarfile.TarInfo("bomb")
        bomb.size = 50_000_000
        tar.addfile(bomb, io.BytesIO(bytes(bomb.size)))
    with pytest.raises(ArchiveError, match="not a readable tar"):
        archives.unpack(compressed.getvalue(), tmp_path / "bomb")
    for broken in (b"", b"x" * 5000, archive[:700]):
        try:
            archives.unpack(broken, tmp_path / "broken")
        except ArchiveError:
            continue
        assert not any((tmp_path / "broken").iterdir())
    sparse = tmp_path / "live"
    sparse.mkdir()
    with (sparse / "huge").open("wb") as file:
        file.truncate(1 << 40)
    with (
        tarfile.open(fileobj=io.BytesIO(), mode="w") as tar,
        pytest.raises(ArchiveError, match="larger than the size limit"),
    ):
        archives.add_tree(tar, "live", str(sparse), 1 << 20)


def test_pack_a_local_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep/run").write_text("#!/bin/sh\n")
    (source / "deep/run").chmod(0o755)
    (source / "link").symlink_to("deep/run")
    os.mkfifo(source / "pipe")
    archive = archives.pack({"in/here": source, "in/one": source / "deep/run"})
    assert archives.unpack(archive, tmp_path / "out") == []
    assert os.readlink(tmp_path / "out/in/here/link") == "deep/run"
    assert os.access(tmp_path / "out/in/one", os.X_OK)
    assert not (tmp_path / "out/in/here/pipe").exists()
    for name in ("/absolute", "../up", "a/../../b"):
        with pytest.raises(ArchiveError):
            archives.pack({name: b""})
