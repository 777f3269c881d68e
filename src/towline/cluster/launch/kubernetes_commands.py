"""Apply, watch and delete the Kubernetes objects with `kubectl`.

The values of secrets go from the environment to `kubectl` by its standard input. They are in no argument and no file, and
`render`, whose result is shown, has `${NAME}` in their place.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from towline.cluster.launch.inputs import LaunchInputs
from towline.cluster.launch.kubernetes import render_objects
from towline.cluster.launch.launcher import LaunchRecord, LaunchStatus
from towline.cluster.launch.objects import PORT, to_yaml
from towline.cluster.launch.programs import call_program

_DELETED = "deployment,statefulset,raycluster.ray.io,service,configmap,secret,networkpolicy"
"""What `down` deletes: all but the volume with the data."""
_STOP_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class KubernetesLauncher:
    """Towline as objects of Kubernetes."""

    inputs: LaunchInputs

    def render(self) -> str:
        return self._manifests({name: f"${{{name}}}" for name in self.inputs.settings.cluster.secrets})

    def up(self) -> LaunchRecord:
        cluster = self.inputs.settings.cluster
        manifests = self._manifests({name: os.environ[name] for name in cluster.secrets})
        call_program(["kubectl", "apply", "--filename=-"], stdin=manifests)
        return LaunchRecord(kind="kubernetes", name=cluster.name, namespace=cluster.kubernetes.namespace)

    def status(self, record: LaunchRecord) -> LaunchStatus:
        chosen = _selection(record)
        found = json.loads(
            call_program(["kubectl", "get", "deployment,raycluster.ray.io,pod", *chosen, "--output=json"])
        )
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for item in found["items"]:
            by_kind.setdefault(item["kind"], []).append(item)
        pods = by_kind.get("Pod", [])
        running = sum(pod.get("status", {}).get("phase") == "Running" for pod in pods)
        state = _server_state(by_kind.get("Deployment", []))
        ray = [one.get("status", {}).get("state", "unknown") for one in by_kind.get("RayCluster", [])]
        name, namespace = record.name, record.namespace
        return LaunchStatus(
            kind="kubernetes",
            name=name,
            namespace=namespace,
            state=state,
            active=bool(found["items"]),
            detail=f"{running} of {len(pods)} pods run; RayCluster: {', '.join(ray) or 'absent'}",
            url=f"http://{name}.{namespace}.svc:{PORT}" if state == "AVAILABLE" else "",
            key=f"kubectl exec -n {namespace} deploy/{name}-server -c server -- cat /data/cluster/admin.key",
            log=f"kubectl logs -n {namespace} deploy/{name}-server -c server",
        )

    def down(self, record: LaunchRecord) -> None:
        command = ["kubectl", "delete", _DELETED, *_selection(record), "--ignore-not-found", "--wait=true"]
        call_program([*command, f"--timeout={_STOP_SECONDS:g}s"], seconds=_STOP_SECONDS + 30)

    def _manifests(self, secrets: dict[str, str]) -> str:
        text = self.inputs.config.read_text("utf-8") if self.inputs.config else ""
        return to_yaml(render_objects(self.inputs, secrets, text))


def _selection(record: LaunchRecord) -> list[str]:
    return [f"--namespace={record.namespace}", f"--selector=app.kubernetes.io/instance={record.name}"]


def _server_state(deployments: list[dict[str, Any]]) -> str:
    if not deployments:
        return "ABSENT"
    ready = any(one.get("status", {}).get("availableReplicas") for one in deployments)
    return "AVAILABLE" if ready else "PROGRESSING"
