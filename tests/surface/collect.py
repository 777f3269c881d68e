"""The public surface of Towline as flat tables of `entry: meaning`, for comparison with a snapshot.

Most of it is read where users see it: the OpenAPI document and metrics of a running service, the command tree, the JSON
that commands print, the files that they write. Names that belong to one run (session ids, segment numbers) become `*`.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import json
import re
import sqlite3
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer.main
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from surface.internals import (
    ControlApi,
    EvaluatorOptions,
    ServerMetrics,
    Settings,
    all_dialects,
    engine_figures,
    replay,
)

import towline
import towline.schema
from towline.cli import app

Table = dict[str, str]

_VARIES = re.compile(r"(alpha|beta|gamma|held|late|broken|shell)([\w.-]*-[0-9a-f]{8})?")
"""Keys that are names of this scenario: its tasks, their sessions, its harness."""


# The server's HTTP API


def http(document: dict[str, Any]) -> Table:
    """Operations, parameters, and every field of every body. Schemas without a public class are shown where they are used."""
    found: Table = {}
    schemas = document["components"]["schemas"]
    public = set(towline.schema.__all__)
    todo: list[tuple[str, str]] = []
    done: set[tuple[str, str]] = set()

    def walk(schema: dict[str, Any], place: str, side: str, inside: tuple[str, ...] = ()) -> None:
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            plain = re.sub(r"-(Input|Output)$", "", name)
            if plain in public:
                found[f"{place}: {plain}"] = ""
                todo.append((side, name))
            elif name not in inside:
                walk(schemas[name], place, side, (*inside, name))
            return
        for many in ("anyOf", "oneOf", "allOf"):
            for one in schema.get(many, ()):
                walk(one, place, side, inside)
        for value in schema.get("enum", [schema["const"]] if "const" in schema else ()):
            found[f"{place} = {json.dumps(value)}"] = ""
        if "properties" in schema:
            _fields(schema, place, side, inside)
        elif isinstance(schema.get("type"), str):
            found[f"{place}: {schema['type']}"] = ""
        if isinstance(schema.get("items"), dict):
            walk(schema["items"], f"{place}[]", side, inside)
        if isinstance(schema.get("additionalProperties"), dict):
            walk(schema["additionalProperties"], f"{place}{{}}", side, inside)

    def _fields(schema: dict[str, Any], place: str, side: str, inside: tuple[str, ...]) -> None:
        for name, field in schema["properties"].items():
            if side == "request":
                required = name in schema.get("required", ())
                found[f"{place}.{name}"] = "required" if required else f"default {json.dumps(field.get('default'))}"
            else:
                found[f"{place}.{name}"] = ""
            walk(field, f"{place}.{name}", side, inside)

    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            route = f"{method.upper()} {path}"
            found[route] = ""
            for one in operation.get("parameters", ()):
                place = f"{route} {one['in']} {one['name']}"
                default = f"default {json.dumps(one['schema'].get('default'))}"
                found[place] = "required" if one.get("required") else default
                walk(one["schema"], place, "request")
            for kind, content in operation.get("requestBody", {}).get("content", {}).items():
                found[f"{route} body {kind}"] = ""
                walk(content.get("schema", {}), f"{route} body", "request")
            for status, answer in operation["responses"].items():
                if status.startswith("2"):
                    for kind, content in answer.get("content", {}).items():
                        found[f"{route} {status} {kind}"] = ""
                        walk(content.get("schema", {}), f"{route} {status}", "response")
    while todo:
        side, name = todo.pop()
        if (side, name) not in done:
            done.add((side, name))
            walk(schemas[name], f"{side} {re.sub(r'-(Input|Output)$', '', name)}", side)
    return found


# The gateway's two listeners


def gateway(answers: dict[str, Any]) -> Table:
    found: Table = {}
    for dialect in all_dialects():
        for route in dialect.routes:
            found[f"provider {route.method} {route.path} {route.operation}"] = ""
    keyed: Any = ControlApi(None, "").app("key")  # type: ignore[arg-type]
    for route in keyed.app.routes:
        for method in sorted(route.methods - {"HEAD"}):
            found[f"control {method} {route.path}"] = ""
    for name, answer in answers.items():
        if name.startswith("gateway "):
            found.update(keys(answer, f"control {name.removeprefix('gateway ')} answers"))
    return found


# The command line


def commands() -> Table:
    found: Table = {}

    def walk(command: Any, path: str) -> None:
        found[path] = ""
        hints = typing.get_type_hints(inspect.unwrap(command.callback)) if command.callback else {}
        for parameter in command.params:
            if "completion" in parameter.name:  # of the library
                continue
            options = sorted([*parameter.opts, *parameter.secondary_opts], key=len, reverse=True)
            name = f"{path} {'/'.join(options)}"
            found[name] = "required" if parameter.required else f"default {_shown(parameter.default)}"
            found.update({f"{name}: {kind}": "" for kind in _types(hints.get(parameter.name, str))})
            variables = parameter.envvar or ()
            for variable in [variables] if isinstance(variables, str) else variables:
                found[f"{name} from {variable}"] = ""
        for name, one in getattr(command, "commands", {}).items():
            walk(one, f"{path} {name}")

    walk(typer.main.get_command(app), "towline")
    return found


def printed(of_commands: dict[str, list[Any]]) -> Table:
    """The keys of what commands print with `--json`."""
    found: Table = {}
    for name, values in of_commands.items():
        for value in values:
            merge(found, keys(value, f"{name}:"))
            if name == "harness list":
                for one in value:
                    merge(found, keys(one["options"], f"harness {one['name']} options"))
    # These figures depend on the machine.
    return {name: meaning for name, meaning in found.items() if not name.startswith("doctor:.findings[].figures.")}


def keys(value: Any, place: str) -> Table:
    """Every path in a JSON value with the type of what is there."""
    found: Table = {}

    def walk(value: Any, place: str) -> None:
        match value:
            case dict():
                merge(found, {place: "object"})
                for key, one in value.items():
                    walk(one, f"{place}.{'*' if _VARIES.fullmatch(key) else key}")
            case list():
                merge(found, {place: "list"})
                for one in value:
                    walk(one, f"{place}[]")
            case None:
                merge(found, {place: "null"})
            case bool():
                merge(found, {place: "bool"})
            case int() | float():
                merge(found, {place: "number"})
            case _:
                merge(found, {place: "string"})

    walk(value, place)
    return found


def merge(into: Table, more: Table) -> None:
    """Entries of both; of a value that is sometimes null, its other type counts."""
    for name, meaning in more.items():
        if into.get(name) in (None, "null"):
            into[name] = meaning


# Settings, evaluators and environment variables


def evaluators() -> Table:
    """What the `evaluator` of a task may say, by its kind."""
    found: Table = {}
    for options in _below(EvaluatorOptions):
        kind = options.model_fields.get("kind")
        for name in typing.get_args(kind.annotation) if kind is not None else ():
            found |= {f"{name} {entry}": meaning for entry, meaning in settings(options).items()}
    return found


def _below(kind: type[BaseModel]) -> Iterable[type[BaseModel]]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)


def settings(of: type[BaseModel] = Settings) -> Table:
    found: Table = {}

    def walk(model: type[BaseModel], path: str) -> None:
        for name, field in model.model_fields.items():
            place = f"{path}.{name}" if path else name
            default = field.get_default(call_default_factory=True)
            given = "required" if field.is_required() else f"default {_shown(default)}"
            inner = [one for one in _arms(field.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
            plain = all(one in inner for one in _arms(field.annotation))
            found[place] = "section" if plain and inner else given
            found.update({f"{place}: {arm}": "" for arm in _types(field.annotation)})
            for one in inner:
                walk(one, place if plain else f"{place}.*")

    walk(of, "")
    return found


def _arms(annotation: Any) -> list[Any]:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return [arm for one in typing.get_args(annotation) for arm in _arms(one)]
    if origin is typing.Annotated:
        return _arms(typing.get_args(annotation)[0])
    if origin in (tuple, list, dict):
        return [annotation, *(arm for one in typing.get_args(annotation) if one is not ... for arm in _arms(one))]
    return [annotation]


def _types(annotation: Any) -> Iterable[str]:
    for arm in _arms(annotation):
        if typing.get_origin(arm) is typing.Literal:
            yield from (f"= {value}" for value in typing.get_args(arm))
        elif isinstance(arm, type) and issubclass(arm, enum.Enum):
            yield from (f"= {member.value}" for member in arm)
        elif isinstance(arm, type) and issubclass(arm, BaseModel):
            yield "table"
        elif typing.get_origin(arm) is not None:
            yield typing.get_origin(arm).__name__
        elif isinstance(arm, type):
            yield arm.__name__


def environment(logs: Iterable[str]) -> Table:
    """`TOWLINE_…` in the text of the program, and what a harness finds in its environment."""
    found: Table = {}
    for path in Path(towline.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for name in re.findall(r"\bTOWLINE_[A-Z]+(?:_[A-Z]+)*\b(?!__)", node.value):
                    found[f"read or set: {name}"] = ""
    for text in logs:
        for line in text.splitlines():
            if line.startswith("environment "):
                found.update({f"of a harness: {name}": "" for name in json.loads(line.removeprefix("environment "))})
    return found


# Metrics


def metrics(text: str) -> Table:
    found: Table = {}
    for metric in [*ServerMetrics().registry.collect(), *engine_figures([], _NoDispatcher())]:  # type: ignore[arg-type]
        found[f"{metric.name} {metric.type}"] = ""
    for collector in ServerMetrics().registry._collector_to_names:
        for label in getattr(collector, "_labelnames", ()):
            found[f"{collector._name} label {label}"] = ""  # type: ignore[attr-defined]
    for family in engine_figures([], _NoDispatcher()):  # type: ignore[arg-type]
        for label in getattr(family, "_labelnames", ()):
            found[f"{family.name} label {label}"] = ""
    for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE):
        found[f"served: {name}"] = ""
    return found


class _NoDispatcher:
    def waiting_for(self, _: object) -> int:
        return 0


# Files


def disk(folder: Path) -> Table:
    """The files under a folder, and the fields in each."""
    found: Table = {}
    for path in sorted(folder.rglob("*")):
        place = _name(path.relative_to(folder))
        if path.is_file() and not place.startswith(_NOT_OURS) and "sandboxes/" not in place:
            found[place] = ""
            merge(found, {f"{_format(place)} {name}": meaning for name, meaning in _content(path).items()})
    return found


_NOT_OURS = (
    "model/",
    "tasks.jsonl",
    "scored.jsonl",
    "held.jsonl",
    "broken.jsonl",
    "late.jsonl",
    "replies.py",
    "holding.py",
    "gateway/open.json",
)


def _name(path: Path) -> str:
    name = re.sub(r"(alpha|beta|gamma|held|late|broken|train)[\w.-]*-[0-9a-f]{8}", "*", path.as_posix())
    name = re.sub(r"store-[0-9a-f]{16}/\d+-[0-9a-f]{8}/(?:[\w.-]+-[0-9a-f]{16}-)?\d{6}/\d{9}", "store-*/*/*/*", name)
    name = re.sub(r"store-[0-9a-f]{16}", "store-*", name)
    name = re.sub(r"\d{8}\.seg", "*.seg", name)
    return re.sub(r"weights/v\d+", "weights/v*", name)


def _format(place: str) -> str:
    """The name of a file's format: a format that several commands write is listed once."""
    for mark, name in _FORMATS.items():
        if mark in place:
            return f"train {name}" if place.startswith("train/") else name
    return place


_FORMATS = {"/journal/": "a journal", "/trajectories/": "a trajectory", "/segments/store-*/*": "a segment"} | {
    "towline.db": "a store", "traces.parquet": "traces.parquet", "progress.jsonl": "progress.jsonl", "recipe.json": "recipe.json"
}  # fmt: skip


def _content(path: Path) -> Table:
    match path.suffix:
        case ".json":
            return keys(json.loads(path.read_text()), "")
        case ".jsonl":
            found: Table = {}
            for line in path.read_text().splitlines():
                merge(found, keys(json.loads(line), ""))
            return found
        case ".arrow":
            return _arrow(path)
        case ".parquet":
            return _columns(pq.read_schema(path))
        case ".db":
            return _tables(path)
        case ".seg" if "train" not in path.parts:
            return _journal(path.parent)
        case ".pt":
            return _checkpoint(path)
    return {}


def _arrow(path: Path) -> Table:
    with pa.memory_map(str(path)) as source:
        for reader in (pa.ipc.open_file, pa.ipc.open_stream):
            try:
                return _columns(reader(source).schema)
            except pa.ArrowInvalid:
                source.seek(0)
    return {"unreadable": ""}


def _columns(schema: Any) -> Table:
    found: Table = {}

    def walk(kind: Any, place: str) -> None:
        if pa.types.is_struct(kind):
            for field in kind:
                walk(field.type, f"{place}.{field.name}")
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            walk(kind.value_type, f"{place}[]")
        else:
            found[place] = str(kind)

    for field in schema:
        walk(field.type, field.name)
    for name, value in (schema.metadata or {}).items():
        if name.startswith(b"towline"):
            found[f"metadata {name.decode()}"] = value.decode() if len(value) < 40 else ""
    return found


def _tables(path: Path) -> Table:
    found: Table = {}
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for _, name, kind, required, _, key in database.execute(f"PRAGMA table_info({table})"):
                found[f"{table}.{name}"] = f"{kind}{' not null' if required else ''}{' key' if key else ''}"
    return found


def _journal(folder: Path) -> Table:
    found: Table = {}
    header = next(iter(sorted(folder.glob("*.seg")))).read_bytes()[:12]
    found[f"magic {header[:8].decode()}"] = f"version {int.from_bytes(header[8:12], 'little')}"
    for record in replay(folder):
        for name, meaning in keys(record.fields, record.kind).items():
            merge(found, {name: meaning})
        for name, array in record.arrays.items():
            found[f"{record.kind} array {name}"] = array.dtype.str
    return {name: meaning for name, meaning in found.items() if ".settings." not in name}


def _checkpoint(path: Path) -> Table:
    import torch

    state = torch.load(path, weights_only=True)
    found = {f"{name}": type(value).__name__ for name, value in state.items()}
    return found | keys(json.loads(state["extra"]), "extra:")


# Imports

MODULES = {
    "": "calls",
    "client": "methods",
    "schema": "fields",
    "conversation": "fields",
    "errors": "fields",
    "engines.scripted": "calls",
    "trainers.areal": "calls",
    "trainers.grpo": "calls",
    "trainers.nemo_gym": "calls",
    "trainers.nemo_rl": "calls",
    "trainers.prime_rl": "calls",
    "trainers.skyrl": "calls",
    "trainers.slime": "calls",
    "trainers.tinker": "calls",
    "trainers.trl": "calls",
    "trainers.verifiers": "calls",
    "trainers.verl": "calls",
}
"""Modules that users import, or name in their configuration, and how much of their content is frozen besides its names: how
it is called, its methods too, or its fields and constants too. Names lack `towline.`: they are what users write, and no
move of a module may change them here."""
NAMED = ("trainers.packing.by_group", "trainers.packing.Dropped", "trainers.service.own_service")
"""Further names that the examples of the adapters tell users to import."""
RUN = ("", "assets", "trainers.nemo_gym")
"""Modules that users run with `python -m`."""


def imports(known: Iterable[str] = ()) -> Table:
    """What the modules define, and the `known` names, wherever those are defined now."""
    paths = {re.split(r"[( ]", entry.removeprefix("from towline: "))[0] for entry in known}
    found: Table = {f"python -m {name}": "" for name in RUN if _runs(_full(name))}
    for name, depth in MODULES.items():
        module = importlib.import_module(_full(name))
        found[name] = ""
        kept = {path.removeprefix(f"{name}.").split(".")[0] for path in paths if path.startswith(f"{name}.")}
        for attribute in sorted({*_public(module), *(one for one in kept if one in vars(module))}):
            _define(found, f"{name}.{attribute}".lstrip("."), getattr(module, attribute), depth)
    for path in NAMED:
        name, _, attribute = path.rpartition(".")
        value = getattr(importlib.import_module(_full(name)), attribute, None)
        if value is not None:
            _define(found, path, value, "calls")
    source = inspect.getsource(importlib.import_module(_full("trainers.areal")))
    if "TowlineWorkflow" in source:  # created on first access, from a class of the framework
        found["trainers.areal.TowlineWorkflow"] = "class"
    return {f"from towline: {name}": meaning for name, meaning in found.items()}


def _full(name: str) -> str:
    return f"towline.{name}".rstrip(".")


def _runs(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        return importlib.util.find_spec(f"{name}.__main__") is not None
    return spec is not None and "__main__" in inspect.getsource(importlib.import_module(name))


def _public(module: types.ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (getattr(value, "__module__", "") or "").startswith(module.__name__)
        and inspect.isclass(value) | inspect.isfunction(value)
    )  # fmt: skip


def _define(found: Table, place: str, value: Any, depth: str) -> None:
    if inspect.isclass(value):
        found[place] = "class"
        if issubclass(value, enum.Enum):
            found.update({f"{place}.{member.name}": repr(member.value) for member in value})
            return
        for base in value.__mro__[1:]:
            if base.__module__.split(".")[0] == "builtins" and issubclass(value, Exception) and base is not object:
                found[f"{place} is a {base.__name__}"] = ""
        if issubclass(value, BaseModel):
            for name, field in value.model_fields.items():
                default = (
                    field.default if field.default_factory is None else field.get_default(call_default_factory=True)
                )
                required = field.is_required() or (field.default is PydanticUndefined and field.default_factory is None)
                found[f"{place}.{name}"] = "required" if required else f"default {_shown(default)}"
        elif dataclasses.is_dataclass(value):
            for one in (field for field in dataclasses.fields(value) if not field.name.startswith("_") and field.init):
                factory = one.default_factory is not dataclasses.MISSING
                required = one.default is dataclasses.MISSING and not factory
                found[f"{place}.{one.name}"] = (
                    "required" if required else "default" if factory else f"default {_shown(one.default)}"
                )
        elif inspect.isfunction(value.__init__) and value.__init__.__module__.startswith("towline"):
            _parameters(found, place, value.__init__)
        if depth in ("methods", "fields"):
            for name, method in inspect.getmembers(value, callable):
                if not name.startswith("_") and (getattr(method, "__module__", "") or "").startswith("towline"):
                    found[f"{place}.{name}()"] = ""
                    _parameters(found, f"{place}.{name}", method)
    elif inspect.isfunction(value):
        found[place] = "function"
        _parameters(found, place, value)
    elif depth == "fields" and isinstance(value, str | int | float):
        found[place] = repr(value)
    elif place != "__version__":
        found[place] = ""


def _parameters(found: Table, place: str, value: Callable[..., Any]) -> None:
    for name, one in inspect.signature(value).parameters.items():
        if name in ("self", "cls"):
            continue
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        default = "required" if one.default is one.empty else f"default {_shown(one.default)}"
        found[f"{place}({stars}{name})"] = "" if stars else default


def _shown(value: Any) -> str:
    """A default as text that does not depend on the machine, the process or the name of a class."""
    if value is None or isinstance(value, bool | int | float | str):
        return json.dumps(value.value if isinstance(value, enum.Enum) else value)
    if isinstance(value, enum.Enum):
        return json.dumps(value.value)
    if isinstance(value, Path):
        return json.dumps(str(value))
    if isinstance(value, frozenset | set):
        return f"{{{', '.join(sorted(map(_shown, value)))}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return json.dumps({str(k): _shown(v) for k, v in value.items()}, sort_keys=True)
    return "…"
