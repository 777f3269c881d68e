"""Manifests: valid by the schema of KubeRay, closed to other pods, and without secrets but in the Secret."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from support.cluster.kuberay import COMMIT, pod_template_schema, strict_schema
from towline.cluster.launch import kubernetes
from towline.cluster.launch.inputs import LaunchInputs
from towline.cluster.launch.kubernetes_commands import KubernetesLauncher
from towline.cluster.launch.objects import to_yaml
from towline.config import Settings
from towline.errors import ConfigError

SECRETS = {
    "TOWLINE_UPSTREAM_KEY": "upstream-value",
    "TOWLINE_SERVER__DATABASE": "database-value",
    "HF_TOKEN": "hf-value",
}


def inputs(folder: Path, **cluster: Any) -> LaunchInputs:
    chosen = {"kind": "kubernetes", "kubernetes": {"image": "registry.example/towline:1"}, **cluster}
    settings = Settings.model_validate({"model": {"folder": "/models/m"}, "cluster": chosen})
    config = folder / "towline.toml"
    config.write_text("# line one\n[node]\nahead = 2\n")
    return LaunchInputs(settings, folder, config)


FULL = {
    "secrets": list(SECRETS),
    "arguments": ["--concurrency", "8"],
    "engine": {"replicas": 2, "gpus": 4, "arguments": ["--tensor-parallel-size", "4"]},
    "kubernetes": {
        "image": "registry.example/towline:1",
        "namespace": "agents",
        "storage_class": "fast",
        "internet": True,
        "seccomp": "profiles/userns.json",
        "ray_version": "2.60.0",
    },
}
MINIMAL: dict[str, Any] = {}


def rendered(folder: Path, cluster: dict[str, Any]) -> list[dict[str, Any]]:
    secrets = {name: SECRETS[name] for name in cluster.get("secrets", ())}
    found = kubernetes.render_objects(inputs(folder, **cluster), secrets, "text")
    # What YAML makes of it.
    return list(yaml.safe_load_all(to_yaml(found)))


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


def pod_templates(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for one in objects:
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one["spec"]["template"]
        elif one["kind"] == "RayCluster":
            yield one["spec"]["headGroupSpec"]["template"]
            yield from (group["template"] for group in one["spec"]["workerGroupSpecs"])


@pytest.mark.parametrize("cluster", [FULL, MINIMAL], ids=["full", "minimal"])
def test_the_ray_cluster_and_all_pods_have_only_known_fields(tmp_path: Path, cluster: dict[str, Any]) -> None:
    objects = rendered(tmp_path, cluster)
    (ray,) = of_kind(objects, "RayCluster")
    assert ray["apiVersion"] == "ray.io/v1"
    jsonschema_rs.validate(strict_schema(), ray)
    templates = list(pod_templates(objects))
    assert len(templates) == (4 if "engine" in cluster else 3)
    for template in templates:
        jsonschema_rs.validate(pod_template_schema(), template)
    # The check sees what it should: an unknown field at any depth, and a wrong type.
    for path in (
        ["spec"],
        ["spec", "headGroupSpec"],
        ["spec", "workerGroupSpecs", 0, "template", "spec", "containers", 0],
    ):
        wrong = copy.deepcopy(ray)
        place = wrong
        for step in path:
            place = place[step]
        place["unknownField"] = 1
        with pytest.raises(jsonschema_rs.ValidationError, match="unknownField"):
            jsonschema_rs.validate(strict_schema(), wrong)
    wrong = copy.deepcopy(ray)
    wrong["spec"]["workerGroupSpecs"][0]["replicas"] = "two"
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(strict_schema(), wrong)


def test_the_source_names_the_commit_that_its_fields_come_from() -> None:
    assert COMMIT in (kubernetes.__doc__ or "")


def test_each_pod_gets_the_secrets_that_it_needs(tmp_path: Path) -> None:
    objects = rendered(tmp_path, FULL)
    (secret,) = of_kind(objects, "Secret")
    assert secret["stringData"] == SECRETS
    text = json.dumps([one for one in objects if one["kind"] != "Secret"])
    assert not [value for value in SECRETS.values() if value in text]
    used = {}
    for template in pod_templates(objects):
        container = template["spec"]["containers"][0]
        references = [one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one]
        used[container["name"]] = sorted(one["key"] for one in references)
    assert used == {
        "ray-head": [],
        "ray-worker": ["TOWLINE_UPSTREAM_KEY"],
        "engine": ["HF_TOKEN", "TOWLINE_UPSTREAM_KEY"],
        "server": sorted([*SECRETS, "auth_token"]),
    }


def test_pods_are_ordinary_users_without_the_api(tmp_path: Path) -> None:
    for template in pod_templates(rendered(tmp_path, FULL)):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


def test_policies_cover_every_pod_and_let_in_clients_only(tmp_path: Path) -> None:
    objects = rendered(tmp_path, FULL)
    policies = of_kind(objects, "NetworkPolicy")
    for template in pod_templates(objects):
        chosen = [one for one in policies if selects(one["spec"]["podSelector"], template["metadata"]["labels"])]
        assert {"Ingress", "Egress"} <= {kind for one in chosen for kind in one["spec"]["policyTypes"]}
    stranger = {"app": "other"}
    client = stranger | {"towline.io/client": "true"}
    opened = {
        (one["metadata"]["name"], port["port"])
        for one in policies
        for rule in one["spec"]["ingress"]
        for source in rule["from"]
        if selects(source["podSelector"], client)
        for port in rule.get("ports", [{"port": "any"}])
    }
    assert opened == {("towline-clients", 8600)}
    for one in policies:
        for rule in one["spec"]["ingress"]:
            assert not any(selects(source["podSelector"], stranger) for source in rule["from"])
        # Cloud metadata and private networks stay closed, with the internet open or not.
        for rule in one["spec"].get("egress", []):
            for target in rule.get("to", []):
                if "ipBlock" in target:
                    assert "169.254.0.0/16" in target["ipBlock"]["except"]
    closed = of_kind(rendered(tmp_path, MINIMAL), "NetworkPolicy")
    assert "ipBlock" not in json.dumps(closed)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items()) and all(
        one["operator"] == "In" and labels.get(one["key"]) in one["values"]
        for one in selector.get("matchExpressions", [])
    )


def test_the_server_knows_ray_and_every_model_server(tmp_path: Path) -> None:
    objects = rendered(tmp_path, FULL)
    (server,) = of_kind(objects, "Deployment")
    command = server["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:2] == ["towline", "serve"]
    env = {one["name"]: one.get("value") for one in server["spec"]["template"]["spec"]["containers"][0]["env"]}
    # The names of the Service, one of which `towline cluster status` prints.
    assert json.loads(env["TOWLINE_SERVER__ALLOWED_HOSTS"])[:3] == ["towline", "towline.agents", "towline.agents.svc"]
    assert command[-2:] == ["--concurrency", "8"]
    assert command[command.index("--cluster") + 1] == "ray://towline-head-svc:10001"
    upstream = [command[place + 1] for place, word in enumerate(command) if word == "--upstream"]
    assert upstream == [f"http://towline-engine-{number}.towline-engine:8000" for number in range(2)]
    (engines,) = of_kind(objects, "StatefulSet")
    assert (engines["metadata"]["name"], engines["spec"]["serviceName"]) == ("towline-engine", "towline-engine")
    container = engines["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][:3] == ["vllm", "serve", "/models/m"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert {one["metadata"]["namespace"] for one in objects} == {"agents"}


def test_what_is_shown_has_no_values_and_reads_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    launcher = KubernetesLauncher(inputs(tmp_path, **FULL))
    text = launcher.render()
    assert text == launcher.render()
    assert "TOWLINE_UPSTREAM_KEY: ${TOWLINE_UPSTREAM_KEY}\n" in text
    assert not [value for value in SECRETS.values() if value in text]
    assert "  towline.toml: |\n    # line one\n" in text
    assert "&id" not in text


def test_an_image_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.kubernetes\.image"):
        kubernetes.render_objects(inputs(tmp_path, kubernetes={}), {}, "")
