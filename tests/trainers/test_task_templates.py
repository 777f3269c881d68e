"""Rows of datasets as tasks: names are filled in, other braces stay, and what is wrong is told with its field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from towline.errors import ConfigError
from towline.trainers.templates import RowError, TaskTemplate

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Why?"}]}]


def made(fields: dict[str, Any], row: dict[str, Any], prompt: Any = "do it") -> Any:
    return TaskTemplate({"harness": "shell", **fields}).task(row, prompt=prompt, name="run", samples=2)


def test_a_lone_reference_is_the_value_and_within_text_it_is_text() -> None:
    fields = {
        "instruction": "{row.question} Choose from {row.choices}.",
        "harness_options": {"command": ["{program}/agent", "{row.choices.1}"]},
        "evaluator": {"kind": "answer", "answer": "{row.choices}", "of": "{row.about.level}"},
    }
    row = {"question": "Which?", "choices": ["a", "b"], "about": {"level": 3}}
    task = made(fields, row)
    assert task.instruction == 'Which? Choose from ["a", "b"].'
    assert task.harness_options == {"command": ["{program}/agent", "b"]}
    assert task.evaluator == {"kind": "answer", "answer": ["a", "b"], "of": 3}
    assert task.num_samples == 2
    assert task.task_id.startswith("run/")
    assert made(fields, row).task_id != task.task_id


def test_without_an_instruction_the_prompt_is_used() -> None:
    assert made({}, {}).instruction == "do it"
    assert made({}, {}, PROMPT).instruction == "Be brief.\n\nWhy?"


def test_a_row_may_override_task_fields() -> None:
    own = {"harness": "pi", "instruction": "literally {row.nothing}"}
    task = made({"evaluator": {"kind": "answer", "answer": "{row.a}"}}, {"a": "1", "towline_task": own})
    assert (task.harness, task.instruction) == ("pi", "literally {row.nothing}")
    assert task.evaluator["answer"] == "1"


@pytest.mark.parametrize(
    ("fields", "row", "prompt", "field", "said"),
    [
        ({"instruction": "{row.gone.0}"}, {"gone": []}, "x", "gone.0", "the row does not have it"),
        ({}, {"towline_task": "pi"}, "x", "towline_task", "an object"),
        ({}, {}, None, "prompt", "text or a list of messages"),
        ({}, {}, " ", "prompt", "is empty"),
        ({}, {}, [{"role": "assistant", "content": "hm"}], "prompt.0", "'assistant'"),
        ({}, {}, [{"role": "user", "content": [{"type": "image"}]}], "prompt.0.content.0", "only text"),
        ({"harness": ""}, {}, "x", "harness", "at least 1 character"),
        ({"timeouts": {"run": "{row.t}"}}, {"t": "soon"}, "x", "timeouts.run", "valid number"),
    ],
)
def test_an_invalid_row_is_reported_with_its_field(
    fields: dict[str, Any], row: dict[str, Any], prompt: Any, field: str, said: str
) -> None:
    with pytest.raises(RowError, match=said) as caught:
        made(fields, row, prompt)
    assert caught.value.field == field


def test_a_missing_field_is_reported_with_where_to_set_it() -> None:
    with pytest.raises(
        RowError, match=r"harness: Field required; set it in the task template or in the row's `towline_task`"
    ):
        TaskTemplate().task({}, prompt="x", name="run")


def test_files_are_toml_or_json_with_the_fields_of_a_task(tmp_path: Path) -> None:
    toml, json, other = tmp_path / "a.toml", tmp_path / "a.json", tmp_path / "b.toml"
    toml.write_text('harness = "pi"\n[timeouts]\nrun = 5\n')
    json.write_text('{"harness": "pi", "timeouts": {"run": 5}}')
    assert TaskTemplate.read(toml) == TaskTemplate.read(json)
    other.write_text('harnes = "pi"')
    with pytest.raises(ConfigError, match="unknown task fields harnes"):
        TaskTemplate.read(other)
    with pytest.raises(ConfigError, match="not a task template in TOML or JSON"):
        TaskTemplate.read(tmp_path / "nowhere.toml")
