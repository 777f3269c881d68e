"""The manifests by the schemas of Kubernetes itself, strictly. `make test-cluster` installs the validator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

_VALIDATOR = Path(__file__).parents[3] / ".venv-cluster/bin/kubernetes-validate"
FULL = """
[model]
folder = "/models/m"
[cluster]
kind = "kubernetes"
secrets = ["TOWLINE_UPSTREAM_KEY", "HF_TOKEN"]
[cluster.kubernetes]
image = "registry.example/towline:1"
namespace = "agents"
internet = true
storage_class = "fast"
seccomp = "profiles/userns.json"
[cluster.engine]
replicas = 2
gpus = 4
"""
MINIMAL = '[cluster]\nkind = "kubernetes"\nkubernetes.image = "towline:1"\n'


def validate(path: Path, document: dict[str, Any]) -> str:
    """What the validator says; empty if it is content."""
    path.write_text(json.dumps(document))
    command = [str(_VALIDATOR), "--strict", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout + done.stderr if done.returncode or "WARN" in done.stdout + done.stderr else ""


@pytest.mark.parametrize("settings", [FULL, MINIMAL], ids=["full", "minimal"])
def test_every_object_is_valid(tmp_path: Path, settings: str) -> None:
    (tmp_path / "towline.toml").write_text(settings)
    command = [sys.executable, "-m", "towline", "cluster", "up", "--config", "towline.toml", "--dry-run"]
    shown = subprocess.run(
        command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=120, check=True
    )
    objects = list(yaml.safe_load_all(shown.stdout))
    kinds = {one["kind"] for one in objects}
    assert {"RayCluster", "Deployment", "PersistentVolumeClaim", "NetworkPolicy", "ConfigMap", "Service"} <= kinds
    assert ("Secret" in kinds) == ("StatefulSet" in kinds) == (settings is FULL)
    for one in objects:
        if one["kind"] != "RayCluster":
            assert validate(tmp_path / "object.json", one) == "", one["kind"]
            continue
        # A RayCluster has no schema here (tests/cluster/test_launch_kubernetes.py has KubeRay's), but its pods do.
        groups = [one["spec"]["headGroupSpec"], *one["spec"]["workerGroupSpecs"]]
        for group in groups:
            pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
            pod["metadata"] = pod["metadata"] | {"name": "pod"}
            assert validate(tmp_path / "object.json", pod) == ""
    broken = next(one for one in objects if one["kind"] == "Deployment")
    broken["spec"]["template"]["spec"]["hostUser"] = False
    assert "hostUser" in validate(tmp_path / "object.json", broken)
