"""Whether a task may come in: everything that can be known to be wrong before anything runs, with the field at fault.

A key of role `submit` is for describing work, not for using the server's machine: what reaches outside a sandbox needs an
admin, or an operator who trusts his submitters.
"""

from __future__ import annotations

from towline.config import ServerSettings
from towline.schema import Task
from towline.server.callbacks import check_callback
from towline.server.errors import Forbidden, Invalid
from towline.server.queueing import Written, written
from towline.server.runner import InvalidTask, Runner


async def admit(task: Task, field: str, *, runner: Runner, settings: ServerSettings, trusted: bool) -> Written:
    """The task as it is stored; raises `Invalid` or `Forbidden`."""

    def at(name: str) -> str:
        return f"{field}.{name}".lstrip(".")

    if task.num_samples > settings.queue:
        raise Invalid(f"{task.num_samples} are more than the queue holds, {settings.queue}", field=at("num_samples"))
    if not task.task_id.strip("/") or task.task_id != task.task_id.strip():
        raise Invalid("must not be blank, or begin or end with a space", field=at("task_id"))
    if task.callback is not None:
        check_callback(task.callback, settings.callback_hosts, at("callback"))
    if not trusted and not settings.trust_submitters:
        for name in runner.reaches(task):
            raise Forbidden(
                "this reaches outside the sandbox: it needs an admin key, or server.trust_submitters", field=at(name)
            )
    one = written(task, field)
    try:
        await runner.check(task)
    except InvalidTask as error:
        raise Invalid(str(error), field=at(error.field)) from error
    return one
