"""Images from a real registry on loopback: pulled, built in stages, and run as bubblewrap roots."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.sandboxes import contract
from support.sandboxes.registry_rig import BASE, push, registry
from towline.sandboxes.base import SandboxSpec
from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime
from towline.sandboxes.images.oci.buildah import Buildah, Registries
from towline.sandboxes.images.oci.store import ImageRoot, OciImages
from towline.sandboxes.images.root_cache import RootCache

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
    many_ids = not any("only one user id" in note for note in runtime.facts.notes)
    said = SAID if many_ids else SAID.replace("agent\n", "root\n", 1)
    async with contract.made(runtime, spec_of(made, user="agent" if many_ids else "")) as sandbox:
        assert await contract.sh(sandbox, SEEN) == said
        assert [change.path for change in await sandbox.diff()] == []
        owner = (await contract.sh(sandbox, "stat -c '%U %a' /home/agent/mine")).split()
        assert owner == ["agent" if os.geteuid() == 0 else "root", "644"]
    # What is cached needs no registry, no buildah and no store.
    assert await buildah.empty()
    again = OciImages(Buildah(buildah.folder, max_bytes=GB), roots, pull="never")
    assert (await again.build(context)).built.root == made.built.root
