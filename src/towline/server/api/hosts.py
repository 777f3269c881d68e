"""Which hosts and origins a request may name.

A web page can make a browser send requests to any address, but it cannot choose their headers: `Host` is the name that the
page used for the service, `Origin` and `Sec-Fetch-Site` say where the page comes from. A name of another domain that points
here (DNS rebinding), and a page of another site, are refused, with or without a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterable
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from towline.common.sockets import is_loopback

_LOOKUP_SECONDS = 2.0
_DEFAULT_PORTS = {"http": 80, "https": 443}


def split_host(value: str) -> tuple[str, int | None] | None:
    """Name and port of a `Host` header; `None` if it is not one."""
    try:
        parts = urlsplit("//" + value)
        if parts.netloc != value or parts.username is not None or not parts.hostname:
            return None
        return parts.hostname.rstrip(".").lower(), parts.port
    except ValueError:
        return None


class AllowedHosts:
    """The names of the service."""

    def __init__(self, host: str, patterns: Iterable[str] = (), machine: Iterable[str] = ()):
        """`host`: the bind address; `patterns`: `server.allowed_hosts`; `machine`: `machine_names()`."""
        self._names = {name.lower() for name in (host.strip("[]"), *machine)}
        self._patterns = [pattern.lower().strip("[]") for pattern in patterns]

    def allows(self, host: str, local: str | None) -> bool:
        """Whether a client may use the name for a connection that it made to the address `local`."""
        if is_loopback(host) or host in self._names or (local is not None and host == local.lower()):
            return True
        return any(host == pattern or _matches(host, pattern) for pattern in self._patterns)


def _matches(host: str, pattern: str) -> bool:
    return "*" in pattern and fnmatchcase(host, pattern.replace("[", "[[]"))


async def machine_names() -> list[str]:
    """The names of this machine, as far as it knows them within a moment."""
    name = os.uname().nodename
    found = [name, name.partition(".")[0], f"{name.partition('.')[0]}.local"]
    with contextlib.suppress(OSError, TimeoutError, UnicodeError):
        async with asyncio.timeout(_LOOKUP_SECONDS):
            entries = await asyncio.get_running_loop().getaddrinfo(name, None, flags=socket.AI_CANONNAME)
            found += [entry[3] for entry in entries if entry[3]]
    return found


def same_origin(origin: str, host: tuple[str, int | None]) -> bool:
    """Whether a page of this origin was served under the host that the request names."""
    try:
        parts = urlsplit(origin)
        default = _DEFAULT_PORTS.get(parts.scheme)
        if default is None or not parts.hostname:
            return False
        # Behind a proxy with TLS the scheme of the request is not that of the page.
        return (parts.hostname.lower(), parts.port or default) == (host[0], host[1] or default)
    except ValueError:
        return False
