"""Roots are unpacked once, completely or not at all, inside their folder, and the cache stays within its limit."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gzip
import io
import os
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.sandboxes.base import SandboxError
from towline.sandboxes.images import root_tar
from towline.sandboxes.images.root_cache import FolderCache, RootCache

MB = 1 << 20


def member(
    name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", mode: int = 0o644, data: bytes = b"", uid: int = 0
):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.size, info.uid, info.mtime = (
        kind,
        link,
        mode,
        len(data),
        uid,
        1_000_000_000,
    )
    return info, data


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


SYSTEM = archive(
    member(".", tarfile.DIRTYPE, mode=0o755),
    member("./usr/", tarfile.DIRTYPE, mode=0o755),
    member("./usr/bin/", tarfile.DIRTYPE, mode=0o555),
    member("./bin", tarfile.SYMTYPE, link="usr/bin"),
    member("./usr/bin/tool", mode=0o4755, data=b"tool"),
    member("bin/through", mode=0o755, data=b"through the link"),
    member("./usr/bin/again", tarfile.LNKTYPE, link="./usr/bin/tool"),
    member("./etc/localtime", tarfile.SYMTYPE, link="/usr/share/zoneinfo/UTC"),
    member("./etc/up", tarfile.SYMTYPE, link="../../../../../../etc/passwd"),
    member("./dev/null", tarfile.CHRTYPE, mode=0o666),
    member("./run/pipe", tarfile.FIFOTYPE),
    member("./home/me/file", data=b"mine", uid=1000),
    member("/absolute", data=b"absolute"),
    member("../../above", data=b"above"),
)


@pytest.mark.parametrize("packing", ["plain", "gzip", "zstd"])
async def test_a_root_is_unpacked_unchanged(tmp_path: Path, packing: str) -> None:
    tar = tmp_path / "root.tar"
    tar.write_bytes(
        {"plain": bytes, "gzip": gzip.compress, "zstd": lambda data: pyarrow.compress(data, "zstd", asbytes=True)}[
            packing
        ](SYSTEM)
    )
    reported: list[tuple[int, int]] = []
    cache = RootCache(tmp_path / "cache", 10 * MB)
    root = await cache.folder(str(tar), progress=lambda done, total: reported.append((done, total)))

    assert (root / "usr/bin/tool").read_bytes() == b"tool"
    assert (root / "usr/bin/through").read_bytes() == b"through the link"
    assert (root / "usr/bin/again").stat().st_ino == (root / "usr/bin/tool").stat().st_ino
    assert stat.S_IMODE((root / "usr/bin/tool").stat().st_mode) == 0o4755
    assert stat.S_IMODE((root / "usr/bin").stat().st_mode) == 0o555
    assert os.readlink(root / "etc/localtime") == "/usr/share/zoneinfo/UTC"
    assert os.listdir(root / "dev") == os.listdir(root / "run") == []
    assert (root / "absolute").read_bytes() == b"absolute"
    assert (root / "above").read_bytes() == b"above", "`..` stops at the root, as in the kernel"
    assert int((root / "usr/bin/tool").stat().st_mtime) == 1_000_000_000
    if os.geteuid() == 0:
        assert (root / "home/me/file").stat().st_uid == 1000
    assert reported[-1] == (tar.stat().st_size, tar.stat().st_size)
    assert await RootCache(tmp_path / "cache", 10 * MB).folder(str(tar)) == root
    assert await cache.folder(str(root)) == root, "a folder is used as it is"


NAMES = st.lists(st.sampled_from(["a", "b", "c", "..", ".", ""]), min_size=1, max_size=4).map("/".join)
OUTSIDE = "OUTSIDE"
LINKS = NAMES | st.sampled_from(["/", "/a", "..", "../..", OUTSIDE, OUTSIDE + "/canary"])
MEMBERS = st.lists(
    st.tuples(
        st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE]),
        NAMES,
        LINKS,
    ),
    min_size=1,
    max_size=12,
)


@given(MEMBERS)
def test_no_archive_writes_outside_its_folder(members: list[tuple[bytes, str, str]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        outside, root, tar = Path(place, "outside"), Path(place, "deep/root"), Path(place, "evil.tar")
        outside.mkdir()
        root.mkdir(parents=True)
        (outside / "canary").write_bytes(b"alive")
        tar.write_bytes(
            archive(
                *(
                    member(
                        name,
                        kind,
                        link=link.replace(OUTSIDE, str(outside)),
                        data=b"x" if kind == tarfile.REGTYPE else b"",
                        mode=0o777,
                    )
                    for kind, name, link in members
                )
            )
        )
        before = (outside / "canary").stat()
        with contextlib.suppress(SandboxError):
            root_tar.unpack(tar, root, max_bytes=MB, owners=None)
        after = (outside / "canary").stat()
        assert (after.st_nlink, after.st_mode, after.st_mtime_ns) == (1, before.st_mode, before.st_mtime_ns)
        assert (outside / "canary").read_bytes() == b"alive"
        assert sorted(os.listdir(place)) == ["deep", "evil.tar", "outside"]
        assert os.listdir(outside) == ["canary"]
        assert os.listdir(Path(place, "deep")) == ["root"]


async def test_a_broken_or_missing_tar_leaves_nothing(tmp_path: Path) -> None:
    cache = RootCache(tmp_path / "cache", 10 * MB)
    cases = {
        "cut": SYSTEM[:3000],
        "noise": b"\x1f\x8bnot gzip at all",
        "empty": b"",
        "saved image": archive(member("manifest.json", data=b"[]"), member("blobs/x", data=b"x")),
        "bomb": gzip.compress(archive(member("f", data=bytes(20 * MB)))),
    }
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SandboxError):
            await cache.folder(str(tmp_path / name))
    with pytest.raises(SandboxError, match="no root file system at"):
        await cache.folder(str(tmp_path / "missing"))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["locks"]
    assert cache.used() == 0


def tar_of(folder: Path, name: str, size: int) -> str:
    path = folder / name
    path.write_bytes(archive(member("name", data=name.encode()), member("big", data=os.urandom(size))))
    return str(path)


async def test_the_limit_holds_and_leased_entries_stay(tmp_path: Path) -> None:
    a, b, c, d = (tar_of(tmp_path, name, MB) for name in "abcd")
    cache = RootCache(tmp_path / "cache", 3 * MB)
    first = await cache.lease(a)
    second = await cache.lease(b)
    second.release()
    third = await cache.lease(c)
    assert first.path.is_dir()
    assert third.path.is_dir()
    assert not second.path.exists(), "the only entry that was not in use"
    with pytest.raises(SandboxError, match="are in use; raise"):
        await cache.lease(d)
    assert cache.used() <= 3 * MB
    first.release()
    third.release()
    with await cache.lease(c):
        pass
    with await cache.lease(d) as path:
        assert (path / "name").read_bytes() == b"d"
    assert not first.path.exists(), "least recently used"
    assert third.path.is_dir()

    # The leftovers of a killed maker are removed with the next eviction.
    left = tmp_path / "cache" / "new-root-dead-0000"
    left.mkdir()
    await cache.shrink()
    assert not left.exists()


OTHER = """
import asyncio, sys
from pathlib import Path
from towline.sandboxes.images.root_cache import FolderCache, RootCache
async def main():
    cache = RootCache(Path(sys.argv[1]), 64 << 20)
    print("ready", flush=True)
    sys.stdin.readline()
    reported = []
    lease = await cache.lease(sys.argv[2], progress=lambda *done: reported.append(done))
    print((lease.path / "name").read_text(), bool(reported), flush=True)
    sys.stdin.readline()
asyncio.run(main())
"""


async def test_many_processes_unpack_once_and_see_each_others_leases(tmp_path: Path) -> None:
    tar = tar_of(tmp_path, "shared", 4 * MB)
    others = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", OTHER, str(tmp_path / "cache"), tar, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(3)
    ]
    for other in others:
        assert other.stdout
        assert await other.stdout.readline() == b"ready\n"
    for other in others:
        assert other.stdin
        other.stdin.write(b"go\n")
    reported: list[object] = []
    cache = RootCache(tmp_path / "cache", 64 * MB)
    mine = await asyncio.gather(*(cache.lease(tar, progress=lambda *done: reported.append(done)) for _ in range(4)))
    answers = [await other.stdout.readline() for other in others if other.stdout]
    assert {answer.split()[0] for answer in answers} == {b"shared"}
    assert [b"True" in answer for answer in answers].count(True) + bool(reported) == 1, (
        "unpacked by exactly one process"
    )

    for lease in mine:
        lease.release()
    small = RootCache(tmp_path / "cache", MB)
    await small.shrink()
    assert mine[0].path.exists(), "leased by the others"
    for other in others:
        other.kill()
        await other.wait()
    await small.shrink()
    assert not mine[0].path.exists(), "a lease dies with its process"


async def test_whoever_waits_to_make_an_entry_takes_the_one_that_another_process_made_and_holds(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path, MB)

    async def make(folder: Path) -> None:
        raise AssertionError("it exists")

    held = cache._lock_file("key")
    fcntl.flock(held, fcntl.LOCK_SH)
    waiting = asyncio.ensure_future(cache.lease("key", make))
    await asyncio.sleep(0)
    made = tmp_path / "key"
    (made / "content").mkdir(parents=True)
    (made / "about.json").write_text('{"size": 0}')
    lease = await asyncio.wait_for(waiting, 30)
    assert lease.path == made / "content"
    lease.release()
    os.close(held)


def as_nobody(work: Callable[[], object]) -> str:
    """The repr of the result of some work in a child process of an ordinary user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65_534)
                os.setuid(65_534)
            result = repr(work())
        except BaseException as error:
            result = repr(error)
        os.write(writing, result.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        result = file.read()
    os.waitpid(child, 0)
    return result


def test_ordinary_users_own_everything_and_can_delete_it() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place = Path(name)
        place.chmod(0o777)
        tar = place / "root.tar"
        tar.write_bytes(SYSTEM)

        async def use() -> tuple[int, bytes, bool]:
            cache = RootCache(place / "cache", 10 * MB)
            with await cache.lease(str(tar)) as root:
                owner, data = (root / "home/me/file").stat().st_uid, (root / "usr/bin/through").read_bytes()
            await RootCache(place / "cache", 0).shrink()
            return owner, data, root.exists()

        assert as_nobody(lambda: asyncio.run(use())) == repr((os.geteuid() or 65_534, b"through the link", False))
        if os.geteuid() == 0:
            root_tar.unpack(tar, place, max_bytes=MB, owners=root_tar.Owners(100_000, 200_000))
            owner = (place / "home/me/file").stat()
            assert (owner.st_uid, owner.st_gid) == (101_000, 200_000)
