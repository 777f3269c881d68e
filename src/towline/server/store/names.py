"""Names of tenants' things in the store: every tenant has a name space of its own.

A task id or a consumer name is stored qualified by its tenant; the API and the nodes see the plain one. Names of the tenant
`default` are stored as they are, so rows of earlier versions keep theirs. The separator is a control character, which no
name that a client sends can contain: no plain name equals a qualified one, and no prefix reaches into another name space.
"""

from __future__ import annotations

from towline.schema import DEFAULT_TENANT
from towline.schema.base import TENANT_NAME
from towline.server.errors import InvalidInput

SEPARATOR = "\x1f"
LONGEST = 512
"""Characters of a stored name."""


def qualify(tenant: str, name: str) -> str:
    """The stored name of a tenant's task or consumer; also of a prefix of names."""
    return name if tenant == DEFAULT_TENANT else f"{tenant}{SEPARATOR}{name}"


def plain(stored: str) -> str:
    """The name as its tenant knows it."""
    return stored.rpartition(SEPARATOR)[2]


def tenant_of(stored: str) -> str:
    """The tenant that a stored name belongs to."""
    tenant, separator, _ = stored.rpartition(SEPARATOR)
    return tenant if separator else DEFAULT_TENANT


def visible(owner: str, tenant: str | None) -> bool:
    """Whether a tenant may see what this owner has; an admin key that asks for all tenants (`None`) sees everything."""
    return tenant is None or owner == tenant


def check_length(stored: str, field: str) -> None:
    """Raise `InvalidInput` for a name that does not fit into the store together with its tenant."""
    if len(stored) > LONGEST:
        longest = LONGEST - len(stored) + len(plain(stored))
        raise InvalidInput(f"must have at most {longest} characters", field=field)


def check_tenant(name: str) -> str:
    """The name, if it can be that of a tenant; raises `InvalidInput`."""
    if not TENANT_NAME.fullmatch(name):
        raise InvalidInput(
            f"{name[:80]!r} cannot name a tenant: use up to 63 letters, digits, '.', '_' and '-'", field="tenant"
        )
    return name
