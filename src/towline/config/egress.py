"""The `[node.egress]` section: what sandboxes with network `open` can reach."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import AfterValidator, Field

from towline.config.section import Section


def _network(text: str) -> str:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a network such as 10.1.0.0/16: {error}") from error
    return text


class EgressSettings(Section):
    """The proxy through which a sandbox with network `open` reaches hosts."""

    hosts: tuple[str, ...] = ("*",)
    """Hosts that may be reached: `name`, `name:port`, `*.name` for all hosts below it, `*` for all. A task may narrow this
    (`environment.allowed_hosts`), never widen it."""
    ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = (80, 443)
    """Ports that may be reached."""
    private_networks: tuple[Annotated[str, AfterValidator(_network)], ...] = ()
    """Networks that are not on the public internet and may be reached all the same: `["10.1.0.0/16"]`. Default: none, so
    neither this machine's loopback nor cloud metadata nor private addresses."""
    connections: int = Field(256, ge=1)
    """Most open connections per sandbox."""
    unfiltered: bool = False
    """Whether `open` is the host's own network instead, without a proxy: everything that the host reaches, loopback
    included, can be reached from inside."""
