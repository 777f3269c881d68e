"""What every Kubernetes object of a deployment has (name, namespace, labels), and objects as YAML."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from towline.config import Settings

Manifest = dict[str, Any]

SERVER, HEAD, NODE, ENGINE = "server", "head", "node", "engine"
"""Components, as the label of their pods says it."""
PORT = 8600
"""Port of the server."""


def labels(settings: Settings, component: str = "") -> dict[str, str]:
    """Labels of an object; those without a component select everything of this deployment."""
    found = {"app.kubernetes.io/name": "towline", "app.kubernetes.io/instance": settings.cluster.name}
    return found | ({"app.kubernetes.io/component": component} if component else {})


def manifest(version: str, kind: str, name: str, settings: Settings, component: str = "", **fields: Any) -> Manifest:
    """An object with its fields besides the metadata."""
    metadata = {
        "name": name,
        "namespace": settings.cluster.kubernetes.namespace,
        "labels": labels(settings, component) | {"app.kubernetes.io/managed-by": "towline"},
    }
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def to_yaml(objects: Iterable[Manifest]) -> str:
    """Documents as people write them: no references between parts, and text of several lines as a block."""
    return str(yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True))


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
