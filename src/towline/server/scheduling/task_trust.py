"""Whose tasks are trusted, and what the others may name.

Admin keys submit trusted tasks: they describe work and may use the nodes' machines. Every other caller submits untrusted
ones (`schema/untrusted.py`), which reach nothing outside their sandboxes: keys with role `submit`, and everyone at a service
without keys, where any local user is a caller. The operator widens that by settings.
"""

from __future__ import annotations

from towline.common.sockets import is_loopback
from towline.config import ServerSettings
from towline.schema import SandboxKind, Task
from towline.schema.trust import Admission, RootRegistry, TaskRefused
from towline.schema.untrusted import admit_task
from towline.server.api.auth import ANONYMOUS, Caller
from towline.server.errors import Forbidden, InvalidInput

_HINT = "use an admin key, or let the operator add `{grant}` to server.submitters_may (without keys: serve --trust)"


def is_trusted(caller: Caller, settings: ServerSettings) -> bool:
    """Whether the tasks of a caller may use the nodes' machines. A caller without a key never has an admin's trust."""
    if caller.name == ANONYMOUS.name:
        return settings.trust_tasks and is_loopback(settings.host)
    return caller.may() or settings.trust_submitters


def admitted(
    task: Task,
    place: str,
    *,
    trusted: bool,
    settings: ServerSettings,
    registry: RootRegistry,
    default_sandbox: SandboxKind,
) -> Task:
    """The task that is stored: as it is if it is trusted, else made of the narrow type. `place` is its path in the request.

    Raises `Forbidden` for a field that an operator can allow, `InvalidInput` for any other.
    """
    if trusted:
        known = registry.find(task.environment.root) if task.environment.root else None
        if known is None:
            return task
        return task.model_copy(update={"environment": task.environment.model_copy(update={"root": known})})
    admission = Admission(frozenset(settings.submitters_may), registry, sandbox=default_sandbox, hint=_HINT)
    try:
        return admit_task(task, admission)
    except TaskRefused as error:
        refusal = Forbidden if error.grant is not None else InvalidInput
        raise refusal(error.reason, field=f"{place}.{error.field}".lstrip(".")) from error
