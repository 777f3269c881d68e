"""The routes of results: lease, acknowledge, release, and the pace of consumers."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from towline.schema import Ack, Acked, Pacing, Results, Stale, Start, Unit
from towline.schema.base import Count, Id, Model
from towline.schema.files import dump_json
from towline.server.api.auth import ANONYMOUS, Caller
from towline.server.api.dependencies import CheckedRoute, Consumer, Reader, ServiceDep
from towline.server.api.tenancy import ActingTenant, VisibleTenant
from towline.server.delivery.leases import LeaseRequest
from towline.server.errors import Forbidden
from towline.server.service import Service
from towline.server.store import names

MAX_VERSION = 2**31 - 1

router = APIRouter(prefix="/v1", route_class=CheckedRoute)


class LeaseBody(Model):
    """Which results to lease, and for how long."""

    consumer: Id
    """Name of the consumer; each has its own position."""
    unit: Unit = Unit.SESSION
    max: int = Field(default=16, ge=0, le=1000)
    """Maximum number of results; 0 only registers the consumer."""
    wait: float = Field(default=0.0, ge=0, le=86_400, allow_inf_nan=False)
    """Seconds to wait for the first result."""
    lease: float | None = Field(default=None, gt=0, le=7 * 86_400, allow_inf_nan=False)
    """Seconds until an unacknowledged result is delivered again."""
    start: Start = Start.BEGINNING
    """Where a new consumer starts."""
    max_staleness: int | None = Field(default=None, ge=0, le=MAX_VERSION)
    stale: Stale = Stale.DROP
    prefix: Id | None = None
    """Only tasks whose ids have this prefix. Fixed by the first call of the consumer."""
    groups_per_update: int | None = Field(default=None, ge=1, le=1_000_000)
    """Groups that the consumer uses per policy version; sessions start at its pace. Needs `unit=group`."""


@router.post("/results", tags=["results"], response_model=Results)
async def lease_results(
    request: Request, service: ServiceDep, caller: Consumer, tenant: ActingTenant, wanted: LeaseBody
) -> Response:
    """Lease results. A result that is not acknowledged before its lease expires is delivered again."""
    seconds = wanted.lease if wanted.lease is not None else service.settings.lease_seconds
    gone = asyncio.Event()
    watching = asyncio.create_task(_watch_disconnect(request, gone, service))
    try:
        lease = LeaseRequest(
            wanted.consumer,
            wanted.unit,
            wanted.max,
            seconds,
            wanted.start,
            wanted.max_staleness,
            wanted.stale,
            wanted.prefix,
            wanted.groups_per_update,
            tenant,
            None if caller.admin else service.tenants.limits(tenant).consumers,
        )
        found = await service.lease(lease, wanted.wait, gone)
    finally:
        watching.cancel()
    # The metadata of a task can contain anything, lone surrogates included.
    return Response(dump_json(found), media_type="application/json")


@router.get("/results", tags=["results"], response_model=Results, deprecated=True)
async def lease_results_by_get(
    request: Request,
    service: ServiceDep,
    caller: Consumer,
    tenant: ActingTenant,
    consumer: Annotated[Id, Query(description="Name of the consumer; each has its own position.")],
    unit: Unit = Unit.SESSION,
    max: Annotated[
        int, Query(ge=0, le=1000, description="Maximum number of results; 0 only registers the consumer.")
    ] = 16,
    wait: Annotated[float, Query(ge=0, le=86_400, allow_inf_nan=False)] = 0.0,
    lease: Annotated[float | None, Query(gt=0, le=7 * 86_400, allow_inf_nan=False)] = None,
    start: Annotated[Start, Query(description="Where a new consumer starts.")] = Start.BEGINNING,
    max_staleness: Annotated[int | None, Query(ge=0, le=MAX_VERSION)] = None,
    stale: Stale = Stale.DROP,
    prefix: Annotated[
        Id | None,
        Query(description="Only tasks whose ids have this prefix. Fixed by the first call of the consumer."),
    ] = None,
    groups_per_update: Annotated[
        int | None,
        Query(
            ge=1,
            le=1_000_000,
            description="Groups that the consumer uses per policy version; sessions start at its pace. Needs `unit=group`.",
        ),
    ] = None,
) -> Response:
    """Lease results as `POST` does, for older clients. Needs a key even if the service needs none: any link is a GET."""
    require_key(caller)
    wanted = LeaseBody(
        consumer=consumer,
        unit=unit,
        max=max,
        wait=wait,
        lease=lease,
        start=start,
        max_staleness=max_staleness,
        stale=stale,
        prefix=prefix,
        groups_per_update=groups_per_update,
    )
    response = await lease_results(request, service, caller, tenant, wanted)
    response.headers["Deprecation"] = "true"
    return response


def require_key(caller: Caller) -> None:
    """Raise `Forbidden` for a caller without a key, who may be a web page that a browser shows."""
    if caller is ANONYMOUS:
        raise Forbidden("without a key, lease with POST /v1/results: GET is for older clients with a key")


async def _watch_disconnect(request: Request, gone: asyncio.Event, service: Service) -> None:
    """Set `gone` when the client disconnects while it waits."""
    while (await request.receive())["type"] != "http.disconnect":
        continue
    gone.set()
    service.signals.results.notify()


class ConsumerName(Model):
    """A consumer."""

    consumer: Id


class Released(Model):
    """How many leases were ended."""

    released: Count


@router.post("/results/release", tags=["results"])
async def release_results(who: ConsumerName, service: ServiceDep, caller: Consumer, tenant: ActingTenant) -> Released:
    """End all leases of a consumer: its results are available again at once. For a trainer that restarts."""
    return Released(released=await service.release(names.qualify(tenant, who.consumer)))


@router.post("/results/ack", tags=["results"])
async def ack_results(ack: Ack, service: ServiceDep, caller: Consumer, tenant: ActingTenant) -> Acked:
    """Acknowledge results: they are never delivered again. Idempotent."""
    return await service.ack(names.qualify(tenant, ack.consumer), ack.result_ids, ack.unusable)


@router.get("/pacing", tags=["results"])
async def get_pacing(service: ServiceDep, caller: Reader, visible: VisibleTenant) -> Pacing:
    """Get the paced consumers: how many groups they have and may have, and what pacing costs."""
    return await service.pacer.status(service.policy.now.version, visible)
