"""`patch`: what the agent changed in the work tree, judged by tests that it could not change.

The change is taken from the agent's sandbox as data: by git where the base commit is known, else the whole tree, compared
with a clean one. Files that are tests are dropped from it. In a fresh sandbox first `test_patch` is applied, then what is
left of the change; so a broken task is an error, and a change that cannot be applied scores 0. Then the tests run. With
`fail_to_pass` and `pass_to_pass` (SWE-bench) the reward is 1 only if every named test passed; a log that does not tell how a
named test ended is an error. Otherwise the exit code decides.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from towline.evaluators import carrying, diffs, testlogs
from towline.evaluators.base import Bench, Carried, EvaluationError, Outcome
from towline.evaluators.inside import put_files, run
from towline.evaluators.options import Options, Seconds
from towline.evaluators.testfiles import PATTERNS, TestFiles
from towline.evaluators.worktree import Change, apply_diff, diff_by_git, diff_of_tree
from towline.sandboxes.base import Done, Sandbox
from towline.schema import File, LogFormat, Reward, Task
from towline.schema.environment import InsidePath


class PatchOptions(Options):
    kind: Literal["patch"]
    command: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)]
    """Runs the tests, in the repository. A text is run by `sh -c`."""
    repository: InsidePath | None = None
    """The working folder if nothing is said."""
    base: str = Field(default="", pattern=r"^([0-9a-fA-F]{7,64})?$")
    """The commit that the agent started from."""
    test_patch: str = ""
    files: list[File] = Field(default_factory=list)
    """Tests as files, for repositories that have no patch for them."""
    test_files: list[str] = Field(default_factory=lambda: list(PATTERNS))
    """Patterns of paths that are dropped from the agent's change, besides those that the verifier brings."""
    fail_to_pass: list[str] = Field(default_factory=list)
    pass_to_pass: list[str] = Field(default_factory=list)
    log_format: LogFormat | None = None
    """The program that prints the results of the named tests; without one, every known format is tried."""
    env: dict[str, str] = Field(default_factory=dict)
    user: str = ""
    seconds: Seconds = 1800.0
    on_timeout: Literal["error", "zero"] = "error"
    """`zero` scores tests that do not end at once, without repeating them and without a control run."""


class PatchEvaluator:
    kind = "patch"
    shared = False
    needs_sandbox = True

    def __init__(self, options: PatchOptions):
        self.options = options
        self.lowest = options.lowest

    def leaks(self) -> tuple[str, ...]:
        return ()

    @property
    def base(self) -> str:
        """The commit that the repository must be at when the agent starts, if it is known."""
        return self.options.base

    def relies_on(self) -> tuple[str, ...]:
        """Patterns of files in the repository that the tests stand on."""
        return tuple(self.options.test_files)

    async def collect(self, sandbox: Sandbox, task: Task) -> Carried:
        repository = self.options.repository or task.environment.workdir
        if self.options.base:
            diff = await diff_by_git(sandbox, repository, self.options.base)
            if diff is not None:
                return Carried(patch=diff)
        return await carrying.carry(sandbox, [repository])

    async def evaluate(self, bench: Bench, outcome: Outcome, carried: Carried) -> Reward:
        options = self.options
        repository = options.repository or bench.task.environment.workdir
        test_patch = options.test_patch.encode("utf-8", "surrogateescape")
        brought = [path for section in diffs.sections(test_patch) for path in section.paths]
        prefix = f"{repository.rstrip('/')}/"
        brought += [file.target.removeprefix(prefix) for file in options.files if file.target.startswith(prefix)]
        is_test = TestFiles(options.test_files, brought)
        change = await self._change(bench, carried, repository, is_test)
        await asyncio.to_thread((bench.logs / "agent.patch").write_bytes, change.shown)
        if change.left_out:
            await asyncio.to_thread(_write, bench.logs / "left-out.txt", change.left_out)
        async with bench.sandbox() as sandbox:
            if test_patch and (problem := await apply_diff(sandbox, repository, test_patch)):
                raise EvaluationError(f"test_patch cannot be applied to a clean repository: {problem}")
            if problem := await change.apply(sandbox, repository):
                await asyncio.to_thread(_write, bench.logs / "not-applied.txt", [problem])
                return Reward(value=self.lowest, components={"applied": 0.0}, evaluator=self.kind)
            await put_files(sandbox, options.files)
            command = ["sh", "-c", options.command] if isinstance(options.command, str) else options.command
            done = await run(
                sandbox,
                command,
                log=bench.logs / "tests.log",
                env=options.env,
                cwd=repository,
                user=options.user,
                seconds=options.seconds,
            )
        return await asyncio.to_thread(self._score, done)

    async def _change(self, bench: Bench, carried: Carried, repository: str, is_test: TestFiles) -> Change:
        if repository in carried.archives:
            async with bench.sandbox() as sandbox:
                return await diff_of_tree(sandbox, repository, carried.archives[repository], is_test)
        return Change.of_diff(carried.patch, is_test)

    def _score(self, done: Done) -> Reward:
        options = self.options
        if done.timed_out:
            if options.on_timeout == "error":
                raise EvaluationError(f"the tests did not end within {options.seconds:g} seconds")
            return Reward(value=self.lowest, components={"applied": 1.0, "timed_out": 1.0}, evaluator=self.kind)
        if done.code in (126, 127):
            raise EvaluationError(f"the tests could not be run ({done.code}): {done.text[-500:].strip()}")
        if not options.fail_to_pass and not options.pass_to_pass:
            return Reward(value=float(done.code == 0), components={"applied": 1.0}, evaluator=self.kind)
        log = testlogs.read(done.text, options.log_format, failed=done.code != 0)
        log.check([*options.fail_to_pass, *options.pass_to_pass], options.log_format)
        found = log.results
        shares = {
            "fail_to_pass": testlogs.share(found, options.fail_to_pass),
            "pass_to_pass": testlogs.share(found, options.pass_to_pass),
        }
        solved = all(share == 1.0 for share in shares.values())
        return Reward(value=float(solved), components={"applied": 1.0, **shares}, evaluator=self.kind)


def _write(path: Path, lines: list[str]) -> None:
    """Keep lines that may hold names which are not text."""
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8", "backslashreplace")
