"""The connections of the service: how many there may be, in all and per client address.

Invariant: a client that has sent a valid key is never disconnected to make room. At a limit the oldest connection that
never sent one is closed; only if there is none, the new one is refused. So a flood without keys takes the place of other
clients without keys, and of no one else.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from typing import Protocol

UNKNOWN = "unknown"


class ClientConnection(Protocol):
    """A connection, as the table sees it."""

    address: str
    """`address_group` of the client."""

    def evict(self) -> None:
        """Close the connection to make room for another."""


def address_group(address: str | None) -> str:
    """What limits count by: an IPv4 address, or the /64 network of an IPv6 address, which one client can use whole."""
    try:
        found = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return UNKNOWN
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        if not found.is_loopback:
            return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)


class ConnectionTable:
    """Every open connection."""

    def __init__(self, most: int, per_address: int):
        self.most = most
        self.per_address = per_address
        self._counts: Counter[str] = Counter()
        self._open: set[ClientConnection] = set()
        self._unproven: OrderedDict[ClientConnection, None] = OrderedDict()
        """Connections that never sent a valid key, oldest first."""

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: ClientConnection) -> bool:
        """Whether the connection may stay; others may be closed for it."""
        if self._counts[connection.address] >= self.per_address and not self._make_room(connection.address):
            return False
        if len(self._open) >= self.most and not self._make_room(None):
            return False
        self._open.add(connection)
        self._unproven[connection] = None
        self._counts[connection.address] += 1
        return True

    def prove(self, connection: ClientConnection) -> None:
        """The client has sent a valid key."""
        self._unproven.pop(connection, None)

    def remove(self, connection: ClientConnection) -> None:
        """The connection is closed, or was never admitted."""
        if connection not in self._open:
            return
        self._open.discard(connection)
        self._unproven.pop(connection, None)
        self._counts[connection.address] -= 1
        if not self._counts[connection.address]:
            del self._counts[connection.address]

    def _make_room(self, address: str | None) -> bool:
        """Close the oldest connection without a valid key, of this address if one is given."""
        for one in self._unproven:
            if address is None or one.address == address:
                self.remove(one)
                one.evict()
                return True
        return False
