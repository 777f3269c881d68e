"""A registry on loopback with a few small images, for tests of pulls and builds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shutil
import signal
import socket
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from support.sandboxes.roots_rig import busybox_root, tar_of
from towline.sandboxes.images.oci.buildah import Buildah, Registries

BASE = """FROM scratch
ADD root.tar /
ENV BASE="from the base" PATH=/opt/bin:/bin:/usr/bin
"""


USER, PASSWORD = "reader", "sesame"
_ACCOUNTS = f"{USER}:$2b$05$Da0sHxnUsG7PrRnOaMGyPOFNk1B1ZvKzwuIvE4iM.dBd5gQvtlYJa\n"


@contextlib.contextmanager
def registry(folder: Path, *, private: bool = False) -> Iterator[str]:
    """`host:port` of an empty registry; `private` asks for `USER` and `PASSWORD`."""
    program = shutil.which("docker-registry")
    assert program, "these tests need a registry: apt-get install docker-registry"
    with socket.create_server(("127.0.0.1", 0)) as free:
        host = f"127.0.0.1:{free.getsockname()[1]}"
    settings: dict[str, object] = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": str(folder / "registry")}, "delete": {"enabled": True}},
        "http": {"addr": host},
        "log": {"level": "error"},
    }
    if private:
        (folder / "accounts").write_text(_ACCOUNTS)
        settings["auth"] = {"htpasswd": {"realm": "lab", "path": str(folder / "accounts")}}
    file = folder / "registry.yml"
    file.write_text(json.dumps(settings))
    with open(folder / "registry.log", "wb") as log:
        server = subprocess.Popen([program, "serve", str(file)], stdout=log, stderr=log, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while not _answers(host):
            assert server.poll() is None, (folder / "registry.log").read_text()[-3000:]
            assert time.monotonic() < until, (folder / "registry.log").read_text()[-3000:]
            time.sleep(0.05)
        yield host
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def _answers(host: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{host}/v2/", timeout=5) as answer:
            return int(answer.status) == 200
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False


async def push(host: str, folder: Path, name: str, dockerfile: str, *, root: bool = False) -> str:
    """Build a Dockerfile over nothing and push it, from a store of its own; the digest."""
    buildah = Buildah(folder / "publisher", max_bytes=1 << 30, registries=Registries([host]))
    context = folder / f"context-{secrets.token_hex(4)}"
    context.mkdir()
    (context / "Dockerfile").write_text(dockerfile)
    if root:
        made = busybox_root(folder / f"root-{context.name}")
        with tarfile.open(context / "root.tar", "w") as tar:
            tar.add(made, arcname=".", filter=_owned_by_root)
    packed = tar_of(context, folder / f"{context.name}.tar")
    policy = " ".join(buildah.policy)
    script = (
        f"mkdir tmp/push && tar -x --no-same-owner -C tmp/push && buildah build {policy} --isolation chroot -t {host}/{name} tmp/push >&2 && "
        f"buildah push {policy} --digestfile tmp/digest {host}/{name} >&2 && cat tmp/digest; code=$?; rm -rf tmp/push; exit $code"
    )
    try:
        with contextlib.closing(await asyncio.to_thread(open, packed, "rb")) as stdin:
            return (
                await buildah.run(
                    ("sh", "-c", script), what="push", seconds=120, network=True, credentials=True, stdin=stdin
                )
            ).strip()
    finally:
        await buildah.empty()


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
