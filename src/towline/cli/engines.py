"""From settings to an engine with its codec, for every kind of engine, and to a gateway over them.

Engines in this process read the model themselves; those behind `--upstream` are asked over HTTP and need the model folder
for its tokenizer and template. Several URLs are replicas of one model.
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

from towline.cli import common
from towline.config import EngineKind, EngineSettings, ModelSettings, Settings
from towline.errors import ConfigError

if TYPE_CHECKING:
    from towline.engines.base import Engine
    from towline.gateway.gateway import Gateway
    from towline.tokens.codec import Codec
    from towline.tokens.template import SentinelCodec

REMOTE = ("vllm", "sglang", "openai")
TRAINABLE = ("embedded", "vllm", "sglang")
"""Engines that take new weights from a model folder."""
_GGUF = ".gguf"


@dataclass(frozen=True, slots=True)
class Made:
    engine: Engine
    codec: Codec
    name: str
    """Of the model."""
    folder: Path | None
    """Where its tokenizer and template are."""


def given(
    engine: str | None = None, upstream: Sequence[str] | None = None, upstream_model: str | None = None
) -> dict[str, Any]:
    """The `engine` section that the options of a command make."""
    kinds = get_args(EngineKind)
    if engine is not None and engine not in kinds:
        raise ConfigError(f"--engine {engine}: there are {', '.join(kinds)}")
    # An engine in this process is not at the addresses that a settings file has for another.
    own = engine is not None and engine not in REMOTE and not upstream
    return {"kind": engine, "urls": () if own else tuple(upstream or ()) or None, "model": upstream_model}


def make_gateway(settings: Settings, console: Console, script: Path | None = None) -> tuple[Gateway, Codec]:
    """`script` is `--script`: a file of the operator's, which no setting can name."""
    from towline.gateway.gateway import Gateway
    from towline.gateway.lanes import Lane

    policy = make(settings.engine, settings.model, console, script)
    others = {}
    for name, further in settings.engines.items():
        try:
            made = make(further.engine, further.model, console)
        except ConfigError as error:
            raise ConfigError(f"engines.{name}: {error}") from error
        stall_seconds = further.engine.stall_seconds
        others[name] = Lane(made.engine, made.codec, name, made.name, stall_seconds=stall_seconds)
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


def make(chosen: EngineSettings, model: ModelSettings, console: Console, script: Path | None = None) -> Made:
    _check(chosen, model)
    if script is not None:
        if chosen.kind != "scripted":
            raise ConfigError(f"--script is for --engine scripted, not for {chosen.kind}")
        return _scripted(chosen, model, console, script)
    return _MAKERS[chosen.kind](chosen, model, console)


def script_recipe(gateway: Gateway) -> dict[str, str]:
    """What a run's recipe says of its script: another one makes other samples."""
    from towline.engines.script_file import ScriptFile
    from towline.engines.scripted import ScriptedEngine

    file = gateway.engine.file if isinstance(gateway.engine, ScriptedEngine) else None
    return {"script": file.digest} if isinstance(file, ScriptFile) else {}


def _check(chosen: EngineSettings, model: ModelSettings) -> None:
    """Refuse what does not go together, before anything is loaded."""
    kind, place = chosen.kind, model.folder
    if kind not in REMOTE and chosen.urls:
        raise ConfigError(
            f"--engine {kind} runs in this process and takes no --upstream; say what is behind it: {', '.join(REMOTE)}"
        )
    if kind in REMOTE and not chosen.urls:
        raise ConfigError(f"--engine {kind} needs --upstream URL, where its server is")
    for url in chosen.urls:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigError(f"--upstream {url} is no http:// or https:// address")
    if len(set(chosen.urls)) != len(chosen.urls):
        raise ConfigError("an --upstream is named twice")
    if kind == "smollm2" and place is not None:
        raise ConfigError(
            "--engine smollm2 brings its own model; for another file: --engine llamacpp --model FILE.gguf"
        )
    if kind == "llamacpp" and place is None:
        raise ConfigError("--engine llamacpp needs --model FILE.gguf")
    if kind not in ("llamacpp", "smollm2") and place is not None and place.suffix == _GGUF:
        raise ConfigError(f"{place} is a GGUF file, and needs --engine llamacpp")
    if kind in ("vllm", "sglang") and place is None:
        raise ConfigError(f"--engine {kind} needs --model FOLDER, the model's tokenizer and chat template")


def _embedded(chosen: EngineSettings, model: ModelSettings, console: Console) -> Made:
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
    return Made(engine, codec, model.name or folder.name, folder)


def _scripted(chosen: EngineSettings, model: ModelSettings, console: Console, script: Path | None = None) -> Made:
    from towline.engines.script_file import ScriptFile
    from towline.engines.scripted import ScriptedEngine

    file = ScriptFile(script) if script is not None else None
    folder = model_folder(model, console)
    codec = make_codec(model, folder, console)
    return Made(ScriptedEngine(codec, file=file, **_context(chosen)), codec, model.name or folder.name, folder)


def _smollm2(chosen: EngineSettings, model: ModelSettings, console: Console) -> Made:
    from towline.engines.llamacpp import smollm2

    return _llamacpp(chosen, model.model_copy(update={"folder": smollm2.find()}), console)


def _llamacpp(chosen: EngineSettings, model: ModelSettings, console: Console) -> Made:
    from towline.engines.llamacpp import Gguf, LlamaCppEngine
    from towline.engines.llamacpp import model_folder as folder_of

    assert model.folder is not None
    gguf = Gguf.find(model.folder)
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
    return Made(engine, codec, model.name or gguf.name, folder)


def _served(chosen: EngineSettings, model: ModelSettings, console: Console) -> Made:
    """vLLM or SGLang: a pool of servers. A pool of one keeps its load in bounds and waits for it when it is away."""
    from towline.engines.pool import Pool

    folder = model_folder(model, console)
    codec = make_codec(model, folder, console)
    key = os.environ.get(chosen.key_variable, "")
    name = model.name or chosen.model or folder.name
    pool = Pool({urlsplit(url).netloc: _server(chosen, url, key) for url in chosen.urls})
    return Made(pool, codec, name, folder)


def _server(chosen: EngineSettings, url: str, key: str) -> Engine:
    if chosen.kind == "sglang":
        from towline.engines.sglang import SglangEngine

        return SglangEngine(url, model=chosen.model, api_key=key)
    from towline.engines.vllm import VllmEngine

    return VllmEngine(url, model=chosen.model, api_key=key)


def _openai(chosen: EngineSettings, model: ModelSettings, console: Console) -> Made:
    from towline.engines.openai import ChatServerEngine
    from towline.tokens.elsewhere import ElsewhereCodec
    from towline.tokens.tokenizer import Tokenizer

    if len(chosen.urls) != 1 or not chosen.model:
        raise ConfigError("--engine openai needs one --upstream URL and --upstream-model NAME")
    tokenizer = Tokenizer.load(model.folder) if model.folder is not None else None
    key = os.environ.get(chosen.key_variable, "")
    engine = ChatServerEngine(chosen.urls[0], chosen.model, api_key=key, tokenizer=tokenizer)
    return Made(engine, ElsewhereCodec(tokenizer or Tokenizer.unknown()), model.name or chosen.model, model.folder)


def _context(chosen: EngineSettings) -> dict[str, Any]:
    return {} if chosen.context is None else {"context": chosen.context}


def model_folder(model: ModelSettings, console: Console) -> Path:
    """The model to serve; without one, the tiny model, made on first use."""
    if model.folder is not None:
        if not model.folder.is_dir():
            raise ConfigError(f"model folder {model.folder} does not exist")
        return model.folder
    return common.tiny(console)


def make_codec(model: ModelSettings, folder: Path, console: Console) -> SentinelCodec:
    from towline.tokens.codec import SpecialText
    from towline.tokens.loading import load_codec
    from towline.tokens.selfcheck import CALLS_AS_TEXT

    with console.status("loading the tokenizer and checking the template"):
        codec = load_codec(
            folder,
            template=model.template,
            renderer=model.renderer,
            format=model.format,
            special_text=SpecialText(model.special_text),
        )
    for problem in (*codec.check.problems, *([CALLS_AS_TEXT] if codec.calls_as_text else [])):
        console.print(f"[yellow]template:[/] {common.plain(problem)}", highlight=False)
    return codec


_MAKERS: dict[str, Callable[[EngineSettings, ModelSettings, Console], Made]] = {
    "embedded": _embedded,
    "scripted": _scripted,
    "llamacpp": _llamacpp,
    "smollm2": _smollm2,
    "vllm": _served,
    "sglang": _served,
    "openai": _openai,
}
