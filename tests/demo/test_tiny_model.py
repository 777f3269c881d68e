"""The tiny model from nothing, the demo over it, and the commands that show what it left."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from random import Random

import pytest
from rich.console import Console
from typer.testing import CliRunner

from towline import cli
from towline.demo import registry, tiny_model, warmup
from towline.demo.run import run as run_demo
from towline.demo.session import LOGPROB_BOUND, recompute
from towline.errors import ConfigError
from towline.evaluators.python import PythonEvaluator, PythonOptions
from towline.schema import Trajectory
from towline.tokens.loading import load_codec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warmed up for a few steps only: it loads and runs, and says what it likes."""
    return tiny_model.create(tmp_path_factory.mktemp("models") / "tiny", steps=20)


def test_the_folder_is_a_model_and_is_created_once(model: Path) -> None:
    codec = load_codec(model)
    assert codec.check.problems == []
    assert codec.format.name == "hermes"
    made = (model / "model.safetensors").stat().st_mtime_ns
    assert tiny_model.create(model, steps=20) == model
    assert (model / "model.safetensors").stat().st_mtime_ns == made


def test_the_same_seed_makes_the_same_weights(model: Path, tmp_path: Path) -> None:
    again = tiny_model.create(tmp_path / "again", steps=20)
    other = tiny_model.create(tmp_path / "other", steps=20, seed=1)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (model, again, other)]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


def test_a_folder_with_other_content_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        tiny_model.create(tmp_path, steps=1)
    assert (tmp_path / "precious").read_text() == "x"


def test_warm_up_shows_the_format_and_keeps_held_out_pairs_unasked(model: Path) -> None:
    codec = load_codec(model)
    row = warmup.conversation(codec, Random(0), 2)
    spoken = codec.tokenizer.decode([row.ids[place] for place, _ in row.targets])
    assert spoken.count("<tool_call>") == spoken.count("</tool_call>") == 2
    random = Random(1)
    for _ in range(200):
        for question in registry.draw_instance(random).questions:
            assert registry.split_of(question.attribute, question.item) is registry.PairSplit.TRAINING
    for instance in registry.held_out_instances():
        for question in instance.questions:
            assert registry.split_of(question.attribute, question.item) is registry.PairSplit.HELD_OUT


async def test_the_demo_runs_the_agent_and_proves_what_was_recorded(model: Path, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    assert await run_demo(console, folder=tmp_path, questions=2, model=model) == 0
    shown = console.file.getvalue()
    assert "of 2 right" in shown
    assert "max |Δlogp|" in shown
    trajectory = Trajectory.read(tmp_path / "trajectory.arrow")
    assert trajectory.report.chains == 1
    assert len(trajectory.turns) >= 2
    assert recompute(model, [trajectory]) < LOGPROB_BOUND
    _check_a_lie_is_found(model, trajectory)
    _check_trace(tmp_path, trajectory.session_id)


def _check_a_lie_is_found(model: Path, trajectory: Trajectory) -> None:
    (row,) = trajectory.traces
    lied = row.logprobs.copy()
    lied[row.loss_mask == 1] -= 0.01
    assert (
        recompute(model, [trajectory.model_copy(update={"traces": [row.model_copy(update={"logprobs": lied})]})]) > 5e-3
    )


def _check_trace(folder: Path, session_id: str) -> None:
    runner = CliRunner()
    shown = runner.invoke(cli.app, ["trace", str(folder / "trajectory.arrow")])
    assert shown.exit_code == 0, shown.output
    assert "<|im_start|>" in shown.output
    as_json = runner.invoke(cli.app, ["trace", str(folder / "trajectory.json"), "--json"])
    assert json.loads(as_json.output)["session_id"] == session_id
    data = folder.parent / f"{folder.name}-elsewhere"
    (data / "trajectories").mkdir(parents=True)
    shutil.copy(folder / "trajectory.arrow", data / "trajectories" / "demo.arrow")
    by_id = runner.invoke(cli.app, ["trace", "demo", "--data", str(data)])
    assert by_id.exit_code == 0
    assert "tokens are shown as ids" in by_id.output
    missing = runner.invoke(cli.app, ["trace", "nothing", "--data", str(data)])
    assert isinstance(missing.exception, ConfigError)


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["gateway"],
        ["trace"],
        ["audit", "fidelity"],
        ["bench", "continue"],
        ["demo"],
        ["run"],
        ["train"],
        ["serve"],
        ["eval"],
        ["generate"],
        ["doctor"],
        ["harness", "check"],
    ],
)
def test_every_command_helps(command: list[str]) -> None:
    result = CliRunner().invoke(cli.app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_stored_tasks_may_name_the_reward_by_its_alias() -> None:
    options = {"kind": "python", "function": "towline.tiny.tasks:reward", "arguments": {"instance": {}}}
    assert PythonEvaluator(PythonOptions.model_validate(options)).function is registry.reward
