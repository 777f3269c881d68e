"""Attacks through callbacks: a task names a URL, and the service sends a request there."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.security.attack import attack, without
from support.server.server_rig import rig, task
from towline.server.delivery import callbacks
from towline.server.delivery.callbacks import PublicResolver, check_callback
from towline.server.errors import InvalidInput

ALLOWED = ("hooks.example:8443", "plain.example", "any.example:*", "127.0.0.1:9000", "[::1]:9001")


@attack("41", guard=without(("towline.server.scheduling.queue.check_callback", lambda *_: None)))
@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:5432/",
        "http://127.0.0.1:9001/",
        "http://127.0.0.1/",
        "http://localhost:9000/",
        "http://LOCALHOST:9000/",
        "http://localhost.:9000/",
        "http://[::1]:9000/",
        "http://[::ffff:127.0.0.1]:9000/",
        "http://127.1:9000/",
        "http://0x7f000001:9000/",
        "http://2130706433:9000/",
        "http://0177.0.0.1:9000/",
        "http://0.0.0.0:9000/",
        "http://169.254.169.254/latest/meta-data",
        "http://hooks.example/",
        "https://hooks.example/",
        "https://plain.example:444/",
        "http://hooks.example:8443@127.0.0.1:22/",
        "http://127.0.0.1:22#hooks.example:8443",
        "http://127.0.0.1:22?hooks.example:8443",
        "http://127.0.0.1:22\\\\@hooks.example:8443/",
        "http://hooks.example:8443\t.evil.example/",
        "http://evil.example/",
        "http://hooks.example.evil.example:8443/",
        "gopher://127.0.0.1:9000/",
        "file:///etc/passwd",
        "//127.0.0.1:9000/",
    ],
)
async def test_a_callback_to_what_the_operator_did_not_list(tmp_path: Path, url: str) -> Any:
    async with rig(tmp_path, callback_hosts=ALLOWED) as r:
        return (await r.caller.call("POST", "/v1/tasks", task("t", callback=url))).status == 200


@attack("41", guard=without(("towline.server.scheduling.queue.check_callback", lambda *_: None)))
@pytest.mark.parametrize("url", ["http://127.0.0.1:8600/v1/policy/pause", "http://localhost/", "http://[::1]/"])
async def test_a_callback_with_the_default_settings(tmp_path: Path, url: str) -> Any:
    async with rig(tmp_path) as r:
        return (await r.caller.call("POST", "/v1/tasks", task("t", callback=url))).status == 200


def test_what_the_operator_listed_is_allowed() -> None:
    for url in (
        "https://hooks.example:8443/a?b=c",
        "http://hooks.example:8443/",
        "http://plain.example/",
        "https://plain.example/",
        "https://any.example:12345/",
        "http://127.0.0.1:9000/hook",
        "http://[::1]:9001/",
    ):
        check_callback(url, ALLOWED, "callback")
    with pytest.raises(InvalidInput, match=r"evil\.example:80 is not in server\.callback_hosts"):
        check_callback("http://evil.example/", ALLOWED, "callback")


class _Target:
    """Counts the requests that reach it."""

    def __init__(self, status: int = 200, location: str = "") -> None:
        self.heard: list[str] = []
        self._answer = (status, {"location": location} if location else {})
        site = web.Application()
        site.router.add_route("*", "/{path:.*}", self._hear)
        self._runner = web.AppRunner(site)

    async def __aenter__(self) -> _Target:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _hear(self, request: web.Request) -> web.Response:
        self.heard.append(request.path)
        return web.Response(status=self._answer[0], headers=self._answer[1])


async def _sent(path: Path, url: str, **settings: Any) -> None:
    """Returns when the callback of a task was tried and given up."""
    async with rig(path, callback_tries=1, **settings) as r:
        await r.caller.submit(task("t", callback=url))
        await r.caller.take(1, unit="group")
        outcomes = r.service.metrics.callbacks
        for _ in range(6000):
            if sum(
                sample.value for metric in outcomes.collect() for sample in metric.samples if "total" in sample.name
            ):
                return
            await _tick()
    raise AssertionError("the callback was not tried")


async def _tick() -> None:
    import asyncio

    await asyncio.sleep(0.01)


def _resolves_here(*_: Any, **__: Any) -> Any:
    async def resolve(self: Any, host: str, port: int = 0, family: Any = socket.AF_INET) -> list[dict[str, Any]]:
        return [{"hostname": host, "host": "127.0.0.1", "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}]

    return resolve


@attack("41", "rebinding", guard=without(("towline.server.delivery.callbacks.check_addresses", lambda *_: None)))
async def test_an_allowed_name_is_pointed_at_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(callbacks.ThreadedResolver, "resolve", _resolves_here())
    async with _Target() as target:
        await _sent(tmp_path, f"http://hooks.example:{target.port}/x", callback_hosts=["hooks.example:*"])
        return target.heard


@attack("41", guard=without(("towline.server.delivery.callbacks.check_callback", lambda *_: None)))
async def test_a_callback_that_was_accepted_under_other_settings(tmp_path: Path) -> Any:
    """The list of the server that sends it counts."""
    async with _Target() as target:
        url = f"http://127.0.0.1:{target.port}/x"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("towline.server.scheduling.queue.check_callback", lambda *_: None)
            await _sent(tmp_path, url, callback_hosts=["127.0.0.1:1"])
        return target.heard


async def test_redirects_are_not_followed(tmp_path: Path) -> None:
    async with _Target() as inner, _Target(307, f"http://127.0.0.1:{inner.port}/inner") as outer:
        await _sent(tmp_path, f"http://127.0.0.1:{outer.port}/x", callback_hosts=[f"127.0.0.1:{outer.port}"])
        assert (outer.heard, inner.heard) == (["/x"], [])


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.8.8.8", "::1", "0.0.0.0", "169.254.169.254", "fe80::1", "::ffff:127.0.0.1"]
)
def test_addresses_of_this_machine(address: str) -> None:
    with pytest.raises(OSError, match="not an address of another machine"):
        callbacks.check_addresses("hooks.example", [address])
    callbacks.check_addresses("hooks.example", ["10.0.0.1", "93.184.216.34"])
    assert issubclass(PublicResolver, callbacks.ThreadedResolver)
