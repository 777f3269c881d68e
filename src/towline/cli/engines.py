"""Build the engine, its codec and the gateway that the settings ask for.

Engines in this process load the model themselves. Servers behind `--upstream` are reached over HTTP; for them the model
folder provides the tokenizer and the chat template, and several URLs are replicas of one model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import urlsplit

from rich.console import Console

from towline.cli import terminal
from towline.config import EngineKind, EngineSettings, ModelSettings, Settings
from towline.errors import ConfigError

if TYPE_CHECKING:
    from towline.engines.base import Engine
    from towline.gateway.gateway import Gateway
    from towline.tokens.codec import ModelCodec
    from towline.tokens.templates.sentinel import SentinelCodec

REMOTE = ("vllm", "sglang", "openai")
TRAINABLE = ("embedded", "vllm", "sglang")
"""Engines that take new weights from a model folder."""
_GGUF = ".gguf"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An engine and what a gateway needs to know of its model."""

    engine: Engine
    codec: ModelCodec
    name: str
    """The name under which the gateway lists the model."""
    folder: Path | None
    """Where the tokenizer and the chat template are; `None` if the server renders prompts itself."""


def engine_overrides(
    engine: str | None = None, upstream: Sequence[str] | None = None, upstream_model: str | None = None
) -> dict[str, Any]:
    """The `engine` section that the options of a command override."""
    kinds = get_args(EngineKind)
    if engine is not None and engine not in kinds:
        raise ConfigError(f"unknown --engine {engine}; choose one of {', '.join(kinds)}")
    # URLs in the settings file belong to the engine named there, not to an in-process one chosen on the command line.
    local = engine is not None and engine not in REMOTE and not upstream
    return {"kind": engine, "urls": () if local else tuple(upstream or ()) or None, "model": upstream_model}


def make_gateway(settings: Settings, console: Console, script: Path | None = None) -> tuple[Gateway, ModelCodec]:
    """A gateway over the engines of the settings. `script` is the operator's `--script` file, which no setting can name."""
    from towline.gateway.gateway import Gateway
    from towline.gateway.model_routes import ModelRoute

    policy = make_engine(settings.engine, settings.model, console, script)
    others = {}
    for name, further in settings.engines.items():
        try:
            made = make_engine(further.engine, further.model, console)
        except ConfigError as error:
            raise ConfigError(f"engines.{name}: {error}") from error
        stall_seconds = further.engine.stall_seconds
        others[name] = ModelRoute(made.engine, made.codec, name, made.name, stall_seconds=stall_seconds)
    gateway = Gateway(
        policy.engine,
        policy.codec,
        settings.gateway,
        defaults=settings.session,
        model=policy.name,
        others=others,
        stall_seconds=settings.engine.stall_seconds,
    )
    settings.gateway.data.mkdir(parents=True, exist_ok=True)
    if policy.folder is not None:
        note = {"folder": str(policy.folder.resolve()), "name": policy.name}
        (settings.gateway.data / "model.json").write_text(json.dumps(note))
    return gateway, policy.codec


def make_engine(
    chosen: EngineSettings, model: ModelSettings, console: Console, script: Path | None = None
) -> ServedModel:
    _check(chosen, model)
    if script is not None:
        if chosen.kind != "scripted":
            raise ConfigError(f"--script is for --engine scripted, not for {chosen.kind}")
        return _scripted(chosen, model, console, script)
    return _MAKERS[chosen.kind](chosen, model, console)


def script_recipe(gateway: Gateway) -> dict[str, str]:
    """The part of a run's recipe that identifies its script: samples of another script are not resumed."""
    from towline.engines.script_file import ScriptFile
    from towline.engines.scripted import ScriptedEngine

    file = gateway.engine.file if isinstance(gateway.engine, ScriptedEngine) else None
    return {"script": file.digest} if isinstance(file, ScriptFile) else {}


def _check(chosen: EngineSettings, model: ModelSettings) -> None:
    """Reject combinations that cannot work, before anything is loaded."""
    kind, place = chosen.kind, model.folder
    if kind not in REMOTE and chosen.urls:
        raise ConfigError(
            f"--engine {kind} runs in this process and takes no --upstream; for a server use {', '.join(REMOTE)}"
        )
    if kind in REMOTE and not chosen.urls:
        raise ConfigError(f"--engine {kind} needs the URL of its server: --upstream URL")
    for url in chosen.urls:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigError(f"--upstream {url} is not an http:// or https:// URL")
    if len(set(chosen.urls)) != len(chosen.urls):
        raise ConfigError("an --upstream is given twice; give each URL once")
    if kind == "smollm2" and place is not None:
        raise ConfigError("--engine smollm2 has its own model; for another one use --engine llamacpp --model FILE.gguf")
    if kind == "llamacpp" and place is None:
        raise ConfigError("--engine llamacpp needs --model FILE.gguf")
    if kind not in ("llamacpp", "smollm2") and place is not None and place.suffix == _GGUF:
        raise ConfigError(f"{place} is a GGUF file; it needs --engine llamacpp")
    if kind in ("vllm", "sglang") and place is None:
        raise ConfigError(f"--engine {kind} needs --model FOLDER for the tokenizer and the chat template")


def _embedded(chosen: EngineSettings, model: ModelSettings, console: Console) -> ServedModel:
    folder = model_folder(model, console)
    codec = make_codec(model, folder, console)
    try:
        from towline.engines.embedded import EmbeddedEngine
    except ImportError as error:
        raise ConfigError("the embedded engine needs torch: pip install 'towline[torch]'") from error
    engine = EmbeddedEngine(
        folder,
        decode=codec.tokenizer.decode,
        max_batch=chosen.max_batch or 16,
        threads=chosen.threads,
        seed=chosen.seed,
        **_context(chosen),
    )
    return ServedModel(engine, codec, model.name or folder.name, folder)


def _scripted(
    chosen: EngineSettings, model: ModelSettings, console: Console, script: Path | None = None
) -> ServedModel:
    from towline.engines.script_file import ScriptFile
    from towline.engines.scripted import ScriptedEngine

    file = ScriptFile(script) if script is not None else None
    folder = model_folder(model, console)
    codec = make_codec(model, folder, console)
    return ServedModel(ScriptedEngine(codec, file=file, **_context(chosen)), codec, model.name or folder.name, folder)


def _smollm2(chosen: EngineSettings, model: ModelSettings, console: Console) -> ServedModel:
    from towline.engines.llamacpp import find_smollm2

    return _llamacpp(chosen, model.model_copy(update={"folder": find_smollm2()}), console)


def _llamacpp(chosen: EngineSettings, model: ModelSettings, console: Console) -> ServedModel:
    from towline.engines.llamacpp import GgufFile, LlamaCppEngine
    from towline.engines.llamacpp import model_folder as folder_of

    assert model.folder is not None
    gguf = GgufFile.find(model.folder)
    folder = folder_of(gguf)
    codec = make_codec(model, folder, console)
    engine = LlamaCppEngine(
        gguf.path,
        decode=codec.tokenizer.decode,
        slots=chosen.max_batch or 4,
        threads=chosen.threads,
        seed=chosen.seed,
        **_context(chosen),
    )
    return ServedModel(engine, codec, model.name or gguf.name, folder)


def _served(chosen: EngineSettings, model: ModelSettings, console: Console) -> ServedModel:
    """vLLM or SGLang: a pool of replicas. A pool of one still limits the load and waits for an unreachable server."""
    from towline.engines.pool import EnginePool, Upstreams

    folder = model_folder(model, console)
    codec = make_codec(model, folder, console)
    key = os.environ.get(chosen.key_variable, "")
    name = model.name or chosen.model or folder.name
    upstreams = Upstreams(chosen.urls, lambda url: _server(chosen, url, key), api_key=key)
    pool = EnginePool({}, listing=upstreams, start_seconds=chosen.start_seconds or 0.0)
    return ServedModel(pool, codec, name, folder)


def _server(chosen: EngineSettings, url: str, key: str) -> Engine:
    if chosen.kind == "sglang":
        from towline.engines.sglang import SglangEngine

        return SglangEngine(url, model=chosen.model, api_key=key)
    from towline.engines.vllm import VllmEngine

    return VllmEngine(url, model=chosen.model, api_key=key)


def _openai(chosen: EngineSettings, model: ModelSettings, console: Console) -> ServedModel:
    from towline.engines.openai import ChatServerEngine
    from towline.tokens.server_rendered import ServerRenderedCodec
    from towline.tokens.tokenizer import Tokenizer

    if len(chosen.urls) != 1 or not chosen.model:
        raise ConfigError("--engine openai needs one --upstream URL and --upstream-model NAME")
    tokenizer = Tokenizer.load(model.folder) if model.folder is not None else None
    key = os.environ.get(chosen.key_variable, "")
    engine = ChatServerEngine(chosen.urls[0], chosen.model, api_key=key, tokenizer=tokenizer)
    return ServedModel(
        engine, ServerRenderedCodec(tokenizer or Tokenizer.unknown()), model.name or chosen.model, model.folder
    )


def _context(chosen: EngineSettings) -> dict[str, Any]:
    return {} if chosen.context is None else {"context": chosen.context}


def model_folder(model: ModelSettings, console: Console) -> Path:
    """The model to serve; by default the tiny model, created on first use."""
    if model.folder is not None:
        if not model.folder.is_dir():
            raise ConfigError(f"model folder {model.folder} does not exist; check --model or model.folder")
        return model.folder
    return tiny_model(console)


def tiny_model(console: Console, folder: Path | None = None) -> Path:
    """The folder of the tiny model, created if it does not exist."""
    from towline.demo import tiny_model as tiny

    with terminal.progress_reporter(console, "tiny model") as report:
        return tiny.create(folder or tiny.default_folder(), progress=report)


def make_codec(model: ModelSettings, folder: Path, console: Console) -> SentinelCodec:
    from towline.tokens.codec import SpecialText
    from towline.tokens.loading import load_codec
    from towline.tokens.templates.self_check import CALLS_AS_TEXT_WARNING

    with console.status("loading the tokenizer and checking the template"):
        codec = load_codec(
            folder,
            template=model.template,
            renderer=model.renderer,
            format=model.format,
            special_text=SpecialText(model.special_text),
        )
    for problem in (*codec.check.problems, *([CALLS_AS_TEXT_WARNING] if codec.calls_as_text else [])):
        console.print(f"[yellow]template:[/] {terminal.escape_markup(problem)}", highlight=False)
    return codec


_MAKERS: dict[str, Callable[[EngineSettings, ModelSettings, Console], ServedModel]] = {
    "embedded": _embedded,
    "scripted": _scripted,
    "llamacpp": _llamacpp,
    "smollm2": _smollm2,
    "vllm": _served,
    "sglang": _served,
    "openai": _openai,
}
