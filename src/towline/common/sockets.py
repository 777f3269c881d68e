"""Listening TCP sockets, and which addresses are loopback."""

from __future__ import annotations

import ipaddress
import socket

from towline.errors import ConfigError

_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free one. Raises `ConfigError` if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY: small responses are sent at once.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another address or port"
        ) from error
    listener.listen(_BACKLOG)
    return listener


def url_of(listener: socket.socket, host: str, *, tls: bool = False) -> str:
    """The HTTP or HTTPS URL of a listening socket, under the name `host`."""
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{listener.getsockname()[1]}"


def is_loopback(host: str) -> bool:
    """Whether the name or address is loopback."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
