"""One small run of every command that writes files or prints JSON, in processes of their own and through nothing but the
command line and HTTP.

`write` makes a folder in which every on-disk format occurs: the data that `data-0.1.tar.xz` holds was written by it.
Everything is relative to that folder, so that it can be resumed wherever it is unpacked.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ARCHIVE = Path(__file__).parent / "data-0.1.tar.xz"
PATIENCE = 240.0
CONTROL_KEY = "control-key-of-the-surface"
KEYS: dict[str, str] = {}
"""Admin keys of services by their URL."""

AGENT = """
import json, os, subprocess, urllib.request
print("environment", json.dumps(sorted(os.environ)), flush=True)
tool = {"type": "function", "function": {"name": "bash", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}
messages = [{"role": "user", "content": os.environ["TOWLINE_INSTRUCTION"]}]
open("score.txt", "wb").write(str(int.from_bytes(os.urandom(3), "big")).encode())
for _ in range(2):
    body = json.dumps({"model": "any", "messages": messages, "tools": [tool], "max_tokens": 160}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    message = json.load(urllib.request.urlopen(request, timeout=900))["choices"][0]["message"]
    messages.append(message)
    for call in message.get("tool_calls") or ():
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})
"""
SCRIPT = """
def script(request):
    if request.turn == 0:
        call = {"name": "bash", "arguments": {"command": "echo 42 | tee answer.txt"}}
        return {"reasoning": "One command.", "text": "I run it.", "tool_calls": [call]}
    return "It is 42."
"""
HOLDING = """
def script(request):
    if request.turn == 0:
        return {"tool_calls": [{"name": "bash", "arguments": {"command": "echo 42 | tee answer.txt"}}]}
    if request.task == "held":
        return {"text": "It is 42.", "delay": 600}
    return "It is 42."
"""


def task(name: str, evaluator: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "task_id": name,
        "instruction": "Write 42 into answer.txt.",
        "harness": "shell",
        "harness_options": {"command": ["python3", "-c", AGENT]},
        "environment": {"sandbox": "process"},
        "evaluator": evaluator,
        "metadata": {"origin": "surface"},
        **fields,
    }


RIGHT = {"kind": "command", "command": 'test "$(cat answer.txt)" = 42'}
SCORED = {"kind": "command", "command": "cat score.txt", "reward": "number"}
COMPLETED = {"kind": "completed"}


class Commands:
    """Runs commands in a folder; `printed` is what each printed with `--json`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.printed: dict[str, list[Any]] = {}
        self.environment = os.environ | {"TOWLINE_CONTROL_KEY": CONTROL_KEY, "OMP_NUM_THREADS": "1"}

    def run(self, *words: str, code: int = 0, name: str = "", **environment: str) -> Any:
        # The stored tasks name the sandbox `process`, which data files may not by themselves.
        trust = ("--trust", "process") if words[0] in ("run", "eval", "generate", "submit", "train") else ()
        done = subprocess.run(
            [sys.executable, "-m", "towline", *words, *trust, "--json"],
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == code, f"towline {' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        output = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]
        self.printed.setdefault(name or words[0], []).extend(output)
        return output[-1] if output else None

    @contextlib.contextmanager
    def started(self, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], Any]]:
        """A server and the line that it prints when it listens."""
        log = self.folder / f"{words[0]}.said"
        with log.open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "towline", *words, "--json"],
                cwd=self.folder, env=self.environment, stdout=said, stderr=said,
            )  # fmt: skip
        try:
            until = time.monotonic() + PATIENCE
            while True:
                lines = [line for line in log.read_text().splitlines() if line.startswith('{"')]
                if lines and log.read_text().endswith("\n"):
                    break
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.05)
            output = json.loads(lines[0])
            if output.get("key_file"):
                KEYS[output["url"]] = (self.folder / output["key_file"]).read_text().strip()
            self.printed.setdefault(words[0], []).append(output)
            yield process, output
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE)
            log.unlink()


def call(url: str, body: Any = None, key: str = "", method: str = "") -> Any:
    """The JSON, or the text, that a URL answers; `key`: default that of the service that `started` it."""
    key = key or KEYS.get("/".join(url.split("/")[:3]), "")
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, data, headers, method=method or None)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.code} {error.read().decode()[:2000]}") from error
    return json.loads(text) if text.startswith(("{", "[")) else text


def unpack(folder: Path, *names: str) -> None:
    """The folders of these names from the archive, all of them if none is named."""
    with tarfile.open(ARCHIVE) as archive:
        chosen = [one for one in archive if not names or one.name.split("/")[0] in names]
        archive.extractall(folder, chosen, filter="data")


def write(folder: Path, *, train: bool) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Fill the folder, which has `model/` only; what the commands printed, and what the services answered."""
    (folder / "replies.py").write_text(SCRIPT)
    (folder / "holding.py").write_text(HOLDING)
    tasks = [task("alpha", RIGHT), task("beta", COMPLETED)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in tasks))
    (folder / "scored.jsonl").write_text(json.dumps(task("gamma", SCORED)) + "\n")
    commands = Commands(folder)
    engine = ("--engine", "scripted", "--model", "model")
    replies = (*engine, "--script", "replies.py")
    output = commands.run("run", "tasks.jsonl", *replies, "--out", "run", "--samples", "2")
    commands.run("trace", f"run/trajectories/{output['results'][0]['session_id']}.arrow")
    generate = ("generate", "tasks.jsonl", "--harness", "shell", *replies, "--out", "generate", "--duplicates", "keep")
    commands.run(*generate)
    evaluate = ("eval", "tasks.jsonl", "--harness", "shell", *replies, "--out", "eval", "--samples", "2")
    commands.run(*evaluate)
    commands.run(*evaluate, "--pass", "turns >= 1", "--compare", "eval")
    broken = task("broken", COMPLETED, environment={"sandbox": "process", "setup": ["exit 3"]}, max_attempts=1)
    (folder / "broken.jsonl").write_text(json.dumps(broken) + "\n")
    commands.run("eval", "broken.jsonl", "--harness", "shell", *replies, "--out", "eval-failed", code=1)
    commands.run("harness", "list", name="harness list")
    commands.run("doctor", *replies, "--sandbox", "process")
    answers = _serve(commands, engine)
    answers |= _gateway(commands, replies)
    if train:
        words = ("train", "scored.jsonl", "--model", "model", "--out", "train", "--steps", "1", "--groups", "1")
        commands.run(
            *words,
            "--samples",
            "4",
            "--synchronous",
            "--sandbox",
            "process",
            "--measure",
            "tasks.jsonl",
            "--no-tensorboard",
        )
    return commands.printed, answers


def _serve(commands: Commands, engine: tuple[str, ...]) -> dict[str, Any]:
    """A service with a finished task, results that are leased and acknowledged, and a session that a kill cut short."""
    answers: dict[str, Any] = {}
    store = ("--data", "serve")
    with commands.started(
        "serve", "--port", "0", "--sandbox", "process", *store, *engine, "--script", "holding.py"
    ) as (process, output):
        url = output["url"]
        at = ("--url", url)
        commands.run("submit", "tasks.jsonl", "--samples", "2", "--wait", *at)
        answers["openapi"] = call(f"{url}/openapi.json")
        for name in ("status", "sessions"):
            commands.run(name, *at)
        commands.run("status", "alpha", *at, name="status TASK_ID")
        (session, *_) = commands.run("sessions", "--task", "alpha", *at)
        commands.run("log", session["session_id"], *at)
        leased = call(f"{url}/v1/results", {"consumer": "first", "unit": "session", "max": 1, "wait": 30})
        answers["leased"] = leased
        commands.run("export", "--out", "traces.parquet", *at)
        commands.run("export", "--out", "trajectories.jsonl", "--what", "trajectories", *at)
        commands.run("submit", _held(commands.folder), *at, name="submit")
        (commands.folder / "late.jsonl").write_text(json.dumps(task("late", COMPLETED)) + "\n")
        commands.run("submit", "late.jsonl", "--priority", "-1", *at)
        commands.run("cancel", "late", *at)
        until = time.monotonic() + PATIENCE
        while True:
            found = call(f"{url}/v1/tasks/held")
            if found["sessions"][0]["state"] == "running" and call(f"{url}/v1/nodes")[0].get("turns", 1):
                break
            assert time.monotonic() < until, found
            time.sleep(0.1)
        # The first turn is in the journal by the time the second one waits.
        while b"held" not in b"".join(path.read_bytes() for path in (commands.folder / "serve").rglob("journal/*")):
            assert time.monotonic() < until
            time.sleep(0.1)
        time.sleep(1)
        answers["metrics"] = call(f"{url}/metrics")
        answers["nodes"] = call(f"{url}/v1/nodes")
        answers["healthz"] = call(f"{url}/healthz")
        answers["livez"] = call(f"{url}/livez")
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
    commands.run("store", "verify", *store, name="store verify")
    made = commands.run("serve", "keys", "create", "--role", "admin", *store, name="serve keys create")
    commands.run("serve", "keys", "list", *store, name="serve keys list")
    commands.run("serve", "keys", "revoke", made["info"]["key_id"], *store, name="serve keys revoke")
    shutil.copytree(commands.folder / "serve", commands.folder / "copy")
    commands.run("store", "move", "--to-segments", "moved", "--data", "copy", name="store move")
    shutil.rmtree(commands.folder / "copy")
    shutil.rmtree(commands.folder / "moved")
    return answers


def _held(folder: Path) -> str:
    (folder / "held.jsonl").write_text(json.dumps(task("held", COMPLETED)) + "\n")
    return "held.jsonl"


def _gateway(commands: Commands, replies: tuple[str, ...]) -> dict[str, Any]:
    """A gateway with a sealed session, and an open one that a kill cut short."""
    answers: dict[str, Any] = {}
    ports = ("--port", "0", "--control-port", "0", "--data", "gateway")
    with commands.started("gateway", *ports, *replies) as (process, output):
        control = output["control_url"]
        for name in ("sealed", "open"):
            body = {"id": name, "group": "g", "instruction": "Say it."}
            opened = call(f"{control}/v1/sessions", body, CONTROL_KEY)
            answers["POST /v1/sessions"] = opened
            chat = {"model": "any", "messages": [{"role": "user", "content": "Say it."}]}
            call(f"{output['base_url']}/v1/chat/completions", chat, opened["key"])
        (commands.folder / "gateway" / "open.json").write_text(json.dumps(opened))
        for path in ("/healthz", "/v1/sessions", "/v1/sessions/open", "/v1/policy"):
            answers[f"GET {path.replace('open', '{id}')}"] = call(f"{control}{path}", None, CONTROL_KEY)
        answers["DELETE /v1/sessions/{id}"] = call(f"{control}/v1/sessions/sealed", None, CONTROL_KEY, "DELETE")
        kept = call(f"{control}/v1/sessions/sealed/trajectory", None, CONTROL_KEY)
        answers["GET /v1/sessions/{id}/trajectory"] = kept
        for name in ("pause", "resume"):
            answers[f"POST /v1/policy/{name}"] = call(f"{control}/v1/policy/{name}", {}, CONTROL_KEY)
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
    return {f"gateway {name}" if " " in name else name: value for name, value in answers.items()}
