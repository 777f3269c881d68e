"""Circuit breakers by themselves: when they open, how they close, and which failures an outage covers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import cast

import pytest

from towline.config import NodeSettings
from towline.errors import EngineError
from towline.node.breakers import CircuitBreaker, CircuitBreakers, ProbeBackoff
from towline.node.components import probe_sandbox
from towline.node.environment import SandboxRuntimes
from towline.sandboxes.apptainer.runtime import ApptainerRuntime
from towline.sandboxes.base import NeedsRoot, SandboxError
from towline.sandboxes.docker.runtime import DockerRuntime
from towline.schema import BreakerStatus, SandboxKind

QUICK = ProbeBackoff(first=0.01, longest=0.02, probe=5.0)


class Component:
    """Fails its probe until it is back."""

    def __init__(self, back: bool = False) -> None:
        self.back = back
        self.probes = 0
        self.third = asyncio.Event()

    async def probe(self) -> None:
        self.probes += 1
        if self.probes == 3:
            self.third.set()
        if not self.back:
            raise EngineError("connection refused")


def made(component: Component, failures: int = 3) -> tuple[CircuitBreakers, CircuitBreaker, list[BreakerStatus]]:
    breakers = CircuitBreakers(QUICK)
    told: list[BreakerStatus] = []
    breakers.on_breaker = told.append
    return breakers, breakers.add("engine:policy", component.probe, failures), told


async def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    component = Component(back=True)
    breakers, breaker, told = made(component)
    for _ in range(4):
        breaker.failed("500")
        breaker.failed("500")
        breaker.succeeded()
    assert not breaker.open
    assert told == []
    for _ in range(3):
        breaker.failed("answered 500: out of memory")
    assert breaker.open
    assert told[0].component == "engine:policy"
    assert told[0].open
    assert told[0].reason == "answered 500: out of memory"
    assert told[0].opened == 1
    await asyncio.wait_for(breaker.wait(), 20)
    assert [status.open for status in told] == [True, False]
    await breakers.close()


async def test_it_closes_when_a_probe_succeeds_and_reports_the_last_answer() -> None:
    component = Component()
    breakers, breaker, told = made(component)
    breaker.failed("reset by peer", unreachable=True)
    assert [status.open for status in told] == [True]
    await asyncio.wait_for(component.third.wait(), 20)
    assert breaker.open
    assert breakers.statuses[0].reason == "connection refused"
    component.back = True
    await asyncio.wait_for(breaker.wait(), 20)
    assert not breakers.statuses[0].open
    await breakers.close()


async def test_an_outage_begins_with_its_first_failure_and_needs_a_failed_probe() -> None:
    component = Component(back=True)
    breakers, breaker, _ = made(component)
    breaker.failed("reset by peer", unreachable=True)
    at = time.monotonic()
    assert not await breaker.outage_at(at), "the probe succeeds: a blip, and no outage"
    before = time.monotonic()
    component.back = False
    for _ in range(2):
        breaker.failed("500")
    early = time.monotonic()
    breaker.failed("500")
    assert await breaker.outage_at(early), "the failures that led to the opening are part of it"
    assert not await breaker.outage_at(before)
    component.back = True
    await asyncio.wait_for(breaker.wait(), 20)
    assert await breaker.outage_at(early)
    assert not await breaker.outage_at(time.monotonic() + 1)
    await breakers.close()


async def test_a_failure_too_few_to_open_it_is_part_of_an_outage_that_a_probe_confirms() -> None:
    component = Component()
    breakers, breaker, told = made(component)
    breaker.failed("connection refused")
    at = time.monotonic()
    assert not breaker.open
    assert await breaker.outage_at(at)
    assert breaker.open
    component.back = True
    await asyncio.wait_for(breaker.wait(), 20)
    assert await breaker.outage_at(at)
    await breakers.close()


async def test_work_from_before_a_failure_does_not_end_the_failures() -> None:
    breakers, breaker, _ = made(Component())
    began = time.monotonic()
    await asyncio.sleep(0.01)
    breaker.failed("connection refused")
    at = time.monotonic()
    breaker.succeeded(began)
    assert await breaker.outage_at(at)
    breaker.succeeded(began)
    assert breaker.open, "nor does it close the breaker"
    breaker.succeeded(time.monotonic())
    assert not breaker.open
    await breakers.close()


async def test_work_that_succeeds_closes_it_too() -> None:
    breakers, breaker, told = made(Component())
    breaker.failed("500", unreachable=True)
    breaker.succeeded()
    assert not breaker.open
    assert [status.open for status in told] == [True, False]
    await breakers.close()


class Pinged:
    """A runtime that makes no sandbox without a root."""

    def __init__(self, problem: str = ""):
        self.problem = problem

    async def get(self, kind: SandboxKind) -> tuple[Pinged, None]:
        return self, None

    async def ping(self) -> None:
        if self.problem:
            raise SandboxError(self.problem)


async def test_a_runtime_that_needs_a_root_is_asked_whether_it_answers() -> None:
    """docker and apptainer as the default: without a task there is no image to try them with."""
    settings = NodeSettings(sandbox=SandboxKind.DOCKER)
    assert isinstance(DockerRuntime(Path("unused")), NeedsRoot)
    assert isinstance(ApptainerRuntime(Path("unused")), NeedsRoot)
    await probe_sandbox(cast(SandboxRuntimes, Pinged()), SandboxKind.DOCKER, settings)
    with pytest.raises(SandboxError, match="no daemon"):
        await probe_sandbox(cast(SandboxRuntimes, Pinged("no daemon")), SandboxKind.DOCKER, settings)
