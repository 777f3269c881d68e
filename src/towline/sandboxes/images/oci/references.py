"""Names of images: `debian`, `lab/base:1`, `127.0.0.1:5000/lab/base@sha256:…`, completed as Docker does. Pure."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from towline.sandboxes.base import SandboxError

DEFAULT_REGISTRY = "docker.io"
_HOST = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::\d{1,5})?")
_PATH = re.compile(r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


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


def parse_reference(text: str) -> ImageReference:
    """The image that a name means; without a registry it is one of Docker Hub, without a tag `latest`."""
    name, at, digest = text.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise SandboxError(f"{text!r} is not an image: a digest is `sha256:` and 64 hexadecimal digits")
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
    if not _HOST.fullmatch(registry) or not _PATH.fullmatch(name) or bad_tag:
        raise SandboxError(f"{text!r} is not the name of an image: [REGISTRY/]NAME[:TAG][@DIGEST], in lower case")
    return ImageReference(registry, name, "" if digest else tag or "latest", digest)


def names_image(root: str) -> bool:
    """Whether a root is the name of an image rather than a path of this machine."""
    if not root or root.startswith(("/", "./", "../", "~")) or os.path.exists(root):
        return False
    try:
        parse_reference(root)
    except SandboxError:
        return False
    return True
