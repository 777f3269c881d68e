"""`towline serve keys` and the queue benchmark."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from typer.testing import CliRunner

from towline.benchmarks import queue
from towline.cli.serve.command import app


def test_keys_from_the_command_line(tmp_path: Path) -> None:
    def keys(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["keys", *arguments, "--data", str(tmp_path)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return str(done.output)

    secret = keys("create", "--role", "admin", "--name", "mine").strip()
    other = json.loads(keys("create", "--role", "submit", "--role", "consume", "--json"))
    listed = json.loads(keys("list", "--json"))
    assert [(key["name"], key["roles"]) for key in listed] == [("mine", ["admin"]), ("", ["consume", "submit"])]
    shown = keys("list")
    assert "mine" in shown
    assert secret not in shown
    keys("revoke", other["info"]["key_id"])
    assert len(json.loads(keys("list", "--json"))) == 1


def test_queue_benchmark_reports_its_numbers() -> None:
    result = queue.run(sizes=(40, 80))
    for found in result["runners"].values():
        assert [size["queued"] for size in found["sizes"]] == [40, 80]
        assert all(size["run_ms"] > 0 for size in found["sizes"])
    assert all(size["deliver_ms"] > 0 for size in result["runners"]["fake"]["sizes"])
    console = Console(record=True, width=120)
    queue.render(result, console)
    assert "sessions/s" in console.export_text()
