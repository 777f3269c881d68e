"""What the separation of server and node hosts gives: throughput per host, and an API that a busy node does not slow.

Both measurements use `towline serve` itself, with the scripted engine and real agent processes that only talk to the model.
Throughput is turns per CPU second of a host process, alone and beside a second host; agents are other processes and not
counted. The latency of the API is that of status, listing and lease calls, first idle and then while the node host spends
all its CPU time, in the same service. Sizes are resident memory of the processes, and bytes on disk per session after all
have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from towline.common.progress import OnProgress
from towline.demo import tokenizer
from towline.errors import TowlineError

_AGENT = """
import http.client, json, os
from urllib.parse import urlsplit

url = urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(url.hostname, url.port, timeout=300)
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
messages = []
for turn in range(%d):
    messages.append({"role": "user", "content": "Step %%d." %% turn})
    connection.request("POST", url.path + "/chat/completions", json.dumps({"model": "any", "messages": messages}), headers)
    messages.append(json.loads(connection.getresponse().read())["choices"][0]["message"])
"""
_ANSWER = "def script(request):\n    return 'Done with this step.'\n"
_BURN = """
import time

def script(request):
    until = time.monotonic() + 0.05
    while time.monotonic() < until:
        pass
    return 'Done with this step.'
"""
_START_SECONDS = 180.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class PlanesPlan:
    """How much is measured."""

    turns: int = 60
    sessions: int = 24
    """Sessions per host, and turns in each of them."""
    concurrency: int = 8
    calls: int = 1500
    """API calls per latency."""


class BenchmarkFailed(TowlineError):
    """The service of a benchmark did not start, or did not do its work."""


class _Service:
    """`towline serve` in a folder of its own."""

    def __init__(self, folder: Path, plan: PlanesPlan, nodes: int, script: str):
        self._model, self._agent, self.data = folder / "model", folder / "agent", folder / "data"
        for path in (self._model, self._agent):
            path.mkdir(parents=True)
        tokenizer.write(self._model)
        (self._agent / "agent.py").write_text(_AGENT % plan.turns)
        (folder / "script.py").write_text(script)
        command = [sys.executable, "-m", "towline", "serve", "--json", "--port", "0", "--engine", "scripted"]
        command += ["--sandbox", "process", "--concurrency", str(plan.concurrency), "--nodes", str(nodes)]
        command += ["--model", str(self._model), "--data", str(self.data), "--script", str(folder / "script.py")]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise BenchmarkFailed(f"towline serve did not start: {(folder / 'log').read_text()[-2000:]}")
        self.url = json.loads(line)["url"]
        self._key = (self.data / "admin.key").read_text().strip()

    def call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def submit(self, name: str, sessions: int) -> None:
        harness = {"command": f"{sys.executable} {{program}}/agent.py", "folder": str(self._agent)}
        task = {"task_id": name, "instruction": "Go.", "harness": "shell", "harness_options": harness}
        self.call("/v1/tasks", {**task, "num_samples": sessions, "evaluator": {"kind": "completed"}})

    def finish(self, name: str) -> list[dict[str, Any]]:
        """The sessions of a task once all have ended."""
        until = time.monotonic() + 1800
        while time.monotonic() < until:
            status = self.call(f"/v1/tasks/{name}")
            if status["state"] == "done":
                failed = [one for one in status["sessions"] if one["state"] != "done"]
                if failed:
                    raise BenchmarkFailed(f"{len(failed)} sessions failed: {failed[0]['error']}")
                return list(status["sessions"])
            time.sleep(0.2)
        raise BenchmarkFailed(f"task {name} did not end")

    def host_cpu(self) -> dict[str, float]:
        """CPU seconds of each host process."""
        return {node["name"]: _cpu(node["pid"]) for node in self.call("/v1/nodes")}

    def latencies(self, count: int) -> list[float]:
        """Seconds of API calls, sorted."""
        lease = {"consumer": "bench", "unit": "session", "wait": 0, "max": 1, "lease": 0.01}
        calls = (("/healthz", None), ("/v1/tasks?limit=20", None), ("/v1/results", lease))
        taken = []
        for number in range(count):
            began = time.perf_counter()
            with contextlib.suppress(urllib.error.HTTPError):
                self.call(*calls[number % len(calls)])
            taken.append(time.perf_counter() - began)
        return sorted(taken)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def _serving(plan: PlanesPlan, nodes: int, script: str) -> Iterator[_Service]:
    with tempfile.TemporaryDirectory(prefix="towline-planes-") as folder:
        service = _Service(Path(folder), plan, nodes, script)
        try:
            yield service
        finally:
            service.stop()


def _cpu(pid: int) -> float:
    """CPU seconds of one process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _resident(pid: int) -> float:
    """Resident memory of one process in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _bytes(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return sum(one.stat().st_size for one in ([path] if path.is_file() else path.rglob("*")) if one.is_file())


def _throughput(plan: PlanesPlan, nodes: int, sizes: dict[str, float] | None = None) -> list[float]:
    """Turns per CPU second of each host; the sizes of one are added to `sizes`."""
    with _serving(plan, nodes, _ANSWER) as service:
        service.submit("warm", nodes * plan.concurrency)
        service.finish("warm")
        before = service.host_cpu()
        service.submit("measured", nodes * plan.sessions)
        ended = service.finish("measured")
        spent = {name: cpu - before[name] for name, cpu in service.host_cpu().items()}
        turns = dict.fromkeys(spent, 0)
        for one in ended:
            turns[one["node"]] += plan.turns
        if sizes is not None:
            (host,) = service.call("/v1/nodes")
            ended_sessions = len(ended) + nodes * plan.concurrency
            sizes |= {"server_mb": _resident(service.process.pid), "host_mb": _resident(host["pid"])}
            for name, pattern in (("segments", "segments"), ("database", "towline.db*"), ("logs", "sessions")):
                used = sum(map(_bytes, service.data.glob(pattern)))
                sizes[f"{name}_kb_per_session"] = used / 1e3 / ended_sessions
        return [turns[name] / spent[name] for name in sorted(spent)]


def _api(plan: PlanesPlan) -> dict[str, float]:
    """Latencies of the API in milliseconds, idle and with a busy node."""
    with _serving(plan, 1, _BURN) as service:
        service.submit("warm", 2)
        service.finish("warm")
        service.latencies(plan.calls // 4)
        idle = service.latencies(plan.calls)
        service.submit("burn", plan.sessions)
        before, began = service.host_cpu(), time.monotonic()
        busy = service.latencies(plan.calls)
        used = (sum(service.host_cpu().values()) - sum(before.values())) / (time.monotonic() - began)
        return {
            "idle_p50_ms": _at(idle, 0.5),
            "idle_p99_ms": _at(idle, 0.99),
            "busy_p50_ms": _at(busy, 0.5),
            "busy_p99_ms": _at(busy, 0.99),
            "p99_ratio": _at(busy, 0.99) / _at(idle, 0.99),
            "node_cores": used,
        }


def _at(values: list[float], share: float) -> float:
    return 1000 * values[min(len(values) - 1, int(share * len(values)))]


def run(plan: PlanesPlan | None = None, on_progress: OnProgress = lambda message: None) -> dict[str, Any]:
    plan = plan or PlanesPlan()
    on_progress("one host")
    sizes: dict[str, float] = {}
    (alone,) = _throughput(plan, 1, sizes)
    on_progress("two hosts")
    beside = _throughput(plan, 2)
    on_progress("the API beside a busy node")
    api = _api(plan)
    ratio = min(beside) / alone
    return {
        "turns_per_cpu_s": {"one_host": alone, "two_hosts": beside, "ratio": ratio},
        "api": api,
        "sizes": sizes,
        "within": {"two_hosts": ratio >= 0.9, "api": api["p99_ratio"] <= 2.0},
    }


def render(result: dict[str, Any], console: Console) -> None:
    turns, api = result["turns_per_cpu_s"], result["api"]
    table = Table("measured", "alone or idle", "beside or busy", "ratio", "goal", box=None)
    shown = ", ".join(f"{one:.0f}" for one in turns["two_hosts"])
    table.add_row(
        "turns per CPU second of a host", f"{turns['one_host']:.0f}", shown, f"{turns['ratio']:.2f}", "at least 0.9"
    )
    latency = f"{api['idle_p99_ms']:.1f} ms", f"{api['busy_p99_ms']:.1f} ms"
    table.add_row("p99 of the API", *latency, f"{api['p99_ratio']:.2f}", "at most 2")
    console.print(table)
    shown = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in result["sizes"].items())
    console.print(f"Sizes: {shown}.", highlight=False)
    console.print(f"The busy node used {api['node_cores']:.2f} cores during the API calls.", highlight=False)
