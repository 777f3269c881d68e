"""Which network addresses an untrusted program may be connected to, and which hosts an allow-list names.

The promise: a name is resolved once, every address that it resolves to is checked, and the connection goes to a checked
address, so a name whose answer changes (DNS rebinding) gains nothing. Addresses that lead back to this machine or its
network are refused unless an operator lists them: loopback, link-local (cloud metadata), private and shared ranges,
multicast, and every IPv6 form that contains such an IPv4 address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence

from towline.errors import TowlineError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
_NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_HOST = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*"
)


class AddressRefused(TowlineError):
    """A host that may not be connected to; the message says why."""


def is_public(address: str) -> bool:
    """Whether an address is on the public internet, with none of the ranges that lead back here inside it."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return all(one.is_global and not one.is_multicast for one in (found, *_embedded(found)))


def _embedded(address: Address) -> list[Address]:
    """The IPv4 addresses that an IPv6 address stands for."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found: list[Address] = [one for one in (address.ipv4_mapped, address.sixtofour) if one is not None]
    found += address.teredo or ()
    if address in _COMPATIBLE or any(address in network for network in _NAT64):
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return found


def is_allowed(host: str, port: int, patterns: Sequence[str]) -> bool:
    """Whether an allow-list names a host: `name`, `name:port`, `*.name` for all hosts below it, `*` for all."""
    wanted = host.lower().rstrip(".")
    for pattern in patterns:
        name, number = _split_pattern(pattern)
        if number is not None and number != port:
            continue
        if name == "*" or wanted == name or (name.startswith("*.") and wanted.endswith(name[1:])):
            return True
    return False


def _split_pattern(pattern: str) -> tuple[str, int | None]:
    name, colon, number = pattern.rpartition(":")
    if colon and number.isdecimal() and (":" not in name or name.startswith("[")):
        return name.strip("[]").lower().rstrip("."), int(number)
    return pattern.strip("[]").lower().rstrip("."), None


def in_networks(address: str, networks: Sequence[str]) -> bool:
    """Whether an address is in one of an operator's networks (`10.0.0.0/8`) or is one of its addresses."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
        return any(found in ipaddress.ip_network(network, strict=False) for network in networks)
    except ValueError:
        return False


def is_own(address: str) -> bool:
    """Whether an address is one of this machine's: what listens there may expect only its own network."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: the kernel only says which address it would send from.
            probe.connect((address, 9))
            return str(probe.getsockname()[0]) == address
    except OSError:
        return False


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of a host, in the resolver's order."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


async def checked_addresses(
    host: str, port: int, *, private: Sequence[str] = (), resolver: Resolve | None = None
) -> Sequence[str]:
    """The addresses of a host, once all of them are known to be public or in an operator's `private` networks.

    Raises `AddressRefused`. Connect to these addresses, never to the name again.
    """
    literal = _literal(host)
    if literal is None and not _HOST.fullmatch(host.rstrip(".")):
        raise AddressRefused(f"{host!r} is not a host name")
    try:
        found = [literal] if literal is not None else await (resolver or resolve)(host, port)
    except OSError as error:
        raise AddressRefused(f"{host} cannot be resolved: {error.strerror or error}") from error
    if not found:
        raise AddressRefused(f"{host} has no address")
    for address in found:
        if in_networks(address, private):
            continue
        if not is_public(address):
            raise AddressRefused(f"{host} is at {address}, which is not on the public internet")
        if is_own(address):
            raise AddressRefused(f"{host} is at {address}, which is this machine")
    return found


def _literal(host: str) -> str | None:
    """The address that a host is written as, in any form that a resolver accepts (`127.1`, `0x7f000001`)."""
    try:
        return str(ipaddress.ip_address(host.strip("[]").partition("%")[0]))
    except ValueError:
        pass
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except (OSError, UnicodeEncodeError):
        return None
