"""Tenants: their weights and limits, from the settings and from the store, where `towline tenants set` writes them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from sqlalchemy import func, select, update

from towline.config.tenants import Tenancy, TenantLimits, TenantSettings
from towline.schema.base import Model
from towline.server.errors import InvalidInput
from towline.server.store import tables
from towline.server.store.database import Store
from towline.server.store.names import check_tenant
from towline.server.store.tables import insert_new

log = logging.getLogger("towline.server")
_STORED_SECONDS = 30.0
"""How long a sum of stored bytes is used."""


class TenantInfo(Model):
    """A tenant as `towline tenants list` shows it."""

    name: str
    weight: float
    limits: dict[str, float | int | None]
    """Those that differ from the defaults of all tenants."""
    keys: int
    waiting: int
    file_bytes: int


class Tenants:
    """What the operator has set for each tenant. `refresh` reads what another process has changed."""

    def __init__(self, store: Store, settings: Tenancy, queue: int):
        """`queue`: waiting sessions of a tenant for which no limit is set."""
        self.store = store
        self._base = settings.limits.with_overrides({"queued": queue} if settings.limits.queued is None else {})
        self._settings = settings.tenants
        self._weights: Mapping[str, float] = {}
        self._overrides: Mapping[str, dict[str, Any]] = {}
        self._limits: dict[str, TenantLimits] = {}
        self._stored: dict[str, tuple[float, int]] = {}

    async def refresh(self) -> None:
        table = tables.tenants
        async with self.store.read() as tx:
            rows = list(await tx.execute(select(table)))
        self._weights = {row.name: row.weight for row in rows if row.weight is not None and row.weight > 0}
        self._overrides = {row.name: _parse(row.name, row.limits) for row in rows}
        self._limits = {}

    def weight(self, tenant: str) -> float:
        """Its part of the session slots, in relation to others'."""
        own = self._settings.get(tenant)
        return self._weights.get(tenant, own.weight if own is not None else 1.0)

    def limits(self, tenant: str) -> TenantLimits:
        """Its maxima: stored ones over those of its section over those of all tenants."""
        if tenant not in self._limits:
            self._limits[tenant] = self._base.with_overrides(self._own(tenant))
        return self._limits[tenant]

    def _own(self, tenant: str) -> dict[str, Any]:
        section = self._settings.get(tenant)
        return (section.overrides if section is not None else {}) | self._overrides.get(tenant, {})

    async def stored_bytes(self, tenant: str) -> int:
        """Bytes of its stored trajectories and tasks, as of a short while ago."""
        at, found = self._stored.get(tenant, (-1e9, 0))
        if time.monotonic() - at > _STORED_SECONDS:
            sessions, tasks = tables.sessions, tables.tasks
            async with self.store.read() as tx:
                found = int(await tx.scalar(select(func.sum(sessions.c.bytes)).where(sessions.c.owner == tenant)) or 0)
                size = func.sum(func.length(tasks.c.body))
                found += int(await tx.scalar(select(size).where(tasks.c.owner == tenant)) or 0)
            self._stored[tenant] = (time.monotonic(), found)
        return found

    # For `towline tenants`

    async def list(self) -> list[TenantInfo]:
        await self.refresh()
        async with self.store.read() as tx:
            keys = await _counted(tx, select(tables.keys.c.owner, func.count()).group_by(tables.keys.c.owner))
            table = tables.sessions
            waits = select(table.c.owner, func.count()).where(table.c.phase == int(tables.Phase.WAITING))
            waiting = await _counted(tx, waits.group_by(table.c.owner))
            sizes = select(tables.files.c.owner, func.sum(tables.files.c.bytes)).group_by(tables.files.c.owner)
            files = await _counted(tx, sizes)
        names = sorted({*self._overrides, *self._settings, *keys, *waiting})
        return [
            TenantInfo(
                name=name,
                weight=self.weight(name),
                limits=self._own(name),
                keys=keys.get(name, 0),
                waiting=waiting.get(name, 0),
                file_bytes=files.get(name, 0),
            )
            for name in names
        ]

    async def set(self, name: str, weight: float | None, limits: Mapping[str, Any], cleared: Mapping[str, Any]) -> None:
        """Store a weight and limits of a tenant; `cleared` names limits that are those of the settings again."""
        check_tenant(name)
        try:
            TenantSettings.model_validate({"weight": 1.0 if weight is None else weight, **limits})
        except ValidationError as error:
            first = error.errors()[0]
            raise InvalidInput(str(first["msg"]), field=".".join(map(str, first["loc"]))) from error
        table = tables.tenants
        async with self.store.write() as tx:
            await tx.execute(insert_new(tx, table), [{"name": name, "created": time.time()}])
            known = _parse(name, str(await tx.scalar(select(table.c.limits).where(table.c.name == name))))
            kept = {key: value for key, value in (known | dict(limits)).items() if key not in cleared}
            values: dict[str, Any] = {"limits": json.dumps(kept, sort_keys=True)}
            values |= {} if weight is None else {"weight": weight}
            await tx.execute(update(table).where(table.c.name == name).values(**values))
        await self.refresh()


async def _counted(tx: Any, query: Any) -> dict[str, int]:
    return {row[0]: int(row[1] or 0) for row in await tx.execute(query)}


def _parse(name: str, text: str) -> dict[str, Any]:
    """The stored limits of a tenant. Those that cannot be read are those of the settings, with a line in the log."""
    try:
        found = json.loads(text)
        TenantLimits.model_validate(found)
    except (ValueError, ValidationError) as error:
        log.error("damaged: limits of tenant %s: %s; those of the settings count", name, str(error).splitlines()[0])
        return {}
    return dict(found)
