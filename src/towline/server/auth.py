"""Keys and roles. A key is shown once, when it is made; the store holds its hash.

Without any key the service is open to whoever reaches it, which is why it then listens on loopback only, and answers only
requests that name loopback as their host: a web page in somebody's browser is not meant to reach it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field
from sqlalchemy import delete, func, insert, select

from towline.schema import Role
from towline.schema.base import Model
from towline.server import tables
from towline.server.errors import Conflict, Forbidden, NotFound, Unauthorised
from towline.server.store import Store

PREFIX = "tlk-"
_TRUST = 2.0
"""Seconds that what the store said of a key is believed."""


class KeyInfo(Model):
    """A key without its secret."""

    key_id: str
    name: str
    roles: list[Role]
    created: float


class NewKey(Model):
    """A key that was just made."""

    key: str
    """Shown here and never again."""
    info: KeyInfo


class KeyWish(Model):
    name: str = Field(default="", max_length=128, pattern=r"^[^\x00]*$")
    roles: list[Role] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call, and what he may do."""

    name: str
    roles: frozenset[Role]

    def may(self, *any_of: Role) -> bool:
        return Role.ADMIN in self.roles or not self.roles.isdisjoint(any_of)

    def need(self, *any_of: Role) -> None:
        if not self.may(*any_of):
            wanted = " or ".join(role.value for role in any_of)
            raise Forbidden(f"this needs a key of role {wanted}; yours has {', '.join(sorted(self.roles))}")


ANYBODY = Caller("anybody", frozenset({Role.ADMIN}))
"""The caller of a service without keys."""


class Keys:
    def __init__(self, store: Store, *, needed: bool = False):
        self.store = store
        self.needed = needed
        """Whether nobody may call while there is no key: where others than this machine can reach the service."""
        self._seen: dict[str, tuple[float, Caller | None]] = {}
        self._any: tuple[float, bool] = (-1e9, True)

    async def caller(self, authorization: str | None) -> Caller:
        """Who this is; raises `Unauthorised` for a missing or unknown key."""
        if not self.needed and not await self.exist():
            return ANYBODY
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorised("send a key: `Authorization: Bearer tlk-…`")
        digest = _hash(key.strip())
        at, found = self._seen.get(digest, (-1e9, None))
        if time.monotonic() - at > _TRUST:
            found = await self._look(digest)
            if len(self._seen) > 1000:
                self._seen.clear()
            self._seen[digest] = (time.monotonic(), found)
        if found is None:
            raise Unauthorised("this key is not known")
        return found

    async def exist(self) -> bool:
        at, any_key = self._any
        if time.monotonic() - at > _TRUST:
            async with self.store.read() as tx:
                any_key = bool(await tx.scalar(select(func.count()).select_from(tables.keys)))
            self._any = (time.monotonic(), any_key)
        return any_key

    async def _look(self, digest: str) -> Caller | None:
        table = tables.keys
        async with self.store.read() as tx:
            row = (await tx.execute(select(table).where(table.c.digest == digest))).one_or_none()
        return None if row is None else Caller(row.name or row.key_id, frozenset(map(Role, row.roles.split(","))))

    async def create(self, name: str, roles: Sequence[Role]) -> NewKey:
        key = PREFIX + secrets.token_urlsafe(32)
        info = KeyInfo(key_id=secrets.token_hex(8), name=name, roles=sorted(set(roles)), created=time.time())
        row = {"key_id": info.key_id, "name": name, "roles": ",".join(info.roles), "created": info.created}
        async with self.store.write() as tx:
            if Role.ADMIN not in roles and not await tx.scalar(select(func.count()).select_from(tables.keys)):
                raise Conflict("the first key must be an admin's: from then on every call needs a key", field="roles")
            await tx.execute(insert(tables.keys), [row | {"digest": _hash(key)}])
        self._forget()
        return NewKey(key=key, info=info)

    async def list(self) -> Sequence[KeyInfo]:
        table = tables.keys
        async with self.store.read() as tx:
            rows = await tx.execute(select(table).order_by(table.c.created))
            return [
                KeyInfo(key_id=row.key_id, name=row.name, roles=row.roles.split(","), created=row.created)
                for row in rows
            ]

    async def revoke(self, key_id: str, *, keep_one: bool) -> None:
        """With `keep_one` the last admin key stays: without it nobody could make another, or everybody could."""
        table = tables.keys
        async with self.store.write() as tx:
            rows = {row.key_id: row.roles.split(",") for row in await tx.execute(select(table))}
            if key_id not in rows:
                raise NotFound(f"no key {key_id!r}")
            admins = [other for other, roles in rows.items() if Role.ADMIN in roles and other != key_id]
            if keep_one and not admins:
                raise Conflict("this is the last admin key; make another before you revoke it")
            await tx.execute(delete(table).where(table.c.key_id == key_id))
        self._forget()

    def _forget(self) -> None:
        self._seen.clear()
        self._any = (-1e9, True)


def _hash(key: str) -> str:
    # A key is 256 random bits: there is nothing to guess, hence nothing to slow down.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def loopback(host: str) -> bool:
    """Whether the name or address is this machine's own."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
