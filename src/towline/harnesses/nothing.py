"""An agent that does nothing: a task is valid only if this scores 0."""

from __future__ import annotations

from towline.harnesses.base import Harness, Launch, LaunchContext


def launch(_: LaunchContext) -> Launch:
    return Launch(command=("true",))


HARNESS = Harness(name="nothing", summary="does nothing, for comparison", launch=launch, calls_model=False)
