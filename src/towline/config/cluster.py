"""The `[cluster]` block: where `towline cluster up` starts Towline, and with what.

Names that a scheduler or an API server parses are checked here, so that no other character reaches them. Secrets are no
settings: `secrets` names environment variables.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from towline.config.section import MAX_COUNT, MAX_SECONDS, Section

ClusterKind = Literal["local", "ray", "slurm", "kubernetes"]

SlurmName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.+,-]*$", max_length=256)]
"""Partition, account or QOS; several partitions are separated by commas."""
DnsLabel = Annotated[str, StringConstraints(pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$")]
"""Name of a Kubernetes object, with room for the suffixes that KubeRay appends."""
DnsName = Annotated[str, StringConstraints(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$")]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?$")]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _one_line(text: str) -> str:
    if any(character in text for character in "\n\r\0"):
        raise ValueError("must be on one line")
    return text


def _sbatch_option(text: str) -> str:
    if not re.match(r"--?[A-Za-z]", _one_line(text)):
        raise ValueError("is no sbatch option; write it as `--name=value`")
    return text


Line = Annotated[str, AfterValidator(_one_line)]
Program = Annotated[tuple[Line, ...], Field(min_length=1)]


class SlurmSettings(Section):
    """The Slurm job of `kind = "slurm"`."""

    partition: SlurmName = ""
    account: SlurmName = ""
    qos: SlurmName = ""
    nodes: int = Field(1, ge=1, le=MAX_COUNT)
    """Nodes that run sessions; the server is on the first one."""
    cpus_per_task: int | None = Field(None, ge=1, le=MAX_COUNT)
    """CPUs per node. Default: what the partition gives."""
    gpus: int = Field(0, ge=0, le=MAX_COUNT)
    """GPUs per node of the nodes that run sessions. Model servers have their own: `cluster.engine.gpus`."""
    memory: Annotated[str, StringConstraints(pattern=r"^([0-9]+[KMGT]?)?$")] = ""
    """Memory per node, `64G`. Default: what the partition gives."""
    time: Annotated[str, StringConstraints(pattern=r"^([0-9]+-)?[0-9]+(:[0-9]{2}){0,2}$")] = "04:00:00"
    """Time limit. A minute before it, the server stops as at Ctrl-C; what is left runs in the next job."""
    options: tuple[Annotated[str, AfterValidator(_sbatch_option)], ...] = ()
    """Further sbatch options: `["--exclusive", "--constraint=ib"]`."""
    setup: tuple[Line, ...] = ()
    """Shell lines that run first on the first node; all nodes inherit the environment: `["module load cuda"]`."""
    interface: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{0,15}$")] = ""
    """Network interface whose address nodes use, `ib0`. Default: the address by which Slurm knows a node."""
    ray: bool | None = None
    """Whether Ray joins the nodes. Default: no, the server starts its node hosts by `srun`."""

    @property
    def with_ray(self) -> bool:
        return bool(self.ray)


class KubernetesSettings(Section):
    """The objects of `kind = "kubernetes"`."""

    image: Line = ""
    """Image with Towline, Ray and bubblewrap."""
    namespace: DnsName = "default"
    replicas: int = Field(2, ge=1, le=MAX_COUNT)
    """Ray worker pods; each runs sessions."""
    cpus: Quantity = "4"
    memory: Quantity = "16Gi"
    """Requests and limits of each worker pod."""
    server_cpus: Quantity = "2"
    server_memory: Quantity = "8Gi"
    """Requests and limits of the server and of the Ray head."""
    storage: Quantity = "50Gi"
    """Size of the volume with the server's data."""
    storage_class: DnsName = ""
    """Default: the default of the Kubernetes cluster."""
    scratch: Quantity = "50Gi"
    """Most disk space of a worker pod: sandboxes, installs and root file systems."""
    internet: bool = False
    """Whether pods may reach addresses outside of this deployment, for installs and images."""
    seccomp: Line = "Unconfined"
    """Profile of worker pods: `Unconfined`, `RuntimeDefault`, or the path of a profile on the nodes. Sandboxes need one that
    allows user namespaces."""
    ray_version: Line = ""
    """Version of Ray in the image, for KubeRay. Default: not stated."""


class LaunchedEngine(Section):
    """Model servers that are started with the cluster. Each replica is one node of a Slurm job, or one pod."""

    command: Program = ("vllm", "serve")
    """Program that takes model, `--host` and `--port`."""
    model: Line = ""
    """Model that the servers load: a folder, or a name that they download. Default: `model.folder`."""
    arguments: tuple[Line, ...] = ()
    """Further arguments: `["--tensor-parallel-size", "4"]`."""
    replicas: int = Field(1, ge=1, le=MAX_COUNT)
    port: int = Field(8000, ge=1, le=65535)
    gpus: int = Field(1, ge=0, le=MAX_COUNT)
    """GPUs per replica."""
    cpus_per_task: int | None = Field(None, ge=1, le=MAX_COUNT)
    """CPUs per replica. Default: what the partition gives; with Kubernetes 8."""
    memory: Quantity | None = None
    """Memory per replica. Default: what the partition gives; with Kubernetes 64Gi."""
    partition: SlurmName = ""
    """Slurm partition of the replicas. Default: `cluster.slurm.partition`."""
    image: Line = ""
    """Container image of the replicas with Kubernetes. Default: `cluster.kubernetes.image`."""


class RaySettings(Section):
    """Node hosts in a Ray cluster: one on every node that suits."""

    resources: dict[str, Annotated[float, Field(ge=0, le=MAX_COUNT)]] = Field(default_factory=lambda: {"CPU": 1.0})
    """Ray resources that each host reserves: `{"CPU": 8, "sandboxes": 1}`. Nodes without them run no sessions."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Only nodes with these labels (`ray start --labels`) run sessions."""
    head: bool = True
    """Whether the head node runs sessions, if it suits."""
    namespace: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "towline"
    """Ray namespace of the named actors."""
    data: Line = ""
    """Folder on each node with the data of its host, relative to `towline/hosts` in the user's cache folder."""
    orphan_seconds: float = Field(3600.0, gt=0, le=MAX_SECONDS)
    """How long hosts run on without a server, which finds them when it is started again."""


def _cluster_address(text: str) -> str:
    if not re.fullmatch(r"|auto|local(:[1-9][0-9]{0,2})?|slurm:[^\n\r\0]+|(ray://)?[][A-Za-z0-9.:_-]+:[0-9]+", text):
        raise ValueError(f"{text!r} is no cluster; use auto, ray://HOST:PORT, HOST:PORT, slurm:FILE or local:N")
    return text


class ClusterSettings(Section):
    """Where Towline runs: on this machine, in a Ray cluster, or started by `towline cluster up` with Slurm or Kubernetes."""

    kind: ClusterKind = "local"
    name: DnsLabel = "towline"
    """Name of the Slurm job, of the Kubernetes objects, or of the hosts in a Ray cluster."""
    address: Annotated[str, AfterValidator(_cluster_address)] = ""
    """Where `towline serve` runs its nodes: `auto` (the Ray cluster of this machine, or `RAY_ADDRESS`), `ray://HOST:PORT`
    (as a Ray client), `HOST:PORT` (of the head), `slurm:FILE` (the nodes of this Slurm job), or `local:N` (N processes on
    this machine). Default: `auto` with `kind = "ray"`, else `server.nodes` processes."""
    program: Program = ("towline",)
    """How jobs call Towline, such as `["apptainer", "exec", "towline.sif", "towline"]`."""
    ray_program: Program = ("ray",)
    """How Slurm jobs call Ray."""
    arguments: tuple[Line, ...] = ()
    """Further arguments of `towline serve`: `["--concurrency", "32"]`."""
    secrets: tuple[VariableName, ...] = ()
    """Environment variables that must be set for `towline cluster up`. Slurm passes the environment on; with Kubernetes they
    become a Secret."""
    ray: RaySettings = RaySettings()
    slurm: SlurmSettings = SlurmSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    engine: LaunchedEngine | None = None
    """Model servers to start as well. Default: none, the `[engine]` section as it stands."""
