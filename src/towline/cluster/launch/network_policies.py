"""Who reaches whom: the network policies of a deployment.

Pods take connections from their own deployment alone, but for the server's port, which is open to pods of the namespace with
the label `towline.io/client: "true"`. They reach each other and DNS; with `cluster.kubernetes.internet` also public
addresses, never the private networks around them or the metadata services of clouds.
"""

from __future__ import annotations

from towline.cluster.launch.objects import ENGINE, HEAD, NODE, PORT, SERVER, Manifest, labels, manifest
from towline.config import Settings

CLIENT_LABEL = {"towline.io/client": "true"}
_PRIVATE = ["10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"]


def network_policies(settings: Settings) -> list[Manifest]:
    """Policies for the Ray cluster with its server, for the server's clients, and for model servers."""
    joined = [SERVER, HEAD, NODE]
    dns = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    egress: list[Manifest] = [{"ports": dns}, {"to": [_pods(settings, [*joined, ENGINE])]}]
    if settings.cluster.kubernetes.internet:
        egress.append({"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": _PRIVATE}}]})
    clients = {"from": [{"podSelector": {"matchLabels": CLIENT_LABEL}}], "ports": [{"protocol": "TCP", "port": PORT}]}
    found = [
        _policy(settings, "cluster", joined, [{"from": [_pods(settings, joined)]}], egress),
        _policy(settings, "clients", [SERVER], [clients]),
    ]
    engine = settings.cluster.engine
    if engine is not None:
        calls = {"from": [_pods(settings, joined)], "ports": [{"protocol": "TCP", "port": engine.port}]}
        found.append(_policy(settings, ENGINE, [ENGINE], [calls], egress))
    return found


def _pods(settings: Settings, components: list[str]) -> Manifest:
    chosen = [{"key": "app.kubernetes.io/component", "operator": "In", "values": components}]
    return {"podSelector": {"matchLabels": labels(settings), "matchExpressions": chosen}}


def _policy(
    settings: Settings, name: str, components: list[str], ingress: list[Manifest], egress: list[Manifest] | None = None
) -> Manifest:
    spec: Manifest = _pods(settings, components) | {"policyTypes": ["Ingress"], "ingress": ingress}
    if egress is not None:
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": egress}
    return manifest("networking.k8s.io/v1", "NetworkPolicy", f"{settings.cluster.name}-{name}", settings, spec=spec)
