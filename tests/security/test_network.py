"""Attack 4: what a sandbox with network `open` can reach. Not the host's loopback, not a private network, whatever the way.

The proxy is attacked in this process, then from inside real sandboxes: as whoever runs the tests, and by
`test_rootless.py` as an ordinary user.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from support.sandboxes import contract
from support.sandboxes import escape_attempts as attempts
from support.security.attack import attack, without
from support.security.canaries import SECRET, canary
from towline.common import addresses
from towline.common.addresses import AddressRefused, checked_addresses, is_allowed
from towline.sandboxes.base import GATEWAY_PORT, Mount, Sandbox, SandboxSpec, execute
from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime
from towline.sandboxes.egress import PROXY_PORT, EgressProxy, EgressRules, parse_head
from towline.schema import Network, Resources

PYTHON = f"/opt/python/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
SPEC = SandboxSpec(
    mounts=(Mount(Path(sys.base_prefix), "/opt/python"),), network=Network.OPEN, resources=Resources(disk_mb=32)
)
PUBLIC = without(("towline.common.addresses.is_public", lambda address: True))
ANYWHERE = without(
    ("towline.common.addresses.is_public", lambda address: True),
    ("towline.common.addresses.is_own", lambda address: False),
)
LOOPBACK = ("127.0.0.0/8",)
PRIVATE = [
    *("127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.1", "017700000001", "0.0.0.0", "0"),
    *("::1", "[::1]", "::", "::ffff:127.0.0.1", "::ffff:7f00:1", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::1"),
    *("10.1.2.3", "172.16.0.1", "172.31.255.1", "192.168.0.1", "100.64.0.1", "169.254.169.254", "198.18.0.1"),
    *("fe80::1", "fe80::1%eth0", "fd00::1", "fc00::1", "224.0.0.1", "ff02::1", "255.255.255.255", "240.0.0.1"),
    *("64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "2002:a9fe:a9fe::", "::ffff:169.254.169.254", "fd00:ec2::254"),
]


@attack("4", "18", guard=ANYWHERE)
@pytest.mark.parametrize("host", PRIVATE)
async def test_a_private_address_however_it_is_written(host: str) -> Sequence[str]:
    try:
        return await checked_addresses(host, 80)
    except AddressRefused:
        return []


@attack("4", "18", guard=ANYWHERE)
@pytest.mark.parametrize("answer", [["127.0.0.1"], ["93.184.216.34", "127.0.0.1"], ["::ffff:10.0.0.1"], ["fe80::1%lo"]])
async def test_a_name_that_leads_to_a_private_address(answer: list[str]) -> Sequence[str]:
    async def resolver(host: str, port: int) -> list[str]:
        return answer

    try:
        return await checked_addresses("innocent.example", 80, resolver=resolver)
    except AddressRefused:
        return []


@attack("4", guard=without(("towline.common.addresses.is_own", lambda address: False)))
async def test_a_public_address_of_this_machine() -> Sequence[str]:
    """What listens on it may trust its own network; the check asks the kernel, so any own address serves."""

    async def resolver(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    with PUBLIC():
        try:
            return await checked_addresses("mine.example", 80, resolver=resolver)
        except AddressRefused:
            return []


async def test_the_operators_networks_are_reached() -> None:
    assert await checked_addresses("127.0.0.1", 80, private=LOOPBACK) == ["127.0.0.1"]
    with pytest.raises(AddressRefused):
        await checked_addresses("10.0.0.1", 80, private=LOOPBACK)
    assert addresses.is_public("93.184.216.34")
    assert addresses.is_public("2606:2800:220:1:248:1893:25c8:1946")


@attack("4", guard=without(("towline.sandboxes.egress.is_allowed", lambda *_: True)))
@pytest.mark.parametrize(
    "host",
    ["evil.example", "example.org.evil.example", "notexample.org", "example.orgs", "sub.example.org", "EVIL.example"],
)
@pytest.mark.parametrize("whose", ["operator", "task"])
async def test_a_host_that_is_not_allowed(host: str, whose: str) -> str:
    names = ("example.org", "example.org.")
    async with canary() as target:
        rules = EgressRules(names if whose == "operator" else ("*",), (target.port,), LOOPBACK)
        return await through(rules, () if whose == "operator" else names, f"CONNECT {host}:{target.port} HTTP/1.1")


def test_allow_lists() -> None:
    for host, pattern in (
        ("a.example", "a.example"),
        ("A.Example.", "a.example"),
        ("x.a.example", "*.a.example"),
        ("x", "*"),
    ):
        assert is_allowed(host, 443, [pattern])
    for host, pattern in (("a.example", "*.a.example"), ("xa.example", "a.example"), ("a.example", "a.example:80")):
        assert not is_allowed(host, 443, [pattern])
    assert is_allowed("a.example", 80, ["a.example:80"])
    assert is_allowed("::1", 80, ["[::1]:80"])


async def local(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


@contextlib.asynccontextmanager
async def proxy(rules: EgressRules, hosts: Sequence[str] = ()) -> AsyncIterator[int]:
    """A proxy whose every name is at 127.0.0.1; yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    made = EgressProxy(rules, hosts, resolver=local)
    await made.serve(listener)
    try:
        yield port
    finally:
        made.close()


async def through(
    rules: EgressRules, hosts: Sequence[str], *requests: str, then: str = "GET / HTTP/1.1\r\nhost: c\r\n\r\n"
) -> str:
    """Send a request to a proxy, and through a tunnel another one; returns what the canary answered."""
    async with proxy(rules, hosts) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for request in requests:
            writer.write(f"{request}\r\n\r\n".encode("latin-1"))
        if requests[0].startswith("CONNECT"):
            writer.write(then.encode())
        answer = ""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(3):
                while SECRET not in answer and (data := await reader.read(65_536)):
                    answer += data.decode("latin-1")
        writer.close()
        return SECRET if SECRET in answer else ""


@attack("4", guard=PUBLIC)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "innocent.example", "127.1", "[::ffff:127.0.0.1]"])
@pytest.mark.parametrize(
    "how", ["CONNECT {}:{} HTTP/1.1", "GET http://{}:{}/ HTTP/1.1", "POST HTTP://{}:{}/x HTTP/1.0"]
)
async def test_the_hosts_loopback_through_the_proxy(host: str, how: str) -> str:
    with without(("towline.common.addresses.is_own", lambda address: False))():
        async with canary() as target:
            return await through(EgressRules(ports=(target.port,)), (), how.format(host, target.port))


@attack("4", guard=without(("towline.sandboxes.egress.permit", lambda *_: None)))
@pytest.mark.parametrize("how", ["CONNECT a.example:{} HTTP/1.1", "GET http://a.example:{}/ HTTP/1.1"])
async def test_a_port_that_is_not_allowed(how: str) -> str:
    async with canary() as target:
        return await through(EgressRules(private_networks=LOOPBACK), (), how.format(target.port))


@attack("smuggling", guard=without(("towline.sandboxes.egress._HOP_HEADERS", ())))
async def test_another_host_by_its_header() -> bool:
    """The server of an allowed host is asked for another one's pages."""
    async with canary() as target:
        rules = EgressRules(("a.example",), (target.port,), LOOPBACK)
        await through(rules, (), f"GET http://a.example:{target.port}/ HTTP/1.1\r\nhost: secret.example")
        return any("secret.example" in head for head in target.asked)


@attack("smuggling", guard=without(("towline.sandboxes.egress._HOP_HEADERS", (b"host",))))
async def test_another_host_by_a_second_request() -> bool:
    """A connection that stays open would take a further request, which nobody checks."""
    async with canary() as target:
        rules = EgressRules(("a.example",), (target.port,), LOOPBACK)
        second = f"GET http://secret.example:{target.port}/ HTTP/1.1\r\nhost: secret.example"
        with without(("towline.sandboxes.egress.parse_head", _kept_alive if _removed() else parse_head))():
            await through(rules, (), f"GET http://a.example:{target.port}/ HTTP/1.1", second)
            await asyncio.sleep(0.05)
        return any("secret.example" in head for head in target.asked)


def _removed() -> bool:
    from towline.sandboxes import egress

    return egress._HOP_HEADERS == (b"host",)


def _kept_alive(head: bytes) -> tuple[str, int, bytes | None]:
    host, port, forwarded = parse_head(head)
    return host, port, forwarded.replace(b"\r\nconnection: close", b"") if forwarded else None


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET https://a/ HTTP/1.1\r\n\r\n",
        b"GET ftp://a/ HTTP/1.1\r\n\r\n",
        b"GET http://user@a/ HTTP/1.1\r\n\r\n",
        b"GET http://a:0/ HTTP/1.1\r\n\r\n",
        b"GET http://a:99999/ HTTP/1.1\r\n\r\n",
        b"CONNECT a HTTP/1.1\r\n\r\n",
        b"CONNECT a:80:90 HTTP/1.1\r\n\r\n",
        b"CONNECT  a:80 HTTP/1.1\r\n\r\n",
        b"GET http://a/ HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n",
        b"GET http://a/ HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 30\r\n\r\n",
        b"GET http://a/ HTTP/1.1\r\nx: y\r\n folded\r\n\r\n",
        b"GET http://a/ HTTP/1.1\r\nx : y\r\n\r\n",
        b"GET http://a/ HTTP/1.1\r\nx: y\x00\r\n\r\n",
        b"GET http://a/\nb HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\r\n\r\n",
    ],
)
def test_requests_that_are_not_understood_are_refused(head: bytes) -> None:
    from towline.sandboxes.egress import EgressRefused

    with pytest.raises(EgressRefused, match="not understood"):
        parse_head(head)


@attack("12", guard=without())
async def test_hold_many_connections_of_the_proxy(unguarded: bool) -> int:
    async with proxy(EgressRules(connections=1000 if unguarded else 5)) as port:
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        open_ones = 0
        for reader, writer in streams:
            with contextlib.suppress(OSError, TimeoutError):
                try:
                    async with asyncio.timeout(0.2 if open_ones < 6 else 0.01):
                        await reader.read(10)
                except TimeoutError:
                    open_ones += 1
            writer.transport.abort()
    return max(0, open_ones - 5)


# From inside a sandbox


@contextlib.asynccontextmanager
async def sandbox_of(tmp_path: Path, rules: EgressRules, *unguarded: str, **changes: object) -> AsyncIterator[Sandbox]:
    runtime = BubblewrapRuntime(tmp_path / "data", egress=rules, _unguarded=unguarded)
    await runtime.open()
    try:
        sandbox = await runtime.create(dataclasses.replace(SPEC, **changes))  # type: ignore[arg-type]
        try:
            yield sandbox
        finally:
            await sandbox.destroy()
    finally:
        await runtime.close()


@attack("4", guard=without())
async def test_the_host_from_inside_an_open_sandbox(tmp_path: Path, unguarded: bool) -> list[str]:
    """Loopback, abstract sockets and other addresses of the host, without the proxy."""
    name = f"towline-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        async with (
            canary() as target,
            sandbox_of(tmp_path, EgressRules(), *(("network",) if unguarded else ())) as sandbox,
        ):
            arguments = ("127.0.0.1", str(target.port), name)
            done = await execute(sandbox, [PYTHON, "-I", "-c", REACH, *arguments], seconds=60)
    assert done.ok, done.text
    reached: list[str] = json.loads(done.stdout)
    return reached


REACH = attempts.program("""
host, port, name = sys.argv[1:]
found = []
for label, family, address in (
    ("loopback", socket.AF_INET, (host, int(port))),
    ("abstract", socket.AF_UNIX, "\\0" + name),
    ("any", socket.AF_INET, ("0.0.0.0", int(port))),
):
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(5)
        try:
            client.connect(address)
            found.append(label)
        except OSError:
            pass
try:
    socket.getaddrinfo("example.org", 80)
    found.append("resolver")
except OSError:
    pass
print(json.dumps(found))
""")

FETCH = attempts.program("""
import urllib.request
try:
    print(json.dumps(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode()))
except OSError as error:
    print(json.dumps(""))
""")


@attack("4", guard=without())
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0x7f000001"])
async def test_the_host_through_the_proxy_from_inside(tmp_path: Path, host: str, unguarded: bool) -> str:
    """Without the guard an operator has listed loopback: then it is reached, so the way there is real."""
    async with canary() as target:
        rules = EgressRules(ports=(target.port,), private_networks=LOOPBACK if unguarded else ())
        async with sandbox_of(tmp_path, rules) as sandbox:
            script = "import os\nfor n in ('no_proxy', 'NO_PROXY'): os.environ[n] = ''\n" + FETCH
            done = await execute(sandbox, [PYTHON, "-I", "-c", script, f"http://{host}:{target.port}/"], seconds=60)
    assert done.ok, done.text
    return str(json.loads(done.stdout))


@attack("4", guard=without())
async def test_a_task_that_widens_the_operators_hosts(tmp_path: Path, unguarded: bool) -> str:
    async with canary() as target:
        hosts = ("*",) if unguarded else ("example.org",)
        rules = EgressRules(hosts, (target.port,), LOOPBACK)
        async with sandbox_of(tmp_path, rules, allowed_hosts=("*", "127.0.0.1")) as sandbox:
            script = "import os\nfor n in ('no_proxy', 'NO_PROXY'): os.environ[n] = ''\n" + FETCH
            done = await execute(sandbox, [PYTHON, "-I", "-c", script, f"http://127.0.0.1:{target.port}/"], seconds=60)
    return str(json.loads(done.stdout))


async def test_the_gateway_and_allowed_hosts_are_reached_from_an_open_sandbox(tmp_path: Path) -> None:
    async with canary() as target:
        rules = EgressRules(ports=(target.port,), private_networks=LOOPBACK)
        async with sandbox_of(tmp_path, rules, allowed_hosts=("localhost",)) as sandbox:
            assert sandbox.listener is not None
            with contract_greeting(sandbox.listener):
                reached = await execute(
                    sandbox,
                    [PYTHON, "-I", "-c", attempts.CONNECT, str(GATEWAY_PORT), "127.0.0.1", str(PROXY_PORT), "x"],
                )
            assert json.loads(reached.stdout)["loopback"] == "reached"
            script = "import os\nfor n in ('no_proxy', 'NO_PROXY'): os.environ[n] = ''\n" + FETCH
            done = await execute(sandbox, [PYTHON, "-I", "-c", script, f"http://localhost:{target.port}/"], seconds=60)
            assert json.loads(done.stdout) == SECRET
            refused = await execute(
                sandbox, [PYTHON, "-I", "-c", script, f"http://127.0.0.1:{target.port}/"], seconds=60
            )
            assert json.loads(refused.stdout) == "", "not in the task's list"
            names = await contract.sh(sandbox, "echo $HTTPS_PROXY $no_proxy")
            assert names.split() == [f"http://127.0.0.1:{PROXY_PORT}", "127.0.0.1,localhost,::1"]


@contextlib.contextmanager
def contract_greeting(listener: socket.socket):  # type: ignore[no-untyped-def]
    """Greets every client of a socket."""
    import threading

    copied = listener.dup()
    copied.setblocking(True)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = copied.accept()
                with connection:
                    connection.sendall(b"reached")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        copied.shutdown(socket.SHUT_RDWR)
        copied.close()
        thread.join(5)
