"""API keys and roles. A key is shown once, when it is created; the store has its hash. Every key belongs to a tenant.

Every request needs a key, also while none exists: a service whose keys are lost refuses all requests until `towline serve
keys create`, or the next start, makes one. Only `server.auth = false` (`--no-auth`) opens a service, on loopback.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field
from sqlalchemy import delete, func, insert, select

from towline.schema import DEFAULT_TENANT, Role
from towline.schema.base import Model, TenantName
from towline.server.errors import Forbidden, ResourceConflict, ResourceNotFound, Unauthorized
from towline.server.store import tables
from towline.server.store.database import Store
from towline.server.store.names import check_tenant
from towline.server.store.tables import insert_new

PREFIX = "tlk-"
_CACHE_SECONDS = 2.0
"""How long a looked-up key is cached."""


class KeyInfo(Model):
    """A key without its secret."""

    key_id: str
    name: str
    roles: list[Role]
    created: float
    tenant: str = DEFAULT_TENANT
    """Whose tasks and results the key reaches; an admin key reaches those of all."""


class NewKey(Model):
    """A key that was just created."""

    key: str
    """Shown only here."""
    info: KeyInfo


class KeyRequest(Model):
    """The key to create."""

    name: str = Field(default="", max_length=128, pattern=r"^[^\x00]*$")
    roles: list[Role] = Field(min_length=1)
    tenant: TenantName = DEFAULT_TENANT
    """The tenant that the key belongs to; it is created with its first key."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request, its roles, and the tenant that its key belongs to."""

    name: str
    roles: frozenset[Role]
    tenant: str = DEFAULT_TENANT

    @property
    def admin(self) -> bool:
        return Role.ADMIN in self.roles

    def may(self, *any_of: Role) -> bool:
        return Role.ADMIN in self.roles or not self.roles.isdisjoint(any_of)

    def require(self, *any_of: Role) -> None:
        if not self.may(*any_of):
            wanted = " or ".join(role.value for role in any_of)
            raise Forbidden(f"this needs a key with role {wanted}; yours has {', '.join(sorted(self.roles))}")


ANONYMOUS = Caller("anonymous", frozenset({Role.ADMIN}))
"""Every caller of a service without authentication."""


class KeyStore:
    """Creates, looks up and revokes API keys."""

    def __init__(self, store: Store, *, needed: bool = True):
        self.store = store
        self.needed = needed
        """Whether requests need a key: `server.auth`."""
        self._seen: dict[str, tuple[float, Caller | None]] = {}

    async def caller(self, authorization: str | None) -> Caller:
        """The caller of a request; raises `Unauthorized` for a missing or unknown key."""
        if not self.needed:
            return ANONYMOUS
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("API key missing: send `Authorization: Bearer tlk-…`")
        digest = _hash(key.strip())
        at, found = self._seen.get(digest, (-1e9, None))
        if time.monotonic() - at > _CACHE_SECONDS:
            found = await self._find(digest)
            if len(self._seen) > 1000:
                self._seen.clear()
            self._seen[digest] = (time.monotonic(), found)
        if found is None:
            raise Unauthorized("unknown API key")
        return found

    async def _find(self, digest: str) -> Caller | None:
        table = tables.keys
        async with self.store.read() as tx:
            row = (await tx.execute(select(table).where(table.c.digest == digest))).one_or_none()
        if row is None:
            return None
        return Caller(row.name or row.key_id, frozenset(map(Role, row.roles.split(","))), row.owner)

    async def create(self, name: str, roles: Sequence[Role], tenant: str = DEFAULT_TENANT, *, key: str = "") -> NewKey:
        """Create a key; `key`: a new secret of `new_secret()` that the caller has stored already."""
        check_tenant(tenant)
        key = key or new_secret()
        info = KeyInfo(
            key_id=secrets.token_hex(8), name=name, roles=sorted(set(roles)), created=time.time(), tenant=tenant
        )
        row = {"key_id": info.key_id, "name": name, "roles": ",".join(info.roles), "created": info.created}
        row["owner"] = tenant
        async with self.store.write() as tx:
            if Role.ADMIN not in roles and not await tx.scalar(select(func.count()).select_from(tables.keys)):
                raise ResourceConflict(
                    "the first key must have role admin: no other can create or revoke keys", field="roles"
                )
            await tx.execute(insert_new(tx, tables.tenants), [{"name": tenant, "created": info.created}])
            await tx.execute(insert(tables.keys), [row | {"digest": _hash(key)}])
        self._forget()
        return NewKey(key=key, info=info)

    async def list(self) -> Sequence[KeyInfo]:
        table = tables.keys
        async with self.store.read() as tx:
            rows = await tx.execute(select(table).order_by(table.c.created))
            return [
                KeyInfo(
                    key_id=row.key_id,
                    name=row.name,
                    roles=row.roles.split(","),
                    created=row.created,
                    tenant=row.owner,
                )
                for row in rows
            ]

    async def revoke(self, key_id: str, *, keep_one: bool) -> None:
        """Revoke a key. With `keep_one`, not the last admin key: no caller could then create keys."""
        table = tables.keys
        async with self.store.write() as tx:
            rows = {row.key_id: row.roles.split(",") for row in await tx.execute(select(table))}
            if key_id not in rows:
                raise ResourceNotFound(f"no key {key_id!r}")
            admins = [other for other, roles in rows.items() if Role.ADMIN in roles and other != key_id]
            if keep_one and not admins:
                raise ResourceConflict("this is the last admin key: create another one first")
            await tx.execute(delete(table).where(table.c.key_id == key_id))
        self._forget()

    def _forget(self) -> None:
        self._seen.clear()


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def _hash(key: str) -> str:
    # A key is 256 random bits, so a fast hash is enough.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
