"""A real Ray cluster on this machine: `ray start` on several nodes, each in namespaces of its own, and `towline serve` on it.

Needs root. A node is a network namespace on a bridge without a way out, with its own process ids, /tmp and /dev/shm; all
share the rest of the file system, as the nodes of a cluster share a folder. The first node is the head, where the server
runs; the others can be killed, and their links cut. Every process is ended by its process id, never by `ray stop`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from towline.demo import tokenizer

PATIENCE = 240.0
CALL_SECONDS = 60.0
_REPOSITORY = Path(__file__).parents[3]
_STARTS = 3
"""Most attempts to start a node."""
_PORT = 8600
_RAY_PORT = 6379
_NEWNET = 0x40000000
"""CLONE_NEWNET of setns(2)."""
T = TypeVar("T")

AGENT = """
import json, os, sys, urllib.request
messages = [{"role": "user", "content": os.environ["TOWLINE_INSTRUCTION"]}]
for _ in range(int(sys.argv[1])):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    messages.append(json.load(urllib.request.urlopen(request, timeout=600))["choices"][0]["message"])
    messages.append({"role": "user", "content": "Go on."})
"""
SCRIPT = """
import re

def script(request):
    seconds = re.search(r"wait ([0-9.]+)", request.messages[0]["text"])
    return {"text": "It is 42.", "delay": float(seconds[1]) if seconds else 0.0}
"""


def task(task_id: str, *, seconds: float = 0.0, turns: int = 1, samples: int = 1, **fields: Any) -> dict[str, Any]:
    """A task whose sessions take `turns` replies, each after that many seconds."""
    return {
        "task_id": task_id,
        "instruction": f"wait {seconds}",
        "harness": "shell",
        "harness_options": {"command": ["python3", "-S", "-E", "-c", AGENT, str(turns)]},
        "num_samples": samples,
        **fields,
    }


class RayRig:
    """A Ray cluster of `count` nodes, numbered from 0, which is the head, and a server on the head."""

    def __init__(
        self,
        count: int = 4,
        *,
        python: Path | None = None,
        failures: int = 15,
        sandbox: str = "process",
        variables: Mapping[str, str] | None = None,
    ):
        """`failures`: health checks, one per second, after which Ray declares a node dead. `variables`: of all processes."""
        self.count = count
        self.python = python or _REPOSITORY / ".venv-ray/bin/python"
        self.sandbox = sandbox
        self._failures = failures
        self.variables = dict(variables or {})
        self._id = secrets.token_hex(2)
        # Not below /tmp, which every node has for itself.
        self.place = Path(tempfile.mkdtemp(prefix="tl-ray-", dir="/var/tmp"))
        self._spaces: list[str] = []
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        """The nodes that run."""
        self._server: subprocess.Popen[bytes] | None = None
        self._inside: ThreadPoolExecutor | None = None

    def address(self, node: int) -> str:
        return f"10.79.0.{10 + node}"

    @property
    def url(self) -> str:
        """The server, as seen from the head: use `call`."""
        return f"http://127.0.0.1:{_PORT}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.place / "home"),
            "PYTHONPATH": str(_REPOSITORY / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "200",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "3000",
            "RAY_health_check_failure_threshold": str(self._failures),
            **self.variables,
        }

    # The cluster

    def start(self) -> None:
        assert os.geteuid() == 0, "nodes on one machine need root for namespaces"
        assert self.python.exists(), f"{self.python} is missing: run requirements/ray.sh"
        for name in ("home", "log", "model", "hosts", "segments"):
            (self.place / name).mkdir()
        tokenizer.write(self.place / "model")
        (self.place / "replies.py").write_text(SCRIPT)
        self._network()
        self.start_node(0)
        self._until("the head runs", lambda: self._runs(0))
        for node in range(1, self.count):
            self.start_node(node)
        for _ in range(_STARTS):
            # On a busy machine `ray start` may give up on its own processes.
            for node in [node for node, process in self.nodes.items() if process.poll() is not None]:
                self.start_node(node)
            self._wait_for(lambda: all(self._runs(one) or self._ended(one) for one in self.nodes))
        self._until("all nodes run", lambda: all(map(self._runs, self.nodes)))

    def start_node(self, node: int) -> None:
        """Start Ray on a node, also again after `kill_node`."""
        head = ["--head", f"--port={_RAY_PORT}", "--include-dashboard=false", "--ray-client-server-port=10001"]
        join = head if node == 0 else [f"--address={self.address(0)}:{_RAY_PORT}"]
        own = [f"--node-ip-address={self.address(node)}", f"--node-name=node{node}", f"--labels=number=n{node}"]
        size = ["--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
        command = [str(self.python), "-m", "ray.scripts.scripts", "start", *join, *own, *size]
        inside = 'mount -t tmpfs tmpfs /tmp; mount -t tmpfs tmpfs /dev/shm; chmod 1777 /tmp /dev/shm; exec "$@"'
        space = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (self.place / f"log/node-{node}.log").open("ab") as log:
            self.nodes[node] = subprocess.Popen(
                [*self._network_of(node), *space, "sh", "-ec", inside, "-", *command],
                env=self.environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def kill_node(self, node: int) -> None:
        """Kill everything on a node at once, as when its power fails."""
        process = self.nodes.pop(node)
        process.kill()
        process.wait(CALL_SECONDS)

    def kill_raylet(self, node: int) -> None:
        """Kill Ray's own process on a node; the others there end by themselves."""
        (raylet,) = [pid for pid in _descendants(self.nodes[node].pid) if _name(pid) == "raylet"]
        os.kill(raylet, signal.SIGKILL)

    def cut(self, node: int) -> None:
        """Cut the link of a node: it lives on, and nothing reaches it."""
        _ip("-n", self._spaces[0], "link", "set", f"v{node}", "down")

    def heal(self, node: int) -> None:
        _ip("-n", self._spaces[0], "link", "set", f"v{node}", "up")

    def stop(self) -> None:
        if self._server is not None:
            self.kill_server()
        if self._inside is not None:
            self._inside.shutdown()
        for node in list(self.nodes):
            self.kill_node(node)
        for space in self._spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, timeout=CALL_SECONDS)
        shutil.rmtree(self.place, ignore_errors=True)

    def logs(self) -> str:
        """The end of every log."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self.place.glob("log/*"))
        )

    # The server

    def serve_command(
        self, *options: str, cluster: str = "auto", concurrency: int = 8, engine: Sequence[str] = ()
    ) -> list[str]:
        """`towline serve`, entered into the namespaces of the head. Without an `engine`, replies are scripted."""
        scripted = ["--engine=scripted", f"--script={self.place / 'replies.py'}", f"--model={self.place / 'model'}"]
        places = ["--data", str(self.place / "data"), "--port", str(_PORT)]
        size = ["--sandbox", self.sandbox, "--concurrency", str(concurrency), "--json", "--no-auth", "--trust"]
        return [
            *self._head(),
            "-m",
            "towline",
            "serve",
            "--cluster",
            cluster,
            *(engine or scripted),
            *places,
            *size,
            *options,
        ]

    def _head(self) -> list[str]:
        """Python in the namespaces of the head."""
        head = _children(self.nodes[0].pid)[0]
        where = [f"--net=/run/netns/{self._spaces[0]}", f"--target={head}", "--mount", "--pid"]
        return ["nsenter", *where, "--", str(self.python)]

    def run_on_head(self, *arguments: str) -> str:
        """Run Python on the head; returns its output."""
        done = subprocess.run(
            [*self._head(), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            cwd=self.place,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().splitlines()[-1]

    def serve_environment(self, **settings: str) -> dict[str, str]:
        """Settings by their variables, such as `TOWLINE_SERVER__LOST_SECONDS`."""
        return (
            self.environment
            | {
                "TOWLINE_SERVER__LOST_SECONDS": "5",
                "TOWLINE_CLUSTER__RAY__DATA": str(self.place / "hosts"),
                "TOWLINE_NODE__WARM": "0",
            }
            | settings
        )

    def serve(self, *options: str, cluster: str = "auto", concurrency: int = 8, **settings: str) -> None:
        """Start the server, and wait until it listens."""
        with (self.place / "log/server.log").open("ab") as log:
            self._server = subprocess.Popen(
                self.serve_command(*options, cluster=cluster, concurrency=concurrency),
                env=self.serve_environment(**settings),
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.place,
            )
        assert self._server.stdout is not None
        ready, _, _ = select.select([self._server.stdout], [], [], PATIENCE)
        line = self._server.stdout.readline() if ready else b""
        assert line, f"the server did not start\n{self.logs()}"
        assert json.loads(line)["url"] == self.url

    @property
    def serving(self) -> bool:
        return self._server is not None

    @property
    def server_pid(self) -> int:
        """The server's process; `nsenter` is its parent."""
        assert self._server is not None
        return _children(self._server.pid)[0]

    def kill_server(self) -> None:
        """As `kill -9` does; node hosts stay."""
        assert self._server is not None
        with contextlib.suppress(IndexError, ProcessLookupError):
            os.kill(self.server_pid, signal.SIGKILL)
        self._server.wait(CALL_SECONDS)
        self._server = None

    def stop_server(self) -> int:
        """As Ctrl-C does; returns the exit code."""
        assert self._server is not None
        os.kill(self.server_pid, signal.SIGTERM)
        code = self._server.wait(PATIENCE)
        self._server = None
        return code

    def call(self, work: Callable[[], T]) -> T:
        """Run a function in the network of the head, where `url` can be reached."""
        if self._inside is None:
            self._inside = ThreadPoolExecutor(1, initializer=_enter_network, initargs=(self._spaces[0],))
        return self._inside.submit(work).result()

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Move this thread, and the processes that it starts, to the network of the head for a block."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter_network(self._spaces[0])
            yield
        finally:
            _set_network(before)
            os.close(before)

    def until(self, what: str, holds: Callable[[], T], seconds: float = PATIENCE) -> T:
        """Poll a function in the network of the head until it returns something true."""
        deadline = time.monotonic() + seconds
        while not (found := self.call(holds)):
            assert time.monotonic() < deadline, f"not so after {seconds:g} s: {what}\n{self.logs()}"
            time.sleep(0.2)
        return found

    # Inside

    def _network(self) -> None:
        """One namespace per node; the first one has the bridge. No route leads out."""
        self._spaces = [f"tr{self._id}-{number}" for number in range(self.count)]
        for space in self._spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        first = self._spaces[0]
        _ip("-n", first, "link", "add", "br0", "type", "bridge")
        _ip("-n", first, "addr", "add", f"{self.address(0)}/24", "dev", "br0")
        _ip("-n", first, "link", "set", "br0", "up")
        for number, space in enumerate(self._spaces[1:], 1):
            _ip("-n", first, "link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", first, "link", "set", f"v{number}", "master", "br0", "up")
            _ip("-n", space, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")

    def _network_of(self, node: int) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self._spaces[node]}", "--"]

    def _runs(self, node: int) -> bool:
        return "Ray runtime started" in (self.place / f"log/node-{node}.log").read_text(errors="replace")

    def _ended(self, node: int) -> bool:
        return self.nodes[node].poll() is not None

    def _wait_for(self, holds: Callable[[], object]) -> None:
        until = time.monotonic() + PATIENCE
        while not holds() and time.monotonic() < until:
            time.sleep(0.2)

    def _until(self, what: str, holds: Callable[[], object]) -> None:
        until = time.monotonic() + PATIENCE
        while not holds():
            dead = [number for number, process in self.nodes.items() if process.poll() is not None]
            assert not dead, f"nodes ended while waiting until {what}: {dead}\n{self.logs()}"
            assert time.monotonic() < until, f"not so after {PATIENCE:g} s: {what}\n{self.logs()}"
            time.sleep(0.2)


def _enter_network(space: str) -> None:
    """Move this thread, and no other, to a network namespace."""
    descriptor = os.open(f"/run/netns/{space}", os.O_RDONLY)
    try:
        _set_network(descriptor)
    finally:
        os.close(descriptor)


def _set_network(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _descendants(pid: int) -> Sequence[int]:
    found = _children(pid)
    for child in found:
        found.extend(_children(child))
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=CALL_SECONDS)


@contextlib.contextmanager
def ray_rig(count: int = 4, **options: Any) -> Iterator[RayRig]:
    """A Ray cluster that ends with the block."""
    rig = RayRig(count, **options)
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()
