"""Whose rows a request is about. Every route takes one of these two, and passes it to what it reads or writes.

A key reaches its own tenant's tasks, sessions, consumers, results, files and events; anything else is not found, as if it
did not exist. An admin key names another tenant with `?tenant=`; where it only reads, it sees all tenants unless it
names one.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query

from towline.schema import Role
from towline.schema.base import TenantName
from towline.server.api.auth import Caller
from towline.server.api.dependencies import CallerDep

TenantQuery = Annotated[
    TenantName | None, Query(description="With an admin key: act for this tenant, or list only what it owns.")
]


def acting_tenant(caller: Caller, named: str | None) -> str:
    """The one tenant in whose name space the caller acts: that of its key, or the one that an admin names."""
    if named is not None and named != caller.tenant:
        caller.require(Role.ADMIN)
        return named
    return caller.tenant


def visible_tenant(caller: Caller, named: str | None) -> str | None:
    """The tenant whose rows the caller may read; `None`: those of all, for an admin that names none."""
    return None if caller.admin and named is None else acting_tenant(caller, named)


def _acting(caller: CallerDep, tenant: TenantQuery = None) -> str:
    return acting_tenant(caller, tenant)


def _visible(caller: CallerDep, tenant: TenantQuery = None) -> str | None:
    return visible_tenant(caller, tenant)


ActingTenant = Annotated[str, Depends(_acting)]
VisibleTenant = Annotated[str | None, Depends(_visible)]
