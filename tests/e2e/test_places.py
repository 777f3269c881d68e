"""One task, everywhere: a real agent program does the same work, captured and scored alike, in every kind of place.

The last test runs the first two again as an ordinary user.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.harnesses.harness_rig import INSTALLS
from support.node.node_rig import running_node
from support.sandboxes.bare_root import make_bare_root
from support.sandboxes.dockerd_rig import dockerd
from support.sandboxes.ordinary_user import SECONDS, run_tests
from towline.conversation import Request, ToolCall
from towline.engines.scripted import Say, example_arguments
from towline.harnesses.registry import find_harness
from towline.runs.run import run_group
from towline.schema import EndReason, SandboxKind, SessionState, Task
from towline.tokens.codec import ModelCodec
from towline.tokens.loading import load_codec

pytestmark = pytest.mark.usefixtures("_installed")


@pytest.fixture(scope="module")
def codec(assets: Path) -> ModelCodec:
    return load_codec(assets / "tokenizers" / "qwen3")


@pytest.fixture(scope="module")
def _installed() -> None:
    pi = find_harness("pi")
    assert INSTALLS.ready(pi), f"pi is not installed in {INSTALLS.folder}; run: towline harness install pi"


def writes_hello(request: Request) -> Say:
    """A command by the harness's own tool for commands, then an answer."""
    if request.messages[-1].role == "tool":
        return Say("It is written.", "The file is there.")
    tool = next(tool for tool in request.tools if tool.name == "bash")
    return Say(
        "", "I write it.", [ToolCall("", tool.name, example_arguments(tool, "printf hello > hello.txt; echo written"))]
    )


async def does_the_task(codec: ModelCodec, out: Path, sandbox: SandboxKind, root: str = "") -> None:
    task = Task.model_validate(
        {
            "task_id": "everywhere",
            "instruction": "Write hello to hello.txt.",
            "harness": "pi",
            "environment": {"root": root, "setup": ["echo ready"]},
            "evaluator": {"kind": "command", "command": 'test "$(cat hello.txt)" = hello'},
            "max_attempts": 1,
        }
    )
    cache = out / "cache"
    cache.mkdir(parents=True)
    (cache / "harnesses").symlink_to(INSTALLS.folder)
    async with running_node(codec, out, writes_hello, sandbox=sandbox, cache=cache) as rig:
        (done,) = await run_group(rig.node, task)
    trajectory = done.trajectory
    assert done.session.state is SessionState.DONE, trajectory.error
    assert trajectory.end_reason is EndReason.EXITED, (done.logs / "harness.log").read_text()
    assert trajectory.reward is not None
    assert trajectory.reward.score == 1.0, trajectory.reward
    assert [turn.reply["text"] for turn in trajectory.turns] == ["", "It is written."]
    assert "written" in trajectory.turns[1].messages[-1]["text"]
    assert trajectory.report.chains == 1
    assert trajectory.metadata["sandbox"] == sandbox


async def test_bubblewrap_over_the_hosts_own_root(codec: ModelCodec, tmp_path: Path) -> None:
    await does_the_task(codec, tmp_path, SandboxKind.BUBBLEWRAP)


async def test_bubblewrap_over_a_root_without_python_or_node(codec: ModelCodec, tmp_path: Path) -> None:
    node = INSTALLS.path(find_harness("pi")) / "bin" / "node"
    root = make_bare_root(tmp_path / "root", node)
    await does_the_task(codec, tmp_path / "out", SandboxKind.BUBBLEWRAP, str(root))


async def test_docker(codec: ModelCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = INSTALLS.path(find_harness("pi")) / "bin" / "node"
    root = make_bare_root(tmp_path / "root", node)
    engine = tmp_path / "engine"
    engine.mkdir()
    with dockerd(engine) as url:
        monkeypatch.setenv("DOCKER_HOST", url)
        await does_the_task(codec, tmp_path / "out", SandboxKind.DOCKER, str(root))


@pytest.mark.timeout(SECONDS)
def test_bubblewrap_without_root(assets: Path) -> None:
    """Both roots once more, by an ordinary user with a range of user ids."""
    shown = {"TOWLINE_ASSETS": assets, "TOWLINE_CACHE": INSTALLS.folder.parent}
    done = run_tests(["tests/e2e/test_places.py", "-k", "over"], subordinate=True, shown=shown)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "2 passed" in done.stdout
