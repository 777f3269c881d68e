"""Names of images as roots: which roots are images, and which are paths of this machine."""

from __future__ import annotations

import os

from towline.common.image_references import DEFAULT_REGISTRY, ImageReference, is_complete, parse_image
from towline.sandboxes.base import SandboxError

__all__ = ["DEFAULT_REGISTRY", "ImageReference", "names_image", "parse_reference", "spellings"]


def parse_reference(text: str) -> ImageReference:
    """The image that a name means; without a registry it is one of Docker Hub, without a tag `latest`."""
    try:
        return parse_image(text)
    except ValueError as error:
        raise SandboxError(str(error)) from error


def names_image(root: str) -> bool:
    """Whether a root is the name of an image rather than a path of this machine.

    A complete name (with registry, and tag or digest) is an image even if a path of that name exists: the images of
    untrusted tasks are always named so.
    """
    if is_complete(root):
        return True
    if not root or root.startswith(("/", "./", "../", "~")) or os.path.exists(root):
        return False
    try:
        parse_reference(root)
    except SandboxError:
        return False
    return True


def spellings(image: str) -> tuple[str, ...]:
    """The given name, and all that mean the same image: a pattern may be written for any of them."""
    try:
        return tuple(dict.fromkeys((image, *parse_image(image).spellings())))
    except ValueError:
        return (image,)
