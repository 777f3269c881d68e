"""Every field of a task has a decision about what an untrusted task may say there; a new field fails until it has one."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from towline.config import RoleRule, SessionSettings
from towline.errors import ConfigError
from towline.evaluators.answer import AnswerOptions
from towline.evaluators.command import CommandOptions
from towline.evaluators.completed import CompletedOptions
from towline.evaluators.harbor import HarborOptions, HarborStep
from towline.evaluators.patch import PatchOptions
from towline.evaluators.python import PythonOptions
from towline.evaluators.registry import KINDS
from towline.evaluators.swe.swebench_grading import SwebenchOptions
from towline.harnesses.registry import all_harnesses
from towline.schema import Environment, File, Resources, Step, Task, Timeouts
from towline.schema import untrusted as narrow
from towline.schema.trust import (
    DATA_FILES,
    EVERYTHING,
    Admission,
    Grant,
    RootRegistry,
    TaskRefused,
    parse_grants,
    pattern_problem,
)
from towline.schema.untrusted import UntrustedTask, admit_task

DECIDED: list[tuple[type[BaseModel], type[BaseModel]]] = [
    (Task, narrow.UntrustedTask),
    (Environment, narrow.UntrustedEnvironment),
    (File, narrow.UntrustedFile),
    (Step, narrow.UntrustedStep),
    (SessionSettings, narrow.UntrustedSettings),
    (RoleRule, narrow.UntrustedRole),
    (AnswerOptions, narrow.UntrustedAnswer),
    (CommandOptions, narrow.UntrustedCommand),
    (CompletedOptions, narrow.UntrustedCompleted),
    (HarborOptions, narrow.UntrustedHarbor),
    (HarborStep, narrow.UntrustedHarborStep),
    (PatchOptions, narrow.UntrustedPatch),
    (SwebenchOptions, narrow.UntrustedSwebench),
    (PythonOptions, narrow.UntrustedPython),
]
"""Each model of a task, and the narrow one whose field types are the decisions."""
NUMBERS: list[type[BaseModel]] = [Resources, Timeouts]
"""Models that are taken whole: they hold numbers and nothing else. Their maxima are the tenant's."""


@pytest.mark.parametrize(("model", "decisions"), DECIDED, ids=lambda model: model.__name__)
def test_every_field_has_a_decision(model: type[BaseModel], decisions: type[BaseModel]) -> None:
    assert set(model.model_fields) == set(decisions.model_fields), (
        f"give every field of {model.__name__} a type in {decisions.__name__} (schema/untrusted.py): what may a task from "
        "a submit key or a data file say there?"
    )


def test_every_model_below_a_task_has_decisions() -> None:
    found = {one for model, _ in DECIDED for one in _models_below(model)}
    known = {model for model, _ in DECIDED} | {*NUMBERS}
    settings = {one for one in found if one.__module__.startswith("towline.config")} - known
    assert {one.__name__ for one in settings} == {"SamplingSettings", "Limits"}  # numbers and choices
    assert found - settings <= known, found - settings - known
    for model in NUMBERS:
        kinds = {str(one.annotation) for one in model.model_fields.values()}
        assert not [kind for kind in kinds if "str" in kind or "dict" in kind or "Any" in kind], kinds


def _models_below(model: type[BaseModel]) -> set[type[BaseModel]]:
    found = {model}
    for field in model.model_fields.values():
        for part in _parts(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel) and part not in found:
                found |= _models_below(part)
    return found


def _parts(annotation: Any) -> list[Any]:
    inner = getattr(annotation, "__args__", ())
    return [annotation, *(one for part in inner for one in _parts(part))]


def test_every_kind_of_evaluator_and_every_option_of_a_harness_has_a_decision() -> None:
    assert set(narrow.EVALUATORS) == set(KINDS)
    for name, harness in all_harnesses().items():
        decided = (
            set(narrow.UntrustedShell.model_fields) if name in narrow.SHELLS else narrow.INSIDE_OPTIONS.get(name, set())
        )
        assert set(harness.options) == set(decided), (
            f"say in schema/untrusted.py whether the options of {name} stay inside its sandbox"
        )


def task(**fields: Any) -> Task:
    return Task.model_validate({"task_id": "t", "instruction": "Do it.", "harness": "pi", **fields})


FULL: dict[str, Any] = {
    "steps": [{"name": "one", "instruction": "x", "files": [{"target": "/work/a", "text": "a"}], "setup": ["true"]}],
    "harness": "mini-swe-agent",
    "harness_options": {"config": "mini.yaml", "step_limit": 3},
    "settings": {"noise": [r"\d+ ms"], "roles": [{"role": "side", "model": "weak*"}], "limits": {"turns": 3}},
    "environment": {
        "sandbox": "docker",
        "workdir": "/app",
        "env": {"A": "${HOME}"},
        "user": "1000:1000",
        "files": [{"target": "/app/x", "base64": "eA==", "mode": 0o755}],
        "setup": ["mkdir -p /app"],
        "artifacts": ["/app/out"],
        "resources": {"memory_mb": 64},
    },
    "evaluator": {"kind": "command", "command": "true", "reward": "regex", "pattern": r"score: (\d+)"},
    "callback": "https://example.com/done",
    "metadata": {"level": 3},
    "num_samples": 4,
}


def test_work_without_anything_of_the_host_is_taken_as_it_is() -> None:
    given = task(**FULL)
    made = admit_task(given, Admission())
    assert made == given
    assert made.environment.model_fields_set == given.environment.model_fields_set


REGISTRY = RootRegistry(
    {"python-3.12": "/roots/python.tar"},
    {"base": "registry.example:5000/lab/base:1", "pinned": f"lab/pinned@sha256:{'a' * 64}"},
    ("docker.io/swebench/*",),
)


@pytest.mark.parametrize(
    ("root", "meaning"),
    [
        ("", ""),
        ("python-3.12", "/roots/python.tar"),
        ("docker.io/library/python-3.12:latest", "/roots/python.tar"),
        ("base", "registry.example:5000/lab/base:1"),
        (f"sha256:{'a' * 64}", f"docker.io/lab/pinned@sha256:{'a' * 64}"),
        ("swebench/x:1", "docker.io/swebench/x:1"),
        (f"debian@sha256:{'b' * 64}", f"docker.io/library/debian@sha256:{'b' * 64}"),
        (f"upload:{'c' * 64}", f"upload:{'c' * 64}"),
        ("debian", None),
        ("towline-data", None),
        (f"sha256:{'d' * 64}", None),
        (f"127.0.0.1:5000/x@sha256:{'b' * 64}", None),
        ("evil.example/swebench/x", None),
        (f"upload:{'C' * 64}", None),
    ],
)
def test_roots_and_images_are_names_of_the_registry(root: str, meaning: str | None) -> None:
    given = task(environment={"root": root})
    if meaning is None:
        with pytest.raises(TaskRefused) as refused:
            admit_task(given, Admission(registry=REGISTRY))
        assert refused.value.field == "environment.root"
        return
    assert admit_task(given, Admission(registry=REGISTRY)).environment.root == meaning


def test_grants_are_words_and_errors_name_the_one_that_is_missing() -> None:
    assert parse_grants(["paths,env", "process"]) == {Grant.PATHS, Grant.ENV, Grant.PROCESS}
    assert parse_grants(["all"]) == EVERYTHING
    assert parse_grants([]) == frozenset()
    with pytest.raises(ConfigError, match="--trust path: unknown; known: paths, process"):
        parse_grants(["path"])
    given = task(environment={"sandbox": "process"})
    with pytest.raises(TaskRefused, match=r"environment\.sandbox: .*; to allow it: --trust process$"):
        admit_task(given, Admission(DATA_FILES))
    assert admit_task(given, Admission(frozenset({Grant.PROCESS}))) == given


@pytest.mark.parametrize(
    "pattern", [r"score: (\d+)", "a|b", "(?i)x{3,7}", r"(?P<n>\w+)", "[^a]*?", "(?:a{10}){10}", ""]
)
def test_patterns_that_re2_runs(pattern: str) -> None:
    assert pattern_problem(pattern) == ""


@pytest.mark.parametrize(
    "pattern", [r"(a)\1", "(?=a)b", "(?<!a)b", "(?>a)", "a++", "(a)?(?(1)b)", "((a{100}){100}){100}", "x" * 1001]
)
def test_patterns_that_re2_does_not_run(pattern: str) -> None:
    assert pattern_problem(pattern)
    with pytest.raises(TaskRefused) as refused:
        UntrustedTask.read(task(settings={"noise": [pattern]}), Admission())
    assert refused.value.grant is Grant.PATTERNS
