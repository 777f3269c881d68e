"""Hostile text never freezes the process that others need: it is parsed in killable workers, or on RE2.

An attack gains CPU seconds of this process. What a worker spends is its own, and bounded.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.security.attack import attack, without
from support.security.workers import backtracking, burned, inline_async, without_workers
from towline.common.untrusted import patterns, workers
from towline.common.untrusted.workers import LimitExceeded, WorkerFailed, WorkerLimits
from towline.config import RoleRule, SessionSettings
from towline.conversation import Message
from towline.errors import ConfigError
from towline.evaluators import eval_inputs, testlogs
from towline.evaluators.answer import AnswerEvaluator, AnswerOptions
from towline.evaluators.base import EvaluationError
from towline.evaluators.hostile import changes, score_text, trees
from towline.evaluators.registry import make_evaluator
from towline.gateway import sampling, turn
from towline.sandboxes.files import archives
from towline.tokens.graph.fingerprint import normalized_text

TIGHT = WorkerLimits(seconds=1.0, memory=256 * 1024 * 1024, result=16 * 1024 * 1024)
DIGITS = ("1" * 990 + "x ") * 3000
MARKS = "x" + "*" * 30_000 + "x"
LOG = "\n".join(["a::b" + " PASSED (" * 200] * 1500)
OBJECTS = "\n".join('{"a": [' + "1," * 200_000 for _ in range(40))


def many_files(count: int) -> bytes:
    return archives.pack({f"work/{index}": b"" for index in range(count)})


def alike(count: int) -> bytes:
    """Files whose line-by-line comparison costs the square of their size."""
    text = "\n".join(f"{index % 199}" for index in range(9000)).encode()
    return archives.pack({f"work/{index}": text for index in range(count)})


def alike_reversed(count: int) -> bytes:
    text = "\n".join(f"{(index * 7) % 199}" for index in range(9000)).encode()
    return archives.pack({f"work/{index}": text for index in range(count)})


def parse(function: Callable[..., Any], *arguments: Any) -> Callable[[], Awaitable[Any]]:
    return lambda: workers.run_async(TIGHT, function, *arguments)


HOSTILE: dict[str, Callable[[], Callable[[], Awaitable[Any]]]] = {
    "reward-digits": lambda: parse(score_text.last_number, DIGITS),
    "reward-objects": lambda: parse(score_text.json_rewards, OBJECTS),
    "reward-file": lambda: parse(score_text.reward_files, b'{"a": ' + b"[" * 100 + b"1," * 6_000_000, None),
    "test-log": lambda: parse(testlogs.read_results, LOG, None, True),
    "archive-entries": lambda: parse(trees.carry_archive, many_files(12_000), "/work"),
    "artifact-entries": lambda: parse(trees.count_members, many_files(20_000)),
    "diff-lines": lambda: parse(changes.compare_trees, alike(20), alike_reversed(20), [], []),
    "diff-sections": lambda: parse(
        changes.kept_diff, b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n" * 60_000, [], []
    ),
}


@attack("8-11", "32", guard=without_workers())
@pytest.mark.parametrize("kind", sorted(HOSTILE))
async def test_text_freezes_the_service(kind: str) -> float | None:
    work = HOSTILE[kind]()
    await workers.run_async(TIGHT, score_text.last_number, "1")  # a worker is there
    return await burned(work)


@attack("9", guard=without_workers())
@pytest.mark.parametrize("text", [MARKS, "answer " + MARKS, "_" * 40_000 + "5x"], ids=["line", "label", "lead"])
async def test_an_answer_freezes_the_service(text: str, monkeypatch: pytest.MonkeyPatch) -> float | None:
    monkeypatch.setattr(workers, "DEFAULT_LIMITS", TIGHT)
    evaluator = AnswerEvaluator(AnswerOptions(kind="answer", answer=["5"], symbolic=False))
    workers.run(score_text.last_number, "1")

    async def score() -> None:
        evaluator.score(text)

    return await burned(score)


EVIL = ["(a+)+$", "(a|a)*$", "(.*a){22}$", "^(([a-z])+.)+[A-Z]([a-z])+$"]
TEXT = "a" * 24 + "!"


def slow_compile(pattern: str) -> Any:
    return backtracking(pattern)


@attack("10", guard=without_workers(("towline.evaluators.hostile.score_text.compile_pattern", slow_compile)))
@pytest.mark.parametrize("pattern", EVIL)
async def test_a_tenants_evaluator_pattern(pattern: str) -> float | None:
    assert make_evaluator({"kind": "command", "command": "x", "reward": "regex", "pattern": pattern}) is not None
    await workers.run_async(TIGHT, score_text.last_number, "1")
    return await burned(parse(score_text.matched_number, f"{TEXT}\n" * 3, pattern))


@attack("11", guard=without(("towline.gateway.turn.compile_pattern", slow_compile)))
@pytest.mark.parametrize("pattern", EVIL)
async def test_tenants_noise(pattern: str) -> float | None:
    settings = SessionSettings(noise=(pattern,))
    noise = tuple(map(turn.compile_pattern, settings.noise))

    async def fingerprint() -> None:
        normalized_text(Message("user", TEXT * 2), noise)

    return await burned(fingerprint)


@attack("11", guard=without(("towline.gateway.sampling.compile_pattern", slow_compile)))
async def test_tenants_role_rules() -> float | None:
    rule = RoleRule.model_validate({"role": "side", "system": EVIL[0]})

    async def match() -> None:
        sampling.compile_pattern(rule.system or "").search(TEXT * 2)

    return await burned(match)


REFUSED = {
    r"(?=a)b": "look-ahead",
    r"(?!a)b": "negative look-ahead",
    r"(?<=a)b": "look-behind",
    r"(?<!a)b": "negative look-behind",
    r"(a)\1": "back-reference",
    r"(?P<x>a)(?P=x)": "back-reference",
    r"(?>a+)b": "atomic",
    r"a*+b": "possessive",
    r"a{5000}": "repetition",
    r"((a{100}){100}){100}": "",
    "a" * 5000: "exceeds the limit",
}


@attack("10", guard=without(("towline.common.untrusted.patterns._compile", lambda pattern: backtracking("x"))))
@pytest.mark.parametrize("pattern", sorted(REFUSED), ids=range(len(REFUSED)))
def test_a_pattern_that_is_not_linear_is_accepted(pattern: str) -> object:
    patterns._compile.cache_clear() if hasattr(patterns._compile, "cache_clear") else None
    try:
        made = make_evaluator({"kind": "command", "command": "x", "reward": "regex", "pattern": pattern})
    except ConfigError as error:
        said = str(error)
        return None if "evaluator.pattern" in said and REFUSED[pattern] in said else said
    return made


def endless() -> None:
    while True:
        pass


def test_a_worker_that_exceeds_a_limit_is_killed_and_replaced() -> None:
    assert workers.run(score_text.last_number, "1.5") == 1.5
    for limits, text in (
        (WorkerLimits(seconds=0.2), DIGITS * 10),
        (WorkerLimits(memory=1024 * 1024), "1" * 8_000_000),
        (WorkerLimits(result=10), "0.123456789012345"),
    ):
        with pytest.raises(LimitExceeded):
            workers.run_within(limits, score_text.last_number, text)
        assert workers.run(score_text.last_number, "2.5") == 2.5


def test_a_worker_that_is_killed_from_outside_is_replaced() -> None:
    workers.run(score_text.last_number, "1")
    for idle in list(workers._pool.idle):
        os.kill(idle.process.pid, signal.SIGKILL)
        idle.process.wait()
    assert workers.run(score_text.last_number, "1") == 1


def environment_of_worker() -> dict[str, str]:
    return dict(os.environ)


def test_a_worker_has_no_secrets_and_only_runs_functions_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    workers._pool.close()
    workers.run(score_text.last_number, "1")
    (idle,) = workers._pool.idle[-1:]
    seen = open(f"/proc/{idle.process.pid}/environ", "rb").read()  # noqa: SIM115
    assert b"s3cret" not in seen
    descriptors = {
        os.readlink(f"/proc/{idle.process.pid}/fd/{name}") for name in os.listdir(f"/proc/{idle.process.pid}/fd")
    }
    assert all(one.startswith("pipe:") or one == "/dev/null" for one in descriptors), descriptors
    with pytest.raises(WorkerFailed, match="not a function of this package"):
        workers.run(environment_of_worker)
    with pytest.raises(EvaluationError, match="no number"):
        workers.run(score_text.last_number, "none")


async def test_a_call_costs_milliseconds() -> None:
    await workers.run_async(TIGHT, score_text.last_number, "1")
    began = time.process_time()
    for _ in range(50):
        await workers.run_async(TIGHT, score_text.last_number, "1")
    assert time.process_time() - began < 0.5  # CPU time of this process: 10 ms per call would be ten times too slow


@attack("17", guard=without(("towline.sandboxes.files.archives._HOLE_COST", 0)))
def test_a_sparse_file_costs_its_reader_more_than_its_author(tmp_path: Any) -> int | None:
    import tarfile

    with open(tmp_path / "big", "wb") as file:
        file.truncate(96 * 1024 * 1024)
    with open(os.devnull, "wb") as nowhere, tarfile.open(fileobj=nowhere, mode="w|") as tar:
        try:
            left = archives.add_tree(tar, "big", str(tmp_path / "big"), 256 * 1024 * 1024)
        except archives.ArchiveError:
            return None
    return 256 * 1024 * 1024 - left


async def test_inline_is_what_a_worker_does() -> None:
    """The unguarded runs above differ from the guarded ones in nothing but the process."""
    raw = archives.pack({"work/a": b"1", "work/b/c": b"\xff\x00"})
    arguments = (raw, "/work", (), False, False)
    apart = await workers.run_async(eval_inputs.ARCHIVE_LIMITS, trees.carry_archive, *arguments)
    assert apart == await inline_async(None, trees.carry_archive, *arguments)
    assert sys.getrecursionlimit() < 10_000
