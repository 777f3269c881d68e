"""Attacks on the keys of the service: to do without one, to be left without any, and to be sent one."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from typer.testing import CliRunner

from support.client.stand_in_service import StandIn
from support.client.stand_in_service import serving as standing_in
from support.security.attack import attack, without
from support.server.server_rig import Caller, admin_key, rig, task
from towline import AsyncClient, Client
from towline.benchmarks.fake_runner import FakeRunner
from towline.cli.serve.command import app
from towline.client import ClientError, NotAllowed
from towline.client.connection import ServiceConnection
from towline.common import local_services
from towline.common.local_services import announced, find_service
from towline.config import ServerSettings
from towline.errors import ConfigError
from towline.schema import Role
from towline.server.api.app import serving
from towline.server.api.auth import ANONYMOUS, KeyStore
from towline.server.store import tables


async def _keyless(self: KeyStore, authorization: str | None) -> Any:
    """As a service that is open while it has no keys."""
    async with self.store.read() as tx:
        if not await tx.scalar(select(func.count()).select_from(tables.keys)):
            return ANONYMOUS
    return await _caller(self, authorization)


_caller = KeyStore.caller
HOST = {"environment": {"sandbox": "process", "setup": ["id"]}}


async def _anyone(*_: Any) -> Any:
    return ANONYMOUS


@attack("3", guard=without(("towline.server.api.auth.KeyStore.caller", _anyone)))
@pytest.mark.parametrize("way", ["GET", "tasks", "host", "keys", "pause", "weights"])
async def test_any_local_user_uses_a_new_service(tmp_path: Path, way: str) -> Any:
    async with rig(tmp_path) as r:
        anyone = Caller(r.caller.web)
        method, path, body = {
            "GET": ("GET", "/v1/tasks", None),
            "tasks": ("POST", "/v1/tasks", task("t")),
            "host": ("POST", "/v1/tasks", task("t", **HOST)),
            "keys": ("POST", "/v1/keys", {"roles": ["admin"]}),
            "pause": ("POST", "/v1/policy/pause", {}),
            "weights": ("POST", "/v1/policy/weights", {"folder": "/none", "version": 1}),
        }[way]
        return (await anyone.call(method, path, body)).status not in (401, 403)


@attack("48", guard=without(("towline.server.api.auth.KeyStore.caller", _keyless)))
@pytest.mark.parametrize("way", ["revoked", "deleted", "replaced"])
@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
async def test_a_service_that_lost_its_keys_is_open(tmp_path: Path, way: str, restarted: bool, unguarded: bool) -> Any:
    async with rig(tmp_path) as r:
        old = r.caller.key
        if way == "revoked":  # as `towline serve keys revoke` may, beside a running server
            for known in await r.service.keys.list():
                await r.service.keys.revoke(known.key_id, keep_one=False)
        else:
            await _delete_keys(tmp_path, r.service.keys)
        if way == "replaced":
            (tmp_path / "admin.key").write_text("tlk-mine\n")
        if not restarted or unguarded:
            answers = [
                (await Caller(r.caller.web, key).call("GET", "/v1/tasks")).status for key in ("", old, "tlk-mine")
            ]
            return 200 in answers
    async with rig(tmp_path) as r:
        # The next start makes a new key; the lost ones stay lost.
        assert r.caller.key not in (old, "tlk-mine")
        assert (await r.caller.call("GET", "/v1/tasks")).status == 200
        answers = [(await Caller(r.caller.web, key).call("GET", "/v1/tasks")).status for key in ("", old, "tlk-mine")]
        return 200 in answers


async def _delete_keys(data: Path, keys: KeyStore) -> None:
    def work() -> None:
        with sqlite3.connect(data / "towline.db", timeout=30) as database:
            database.execute("DELETE FROM keys")
        database.close()

    await asyncio.to_thread(work)
    keys._forget()


@attack("3", "48", guard=without(("towline.server.api.app.is_loopback", lambda host: True)))
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_a_service_without_keys_beyond_loopback(tmp_path: Path, host: str) -> Any:
    if host == "::" and not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        async with serving(ServerSettings(host=host, port=0, data=tmp_path, auth=False), FakeRunner()) as running:
            return running.url
    except ConfigError as error:
        # Without IPv6 on this machine it cannot listen at all.
        return None if "--no-auth" in str(error) else pytest.skip(str(error))


async def test_the_first_start_makes_a_key_and_later_ones_keep_it(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        key = r.caller.key
        assert (tmp_path / "admin.key").stat().st_mode & 0o777 == 0o600
        assert (await r.caller.call("GET", "/v1/keys")).status == 200
        other = (await r.service.keys.create("", [Role.SUBMIT])).key
    async with rig(tmp_path) as r:
        assert r.caller.key == key
        for one in (key, other):
            assert (await Caller(r.caller.web, one).call("GET", "/v1/tasks")).status == 200
        assert _files_with(tmp_path, key) == ["admin.key"]


def _files_with(folder: Path, text: str) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_keys_can_be_made_without_a_service(tmp_path: Path) -> None:
    """A data folder whose keys were made before its first start gets no other one."""

    def keys(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["keys", *arguments, "--data", str(tmp_path)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return str(done.output)

    mine = keys("create", "--role", "admin").strip()

    async def start() -> None:
        async with rig(tmp_path) as r:
            assert r.caller.key == ""
            assert (await Caller(r.caller.web, mine).call("GET", "/v1/tasks")).status == 200

    asyncio.run(start())
    assert len(json.loads(keys("list", "--json"))) == 1


# Clients find the key of their own service


async def test_clients_of_the_same_user_need_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(tmp_path) as r:
        port = r.url.rpartition(":")[2]
        for url in (r.url, f"http://localhost:{port}"):
            async with AsyncClient(url, patience=0) as client:
                assert await client.tasks() == []
        assert await asyncio.to_thread(lambda: Client(r.url, patience=0).tasks()) == []
        # A key that is given is the one that is used, and an empty one is none.
        for wrong in ("tlk-wrong", ""):
            with pytest.raises(NotAllowed):
                await AsyncClient(r.url, wrong, patience=0).tasks()
        monkeypatch.setenv("TOWLINE_KEY", "tlk-other")
        with pytest.raises(NotAllowed):
            await AsyncClient(r.url, patience=0).tasks()
    assert find_service(r.url) is None


async def test_a_client_outlives_the_key_of_its_service(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with AsyncClient(f"http://127.0.0.1:{port}", patience=60) as client:
        for data in ("one", "two"):
            async with rig(tmp_path / data, port=port):
                assert await client.tasks() == []


@attack("key theft", guard=without(("towline.common.local_services._locked_text", lambda place: place.read_text())))
@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_another_program_on_the_port_of_a_service_is_sent_its_key(
    tmp_path: Path, how: str, unguarded: bool
) -> Any:
    """The record of a service that was killed stays; no key goes to what listens there now."""
    heard = StandIn()
    with standing_in(heard) as url:
        key_file = tmp_path / "admin.key"
        key_file.touch(0o600)
        key_file.write_text("tlk-secret")
        with announced(url, key_file):
            record = local_services._place(url)
            assert record is not None
            kept = record.read_text()
            assert find_service(url) is not None
        if how == "killed" or unguarded:  # as if nothing had cleaned up
            record.touch(0o600)
            record.write_text(kept)
        return ServiceConnection(url, None, 1, 0)._credentials()[1]


@attack("key theft", guard=without(("towline.common.private_files.is_private", lambda found: True)))
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604])
async def test_a_key_that_others_could_read_is_used(tmp_path: Path, mode: int) -> Any:
    key_file = tmp_path / "admin.key"
    key_file.write_text("tlk-anyone")
    key_file.chmod(mode)
    with announced("http://127.0.0.1:1", key_file):
        return find_service("http://127.0.0.1:1")


@attack("key theft", guard=without(("towline.common.local_services._local_url", lambda url: "http://127.0.0.1:1")))
@pytest.mark.parametrize(
    "url",
    ["http://evil.example:1", "http://127.0.0.2:1", "http://127.0.0.1:2", "https://127.0.0.1:1", "http://[::1]:1", "http://127.0.0.1.evil.example:1"],
)  # fmt: skip
async def test_another_address_is_sent_the_key(tmp_path: Path, url: str) -> Any:
    key_file = tmp_path / "admin.key"
    key_file.touch(0o600)
    key_file.write_text("tlk-secret")
    with announced("http://127.0.0.1:1", key_file):
        return find_service(url)


async def test_a_symlink_in_place_of_a_key_is_not_followed(tmp_path: Path) -> None:
    key_file, target = tmp_path / "admin.key", tmp_path / "target"
    target.touch(0o600)
    target.write_text("tlk-x")
    key_file.symlink_to(target)
    with announced("http://127.0.0.1:1", key_file):
        assert find_service("http://127.0.0.1:1") is None


def test_localhost_means_the_address_of_the_service(tmp_path: Path) -> None:
    """`localhost` also names ::1, where another user may listen on the same port."""
    key_file = tmp_path / "admin.key"
    key_file.touch(0o600)
    key_file.write_text("tlk-x\n")
    with announced("http://127.0.0.1:1", key_file):
        url, headers = ServiceConnection("http://localhost:1", None, 1, 0)._credentials()
    assert (url, headers) == ("http://127.0.0.1:1", {"Authorization": "Bearer tlk-x"})


# TLS and older services


async def test_a_service_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = _certificate(tmp_path)
    async with rig(tmp_path / "data", tls_cert=cert, tls_key=key) as r:
        assert r.url.startswith("https://127.0.0.1:")
        async with AsyncClient(r.url, patience=0, ca=cert) as client:
            assert await client.tasks() == []
        monkeypatch.setenv("TOWLINE_CA", str(cert))
        assert await asyncio.to_thread(lambda: Client(r.url, patience=0).tasks()) == []
        monkeypatch.delenv("TOWLINE_CA")
        with pytest.raises(ClientError, match="certificate"):
            await AsyncClient(r.url, patience=0).tasks()
    with pytest.raises(ConfigError, match="tls_cert"):
        async with rig(tmp_path / "data", tls_cert=key, tls_key=cert):
            pass
    with pytest.raises(ValueError, match="belong together"):
        ServerSettings(tls_cert=cert)


def _certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1, and its private key."""
    import subprocess

    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return cert, key


@pytest.mark.parametrize("older", [False, True])
def test_clients_lease_by_post_and_fall_back_to_get(older: bool) -> None:
    service = StandIn(older=older)
    with standing_in(service) as url, Client(url, patience=20) as client:
        client.submit({"task_id": "t", "instruction": "x", "harness": "shell", "num_samples": 2})
        assert len(client.lease("c", max=1).results) == 1
        assert len(client.lease("c", max=1).results) == 1
    methods = [call.split()[0] for call in service.calls if call.endswith("/v1/results")]
    assert methods == (["POST", "GET", "GET"] if older else ["POST", "POST"])


def test_no_key_is_found_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(blocked))
    with announced("http://127.0.0.1:1", tmp_path / "admin.key"):
        assert find_service("http://127.0.0.1:1") is None
    assert os.listdir(tmp_path) == ["file"]
    assert admin_key(tmp_path) == ""
