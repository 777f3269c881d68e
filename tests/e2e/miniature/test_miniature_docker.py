"""The miniature suite on a real dockerd, in an image of this machine's own Debian packages."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.sandboxes.debian_root import make_debian_root
from support.sandboxes.dockerd_rig import dockerd
from support.tasks.miniature import TASKS, check_row
from towline.sandboxes.base import Runtime
from towline.sandboxes.docker.runtime import DockerRuntime

IMAGE = "towline/miniature:1"
PACKAGES = (
    "base-files", "bash", "coreutils", "dash", "diffutils", "findutils", "gcc", "git", "grep", "libc-bin", "libc6-dev", "mawk",
    "nodejs", "python3", "sed", "tar",
)  # fmt: skip
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # Short, since the length of a socket's path is limited.
    with tempfile.TemporaryDirectory(prefix="towline-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[str]:
    """A docker engine that has the image."""
    root = make_debian_root(folder / "root", PACKAGES)
    with dockerd(folder) as url:
        tar = subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE)
        imported = ["docker", "-H", url, "import", "-", IMAGE]
        subprocess.run(imported, stdin=tar.stdout, check=True, capture_output=True)
        assert tar.wait() == 0
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(folder: Path, engine: str) -> AsyncIterator[Runtime]:
    opened = DockerRuntime(folder / "sandboxes", url=engine)
    await opened.open()
    yield opened
    await opened.close()


@pytest.mark.parametrize("name", list(TASKS))
async def test_the_fix_scores_1_and_nothing_else_does(name: str, runtime: Runtime, tmp_path: Path) -> None:
    assert await check_row(name, runtime, tmp_path, root=IMAGE) == {"oracle": 1, "nothing": 0, "edited tests": 0}
