"""The leak audit: every way in which an environment gives its answer away is found, and a clean one passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.evaluators.evaluator_rig import MakeRig

GIT = "git -c user.name=a -c user.email=a@example.com"
BASE = f"git init -q -b main && echo broken >lib && git add -A && {GIT} commit -q -m base"
FIX = f"echo fixed >lib && {GIT} commit -q -am fix"
SPEC = {"kind": "patch", "command": "true"}


@pytest.mark.parametrize(
    ("history", "reason"),
    [
        ("true", ""),
        ("git tag v1 && git tag -a -m x v2", "tag_needs_identity"),
        (f"git checkout -q -b other && {FIX} && git checkout -q main", "refs/heads/other is ahead of HEAD"),
        (f"{FIX} && git tag v2 && git reset -q --hard HEAD~1", "refs/tags/v2 is ahead of HEAD"),
        (f"{FIX} && git update-ref refs/remotes/origin/main HEAD && git reset -q --hard HEAD~1", "refs/remotes/origin/main"),
        (f"{FIX} && git reset -q --hard HEAD~1", "1 commit, 1 tree, 1 blob unreachable"),
        (f"{FIX} && git reset -q --hard HEAD~1 && git reflog expire --expire=now --all", "unreachable from HEAD"),
        (f"{FIX} && git reset -q --hard HEAD~1 && git repack -q -a -d --keep-unreachable && git reflog expire --expire=now --all", "unreachable from HEAD"),
        (f"{FIX} && git reset -q --hard HEAD~1 && git reflog expire --expire=now --all && git gc -q --prune=now && rm -f .git/ORIG_HEAD", ""),
        (f"echo fixed >lib && {GIT} stash -q", "refs/stash is ahead of HEAD"),
        ("echo answer | git hash-object -w --stdin", "1 blob unreachable"),
        ("echo staged >new && git add new", ""),
        ("git clone -q . inner && cd inner && git checkout -q -b more && echo 2 >lib && git -c user.name=a -c user.email=a@b commit -qam x && git checkout -q main", "inner: refs/heads/more"),
        ("git clone -q --shared . /copy && mv .git /git && mv /copy/.git .git && sed -i s,/work/.git,/git, .git/objects/info/alternates", "borrows objects"),
    ],
)  # fmt: skip
async def test_history_beyond_the_base(rig: MakeRig, history: str, reason: str) -> None:
    if reason == "tag_needs_identity":
        # Tags of what is reachable anyway are no leak.
        history, reason = f"git tag v1 && {GIT} tag -a -m x v2", ""
    problems = await rig(SPEC, environment={"setup": [BASE, history]}).problems()
    if reason:
        assert len(problems) == 1
        assert problems[0].startswith("/work")
        assert reason in problems[0]
        assert "borrows" in reason or "git gc --prune=now" in problems[0]
    else:
        assert problems == []


async def test_the_base_must_be_there(rig: MakeRig) -> None:
    problems = await rig({**SPEC, "base": "0" * 40}, environment={"setup": [BASE]}).problems()
    assert problems == ["/work: HEAD does not contain the base commit 000000000000"]


async def test_a_task_can_do_without(rig: MakeRig) -> None:
    environment = {"setup": [BASE, FIX, "git reset -q --hard HEAD~1"]}
    assert await rig(SPEC, environment=environment).problems()
    assert await rig(SPEC, environment=environment, metadata={"leak_audit": False}).problems() == []


async def test_verifier_files_under_any_name(rig: MakeRig, tmp_path: Path) -> None:
    tests, solution, context = (tmp_path / name for name in ("tests", "solution", "context"))
    for folder in (tests, solution, context):
        folder.mkdir()
    (tests / "test.sh").write_text("#!/bin/sh\necho 1 >/logs/verifier/reward.txt\n")
    (tests / "expected.txt").write_text("the one and only answer to it all\n")
    (tests / "shared.csv").write_text("a,b\n" + "1,2\n" * 20)
    (context / "shared.csv").write_bytes((tests / "shared.csv").read_bytes())
    (solution / "solve.sh").write_text("#!/bin/sh\necho 42 >/work/answer.txt\n")
    spec = {"kind": "harbor", "tests": str(tests), "secret": [str(tests), str(solution)]}

    def with_files(*files: dict[str, str]) -> dict[str, object]:
        return {"files": list(files), "build": str(context)}

    shared = {"target": "/work/data.csv", "source": str(tests / "shared.csv")}
    assert await rig(spec, environment=with_files(shared)).problems() == []
    assert await rig(spec, environment=with_files({"target": "/tests/a", "text": ""})).problems() == [
        "/tests exists before the agent runs"
    ]
    hidden = {"target": "/opt/x/.cache", "source": str(tests / "expected.txt")}
    renamed = {"target": "/work/notes.md", "source": str(solution / "solve.sh")}
    problems = await rig(spec, environment=with_files(hidden, renamed)).problems()
    assert sorted(problem.split(":")[0] for problem in problems) == [
        "/opt/x/.cache is a copy of tests/expected.txt, a file of the verifier or the solution",
        "/work/notes.md is a copy of solution/solve.sh, a file of the verifier or the solution",
    ]
    assert await rig({**spec, "oracle": True}, environment=with_files(renamed)).problems() == []
    # A command's own files and what it names as hidden must not be there either.
    command = {
        "kind": "command",
        "command": "true",
        "files": [{"target": "/key", "text": "k"}],
        "hidden": ["/work/later"],
    }
    made = rig(command, environment={"setup": ["ln -s /nowhere /key; mkdir later"]})
    assert len(await made.problems()) == 2


async def test_what_the_agent_changed_of_the_verifiers_is_told(rig: MakeRig) -> None:
    files = [{"target": "/work/conftest.py", "text": "x"}, {"target": "/work/tests/test_a.py", "text": "y"}]
    made = rig({**SPEC, "test_files": ["tests/*", "conftest.py"]}, environment={"files": files})
    # What the set-up put there is not the agent's doing.
    await made.judge("echo z >other.py")
    assert made.notes == []
    await made.judge("echo more >>conftest.py; rm tests/test_a.py")
    assert made.notes == [
        "the agent changed files that the verifier relies on: /work/conftest.py (changed), /work/tests/test_a.py (deleted)"
    ]
    await made.judge("echo z >tests/test_b.py; mkdir /tests; echo x >/etc/ld.so.preload")
    (note,) = made.notes
    for path in ("/work/tests/test_b.py (added)", "/tests (added)", "/etc/ld.so.preload (added)"):
        assert path in note
