"""The Kubernetes objects: a pure function from settings to manifests.

A KubeRay RayCluster joins the pods that run sessions; the server is a Deployment of one pod with a volume for its data;
launched model servers are a StatefulSet, so that each replica has a name of its own. The fields of the RayCluster are those
of `ray.io/v1` in KubeRay 1.7.0 (ray-project/kuberay, commit 59d663aeec13760646da3db9c1cf8cfe883e30b7). KubeRay keeps the
token of the Ray cluster in a Secret with the cluster's name, under `auth_token`.

Values of secrets are in the Secret alone; pods refer to them, each to those that it needs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from towline.cluster.launch.inputs import LaunchInputs, engine_kind, engine_model
from towline.cluster.launch.network_policies import network_policies
from towline.cluster.launch.objects import ENGINE, HEAD, NODE, PORT, SERVER, Manifest, labels, manifest
from towline.config import Settings
from towline.errors import ConfigError

_USER = 1000
_DATA, _SETTINGS = "/data", "/etc/towline"
_KEY_SCRIPT = """\
set -eu
umask 077
if [ ! -s /data/cluster/admin.key ]; then
    mkdir -p /data/cluster
    "$@" serve keys create --role admin --name cluster --data /data \\
        --config /etc/towline/towline.toml >/data/cluster/admin.key.new
    mv /data/cluster/admin.key.new /data/cluster/admin.key
fi
"""


def render_objects(inputs: LaunchInputs, secrets: Mapping[str, str], settings_text: str) -> list[Manifest]:
    """The manifests, in the order in which they are applied. `secrets` has a value for each of `cluster.secrets`."""
    settings = inputs.settings
    if not settings.cluster.kubernetes.image:
        raise ConfigError("cluster.kubernetes.image: name an image with Towline, Ray and bubblewrap")
    name = settings.cluster.name
    found: list[Manifest] = []
    if settings.cluster.secrets:
        values = {variable: secrets[variable] for variable in settings.cluster.secrets}
        found.append(manifest("v1", "Secret", _secret_name(settings), settings, type="Opaque", stringData=values))
    found.append(
        manifest("v1", "ConfigMap", f"{name}-settings", settings, data={"towline.toml": settings_text}),
    )
    found += [_volume(settings), *network_policies(settings), _ray_cluster(settings)]
    if settings.cluster.engine is not None:
        found += _engine(settings)
    return [*found, _service(settings), _server(settings, settings_text)]


def _secret_name(settings: Settings) -> str:
    # Not the cluster's own name: KubeRay keeps its token there.
    return f"{settings.cluster.name}-secrets"


def _volume(settings: Settings) -> Manifest:
    chosen = settings.cluster.kubernetes
    spec: Manifest = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": chosen.storage}}}
    if chosen.storage_class:
        spec["storageClassName"] = chosen.storage_class
    return manifest("v1", "PersistentVolumeClaim", f"{settings.cluster.name}-data", settings, spec=spec)


def _ray_cluster(settings: Settings) -> Manifest:
    chosen = settings.cluster.kubernetes
    head = _container(settings, "ray-head", chosen.server_cpus, chosen.server_memory)
    worker = _container(settings, "ray-worker", chosen.cpus, chosen.memory)
    worker["resources"]["limits"]["ephemeral-storage"] = chosen.scratch
    # Sandboxes mount their own /proc, which needs an unmasked one; it is that of the pod's own user namespace.
    worker["securityContext"] |= {"procMount": "Unmasked", "seccompProfile": _seccomp(chosen.seccomp)}
    worker["env"] += _secret_variables(settings, [settings.engine.key_variable])
    worker["env"] += _environment(XDG_CACHE_HOME="/tmp/cache")
    worker["volumeMounts"] = [{"name": "scratch", "mountPath": "/tmp"}]
    spec: Manifest = {
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            # Sessions run on workers alone: the head is lost with all of them, so nothing else may exhaust its memory.
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "127.0.0.1"},
            "template": _pod(settings, HEAD, head),
        },
        "workerGroupSpecs": [
            {
                "groupName": "nodes",
                "replicas": chosen.replicas,
                "minReplicas": chosen.replicas,
                "maxReplicas": chosen.replicas,
                "rayStartParams": {},
                "template": _pod(
                    settings,
                    NODE,
                    worker,
                    hostUsers=False,
                    volumes=[{"name": "scratch", "emptyDir": {"sizeLimit": chosen.scratch}}],
                ),
            }
        ],
    }
    if chosen.ray_version:
        spec["rayVersion"] = chosen.ray_version
    return manifest("ray.io/v1", "RayCluster", settings.cluster.name, settings, spec=spec)


def _server(settings: Settings, settings_text: str) -> Manifest:
    chosen, name = settings.cluster.kubernetes, settings.cluster.name
    mounts = [
        {"name": "data", "mountPath": _DATA},
        {"name": "settings", "mountPath": _SETTINGS, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    variables = _secret_variables(settings, settings.cluster.secrets)
    key = _container(settings, "key", chosen.server_cpus, chosen.server_memory)
    key |= {"command": ["sh", "-c", _KEY_SCRIPT, "key", *settings.cluster.program], "volumeMounts": mounts}
    key["env"] += variables
    server = _container(settings, SERVER, chosen.server_cpus, chosen.server_memory)
    token = {"secretKeyRef": {"name": name, "key": "auth_token"}}
    own = _environment(RAY_AUTH_MODE="token", TOWLINE_SERVER__ALLOWED_HOSTS=json.dumps(_names(settings)))
    server["env"] += [*variables, *own, {"name": "RAY_AUTH_TOKEN", "valueFrom": token}]
    server |= {
        "command": [*settings.cluster.program, "serve", *_serve_arguments(settings), *settings.cluster.arguments],
        "ports": [{"name": "http", "containerPort": PORT}],
        "volumeMounts": mounts,
        "startupProbe": _probe("/livez", 60),
        "livenessProbe": _probe("/livez", 6),
        "readinessProbe": _probe("/livez", 3),
    }
    volumes = [
        {"name": "data", "persistentVolumeClaim": {"claimName": f"{name}-data"}},
        {"name": "settings", "configMap": {"name": f"{name}-settings"}},
        {"name": "tmp", "emptyDir": {}},
    ]
    grace = int(settings.server.stop_seconds) + 30
    pod = _pod(settings, SERVER, server, volumes=volumes, initContainers=[key], terminationGracePeriodSeconds=grace)
    # Other settings replace the pod.
    pod["metadata"]["annotations"] = {"towline.io/settings": hashlib.sha256(settings_text.encode()).hexdigest()}
    spec = {
        "replicas": 1,
        # One server at a time writes the data.
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels(settings, SERVER)},
        "template": pod,
    }
    return manifest("apps/v1", "Deployment", f"{name}-server", settings, SERVER, spec=spec)


def _names(settings: Settings) -> list[str]:
    """The names of the Service, under which clients address the server, and those of the operator's settings."""
    name, namespace = settings.cluster.name, settings.cluster.kubernetes.namespace
    own = [name, *(f"{name}.{namespace}{end}" for end in ("", ".svc", ".svc.cluster.local"))]
    return [*own, *settings.server.allowed_hosts]


def _serve_arguments(settings: Settings) -> list[str]:
    name = settings.cluster.name
    found = ["--config", f"{_SETTINGS}/towline.toml", "--host", "0.0.0.0", "--port", str(PORT), "--data", _DATA]
    found += ["--cluster", f"ray://{name}-head-svc:10001"]
    engine = settings.cluster.engine
    if engine is not None:
        found += ["--engine", engine_kind(settings)]
        for number in range(engine.replicas):
            found += ["--upstream", f"http://{name}-engine-{number}.{name}-engine:{engine.port}"]
    return found


def _service(settings: Settings) -> Manifest:
    spec = {"selector": labels(settings, SERVER), "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]}
    return manifest("v1", "Service", settings.cluster.name, settings, SERVER, spec=spec)


def _engine(settings: Settings) -> list[Manifest]:
    """Model servers, and the headless Service that gives each its name."""
    engine, name = settings.cluster.engine, f"{settings.cluster.name}-engine"
    assert engine is not None
    container = _container(settings, ENGINE, str(engine.cpus_per_task or 8), engine.memory or "64Gi")
    if engine.image:
        container["image"] = engine.image
    if engine.gpus:
        container["resources"]["limits"]["nvidia.com/gpu"] = str(engine.gpus)
    container["env"] += [
        *_secret_variables(settings, [settings.engine.key_variable], rename="VLLM_API_KEY"),
        *_secret_variables(settings, ["HF_TOKEN"]),
    ]
    address = ["--host", "0.0.0.0", "--port", str(engine.port)]
    container |= {
        "command": [*engine.command, engine_model(settings), *address, *engine.arguments],
        "ports": [{"name": "http", "containerPort": engine.port}],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes = [{"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    ports = [{"name": "http", "port": engine.port, "targetPort": "http"}]
    selector = labels(settings, ENGINE)
    # Names of replicas exist before they are ready: the server waits for its engines by itself.
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": ports}
    spec = {
        "serviceName": name,
        "replicas": engine.replicas,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": selector},
        "template": _pod(settings, ENGINE, container, volumes=volumes),
    }
    return [
        manifest("v1", "Service", name, settings, ENGINE, spec=service),
        manifest("apps/v1", "StatefulSet", name, settings, ENGINE, spec=spec),
    ]


def _container(settings: Settings, name: str, cpus: str, memory: str) -> Manifest:
    amounts = {"cpu": cpus, "memory": memory}
    return {
        "name": name,
        "image": settings.cluster.kubernetes.image,
        "env": _environment(HOME="/tmp", RAY_USAGE_STATS_ENABLED="0"),
        "resources": {"requests": dict(amounts), "limits": dict(amounts)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def _pod(settings: Settings, component: str, container: Manifest, **fields: Any) -> Manifest:
    """A pod template: an ordinary user, no access to the API of Kubernetes."""
    user = {"runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER}
    return {
        "metadata": {"labels": labels(settings, component)},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": user | {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            **fields,
        },
    }


def _seccomp(profile: str) -> Manifest:
    if profile in ("Unconfined", "RuntimeDefault"):
        return {"type": profile}
    return {"type": "Localhost", "localhostProfile": profile}


def _environment(**variables: str) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def _secret_variables(settings: Settings, names: list[str] | tuple[str, ...], rename: str = "") -> list[Manifest]:
    """References to those of the variables that the Secret has."""
    return [
        {"name": rename or name, "valueFrom": {"secretKeyRef": {"name": _secret_name(settings), "key": name}}}
        for name in names
        if name in settings.cluster.secrets
    ]


def _probe(path: str, failures: int) -> Manifest:
    get = {"path": path, "port": "http"}
    return {"httpGet": get, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": failures}
