"""The way out of a sandbox with network `open`: an HTTP proxy of the node, and nothing else.

The sandbox has a network namespace of its own, whose only interface is loopback. One more socket listens there
(`netns_listener`), and the node serves a proxy on it: `CONNECT` for TLS, and plain HTTP by absolute URL. Programs find it by
the usual variables. The proxy resolves names itself, checks every address that a name resolves to, and connects to a checked
address, so that neither a name nor a redirect nor a changing DNS answer leads to the host's loopback, to cloud metadata or
to a private network. An operator may list private networks, and narrow the hosts; a task may narrow them further.

What a proxy cannot see stays possible: inside TLS a client may ask an allowed server for another host's content.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from towline.common.addresses import AddressRefused, Resolve, checked_addresses, is_allowed
from towline.errors import TowlineError
from towline.sandboxes.base import SandboxSpec
from towline.schema import Network

log = logging.getLogger("towline.egress")
PROXY_PORT = 8580
"""Where the proxy listens inside a sandbox with network `open`, on 127.0.0.1."""
_HEAD_BYTES = 32 * 1024
_HEAD_SECONDS = 15.0
_CONNECT_SECONDS = 15.0
_IDLE_SECONDS = 600.0
_CHUNK = 65_536
_START = re.compile(rb"([A-Z]{1,20}) (\S{1,16384}) HTTP/1\.[01]")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00\r\n]*?)[ \t]*")
_URL = re.compile(r"[hH][tT][tT][pP]://([^/?#@\s]+)([/?][^#\s]*)?")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]]+)(?::([0-9]{1,5}))?")
_HOP_HEADERS = (b"connection", b"keep-alive", b"host", b"te", b"upgrade")


@dataclass(frozen=True, slots=True)
class EgressRules:
    """What an operator lets sandboxes with network `open` reach."""

    hosts: tuple[str, ...] = ("*",)
    """`name`, `name:port`, `*.name` for all hosts below it, `*` for all."""
    ports: tuple[int, ...] = (80, 443)
    private_networks: tuple[str, ...] = ()
    """Networks that are not on the public internet and may be reached all the same: `10.1.0.0/16`."""
    connections: int = 256
    """Most open connections per sandbox."""
    unfiltered: bool = False
    """Whether `open` is the host's own network, without a proxy: everything that the host reaches can be reached."""


class EgressRefused(TowlineError):
    """A request that the proxy does not forward; the message is for the program inside."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status = status


def proxy_variables(port: int = PROXY_PORT) -> dict[str, str]:
    """The variables by which programs inside find the proxy."""
    url = f"http://127.0.0.1:{port}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    found = {each: url for name in names for each in (name, name.lower())}
    # Node's own HTTP client reads the others only with this one.
    return found | dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost,::1") | {"NODE_USE_ENV_PROXY": "1"}


def is_proxied(spec: SandboxSpec, rules: EgressRules) -> bool:
    """Whether a sandbox reaches the network through the proxy."""
    return spec.network is Network.OPEN and not rules.unfiltered


def environment(spec: SandboxSpec, rules: EgressRules) -> dict[str, str]:
    """The environment of every command in a sandbox, with where the proxy is."""
    return {**(proxy_variables() if is_proxied(spec, rules) else {}), **dict(spec.env)}


def permit(host: str, port: int, rules: EgressRules, hosts: Sequence[str]) -> None:
    """Raise `EgressRefused` unless the operator and the task allow a host, before its name is resolved."""
    if port not in rules.ports:
        ports = ", ".join(map(str, rules.ports))
        raise EgressRefused("403 Forbidden", f"port {port} is not allowed; the operator allows {ports}")
    if not is_allowed(host, port, rules.hosts) or (hosts and not is_allowed(host, port, hosts)):
        raise EgressRefused("403 Forbidden", f"host {host} is not in the list of allowed hosts")


async def proxy_of(pid: int, spec: SandboxSpec, rules: EgressRules) -> EgressProxy:
    """Serve the proxy of a sandbox inside the network namespace of one of its processes."""
    from towline.sandboxes.netns_listener import open_listener

    proxy = EgressProxy(rules, spec.allowed_hosts)
    await proxy.serve(await open_listener(pid, PROXY_PORT))
    return proxy


class EgressProxy:
    """The proxy of one sandbox."""

    def __init__(self, rules: EgressRules, hosts: Sequence[str] = (), *, resolver: Resolve | None = None):
        """`hosts` narrows the operator's list for this sandbox; empty: not at all."""
        self._rules = rules
        self._hosts = tuple(hosts)
        self._resolver = resolver
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Serve a socket, which this object owns from now on."""
        listener.setblocking(False)
        self._server = await asyncio.start_server(self._connected, sock=listener, limit=_HEAD_BYTES)

    def close(self) -> None:
        """Stop, and end every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) > self._rules.connections:
                raise EgressRefused("503 Service Unavailable", "too many connections at once")
            await self._forward(reader, writer)
        except EgressRefused as refused:
            body = f"towline: {refused}\n".encode()
            head = f"HTTP/1.1 {refused.status}\r\ncontent-type: text/plain\r\ncontent-length: {len(body)}\r\n"
            with contextlib.suppress(OSError):
                writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
                await asyncio.wait_for(writer.drain(), _HEAD_SECONDS)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            with contextlib.suppress(OSError):
                writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_SECONDS)
        except (asyncio.IncompleteReadError, TimeoutError):
            return
        except asyncio.LimitOverrunError as error:
            raise EgressRefused("431 Request Header Fields Too Large", "the request headers are too large") from error
        host, port, forwarded = parse_head(head)
        permit(host, port, self._rules, self._hosts)
        private = self._rules.private_networks
        try:
            addresses = await checked_addresses(host, port, private=private, resolver=self._resolver)
        except AddressRefused as error:
            raise EgressRefused("403 Forbidden", str(error)) from error
        out_reader, out_writer = await _connect(host, addresses, port)
        try:
            if forwarded is None:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                out_writer.write(forwarded)
            await _splice((reader, writer), (out_reader, out_writer))
        finally:
            with contextlib.suppress(OSError):
                out_writer.close()


def parse_head(head: bytes) -> tuple[str, int, bytes | None]:
    """Host and port of a proxied request, and what to send there first (`None` for a tunnel). Raises `EgressRefused`."""
    first, *lines = head[:-4].split(b"\r\n")
    start = _START.fullmatch(first)
    if start is None:
        raise _bad("it does not begin with a method, a target and HTTP/1.1")
    method, target = start[1], start[2].decode("latin-1")
    fields = []
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise _bad("a header field is malformed")
        fields.append((field[1].lower(), field[2]))
    if method == b"CONNECT":
        host, port = _authority(target, None)
        return host, port, None
    url = _URL.fullmatch(target)
    if url is None:
        raise _bad("use CONNECT, or an absolute http:// URL")
    host, port = _authority(url[1], 80)
    names = [name for name, _ in fields]
    if (b"transfer-encoding" in names and b"content-length" in names) or names.count(b"content-length") > 1:
        raise _bad("its length is ambiguous")
    path = (url[2] or "/") if not (url[2] or "").startswith("?") else f"/{url[2]}"
    kept = [(name, value) for name, value in fields if name not in _HOP_HEADERS and not name.startswith(b"proxy-")]
    made = [method + b" " + path.encode("latin-1") + b" HTTP/1.1", b"host: " + url[1].encode("latin-1")]
    # One request per connection: what follows on it must not reach another host by another Host header.
    made += [*(name + b": " + value for name, value in kept), b"connection: close"]
    return host, port, b"\r\n".join(made) + b"\r\n\r\n"


def _authority(text: str, default: int | None) -> tuple[str, int]:
    found = _AUTHORITY.fullmatch(text)
    port = int(found[2]) if found is not None and found[2] else default
    if found is None or port is None or not 0 < port < 65536:
        raise _bad(f"{text[:80]!r} is not a host with a port")
    return found[1].strip("[]"), port


def _bad(reason: str) -> EgressRefused:
    return EgressRefused("400 Bad Request", f"this proxy request is not understood: {reason}")


async def _connect(host: str, addresses: Sequence[str], port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the first of the checked addresses that answers."""
    problem = "no address"
    for address in addresses:
        try:
            return await asyncio.wait_for(asyncio.open_connection(address, port), _CONNECT_SECONDS)
        except (OSError, TimeoutError) as error:
            problem = getattr(error, "strerror", None) or "no answer"
    raise EgressRefused("502 Bad Gateway", f"{host}:{port} cannot be reached: {problem}")


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _splice(inner: Stream, outer: Stream) -> None:
    """Copy both ways until both sides have ended, or either fails."""
    async with asyncio.TaskGroup() as group:
        group.create_task(_copy(inner[0], outer[1]))
        group.create_task(_copy(outer[0], inner[1]))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await asyncio.wait_for(reader.read(_CHUNK), _IDLE_SECONDS):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except (OSError, TimeoutError):
        writer.close()
