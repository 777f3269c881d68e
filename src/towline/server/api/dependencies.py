"""What routes depend on: the service, and a caller with a role, which is checked before the body is read."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute

from towline.schema import Role
from towline.server.api.auth import Caller
from towline.server.service import Service


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _caller(request: Request) -> Caller:
    return await _service(request).keys.caller(request.headers.get("authorization"))


ServiceDep = Annotated[Service, Depends(_service)]
CallerDep = Annotated[Caller, Depends(_caller)]


class RoleCheck:
    """A dependency: the caller, who has one of the roles."""

    def __init__(self, *roles: Role):
        self.roles = roles

    async def __call__(self, caller: CallerDep) -> Caller:
        caller.require(*self.roles)
        return caller


class CheckedRoute(APIRoute):
    """A route that checks the caller's role before the body is read; its dependencies come after."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        checks = [one.call for one in self.dependant.dependencies if isinstance(one.call, RoleCheck)]

        async def checked(request: Request) -> Response:
            await check_roles(request, checks)
            return await handler(request)

        return checked


async def check_roles(request: Request, checks: Sequence[RoleCheck]) -> None:
    """Raise `Unauthorized` or `Forbidden` unless the caller passes all checks."""
    for check in checks:
        await check(await _caller(request))


def _role(*roles: Role) -> Any:
    return Depends(RoleCheck(*roles))


Submitter = Annotated[Caller, _role(Role.SUBMIT)]
Consumer = Annotated[Caller, _role(Role.CONSUME)]
Reader = Annotated[Caller, _role(Role.SUBMIT, Role.CONSUME)]
Admin = Annotated[Caller, _role(Role.ADMIN)]
