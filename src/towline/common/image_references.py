"""Names of images: `debian`, `lab/base:1`, `127.0.0.1:5000/lab/base@sha256:…`, completed as Docker does. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT_REGISTRY = "docker.io"
_HOST = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::\d{1,5})?")
_PATH = re.compile(r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image in a registry, by tag or by digest."""

    registry: str
    repository: str
    tag: str
    """Empty for a reference by digest."""
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.registry}/{self.repository}" + (f"@{self.digest}" if self.digest else f":{self.tag}")

    def at(self, digest: str) -> ImageReference:
        """The same image by digest."""
        return ImageReference(self.registry, self.repository, "", digest)

    def spellings(self) -> tuple[str, ...]:
        """The complete name, and the shorter ones that mean the same image."""
        names = [f"{self.registry}/{self.repository}"]
        if self.registry == DEFAULT_REGISTRY:
            names.append(self.repository)
            names.append(self.repository.removeprefix("library/"))
        end = f"@{self.digest}" if self.digest else f":{self.tag}"
        found = [name + end for name in names]
        return tuple(dict.fromkeys(found + (names if self.tag == "latest" else [])))


def parse_image(text: str) -> ImageReference:
    """The image that a name means; without a registry it is one of Docker Hub, without a tag `latest`.

    Raises `ValueError` for anything else. No name that it accepts has a component `.` or `..`, or starts with `/` or `~`.
    """
    name, at, digest = text.partition("@")
    if at and not DIGEST.fullmatch(digest):
        raise ValueError(f"{text!r} is not an image: a digest is `sha256:` and 64 hexadecimal digits")
    head, slash, rest = name.partition("/")
    registry = DEFAULT_REGISTRY
    if slash and (head == "localhost" or any(mark in head for mark in ".:")):
        registry, name = head, rest
    name, colon, tag = name.partition(":")
    if registry == "index.docker.io":
        registry = DEFAULT_REGISTRY
    if registry == DEFAULT_REGISTRY and "/" not in name:
        name = f"library/{name}"
    bad_tag = colon and not _TAG.fullmatch(tag)
    if not _HOST.fullmatch(registry) or registry.strip(".") == "" or not _PATH.fullmatch(name) or bad_tag:
        raise ValueError(f"{text!r} is not the name of an image: [REGISTRY/]NAME[:TAG][@DIGEST], in lower case")
    return ImageReference(registry, name, "" if digest else tag or "latest", digest)


def is_complete(text: str) -> bool:
    """Whether a name is written with its registry and its tag or digest, as `str(ImageReference)` is."""
    try:
        return str(parse_image(text)) == text
    except ValueError:
        return False
