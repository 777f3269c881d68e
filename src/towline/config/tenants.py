"""The sections `[server.limits]` and `[server.tenants.NAME]`: what tenants may use, and their weights.

`towline tenants set` stores values of its own, which replace those of the file for that tenant.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from towline.config.section import Section
from towline.schema.base import TENANT_NAME

_MOST = 2**53


class TenantLimits(Section):
    """Maxima of one tenant. What exceeds one is refused, never cut to size. `None`: no limit. Admin keys may exceed them."""

    queued: int | None = Field(None, ge=0, le=_MOST)
    """Waiting sessions. Default: `server.queue`."""
    samples: int | None = Field(10_000, ge=1, le=_MOST)
    """Samples per task."""
    attempts: int | None = Field(100, ge=1, le=_MOST)
    """`max_attempts` per task."""
    priority: int | None = Field(1000, ge=0, le=2**31 - 1)
    """Highest priority of a task; it orders the tenant's own sessions only."""
    run_seconds: float | None = Field(86_400.0, gt=0)
    """Longest run of a session: `timeouts.run`, and all steps of a task together."""
    stage_seconds: float | None = Field(21_600.0, gt=0)
    """Longest of the other stages, and longest grace period."""
    memory_mb: int | None = Field(65_536, ge=16)
    """Memory per sandbox."""
    disk_mb: int | None = Field(262_144, ge=1)
    """Written files per sandbox."""
    cpus: float | None = Field(64.0, gt=0)
    pids: int | None = Field(32_768, ge=8)
    task_bytes: int | None = Field(4 * 1024 * 1024, ge=1024)
    """One task as JSON; larger files are uploaded (`POST /v1/files`)."""
    body_bytes: int | None = Field(16 * 1024 * 1024, ge=1024)
    """One request; uploads have `file_bytes`."""
    file_bytes: int | None = Field(10 * 1024**3, ge=0)
    """Uploaded files together."""
    stored_bytes: int | None = Field(None, ge=0)
    """Stored trajectories and tasks together; above it, no task is accepted until results have been removed."""
    consumers: int | None = Field(1000, ge=1)
    """Consumers of results, by name."""
    requests_per_second: float | None = Field(500.0, gt=0)
    """Requests per second, over a few seconds."""
    requests_in_flight: int | None = Field(256, ge=1)
    """Requests that are being answered at once, waiting ones included."""

    def with_overrides(self, values: dict[str, Any]) -> TenantLimits:
        """These limits with some replaced."""
        return TenantLimits.model_validate(self.model_dump() | values)


class TenantSettings(TenantLimits):
    """One tenant: its weight, and limits that differ from `[server.limits]`."""

    weight: float = Field(1.0, gt=0, le=1e6)
    """Share of the session slots, in relation to the weights of other tenants with waiting sessions."""

    @property
    def overrides(self) -> dict[str, Any]:
        """The limits that this section sets."""
        return {name: getattr(self, name) for name in self.model_fields_set - {"weight"}}


class Tenancy(Section):
    """What is set for all tenants, and for some."""

    limits: TenantLimits = TenantLimits()
    tenants: dict[str, TenantSettings] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names_are_tenants(self) -> Self:
        for name in self.tenants:
            if not TENANT_NAME.fullmatch(name):
                raise ValueError(f"tenants.{name}: a name has up to 63 letters, digits, '.', '_' and '-'")
        return self
