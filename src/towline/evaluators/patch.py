"""`patch`: scores the agent's change to the work tree with tests that it could not change.

The change is taken from the agent's sandbox as data: by git where the base commit is known, else the whole tree, compared
with a clean one. Test files are dropped from it. In a fresh sandbox `test_patch` is applied first, then the rest of the
change; so a broken task is an error, and a change that does not apply gets the lowest score. Then the tests run. With
`fail_to_pass` and `pass_to_pass` (SWE-bench) the reward is 1 only if every named test passed; a log without the result of a
named test is an error. Otherwise the exit code decides.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, ParamSpec, TypeVar

from pydantic import Field

from towline.common.untrusted import workers
from towline.common.untrusted.workers import LimitExceeded
from towline.evaluators import eval_inputs, repository_changes, testlogs
from towline.evaluators.base import (
    AgentCaused,
    EvalContext,
    EvalInputs,
    EvaluationError,
    EvaluatorOptions,
    RunOutcome,
    Seconds,
)
from towline.evaluators.repository_changes import (
    TEST_PATTERNS,
    RepositoryChange,
    TestFileMatcher,
    apply_diff,
    change_of_tree,
    collect_repository,
)
from towline.evaluators.sandbox_io import put_files
from towline.evaluators.swe import eval_script, expected_results, swebench_grading
from towline.evaluators.swe.swebench_grading import SwebenchOptions
from towline.evaluators.testlogs import CaseResult, TestLog
from towline.evaluators.verifier_run import VerifierRun, run_verifier
from towline.sandboxes.base import Sandbox
from towline.schema import File, LogFormat, Reward, Task
from towline.schema.entities import InsidePath


class PatchOptions(EvaluatorOptions):
    kind: Literal["patch"]
    command: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)]
    """Runs the tests, in the repository. A string is run by `sh -c`."""
    repository: InsidePath | None = None
    """The working folder by default."""
    base: str = Field(default="", pattern=r"^([0-9a-fA-F]{7,64})?$")
    """The commit that the agent started from."""
    test_patch: str = ""
    files: list[File] = Field(default_factory=list)
    """Tests as files, for repositories without a test patch."""
    test_files: list[str] = Field(default_factory=lambda: list(TEST_PATTERNS))
    """Patterns of paths that are dropped from the agent's change, besides the files of the verifier."""
    fail_to_pass: list[str] = Field(default_factory=list)
    pass_to_pass: list[str] = Field(default_factory=list)
    expected: dict[str, str] = Field(default_factory=dict)
    """R2E-Gym: the result of each test in pytest's summary (`PASSED`, `FAILED`, `ERROR`); 1 only if the summary is equal."""
    command_applies_tests: bool = False
    """The command applies `test_patch` itself (a published evaluation script); the patch then only names test files."""
    swebench: SwebenchOptions | None = None
    """Grade the log by the `swebench` package's own functions instead of `log_format`."""
    conceal: Literal["", "beyond", "single"] = ""
    """Before the agent starts, remove git history: what HEAD does not contain (`beyond`), or all of it (`single`)."""
    withheld: list[InsidePath] = Field(default_factory=list)
    """Paths of the image that only the evaluation sees: they are removed from the agent's sandbox."""
    log_format: LogFormat | None = None
    """The test runner that prints the results of the named tests; by default every known format is tried."""
    env: dict[str, str] = Field(default_factory=dict)
    user: str = ""
    seconds: Seconds = 1800.0
    on_timeout: Literal["error", "zero"] = "error"
    """`zero` scores tests that time out with `lowest` at once, without a retry and without a control run."""


class PatchEvaluator:
    kind = "patch"
    shared = False
    needs_sandbox = True

    def __init__(self, options: PatchOptions):
        self.options = options
        self.lowest = options.lowest
        if options.swebench is not None:
            swebench_grading.check(options.swebench)

    def leaks(self) -> tuple[str, ...]:
        return ()

    @property
    def concealed_history(self) -> str:
        return self.options.conceal

    def withheld(self) -> tuple[str, ...]:
        return tuple(self.options.withheld)

    def repository(self, task: Task) -> str:
        return self.options.repository or task.environment.workdir

    @property
    def base(self) -> str:
        """The commit that the repository must be at when the agent starts, if it is known."""
        return self.options.base

    def relies_on(self) -> tuple[str, ...]:
        """Patterns of files in the repository that the tests rely on."""
        return tuple(self.options.test_files)

    async def collect(self, sandbox: Sandbox, task: Task) -> EvalInputs:
        repository = self.repository(task)
        brought = [posixpath.join(repository, name) for name in self._brought(repository)]
        return await collect_repository(sandbox, repository, brought)

    def _brought(self, repository: str) -> list[str]:
        """The verifier's own files in the repository, relative to it."""
        test_patch = self.options.test_patch.encode("utf-8", "surrogateescape")
        brought = [path for section in repository_changes.diff_sections(test_patch) for path in section.paths]
        prefix = f"{repository.rstrip('/')}/"
        targets = [*self.options.withheld, *eval_inputs.brought_paths(self.options.files)]
        return brought + [target.removeprefix(prefix) for target in targets if target.startswith(prefix)]

    async def evaluate(self, context: EvalContext, outcome: RunOutcome, inputs: EvalInputs) -> Reward:
        options = self.options
        repository = self.repository(context.task)
        test_patch = options.test_patch.encode("utf-8", "surrogateescape")
        brought = await asyncio.to_thread(self._brought, repository)
        is_test = TestFileMatcher(options.test_files, brought)
        change = await self._change(context, inputs, repository, is_test)
        await asyncio.to_thread((context.logs / "agent.patch").write_bytes, change.shown)
        if change.left_out:
            await asyncio.to_thread(_write, context.logs / "left-out.txt", change.left_out)
            inputs.findings += [("edited_tests", name) for name in change.left_out]
        async with context.sandbox() as sandbox:
            native = await eval_inputs.module_names(sandbox, [repository])
            if (
                test_patch
                and not options.command_applies_tests
                and (problem := await apply_diff(sandbox, repository, test_patch))
            ):
                raise EvaluationError(f"test_patch cannot be applied to a clean repository: {problem}")
            if problem := await change.apply(sandbox, repository):
                await asyncio.to_thread(_write, context.logs / "not-applied.txt", [problem])
                return Reward(value=self.lowest, components={"applied": 0.0}, evaluator=self.kind)
            await put_files(sandbox, options.files)
            command = ["sh", "-c", options.command] if isinstance(options.command, str) else options.command
            run = await run_verifier(
                sandbox,
                command,
                inputs=EvalInputs(archives={repository: b""}, native=native),
                brought=[posixpath.join(repository, name) for name in brought],
                log=context.logs / "tests.log",
                env=options.env,
                cwd=repository,
                user=options.user,
                seconds=options.seconds,
            )
        inputs.findings += run.findings
        return await self._score(run, inputs)

    async def _change(
        self, context: EvalContext, inputs: EvalInputs, repository: str, is_test: TestFileMatcher
    ) -> RepositoryChange:
        if repository in inputs.archives:
            async with context.sandbox() as sandbox:
                return await change_of_tree(sandbox, repository, inputs.archives[repository], is_test)
        return await RepositoryChange.of_diff(inputs.patch, is_test)

    async def _score(self, run: VerifierRun, inputs: EvalInputs) -> Reward:
        options, done = self.options, run.result
        if done.timed_out:
            if options.on_timeout == "error":
                raise EvaluationError(f"the tests timed out after {options.seconds:g} seconds")
            return Reward(value=self.lowest, components={"applied": 1.0, "timed_out": 1.0}, evaluator=self.kind)
        if done.code in (126, 127):
            raise EvaluationError(f"the tests could not be run (exit code {done.code}): {done.text[-500:].strip()}")
        by_log = options.expected or options.swebench is not None or options.fail_to_pass or options.pass_to_pass
        if not by_log:
            return Reward(value=float(done.code == 0), components={"applied": 1.0}, evaluator=self.kind)
        if run.cut:
            inputs.findings.append(("forged_output", run.cut))
            raise AgentCaused(f"the log of the tests is not their own: {run.cut}")
        if options.expected:
            found_words = await _in_worker(inputs, expected_results.summary_results, done.text)
            share = expected_results.share_as_expected(found_words, options.expected)
            return Reward(
                value=float(share == 1.0), components={"applied": 1.0, "as_expected": share}, evaluator=self.kind
            )
        if options.swebench is not None:
            named = (options.fail_to_pass, options.pass_to_pass)
            solved, shares = await asyncio.to_thread(
                swebench_grading.grade, options.swebench, done.text, done.code or 0, named[0], named[1]
            )
            return Reward(value=float(solved), components={"applied": 1.0, **shares}, evaluator=self.kind)
        text, code = await _in_worker(inputs, eval_script.test_output, done.text, done.code or 0)
        results, unbuilt = await _in_worker(inputs, testlogs.read_results, text, options.log_format, code != 0)
        log = TestLog({name: CaseResult(result) for name, result in results.items()}, unbuilt)
        log.check([*options.fail_to_pass, *options.pass_to_pass], options.log_format, code=code)
        found = log.results
        shares = {
            "fail_to_pass": testlogs.share(found, options.fail_to_pass),
            "pass_to_pass": testlogs.share(found, options.pass_to_pass, or_skipped=True),
        }
        solved = all(share == 1.0 for share in shares.values())
        return Reward(value=float(solved), components={"applied": 1.0, **shares}, evaluator=self.kind)


P = ParamSpec("P")
T = TypeVar("T")


async def _in_worker(inputs: EvalInputs, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """A parser of the tests' log in a worker; what is too much for it is the agent's doing."""
    try:
        return await workers.run_async(workers.DEFAULT_LIMITS, function, *arguments, **keywords)
    except LimitExceeded as error:
        inputs.findings.append(("hostile_text", f"the log of the tests: {error}"))
        raise AgentCaused(f"the log of the tests cannot be read: {error}") from error


def _write(path: Path, lines: list[str]) -> None:
    """Write lines that may contain names which are not valid text."""
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8", "backslashreplace")
