"""The process next to the server that speaks to Ray: `python -m towline.cluster.ray.bridge`.

It keeps one `HostActor` on every suitable Ray node and reports which hosts listen. Ray ends a process that has lost its
head node, and takes 100 MB and seconds to import; in a process of its own it does neither to the server, which starts
the bridge again. Actors are detached and named, so that the next bridge, of this server or a later one, finds them.

Messages are lines of JSON. Input: `BridgeInput` first, then `{"replace": NAME}`, `{"demand": SESSIONS}` or
`{"close": true}`. Output: `{"up": HostAddress}`, `{"down": NAME, "reason"}`, `{"ready": HOSTS, "errors": []}` once every
node that was there at the start has a host or an error, and `{"error": TEXT}` if Ray cannot be used at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from towline.cluster.ray.actor import HostActor, digest
from towline.common.background import BackgroundTasks
from towline.config.cluster import RaySettings

log = logging.getLogger("towline.ray")
_POLL_SECONDS = 1.0
"""Between two looks at the nodes, and two calls of each actor."""
_CALL_SECONDS = 5.0
"""How long an actor may take to answer; one that does not is not dead: its link may be cut."""
_START_SECONDS = 900.0
"""How long a host may take to start, with the resources that its actor waits for."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds between two attempts to start a host."""
_STOP_SECONDS = 30.0
_HEAD = "node:__internal_head__"
"""Resource of the head node."""


@dataclass(frozen=True, slots=True)
class BridgeInput:
    """What the server asks of the bridge."""

    address: str
    """`auto`, `HOST:PORT` or `ray://HOST:PORT`."""
    cluster: str
    """Part of the names of actors: another server with another name has its own."""
    given: str
    """`HostSettings` as JSON, without name, address, token and data folder."""
    ray: dict[str, Any]
    """`RaySettings`."""
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    """Variables for the hosts."""
    sessions: int = 1
    """Sessions per host, to know how many hosts a demand is."""

    def dump(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class RayNode:
    """A machine of the Ray cluster."""

    id: str
    name: str
    """Name of the host on it: unique, and usable in URLs and file names."""
    machine: str
    """Name of the machine, which outlives the node."""
    ip: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> RayNode:
        """From an entry of `ray.nodes()`."""
        machine = re.sub(r"[^A-Za-z0-9.-]", "-", fields.get("NodeName") or fields["NodeManagerAddress"])[:60]
        return cls(
            fields["NodeID"],
            f"{machine}-{fields['NodeID'][:8]}",
            machine,
            fields["NodeManagerAddress"],
            fields.get("Resources") or {},
            {name: value for name, value in (fields.get("Labels") or {}).items() if not name.startswith("ray.io/")},
        )

    def suits(self, settings: RaySettings) -> bool:
        """Whether it runs sessions: it has the resources that a host reserves, and the labels."""
        return (
            (settings.head or _HEAD not in self.resources)
            and all(self.resources.get(name, 0) >= amount for name, amount in settings.resources.items())
            and all(self.labels.get(name) == value for name, value in settings.labels.items())
        )


def wanted_hosts(waiting: int, hosts: int, sessions: int) -> int:
    """How many hosts a cluster should have room for: those that there are, and as many as the waiting sessions fill."""
    return hosts + math.ceil(waiting / max(1, sessions)) if waiting > 0 else 0


class Bridge:
    """Keeps a host on every suitable node of a Ray cluster."""

    def __init__(self, given: BridgeInput, send: Callable[[dict[str, Any]], None]):
        self.given = given
        self.settings = RaySettings.model_validate(given.ray)
        self.send = send
        self._hosts: dict[str, _Host] = {}
        self._background = BackgroundTasks()

    async def run(self) -> None:
        """Report what there is, then every change, forever."""
        await asyncio.to_thread(connect, self.given.address, self.settings.namespace)
        for node in await self._nodes():
            self._add(node)
        errors = await asyncio.gather(*(host.settled for host in self._hosts.values()))
        self.send({"ready": len(self._hosts), "errors": [error for error in errors if error]})
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            try:
                nodes = {node.id: node for node in await self._nodes()}
            except Exception as error:  # Ray raises what it likes; only the nodes' own hosts matter meanwhile
                log.error("the nodes of the Ray cluster are unknown: %s", error)
                continue
            for node in nodes.values():
                self._add(node)
            for gone in self._hosts.keys() - nodes.keys():
                self._hosts.pop(gone).node_died()

    async def _nodes(self) -> list[RayNode]:
        import ray

        found = await asyncio.to_thread(ray.nodes)
        nodes = [RayNode.of(fields) for fields in found if fields["Alive"]]
        return [node for node in nodes if node.suits(self.settings)]

    def _add(self, node: RayNode) -> None:
        if node.id not in self._hosts:
            self._hosts[node.id] = host = _Host(node, self)
            host.task = self._background.start(host.supervise(), node.name)

    async def obey(self, command: dict[str, Any]) -> None:
        if "replace" in command:
            for host in self._hosts.values():
                if host.node.name == command["replace"]:
                    await host.replace()
        elif "demand" in command:
            await asyncio.to_thread(self._demand, command["demand"])

    def _demand(self, waiting: int) -> None:
        from ray.autoscaler.sdk import request_resources

        count = wanted_hosts(waiting, len(self._hosts), self.given.sessions)
        request_resources(bundles=[dict(self.settings.resources) for _ in range(count)])

    async def close(self) -> None:
        """End all hosts and their actors."""
        await self._background.close()
        await asyncio.gather(*(host.end() for host in self._hosts.values()), return_exceptions=True)


class _Host:
    """The host of one Ray node."""

    def __init__(self, node: RayNode, bridge: Bridge):
        self.node = node
        self._bridge = bridge
        self._actor: Any = None
        self._up = False
        self.settled: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Set once, when the host listens, to nothing, or to why it could not be started."""
        self.task: asyncio.Task[None] | None = None

    async def supervise(self) -> None:
        """Start the host, or find it, report it, and start it again whenever it has died."""
        pause = _FIRST_PAUSE
        while True:
            try:
                address = await self._listening()
            except Exception as error:
                reason = _reason(error)
                log.error("node %s: its host cannot start: %s; next attempt in %g s", self.node.name, reason, pause)
                self._settle(f"{self.node.name}: {reason}")
            else:
                self._up = True
                self._bridge.send({"up": address})
                self._settle("")
                reason = await self._ended()
                self._down(reason)
                pause = _FIRST_PAUSE
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 2)

    def _settle(self, error: str) -> None:
        if not self.settled.done():
            self.settled.set_result(error)

    def _down(self, reason: str) -> None:
        if self._up:
            self._up = False
            log.error("node %s: %s", self.node.name, reason)
            self._bridge.send({"down": self.node.name, "reason": reason})

    def node_died(self) -> None:
        assert self.task is not None
        self.task.cancel()
        self._settle(f"{self.node.name}: the Ray node died")
        self._down(f"the Ray node {self.node.name} died")

    async def _listening(self) -> dict[str, Any]:
        """The address of the host, which is started unless it runs with these settings."""
        given = self._given()
        actor = await asyncio.to_thread(self._find)
        if actor is not None:
            status = await self._ask(actor)
            if status is None or (status["running"] and status["digest"] != digest(given)):
                if status is not None:
                    log.warning("node %s: its host has other settings and is replaced", self.node.name)
                    await _result(actor.stop.remote(_STOP_SECONDS), _STOP_SECONDS * 2)
                await asyncio.to_thread(_kill, actor)
                actor = None
        if actor is None:
            actor = await asyncio.to_thread(self._create)
        self._actor = actor
        settings = self._bridge.settings
        folder = str(Path(settings.data, self._bridge.given.cluster, self.node.machine))
        status = await _result(actor.start.remote(given, folder, self._bridge.given.environment), _START_SECONDS)
        address = {name: status[name] for name in ("url", "token")}
        return {"name": self.node.name, "labels": dict(self.node.labels), **address}

    def _given(self) -> str:
        fields = json.loads(self._bridge.given.given)
        return json.dumps(fields | {"name": self.node.name, "listen": f"{self.node.ip}:0"})

    async def _ask(self, actor: Any) -> dict[str, Any] | None:
        """The status of an actor; `None` if it is dead. Waits while it cannot be reached."""
        import ray

        while True:
            try:
                answer: dict[str, Any] = await _result(actor.status.remote(), _CALL_SECONDS)
                return answer
            except ray.exceptions.RayActorError as error:
                if isinstance(error, ray.exceptions.ActorUnavailableError):
                    await asyncio.sleep(_POLL_SECONDS)
                    continue
                return None
            except (TimeoutError, ray.exceptions.GetTimeoutError):
                log.debug("node %s: its actor does not answer", self.node.name)

    async def _ended(self) -> str:
        """Wait until the host has ended; returns why."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            status = await self._ask(self._actor)
            if status is None:
                return "the actor of its host died"
            if not status["running"]:
                return f"its host ended with code {status['code']}"

    async def replace(self) -> None:
        """End the host process if its actor can be reached; otherwise Ray will say whether the node is dead."""
        if self._actor is None:
            return
        with contextlib.suppress(Exception):
            await _result(self._actor.status.remote(), _CALL_SECONDS)
            await _result(self._actor.stop.remote(0), _CALL_SECONDS)

    async def end(self) -> None:
        if self._actor is not None:
            with contextlib.suppress(Exception):
                await _result(self._actor.stop.remote(_STOP_SECONDS), _STOP_SECONDS + _CALL_SECONDS)
            await asyncio.to_thread(_kill, self._actor)

    # Ray's own calls block: they run in threads.

    @property
    def _name(self) -> str:
        return f"towline-host-{self._bridge.given.cluster}-{self.node.id}"

    def _find(self) -> Any:
        import ray

        try:
            return ray.get_actor(self._name, namespace=self._bridge.settings.namespace)
        except ValueError:
            return None

    def _create(self) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        settings = self._bridge.settings
        resources = dict(settings.resources)
        options = {
            "name": self._name,
            "namespace": settings.namespace,
            "lifetime": "detached",
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "max_concurrency": 4,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self.node.id, soft=False),
        }
        return ray.remote(HostActor).options(**options).remote(settings.orphan_seconds)


async def _result(ref: Any, seconds: float) -> Any:
    """What a call of an actor returns; the same for a driver in the cluster and for a client of it."""
    return await asyncio.wait_for(asyncio.wrap_future(ref.future()), seconds)


def _kill(actor: Any) -> None:
    import ray

    with contextlib.suppress(Exception):
        ray.kill(actor)


def _reason(error: Exception) -> str:
    """The error that the actor raised, without Ray's traceback around it."""
    cause = getattr(error, "cause", None) or error
    return str(cause).strip().splitlines()[-1] if str(cause).strip() else repr(cause)


def connect(address: str, namespace: str) -> None:
    import ray

    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)


def find_engines(address: str, namespace: str, names: Sequence[str]) -> dict[str, list[str]]:
    """The URLs that named actors answer to `urls()`; a name may be `NAMESPACE/NAME`."""
    import ray

    connect(address, namespace)
    found = {}
    for name in names:
        where, _, actor = name.rpartition("/")
        found[name] = [str(url) for url in ray.get(ray.get_actor(actor, namespace=where or namespace).urls.remote())]
    return found


# The process


async def _serve(send: Callable[[dict[str, Any]], None]) -> None:
    lines = asyncio.StreamReader(limit=2**26)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer)
    bridge = Bridge(BridgeInput(**json.loads(await lines.readline())), send)
    running = asyncio.create_task(bridge.run())
    running.add_done_callback(lambda done: _exit_with_error(done, send))
    commands = BackgroundTasks()
    # Standard input ends with the server; hosts stay, for the next one.
    while line := await lines.readline():
        command = json.loads(line)
        if "close" in command:
            running.cancel()
            await bridge.close()
            break
        commands.start(bridge.obey(command))
    os._exit(0)


def _exit_with_error(done: asyncio.Task[None], send: Callable[[dict[str, Any]], None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("Ray cannot be used", exc_info=error)
        send({"error": _reason(error) if isinstance(error, Exception) else repr(error)})
        os._exit(1)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # Ray prints to standard output; the lines of the protocol have a descriptor of their own.
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        output.write(json.dumps(message) + "\n")
        output.flush()

    if len(sys.argv) > 1:
        address, namespace, *names = sys.argv[1:]
        try:
            send({"urls": find_engines(address, namespace, names)})
        except Exception as error:
            send({"error": _reason(error)})
        os._exit(0)
    asyncio.run(_serve(send))


if __name__ == "__main__":
    main()
