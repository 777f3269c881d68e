"""Dockerfiles: parsed as Docker does, built over a local root, unsupported instructions refused by name."""

from __future__ import annotations

import asyncio
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.sandboxes import contract
from support.sandboxes.dockerd_rig import dockerd
from support.sandboxes.roots_rig import busybox_root
from towline.sandboxes.base import SandboxSpec, Unsupported
from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime
from towline.sandboxes.docker.runtime import DockerRuntime
from towline.sandboxes.images import dockerfile
from towline.sandboxes.images.build import DockerfileError, build, resolve_base
from towline.sandboxes.images.build_plan import CopyStep, RunStep, WorkdirStep, plan_build
from towline.sandboxes.images.root_cache import RootCache
from towline.sandboxes.process.runtime import ProcessRuntime
from towline.schema import Resources

PARSED = r"""# syntax=docker/dockerfile:1
# escape=\
ARG VERSION=3.12
ARG UNUSED
FROM --platform=linux/amd64 python:${VERSION}-slim AS main
ARG VERSION
ARG NAME="a b"
ENV A=1 B="two words" C='$A' D=${NAME:-none}${NOPE:+x} \
    # a comment between
    E=\$A

ENV OLD the old form
WORKDIR /app
WORKDIR sub/../src
RUN echo "$A" && \
    # not this
    echo two
RUN ["/bin/echo", "$A", "x y"]
SHELL ["/bin/bash", "-ec"]
RUN <<EOF
echo one
echo $A
EOF
RUN cat <<-"END" > /file && echo done
	kept $A
	END
RUN <<EOF
#!/usr/bin/env python3
print("hi")
EOF
COPY --chown=me:us --chmod=640 a.txt $OLDNAME ./in/
COPY <<one <<"two" /etc/
value $A
one
value $A
two
USER me:us
EXPOSE 80
CMD ["sleep"]
"""


def test_parsing() -> None:
    plan = plan_build(PARSED, {"NAME": "given"})
    assert plan.base == "python:3.12-slim"
    assert plan.env == {"A": "1", "B": "two words", "C": "$A", "D": "given", "E": "$A", "OLD": "the old form"}
    assert (plan.workdir, plan.user) == ("/app/src", "me")
    runs = [step for step in plan.steps if isinstance(step, RunStep)]
    assert [run.command for run in runs] == [
        ("/bin/sh", "-c", 'echo "$A" &&     echo two'),
        ("/bin/echo", "$A", "x y"),
        ("/bin/bash", "-ec", "echo one\necho $A\n"),
        ("/bin/bash", "-ec", 'cat <<-"END" > /file && echo done\nkept $A\nEND'),
        (),
    ]
    assert runs[4].script == '#!/usr/bin/env python3\nprint("hi")\n'
    assert runs[0].env["VERSION"] == "3.12"
    assert runs[0].cwd == "/app/src"
    assert [step.path for step in plan.steps if isinstance(step, WorkdirStep)] == ["/app", "/app/src"]
    one, two = [step for step in plan.steps if isinstance(step, CopyStep)]
    assert (one.sources, one.target, one.chown, one.chmod) == (("a.txt", ""), "/app/src/in/", "me:us", 0o640)
    assert two.documents == (("one", "value 1\n"), ("two", "value $A\n"))
    assert [note.split(": ")[1].split()[0] for note in plan.notes] == ["the", "EXPOSE", "CMD"]


REFUSED = {
    "FROM a\nFROM b": "multi-stage builds",
    "FROM a\nCOPY --from=b /x /y": "--from=b",
    "FROM a\nRUN --mount=type=secret,id=x true": "--mount=type=secret",
    "FROM a\nVOLUME /data": "VOLUME: is not supported",
    "FROM a\nONBUILD RUN x": "ONBUILD",
    "FROM a\nADD https://example.com/x /": "is remote",
    "FROM a\nCOPY --chmod=u+x a /": "octal",
    "FROM a\nCOPY a": "a source and a target",
    "FROM a\nRUN <<EOF\nno end": "is not terminated",
    "FROM a\nENV A='x": "is not closed",
    "FROM a\nENV A": "no value",
    "RUN x": "not allowed before FROM",
    "# nothing": "no FROM",
    "FROM a\n__init__ x": "is not supported",
    "FROM a\nCOPY ${X:?needed} /": "X is not set: needed",
}


@pytest.mark.parametrize("text", REFUSED)
def test_unsupported_instructions_are_refused_by_name(text: str) -> None:
    with pytest.raises(DockerfileError, match=REFUSED[text]):
        plan_build(text, {})


def test_dockerignore_and_bases() -> None:
    ignored = dockerfile.patterns("# comment\n\n*.log\n!keep.log\n/build/\n**/cache\ndocs/*.m[dx]\nsrc/**/x?.py\n")
    paths = {
        "a.log": True, "keep.log": False, "sub/a.log": False, "build": True, "build/deep/file": True, "sub/build": False,
        "cache": True, "a/b/cache/c": True, "docs/a.md": True, "docs/a.mx": True, "docs/a.my": False, "docs/b/a.md": False,
        "src/x1.py": True, "src/a/b/x2.py": True, "src/x12.py": False,
    }  # fmt: skip
    assert {path: dockerfile.is_ignored(path, ignored) for path in paths} == paths
    assert resolve_base("python:3.12", {"node:*": "/n", "python:3.*": "/p"}, "/r") == "/p"
    assert resolve_base("ubuntu", {"node:*": "/n"}, "/r") == "/r"


DOCKERFILE = """
FROM ubuntu:24.04
ARG WHO=world
ENV GREETING="hello ${WHO}" PATH=/opt/bin:/bin:/usr/bin
WORKDIR /srv/app
COPY . .
COPY --chmod=755 tools/*.sh /opt/bin/
COPY config renamed.conf
COPY config /etc
ADD packed.tar.gz /opt/packed/
RUN cat renamed.conf > out && echo "$GREETING" >> out && pwd >> out && rm /etc/old
RUN rm -rf /var && mkdir /var && echo new > /var/new
RUN <<EOF
set -e
say.sh > said
ln -s /etc/passwd link
chmod 700 tools
EOF
RUN (while :; do sleep 1; done) >/dev/null 2>&1 &
CMD ["sh"]
"""
OWNERS = """
COPY --chown=agent:agent config /home/agent/config
RUN chown agent /srv/app && chmod 4755 /opt/bin/say.sh
USER agent
RUN id -un > /srv/app/who
"""


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    (folder / "tools").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "tools/say.sh").write_text("#!/bin/sh\necho said\n")
    (folder / "config").write_text("configured\n")
    (folder / "secret.key").write_text("not for the image")
    (folder / ".dockerignore").write_text("*.key\nDockerfile\n.dockerignore\n")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        info = tarfile.TarInfo("inner/file")
        info.size = 7
        tar.addfile(info, io.BytesIO(b"packed\n"))
    (folder / "packed.tar.gz").write_bytes(packed.getvalue())
    (folder / "Dockerfile").write_text(DOCKERFILE)
    return folder


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="towline-") as name:
        Path(name).chmod(0o755)
        folder = busybox_root(Path(name) / "root")
        (folder / "var/lib").mkdir()
        (folder / "var/lib/file").write_text("below\n")
        yield str(folder)


@pytest.fixture
async def runtime() -> AsyncIterator[BubblewrapRuntime]:
    with tempfile.TemporaryDirectory(prefix="towline-") as name:
        opened = BubblewrapRuntime(Path(name))
        await opened.open()
        yield opened
        await opened.close()


SEEN = """
cat out said; ls /etc/old 2>&1 | grep -c 'No such'; ls /var; readlink link; cat /etc/config /opt/packed/inner/file
ls -d empty secret.key Dockerfile 2>/dev/null; stat -c %a tools /opt/bin/say.sh
"""
SAID = """configured
hello there
/srv/app
said
1
new
/etc/passwd
configured
packed
empty
700
755
"""


async def test_built_in_bubblewrap(runtime: BubblewrapRuntime, root: str, context: Path, tmp_path: Path) -> None:
    cache = RootCache(tmp_path / "cache", 1 << 30)
    steps: list[str] = []
    building = [
        build(runtime, root, context, cache=cache, args={"WHO": "there"}, on_progress=steps.append) for _ in range(3)
    ]
    built, *others = await asyncio.gather(*building)
    assert all(other == built for other in others)
    assert len(steps) == len(plan_build(DOCKERFILE, {}).steps), "three requests, one build"
    assert built.root == root
    assert built.layer is not None
    assert built.env["GREETING"] == "hello there"
    assert built.workdir == "/srv/app"
    assert any("CMD has no effect" in note for note in built.notes)
    assert "srv" not in os.listdir(root)
    assert sorted(os.listdir(built.layer)) == ["etc", "opt", "srv", "var"]
    gone = os.lstat(built.layer / "etc/old")
    assert stat.S_ISCHR(gone.st_mode)
    assert gone.st_rdev == 0
    spec = SandboxSpec(root=built.root, layers=built.layers, env=tuple(built.env.items()), workdir=built.workdir)
    async with contract.made(runtime, spec) as sandbox:
        assert await contract.sh(sandbox, SEEN) == SAID
        assert [change.path for change in await sandbox.diff()] == [], "a layer is not a change"

    # Any changed input makes another build.
    (context / "config").write_text("changed\n")
    again = await build(runtime, root, context, cache=cache, args={"WHO": "there"})
    assert again.layer != built.layer
    for one in (built, *others, again):
        assert one.lease is not None
        one.lease.release()
    await RootCache(tmp_path / "cache", 0).shrink()
    assert not built.layer.exists()


async def test_owners_and_modes_are_kept(runtime: BubblewrapRuntime, root: str, context: Path, tmp_path: Path) -> None:
    (context / "Dockerfile").write_text(DOCKERFILE + OWNERS)
    built = await build(runtime, root, context, cache=RootCache(tmp_path / "cache", 1 << 30))
    assert built.user == "agent"
    spec = SandboxSpec(root=built.root, layers=built.layers, workdir=built.workdir, user=built.user)
    async with contract.made(runtime, spec) as sandbox:
        said = await contract.sh(sandbox, "cat who; stat -c '%U %a' . /home/agent/config /opt/bin/say.sh /etc")
    if os.geteuid() == 0:
        assert said == "agent\nagent 755\nagent 644\nroot 4755\nroot 755\n"
    else:
        assert said == "agent\nroot 755\nroot 644\nroot 4755\nroot 755\n"
        assert any("have other owners" in note for note in built.notes)


async def test_failures_leave_nothing(runtime: BubblewrapRuntime, root: str, context: Path, tmp_path: Path) -> None:
    cache = RootCache(tmp_path / "cache", 1 << 30)
    cases = {
        "FROM x\nRUN echo about to fail; exit 3": "RUN exited with code 3: about to fail",
        "FROM x\nCOPY secret.key /": "cannot copy 'secret.key'",
        "FROM x\nCOPY ../../../etc/passwd /": "cannot copy '../../../etc/passwd'",
        "FROM x\nRUN sleep 60": "timed out",
        "FROM scratch": "scratch",
    }
    for text, reason in cases.items():
        (context / "Dockerfile").write_text(text)
        with pytest.raises(DockerfileError, match=reason):
            await build(runtime, root, context, cache=cache, seconds=3 if "sleep" in text else 60)
    assert cache.used() == 0
    (context / "Dockerfile").write_text("FROM x\nRUN true")
    with pytest.raises(Unsupported):
        await build(ProcessRuntime(tmp_path), root, context, cache=cache)


async def test_built_by_the_engine(root: str, context: Path, tmp_path: Path) -> None:
    cache = RootCache(tmp_path / "cache", 1 << 30)
    with tempfile.TemporaryDirectory(prefix="towline-") as name, dockerd(Path(name)) as url:
        runtime = DockerRuntime(tmp_path / "node", url=url)
        await runtime.open()
        try:
            # The engine's own builder knows neither here-documents nor --chmod: the same steps without them.
            script = "set -e\nsay.sh > said\nln -s /etc/passwd link\nchmod 700 tools\n"
            plain = DOCKERFILE.replace(f"<<EOF\n{script}EOF", " && ".join(script.splitlines()))
            (context / "Dockerfile").write_text(plain.replace(" --chmod=755", ""))
            (context / "tools/say.sh").chmod(0o755)
            built = await build(runtime, root, context, cache=cache, args={"WHO": "there"})
            assert built.layer is None
            assert (built.workdir, built.env["GREETING"]) == ("/srv/app", "hello there")
            limits = Resources(memory_mb=256, pids=64)
            spec = SandboxSpec(root=built.root, layers=built.layers, workdir=built.workdir, resources=limits)
            async with contract.made(runtime, spec) as sandbox:
                assert await contract.sh(sandbox, SEEN) == SAID
            assert await build(runtime, root, context, cache=cache, args={"WHO": "there"}) == built
            (context / "Dockerfile").write_text("FROM ubuntu:24.04\nRUN exit 3")
            with pytest.raises(DockerfileError, match="non-zero code: 3"):
                await build(runtime, root, context, cache=cache)
            (context / "Dockerfile").write_text("FROM localhost:1/no/such-image:1\nRUN exit 3")
            with pytest.raises(DockerfileError, match="its base image is missing"):
                await build(runtime, "", context, cache=cache)
        finally:
            await runtime.close()
