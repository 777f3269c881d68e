"""`towline generate` end to end: killed twice, it writes the dataset of an uninterrupted run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from towline.demo import tokenizer

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "examples/first_agent"
COMMAND = [sys.executable, "-m", "towline", "generate"]
SAMPLES = 3
EXAMPLES = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a template are all that the scripted engine needs."""
    made = tmp_path_factory.mktemp("model")
    tokenizer.write(made)
    return made


def arguments(model: Path, tasks: Path, out: Path, *more: str) -> list[str]:
    fixed = ["--harness", "shell", "--engine", "scripted", "--model", str(model), "--concurrency", "2", "--json"]
    return [*COMMAND, str(tasks), "--out", str(out), *fixed, *more]


def finished(out: Path) -> int:
    path = out / "progress.jsonl"
    return path.read_bytes().count(b'"session_id"') if path.exists() else 0


def accepted(out: Path) -> list[tuple[str, int, float, str]]:
    lines = map(json.loads, (out / "accepted.jsonl").read_text().splitlines())
    return [(line["task_id"], line["sample"], line["reward"], line["content"]) for line in lines]


def generate(model: Path, tasks: Path, out: Path, *more: str) -> dict[str, Any]:
    words = arguments(model, tasks, out, *more)
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_killed_twice_it_writes_the_dataset_of_an_uninterrupted_run(model: Path, tmp_path: Path) -> None:
    # An agent that goes through one question, and happens to know the answer to one of the tasks.
    command = "{python} {program}/agent.py --questions 1; echo 226637 > answer.txt"
    accept = "reward >= 1 or task_id == 'towline/refund-report'"
    more = ["--option", f"command={command}", "--option", f"folder={AGENT}", "--samples", str(SAMPLES)]
    more += ["--accept", accept, "--duplicates", "keep"]
    examples, whole, cut = ROOT / "examples/tasks", tmp_path / "whole", tmp_path / "cut"
    output = generate(model, examples, whole, *more)
    total = EXAMPLES * SAMPLES
    assert (output["samples"], output["accepted"], output["rejected"], output["failed"]) == (total, 6, total - 6, 0)

    for kill in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        before = finished(cut)
        with (tmp_path / "output.txt").open("ab") as printed:
            process = subprocess.Popen(arguments(model, examples, cut, *more), stdout=printed, stderr=printed)
        try:
            until = time.monotonic() + 240
            while finished(cut) < before + 3:
                assert time.monotonic() < until, (tmp_path / "output.txt").read_text()
                assert process.poll() is None, (tmp_path / "output.txt").read_text()
                time.sleep(0.01)
        finally:
            os.kill(process.pid, kill)
            process.wait(60)
        assert process.returncode != 0
        assert finished(cut) < total
    # A crash may also cut a line in two.
    with (cut / "progress.jsonl").open("ab") as file:
        file.write(b'{"task_id": "towline/stock-take", "sam')
    again = generate(model, examples, cut, *more)
    assert again["attempts"] == total, "a sample that had finished was run again"
    assert finished(cut) == total

    names = [(task, sample) for task, sample, _, _ in accepted(whole)]
    chosen = ("towline/lattice-paths", "towline/refund-report")
    assert names == [(task, sample) for task in chosen for sample in range(SAMPLES)]
    assert [name for *name, _ in accepted(cut)] == [name for *name, _ in accepted(whole)]
    assert tokens(cut) == tokens(whole)
    for name in ("samples", "accepted", "rejected", "duplicates", "rows", "trained_tokens", "row_tokens"):
        assert again[name] == output[name], name


def tokens(out: Path) -> list[tuple[Any, ...]]:
    """The dataset as `datasets` reads it."""
    import datasets

    datasets.disable_progress_bars()
    loaded = datasets.load_dataset(
        "parquet", data_files=str(out / "data/*.parquet"), split="train", cache_dir=str(out / "cache")
    )
    return [(r["task_id"], r["sample"], r["reward"], r["token_ids"], r["loss_mask"], r["logprobs"]) for r in loaded]


def test_a_finished_folder_is_rewritten_without_running_anything(model: Path, tmp_path: Path) -> None:
    tasks, out = tmp_path / "registries.jsonl", tmp_path / "out"
    with tasks.open("w") as file:
        for n in range(5):
            command = f"{{python}} {{program}}/agent.py --seed {n} --questions 2; exit {int(n % 3 == 2)}"
            task = {
                "task_id": f"registry/{n}",
                "instruction": "Answer the questions.",
                "harness_options": {"command": command, "folder": str(AGENT)},
                "evaluator": {"kind": "completed"},
                "metadata": {"number": n},
            }
            file.write(json.dumps(task) + "\n")
    more = ["--samples", "2", "--sandbox", "process"]
    first = generate(model, tasks, out, *more)
    # The scripted model says the same in both samples of a task: the second is a duplicate.
    assert (first["accepted"], first["duplicates"], first["rejected"]) == (4, 4, 2)
    assert [sample for _, sample, _, _ in accepted(out)] == [0] * 4
    assert len(list((out / "atif").iterdir())) == len((out / "sharegpt.jsonl").read_text().splitlines()) == 4

    rule = "metadata.number < 3 and turns > 1"
    again = generate(model, tasks, out, *more, "--accept", rule, "--format", "parquet")
    assert again["attempts"] == first["attempts"] == 10
    assert [task for task, *_ in accepted(out)] == ["registry/0", "registry/1", "registry/2"]
    assert not (out / "atif").exists()
    card = json.loads((out / "card.json").read_text())
    assert card["accepted"] == 3
    assert card["recipe"]["accept"] == rule
    assert card["tasks"]["registry/4"]["rejected"] == 2
    assert card["hours"] > 0
    readme = (out / "README.md").read_text()
    assert "path: data/*.parquet" in readme
    assert "| accepted | 3 |" in readme

    import datasets

    loaded = datasets.load_dataset(str(out), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded[0]["messages"][-1]["role"] == "assistant"
    assert sum(loaded[0]["loss_mask"]) == loaded[0]["trained_tokens"]

    words = arguments(model, tasks, out, *more, "--temperature", "0.5")
    other = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert other.returncode == 1
    assert "was started with other settings: session was" in " ".join(other.stderr.split())
