"""The frozen surface in files, and the comparison with what there is now: by addition only."""

from __future__ import annotations

import json
from pathlib import Path

from surface import collect, scenario
from surface.collect import Table

FOLDER = Path(__file__).parent / "frozen"


def everything(folder: Path) -> dict[str, Table]:
    """Every table as it is now; `folder` is where the scenario runs."""
    scenario.unpack(folder, "model")
    printed, answers = scenario.write(folder, train=True)
    logs = [path.read_text() for path in folder.rglob("harness.log")]
    return {
        "cli": collect.commands(),
        "cli_json": collect.printed(printed),
        "environment": collect.environment(logs),
        "evaluators": collect.evaluators(),
        "files": collect.disk(folder),
        "gateway": collect.gateway(answers),
        "http": collect.http(answers["openapi"])
        | {name: "" for route in ("nodes", "healthz", "livez") for name in collect.keys(answers[route], f"{route}:")},
        "imports": collect.imports(read().get("imports", ())),
        "metrics": collect.metrics(answers["metrics"]),
        "settings": collect.settings(),
    }


def read() -> dict[str, Table]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def write(tables: dict[str, Table]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, table in tables.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(table, indent=0, sort_keys=True, ensure_ascii=False) + "\n")


def broken(frozen: dict[str, Table], now: dict[str, Table]) -> list[str]:
    """Entries that are gone or have another meaning, and new entries that users are required to give."""
    problems = []
    for name, table in frozen.items():
        there = now.get(name, {})
        for entry, meaning in table.items():
            if entry not in there:
                problems.append(f"{name}: {entry!r} is gone")
            elif there[entry] != meaning and "null" not in (there[entry], meaning):
                problems.append(f"{name}: {entry!r} was {meaning!r} and is {there[entry]!r}")
        for entry, meaning in there.items():
            if meaning == "required" and entry not in table and _parent(entry) in table:
                problems.append(f"{name}: {entry!r} is new and required")
    return problems


def _parent(entry: str) -> str:
    """The entry that contains this one: the model of a field, the command of an argument, the function of a parameter."""
    if entry.endswith(")"):
        return entry.rpartition("(")[0]
    return max(entry.rpartition(".")[0], entry.rpartition(" ")[0], key=len)
