"""Images from a real registry on loopback: pulled, built in stages, and run as bubblewrap roots."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.sandboxes import contract
from support.sandboxes.registry_rig import BASE, PASSWORD, USER, push, registry
from towline.sandboxes.base import SandboxError, SandboxSpec, Unsupported
from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime
from towline.sandboxes.images.dockerfile import DockerfileError
from towline.sandboxes.images.oci import namespace
from towline.sandboxes.images.oci.buildah import Buildah, Registries
from towline.sandboxes.images.oci.store import ImageRoot, ImageUnavailable, OciImages, PullError
from towline.sandboxes.images.root_cache import RootCache
from towline.schema import Trajectory

GB = 1 << 30


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="towline-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def host(place: Path) -> Iterator[str]:
    """A registry with `lab/base:1` and `lab/base:2`."""
    with registry(place) as address:
        asyncio.run(push(address, place, "lab/base:1", BASE, root=True))
        yield address


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[BubblewrapRuntime]:
    with tempfile.TemporaryDirectory(prefix="towline-") as name:
        opened = BubblewrapRuntime(Path(name))
        await opened.open()
        yield opened
        await opened.close()


@pytest.fixture
async def buildah(tmp_path: Path, host: str) -> AsyncIterator[Buildah]:
    made = Buildah(tmp_path / "images", max_bytes=GB, registries=Registries([host]))
    yield made
    # An ordinary user could not delete files of its subordinate ids.
    assert await made.empty()


@pytest.fixture
def roots(tmp_path: Path) -> RootCache:
    return RootCache(tmp_path / "roots", GB)


def reader(place: Path, host: str, roots: RootCache, **options: Any) -> OciImages:
    return OciImages(Buildah(place / "images", max_bytes=GB, registries=Registries([host])), roots, **options)


def file_in(made: ImageRoot, name: str) -> bytes:
    return Path(made.built.root, name).read_bytes()


def spec_of(made: ImageRoot, **changes: object) -> SandboxSpec:
    built = made.built
    fields = {"env": tuple(built.env.items()), "workdir": built.workdir or "/work", "user": built.user} | changes
    return SandboxSpec(root=built.root, layers=built.layers, **fields)  # type: ignore[arg-type]


STAGES = """
ARG TAG=1
FROM {host}/lab/base:${{TAG}} AS compile
WORKDIR /src
COPY source.txt .
RUN tr a-z A-Z <source.txt >made && mkdir -p /opt/bin && printf '#!/bin/sh\\necho tool\\n' >/opt/bin/tool && chmod 755 /opt/bin/tool
RUN test "$(grep -c : /proc/net/dev)" = 1 && for p in /proc/[0-9]*/root; do test ! -e $p/images || exit 1; done

FROM {host}/lab/base:1
COPY --from=compile /src/made /opt/made
COPY --from=compile /opt/bin/tool /opt/bin/tool
COPY --chown=agent:agent source.txt /home/agent/mine
ENV GREETING="hello there"
RUN rm /etc/old && chown agent /home/agent
WORKDIR /srv/app
USER agent
RUN id -un >/tmp/who
CMD ["sleep", "1"]
"""
SEEN = 'pwd; id -un; cat /opt/made; tool; echo "$BASE, $GREETING"; ls /etc/old 2>&1 | grep -c "No such"; ls /src 2>&1 | grep -c "No such"'
SAID = "/srv/app\nagent\nHELLO FROM SOURCE\ntool\nfrom the base, hello there\n1\n1\n"


@pytest.fixture
def context(tmp_path: Path, host: str) -> Path:
    folder = tmp_path / "context"
    folder.mkdir()
    (folder / "source.txt").write_text("hello from source\n")
    (folder / "secret").write_text("not for the image")
    (folder / ".dockerignore").write_text("secret\n")
    (folder / "Dockerfile").write_text(STAGES.format(host=host))
    return folder


async def test_a_dockerfile_of_two_stages_runs_as_a_root(
    runtime: BubblewrapRuntime, host: str, context: Path, buildah: Buildah, roots: RootCache
) -> None:
    lines: list[str] = []
    store = OciImages(buildah, roots)
    made, *others = await asyncio.gather(*(store.build(context, on_line=lines.append) for _ in range(3)))
    assert {other.built.root for other in others} == {made.built.root}
    assert sum("STEP 1/" in line for line in lines) == 2, "three requests, one build of two stages"
    assert set(made.images) == {f"{host}/lab/base:1"}
    assert all(digest.startswith("sha256:") for digest in made.images.values())
    assert any("Cmd has no effect" in note for note in made.built.notes)
    async with contract.made(runtime, spec_of(made)) as sandbox:
        assert await contract.sh(sandbox, SEEN) == SAID
        assert [change.path for change in await sandbox.diff()] == []
        owner = (await contract.sh(sandbox, "stat -c '%U %a' /home/agent/mine")).split()
        assert owner == ["agent" if os.geteuid() == 0 else "root", "644"]
    # What is cached needs no registry, no buildah and no store.
    assert await buildah.empty()
    again = OciImages(Buildah(buildah.folder, max_bytes=GB), roots, pull="never")
    assert (await again.build(context)).built.root == made.built.root


async def test_a_tag_is_resolved_once_and_a_digest_is_verified(
    runtime: BubblewrapRuntime, host: str, place: Path, tmp_path: Path, buildah: Buildah, roots: RootCache
) -> None:
    changing = "FROM scratch\nADD root.tar /\nRUN echo {} >/version\n"
    first = await push(host, place, "lab/moving:1", changing.format("first"), root=True)
    made = await reader(tmp_path, host, roots).root(f"{host}/lab/moving:1")
    assert made.images == {f"{host}/lab/moving:1": first}
    second = await push(host, place, "lab/moving:1", changing.format("second"), root=True)
    assert second != first

    # Another process uses what the tag meant before; the same content has one root, however it is named.
    again = await reader(tmp_path, host, roots).root(f"{host}/lab/moving:1")
    by_digest = await reader(tmp_path, host, roots).root(f"{host}/lab/moving@{first}")
    assert made.built.root == again.built.root == by_digest.built.root
    # Asking again moves the tag, for later processes too.
    fresh = reader(tmp_path, host, roots)
    assert (await fresh.resolve(f"{host}/lab/moving:1", fresh=True)).digest == second
    moved = await reader(tmp_path, host, roots).root(f"{host}/lab/moving:1")
    assert file_in(moved, "version") == b"second\n"
    assert file_in(made, "version") == b"first\n"
    assert {one["reference"]: one["digest"] for one in fresh.recorded()} == {
        f"{host}/lab/moving:1": second,
        f"{host}/lab/moving@{first}": first,
    }
    async with contract.made(runtime, spec_of(moved)) as sandbox:
        assert (
            await contract.sh(sandbox, "cat /version; echo $PATH")
            == "second\n/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"
        )

    # A store that was emptied gets the same image again, by its digest.
    assert await buildah.empty()
    for one in (made, again, by_digest, moved):
        assert one.built.lease is not None
        one.built.lease.release()
    await RootCache(roots.path, 0).shrink()
    with pytest.raises(FileNotFoundError):
        file_in(made, "version")
    assert (await reader(tmp_path, host, roots).root(f"{host}/lab/moving@{first}")).images == {
        f"{host}/lab/moving@{first}": first
    }
    wrong = f"{host}/lab/moving@sha256:{'0' * 64}"
    with pytest.raises(ImageUnavailable, match="manifest unknown"):
        await reader(tmp_path, host, roots).root(wrong)


async def test_what_cannot_be_resolved_fails_in_one_line(
    host: str, tmp_path: Path, context: Path, buildah: Buildah, roots: RootCache
) -> None:
    store = OciImages(buildah, roots)
    cases: dict[str, tuple[type[SandboxError], str]] = {
        f"{host}/lab/none:1": (ImageUnavailable, "manifest unknown"),
        "127.0.0.1:1/lab/base:1": (PullError, "connection refused"),
    }
    for name, (kind, reason) in cases.items():
        (context / "Dockerfile").write_text(f"# one\nFROM {name}\nRUN true\n")
        for work in (store.build(context), store.root(name)):
            with pytest.raises(kind) as failure:
                await work
            line = str(failure.value)
            assert "\n" not in line
            for part in (name, reason, "`node.bases`", '`images.base = "host"`'):
                assert part in line, line
        with pytest.raises(kind, match=f"{context}/Dockerfile:2: FROM "):
            await store.build(context)
    with pytest.raises(ImageUnavailable, match="not pulled yet"):
        await OciImages(buildah, roots, pull="never").root(f"{host}/lab/base:1")
    assert roots.used() == 0


async def test_a_failed_build_names_its_step_and_leaves_nothing(
    host: str, tmp_path: Path, context: Path, buildah: Buildah, roots: RootCache
) -> None:
    store = OciImages(buildah, roots)
    start = f"FROM {host}/lab/base:1\n"
    (context / "Dockerfile").write_text(start + "RUN echo fine\nRUN echo about to fail; exit 3\n")
    with pytest.raises(DockerfileError) as failure:
        await store.build(context)
    line = str(failure.value)
    assert "step 3/3: RUN echo about to fail; exit 3 failed: exit status 3: about to fail" in line, line
    assert "\n" not in line
    (log,) = (buildah.folder / "logs").iterdir()
    assert line.endswith(str(log))
    assert "STEP 2/3: RUN echo fine" in log.read_text()

    # A build that is interrupted or takes too long: no process and no entry is left, and the next one works.
    token = "token" + secrets.token_hex(8)
    slow = f"RUN sh -c 'sleep 1000; echo {token}' & sh -c 'echo {token} >/began; sleep 1000'\n"
    (context / "Dockerfile").write_text(start + slow)
    steps: asyncio.Queue[str] = asyncio.Queue()
    building = asyncio.ensure_future(store.build(context, on_line=steps.put_nowait))
    async with asyncio.timeout(120):
        while token not in await steps.get():
            pass
        while len(contract.processes(token)) < 2:  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.05)
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    assert contract.processes(token) == []
    impatient = OciImages(buildah, roots, seconds=5)
    with pytest.raises(DockerfileError, match="not finished after 5 seconds"):
        await impatient.build(context)
    assert contract.processes(token) == []
    assert roots.used() == 0
    assert [path.name for path in roots.path.iterdir() if path.name != "locks"] == []
    (context / "Dockerfile").write_text(start + "RUN echo done >/done\n")
    made = await store.build(context)
    assert file_in(made, "done") == b"done\n"
    left = await buildah.run(("sh", "-c", "buildah containers -q; ls work tmp"), what="list", seconds=60)
    assert left == "tmp:\n\nwork:\n", "no working container and no file of the interrupted builds"


async def test_the_store_has_a_bound(host: str, tmp_path: Path, context: Path, roots: RootCache) -> None:
    small = Buildah(tmp_path / "small", max_bytes=200_000_000, registries=Registries([host]))
    store = OciImages(small, roots)

    async def built(size: int) -> ImageRoot:
        text = f"FROM {host}/lab/base:1\nRUN head -c {size} /dev/urandom >/large\n"
        (context / "Dockerfile").write_text(text)
        return await store.build(context)

    try:
        with pytest.raises(DockerfileError, match="larger than 200,000,000 bytes"):
            await built(8_000_000_000)
        assert len(file_in(await built(30_000_000), "large")) == 30_000_000
        assert await small.used() > 30_000_000
        await small.shrink()
        assert await small.used() > 30_000_000, "less than half is used"
        await Buildah(small.folder, max_bytes=50_000_000).shrink()
        assert await small.used() < 1_000_000, "more than half was used"
    finally:
        assert await small.empty()


async def test_a_mirror_is_asked_first(host: str, tmp_path: Path, roots: RootCache) -> None:
    registries = Registries([host, "127.0.0.1:1"], {"127.0.0.1:1": host})
    mirrored = Buildah(tmp_path / "mirrored", max_bytes=GB, registries=registries)
    try:
        made = await OciImages(mirrored, roots).root("127.0.0.1:1/lab/base:1")
        assert made.built.env["BASE"] == "from the base"
    finally:
        assert await mirrored.empty()


async def test_credentials_come_from_the_file_of_the_variable_and_only_for_pulls(
    host: str, tmp_path: Path, context: Path, roots: RootCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    with registry(tmp_path, private=True) as private:
        auth = tmp_path / "auth.json"
        auth.write_text(json.dumps({"auths": {private: {"auth": secret}}}))
        auth.chmod(0o600)
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(auth))
        await push(private, tmp_path, "lab/base:1", BASE, root=True)
        buildah = Buildah(tmp_path / "images", max_bytes=GB, registries=Registries([private]))
        store = OciImages(buildah, roots)
        try:
            monkeypatch.delenv("REGISTRY_AUTH_FILE")
            with pytest.raises(ImageUnavailable, match="authentication required"):
                await store.root(f"{private}/lab/base:1")
            monkeypatch.setenv("REGISTRY_AUTH_FILE", str(auth))
            look = "RUN if env | grep -i auth || ls /run/auth.json /images; then exit 9; fi\n"
            (context / "Dockerfile").write_text(f"FROM {private}/lab/base:1\n{look}")
            assert (await store.build(context)).built.env["BASE"] == "from the base"
            found = await buildah.run(("sh", "-c", f"grep -rl {secret} . || true"), what="look", seconds=60)
            assert found == "", "credentials are never written to the store"
        finally:
            assert await buildah.empty()


async def test_with_one_user_id_images_are_pulled_and_no_dockerfile_is_built(
    runtime: BubblewrapRuntime, host: str, context: Path, buildah: Buildah, roots: RootCache
) -> None:
    if namespace.image_user_mapping().mapped > 1:
        pytest.skip("this user has many ids")
    store = OciImages(buildah, roots)
    async with contract.made(runtime, spec_of(await store.root(f"{host}/lab/base:1"))) as sandbox:
        assert await contract.sh(sandbox, "id -un; echo $BASE") == "root\nfrom the base\n"
    with pytest.raises(Unsupported, match="/etc/subuid"):
        await store.build(context)


TASK = """
[task]
name = "lab/built"
[environment]
build_timeout_sec = 120
network_mode = "no-network"
"""


def test_sessions_and_prefetch_by_the_command_line(host: str, context: Path, tmp_path: Path) -> None:
    task = tmp_path / "tasks" / "built"
    shutil.copytree(context, task / "environment")
    for name, text in {
        "task.toml": TASK,
        "instruction.md": "Copy the made file.",
        "solution/solve.sh": "#!/bin/sh\ncp /opt/made copied\n",
        "tests/test.sh": "#!/bin/sh\nif cmp copied /opt/made; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n",
    }.items():
        (task / name).parent.mkdir(exist_ok=True)
        (task / name).write_text(text)
    (tmp_path / "towline.toml").write_text(
        f'[images]\ninsecure_registries = ["{host}"]\n[node]\ncache = "{tmp_path}/cache"\n'
    )

    def towline(*words: str, code: int = 0) -> Any:
        command = [sys.executable, "-m", "towline", *words, "--config", "towline.toml", "--json"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
        return json.loads(done.stdout)

    try:
        (ready,) = towline("images", "pull", "tasks")["environments"]
        assert (ready["tasks"], ready["needs_image"], ready["error"]) == (["lab/built"], True, "")
        listed = towline("images", "list")
        assert {one["reference"]: one["digest"] for one in listed["images"]} == ready["images"]
        assert listed["store_bytes"] > 0

        run = towline("run", "tasks", "--oracle", "--out", "out")
        assert [line["reward"] for line in run["results"]] == [1.0], run
        trajectory = Trajectory.read(next((tmp_path / "out" / "trajectories").glob("*.arrow")))
        assert trajectory.metadata["images"] == ready["images"]

        (task / "environment" / "Dockerfile").write_text(f"FROM {host}/lab/none:1\nWORKDIR /srv/app\n")
        failed = towline("run", "tasks", "--oracle", "--out", "none", code=1)["results"][0]
        assert (failed["state"], failed["attempt"]) == ("failed", 1), "a retry would change nothing"
        assert f"FROM {host}/lab/none:1: cannot be pulled" in failed["error"]
        assert "\n" not in failed["error"]
        (unready,) = towline("images", "pull", "tasks", code=1)["environments"]
        assert "manifest unknown" in unready["error"]
    finally:
        assert towline("images", "prune", "--roots") == {"pruned": True, "root_bytes": 0}
