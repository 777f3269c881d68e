"""The schema of `ray.io/v1` RayCluster, as KubeRay publishes it, for strict checks without an API server.

`raycluster.json.xz` is the v1 schema in `ray-operator/config/crd/bases/ray.io_rayclusters.yaml` of ray-project/kuberay, release
1.7.0, commit 59d663aeec13760646da3db9c1cf8cfe883e30b7 (Apache-2.0), without descriptions and status. To take another release:
`python tests/support/cluster/kuberay.py FILE.yaml`.
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from typing import Any

import yaml

COMMIT = "59d663aeec13760646da3db9c1cf8cfe883e30b7"
_FILE = Path(__file__).with_name("raycluster.json.xz")


def strict_schema() -> dict[str, Any]:
    """The schema as JSON Schema that rejects fields which the API server would drop."""
    return _strict(json.loads(lzma.decompress(_FILE.read_bytes())))


def pod_template_schema() -> dict[str, Any]:
    """The part for pod templates, which is that of Kubernetes itself."""
    group = strict_schema()["properties"]["spec"]["properties"]["headGroupSpec"]
    return dict(group["properties"]["template"])


def _strict(schema: Any) -> Any:
    """Objects with named fields have no others. A Quantity or a port is a number or text, as Kubernetes marks it."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _strict(value) for name, value in schema.items() if not name.startswith("x-kubernetes")}
    if isinstance(found.get("properties"), dict) and "type" in found:
        found.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    # `metadata` of an object is checked by the API server, not by the definition.
    if schema == {"type": "object"}:
        return {"type": "object"}
    return found


def _without_descriptions(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_descriptions(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _without_descriptions(value)
        for name, value in schema.items()
        if not (name == "description" and isinstance(value, str))
    }


def write(definition: Path) -> None:
    """Take the schema out of a custom resource definition."""
    versions = yaml.safe_load(definition.read_text())["spec"]["versions"]
    schema = next(one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == "v1")
    del schema["properties"]["status"]
    text = json.dumps(_without_descriptions(schema), separators=(",", ":"), sort_keys=True)
    _FILE.write_bytes(lzma.compress(text.encode()))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
