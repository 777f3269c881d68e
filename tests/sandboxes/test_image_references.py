"""Image names and Dockerfiles of several stages, as text; and what is said where images cannot be pulled."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.config import NodeSettings
from towline.config.images import ImageSettings
from towline.node import task_check
from towline.node.environment_root import oci_images
from towline.sandboxes.base import SandboxError
from towline.sandboxes.images.dockerfile import DockerfileError
from towline.sandboxes.images.oci.buildah import Buildah, Registries, registries_text
from towline.sandboxes.images.oci.references import names_image, parse_reference
from towline.sandboxes.images.oci.stages import Stages
from towline.sandboxes.images.oci.store import ImageUnavailable
from towline.sandboxes.images.root_cache import RootCache
from towline.schema import Environment, ImageBase, SandboxKind

DIGEST = "sha256:" + "0f" * 32
REFERENCES = {
    "debian": "docker.io/library/debian:latest",
    "debian:bookworm-slim": "docker.io/library/debian:bookworm-slim",
    "lab/base": "docker.io/lab/base:latest",
    "index.docker.io/lab/base:1": "docker.io/lab/base:1",
    "localhost/lab": "localhost/lab:latest",
    "127.0.0.1:5000/lab/deep/base:1.2_3": "127.0.0.1:5000/lab/deep/base:1.2_3",
    f"registry.example/base@{DIGEST}": f"registry.example/base@{DIGEST}",
    f"registry.example/base:1@{DIGEST}": f"registry.example/base@{DIGEST}",
}


def test_references_are_completed_as_docker_does() -> None:
    assert {text: str(parse_reference(text)) for text in REFERENCES} == REFERENCES
    reference = parse_reference("debian")
    assert str(reference.at(DIGEST)) == f"docker.io/library/debian@{DIGEST}"


@pytest.mark.parametrize(
    "text", ["", "Debian", "a b", "x:", "x@sha256:12", "/x", "-rm", "x/../y", "a:b:c", "$(id)", "x\ny"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(SandboxError):
        parse_reference(text)


def test_a_root_is_an_image_unless_it_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_image("debian:12")
    assert not any(map(names_image, ["", "/roots/a", "./a", "../a", "~/a", "A folder"]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "debian").mkdir()
    assert not names_image("debian")


STAGES = """# syntax=docker/dockerfile:1
ARG TAG=1
ARG UNSET
FROM --platform=$BUILDPLATFORM lab/base:${TAG} AS One
ARG TAG
RUN echo $TAG
FROM one AS two
FROM scratch
COPY --from=two /a /b
COPY --chown=me --from=lab/tools:2 /c \\
    /d
COPY --from=0 /e /f
RUN --mount=type=bind,from=lab/tools:2,target=/t,ro true
FROM \\
    lab/base:${TAG}
"""


def test_every_image_of_every_stage_is_found_and_pinned() -> None:
    stages = Stages(STAGES, {"TAG": "9"})
    assert stages.images == ["lab/base:9", "lab/tools:2"]
    assert (stages.count, stages.scratch, stages.has_documents) == (4, ["scratch"], False)
    assert (stages.line_of("lab/base:9"), stages.line_of("lab/tools:2")) == (4, 10)
    pinned = stages.pinned({"lab/base:9": "aaa", "lab/tools:2": "bbb"}).splitlines()
    assert len(pinned) == len(STAGES.splitlines())
    assert pinned[3] == "FROM --platform=$BUILDPLATFORM aaa AS One"
    assert pinned[6:9] == ["FROM one AS two", "FROM scratch", "COPY --from=two /a /b"]
    assert pinned[9] == "COPY --chown=me --from=bbb /c \\"
    assert pinned[12] == "RUN --mount=type=bind,from=bbb,target=/t,ro true"
    assert pinned[13:] == ["FROM aaa", ""]
    assert Stages("FROM a\nRUN <<EOF\nFROM not-this\nEOF\n").images == ["a"]
    for text, reason in {"RUN x": "before FROM", "# nothing": "no FROM", "FROM a b": "IMAGE"}.items():
        with pytest.raises(DockerfileError, match=reason):
            Stages(text)


def test_registries_and_mirrors() -> None:
    text = registries_text(Registries(["127.0.0.1:5000"], {"docker.io": "127.0.0.1:5000/hub"}))
    assert text == (
        '[[registry]]\nlocation = "127.0.0.1:5000"\ninsecure = true\n'
        '[[registry]]\nlocation = "docker.io"\ninsecure = false\n'
        '[[registry.mirror]]\nlocation = "127.0.0.1:5000/hub"\ninsecure = true\n'
    )


async def test_without_buildah_one_line_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buildah, "missing", staticmethod(lambda: ["buildah"]))
    images = oci_images(NodeSettings(), ImageSettings(), tmp_path, RootCache(tmp_path / "roots", 1 << 20))
    with pytest.raises(ImageUnavailable) as failure:
        await images.root("debian:12")
    line = str(failure.value)
    assert "\n" not in line
    for part in ("docker.io/library/debian:12", "`buildah`", "`node.bases`", '`images.base = "host"`'):
        assert part in line
    problem = next(task_check.root_problems(Environment(root="debian:12"), SandboxKind.BUBBLEWRAP))
    assert "lacks buildah" in problem
    allowed = [
        task_check.root_problems(Environment(root="debian:12"), SandboxKind.DOCKER),
        task_check.root_problems(Environment(root="debian:12", base=ImageBase.HOST), SandboxKind.BUBBLEWRAP),
        task_check.root_problems(Environment(root="debian:12"), SandboxKind.APPTAINER, ImageBase.HOST),
        task_check.root_problems(
            Environment(root="debian:12"), SandboxKind.BUBBLEWRAP, ImageBase.REGISTRY, {"debian:*": "/roots/debian"}
        ),
    ]
    assert [list(problems) for problems in allowed] == [[], [], [], []]
