"""A service with two tenants: `alice`, who has tasks, results, a consumer and files, and `mallory`, who wants them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select

from support.server.server_rig import Answer, Caller, Rig, rig, task
from towline.benchmarks.fake_runner import FakeRunner
from towline.schema import Role
from towline.server.store import tables

MARK = "alices"
"""In every name that is Alice's."""


@dataclass
class TwoTenants:
    rig: Rig
    admin: Caller
    alice: Caller
    mallory: Caller
    session_id: str
    """A finished session of Alice's."""
    result_id: str
    """A result that Alice has leased."""

    @property
    def ids(self) -> dict[str, str]:
        """What fills the paths of routes: ids of Alice's."""
        return {"task_id": f"{MARK}-task", "session_id": self.session_id, "key_id": "none", "name": "none"}

    async def rows(self) -> dict[str, list[Any]]:
        """Every row that is Alice's, with what a read may change left out."""
        found: dict[str, list[Any]] = {}
        async with self.rig.service.store.read() as tx:
            for table in (tables.tasks, tables.sessions, tables.results, tables.consumers, tables.leases):
                rows = await tx.execute(select(table).where(table.c.owner == "alice"))
                found[table.name] = sorted(str(dict(row._mapping) | {"seen": 0}) for row in rows)
        return found


def leaks(answer: Answer) -> bool:
    """Whether an answer tells anything of Alice's, other than by repeating what was asked for."""
    text = answer.body if isinstance(answer.body, bytes) else repr(answer.body).encode()
    return answer.status < 400 and MARK.encode() in text


async def key(r: Rig, tenant: str, *roles: Role) -> Caller:
    """A caller with a new key."""
    return Caller(r.caller.web, (await r.service.keys.create("", roles, tenant)).key)


@contextlib.asynccontextmanager
async def two_tenants(data: Path, *, runner: FakeRunner | None = None, **settings: Any) -> AsyncIterator[TwoTenants]:
    runner = runner or FakeRunner()
    async with rig(data, runner=runner, **settings) as r:
        admin = await key(r, "default", Role.ADMIN)
        alice = await key(r, "alice", Role.SUBMIT, Role.CONSUME)
        mallory = await key(r, "mallory", Role.SUBMIT, Role.CONSUME)
        await alice.submit(task(f"{MARK}-task", metadata={"secret": MARK}))
        (result,) = await alice.lease(f"{MARK}-consumer", wait=30, lease=600)
        session_id = result.sessions[0].session_id
        runner.logs[session_id] = {"harness.log": MARK.encode()}
        yield TwoTenants(r, admin, alice, mallory, session_id, result.result_id)
