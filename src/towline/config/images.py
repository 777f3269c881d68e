"""The `[images]` section: where the root file systems of sandboxes come from, without a container engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from towline.common.image_references import parse_image
from towline.config.section import MAX_BYTES, Section
from towline.schema import ImageBase
from towline.schema.trust import ROOT_NAME


class ImageSettings(Section):
    """Images of bubblewrap and apptainer sandboxes: pulled and built by buildah, without a daemon."""

    base: ImageBase = ImageBase.REGISTRY
    """What an image name means, in `FROM` and as an environment's root. `registry`: that image, or the session fails.
    `host`: the host's own root instead, without pulling anything."""
    pull: Literal["missing", "always", "never"] = "missing"
    """When a registry is asked what a tag means: if this machine does not know it, once per process, or never."""
    network: Literal["none", "open"] = "none"
    """What RUN may reach: nothing, or the host's network. A task with network `open` also builds with it."""
    insecure_registries: tuple[str, ...] = ()
    """Registries (`host:port`) that may be asked over plain HTTP or with an unknown certificate."""
    mirrors: dict[str, str] = Field(default_factory=dict)
    """A mirror to ask before a registry: `{"docker.io": "mirror.example:5000"}`."""
    names: dict[str, str] = Field(default_factory=dict)
    """Images by the name that untrusted tasks use for them: `{"python": "docker.io/library/python@sha256:…"}`."""
    allowed: tuple[str, ...] = ()
    """Patterns of images that untrusted tasks may name directly (`docker.io/swebench/*`). By digest: all of Docker Hub."""
    store_bytes: int = Field(20 * 1024**3, ge=1024**2, le=MAX_BYTES)
    """Maximum number of bytes of pulled images and build layers; finished roots count against `node.cache_bytes`."""

    @field_validator("names")
    @classmethod
    def _names_mean_images(cls, names: dict[str, str]) -> dict[str, str]:
        for name, image in names.items():
            if not ROOT_NAME.fullmatch(name):
                raise ValueError(f"{name!r}: a name has lower-case letters and digits, joined by '.', '_' or '-'")
            parse_image(image)
        return names
