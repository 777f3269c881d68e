"""`towline doctor`: its checks, its messages and its exit status."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from towline.cli.doctor import Finding, Level, worst
from towline.cli.doctor import engine as model
from towline.cli.doctor import machine as place
from towline.cli.doctor.command import doctor
from towline.cli.engines import make_codec
from towline.config import ModelSettings, ServerSettings, Settings
from towline.demo import tokenizer
from towline.engines.base import CaptureLevel, EngineInfo
from towline.engines.embedded import EmbeddedEngine
from towline.engines.embedded.config import DecoderConfig
from towline.engines.embedded.model import create_decoder
from towline.engines.scripted import Say, ScriptedEngine
from towline.gateway.gateway import Gateway
from towline.harnesses.install import Installs
from towline.schema import Trajectory
from towline.tokens.loading import load_codec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tokenizer.write(made)
    return made


def examine(*words: str) -> tuple[int, dict[str, Any]]:
    app = typer.Typer()
    app.command()(doctor)
    done = CliRunner().invoke(app, [*words, "--json"])
    return done.exit_code, json.loads(done.stdout)


UNKNOWN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}@@{{ c.function.name }} {{ c.function.arguments|tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_template_with_unparsed_tool_calls_is_reported(folder: Path, tmp_path: Path, assets: Path) -> None:
    """In the doctor's findings, and in one line wherever a model is loaded."""
    template = tmp_path / "unknown.jinja"
    template.write_text(UNKNOWN)
    output = "tool calls of this template reach the harness as text"
    for given, unknown in ((template, True), (None, False)):
        settings = ModelSettings(folder=assets / "tokenizers" / "qwen3", template=given)
        console = Console(file=io.StringIO(), width=200)
        codec = make_codec(settings, assets / "tokenizers" / "qwen3", console)
        assert isinstance(console.file, io.StringIO)
        assert (output in console.file.getvalue()) is unknown
        assert (
            any(output in found.message and found.level is Level.WARNING for found in model.check_template(codec))
            is unknown
        )
    named = make_codec(
        ModelSettings(template=template, format="hermes"), assets / "tokenizers" / "qwen3", Console(quiet=True)
    )
    assert not named.calls_as_text


def test_required_checks_decide_the_exit_status(folder: Path, tmp_path: Path) -> None:
    fixed = ["--engine", "scripted", "--model", str(folder), "--sandbox", "process", "--data", str(tmp_path / "data")]
    code, output = examine(*fixed, "--harness", "shell")
    found = {(one["area"], one["name"]): one for one in output["findings"]}
    assert (code, output["ok"]) == (0, True)
    assert found["engine", "scripted"]["figures"]["capture"] == "tokens"
    assert "capture level tokens" in found["engine", "scripted"]["said"]
    assert found["engine", "a conversation"]["figures"]["chains"] == 1
    assert 0 <= found["engine", "re-tokenisation skew"]["figures"]["plain_difference"] <= 1
    # The scripted engine has no cache, and says nothing of one.
    assert found["engine", "prefix caching"]["level"] == "note"
    assert len(found["engine", "prefix caching"]["figures"]["cached"]) >= 3
    assert found["template", "sentinel"]["level"] == "ok"
    # It works, with a warning.
    assert found["sandboxes", "process (default)"]["level"] == "warning"
    assert "no isolation" in found["sandboxes", "process (default)"]["said"]
    assert found["harnesses", "shell"]["level"] == "ok"
    assert found["harnesses", "codex"]["fix"] == "towline harness install codex"
    assert found["database", "store"]["level"] == "ok"
    assert not (tmp_path / "data").exists(), "nothing is made where the service would be"

    code, output = examine(*fixed, "--harness", "codex", "--harness", "nobody")
    broken = {one["name"]: one for one in output["findings"] if one["level"] == "broken"}
    assert (code, output["ok"]) == (1, False)
    assert set(broken) == {"codex", "nobody"}

    code, output = examine(
        "--engine", "openai", "--upstream", "http://127.0.0.1:9/v1", "--upstream-model", "m", *fixed[4:]
    )
    broken = {one["name"]: one for one in output["findings"] if one["level"] == "broken"}
    assert code == 1
    assert "chat completions" in broken["openai"]["said"]
    assert "--upstream" in broken["openai"]["fix"]


async def test_retokenization_skew_is_measured_on_sampled_tokens(folder: Path, tmp_path: Path) -> None:
    """A model that spells a word in other tokens than a tokenizer would is what re-tokenising gets wrong."""
    codec = load_codec(folder, renderer="sentinel")
    settings = Settings.load(gateway={"port": 0, "control_port": 0, "data": tmp_path, "journal": "none"})

    def odd(request: Any) -> Say:
        letters = [codec.tokenizer.encode(letter)[0] for letter in "registry lamp colour"]
        return Say(ids=[*letters, min(codec.stop_ids)])  # type: ignore[arg-type]

    gateway = Gateway(ScriptedEngine(codec, odd), codec, settings.gateway, defaults=settings.session, model="odd")
    found = {one.name: one for one in await model.check_engine(gateway, codec)}
    assert found["a conversation"].level is Level.OK
    assert found["re-tokenisation skew"].values["plain_difference"] > 0.05


async def test_cache_hits_are_measured_per_turn(folder: Path, tmp_path: Path) -> None:
    """A turn finds in the cache what the turn before left there; an engine that only says so is found out."""
    codec = load_codec(folder, renderer="sentinel")
    shape = DecoderConfig("llama", codec.tokenizer.size, 32, 64, 2, 2, 1, 16, 8192)
    settings = Settings.load(gateway={"port": 0, "control_port": 0, "data": tmp_path, "journal": "none"})
    engine = EmbeddedEngine(create_decoder(shape, 0), decode=codec.tokenizer.decode, seed=0)
    gateway = Gateway(engine, codec, settings.gateway, defaults=settings.session, model="small")
    found = {one.name: one for one in await model.check_engine(gateway, codec)}
    assert "embedded" in found
    cache = found["prefix caching"]
    assert cache.level is Level.OK
    first, *later = zip(cache.values["cached"], cache.values["prompts"], strict=True)
    assert len(later) >= 2
    assert first[0] == 0
    assert all(cached > before for (cached, _), (_, before) in zip(later, [first, *later], strict=False))
    assert f"{later[0][0]} of {later[0][1]}" in cache.message

    (name,) = os.listdir(tmp_path / "trajectories")
    trajectory = Trajectory.read(tmp_path / "trajectories" / name)
    cold = trajectory.model_copy(
        update={"turns": [t.model_copy(update={"cached_tokens": 0}) for t in trajectory.turns]}
    )
    for output, level in (("on", Level.WARNING), ("off", Level.WARNING), ("unknown", Level.NOTE)):
        info = EngineInfo("x", CaptureLevel.TOKENS, 1, 1, {"prefix_caching": output})
        assert model.caching_finding(cold, info).level is level
    silent = EngineInfo("x", CaptureLevel.TOKENS, 1, 1, {"prefix_caching": "on", "cached_tokens": "not reported"})
    assert "--enable-prompt-tokens-details" in model.caching_finding(cold, silent).fix


async def test_every_capture_level_has_a_message(tmp_path: Path) -> None:
    for capture in CaptureLevel:
        level, printed, fix = model._CAPTURE[capture]
        assert printed
        assert (level is Level.OK) == (not fix)
    elsewhere = Settings(server=ServerSettings(data=tmp_path, database="postgresql://nobody@127.0.0.1:9/none"))
    assert (await place.check_database(elsewhere)).level is Level.BROKEN
    machine = await place.check_machine(
        Settings(server=ServerSettings(data=tmp_path / "not" / "yet")), Installs(tmp_path)
    )
    assert {one.name for one in machine} >= {"disk of data", "open files", "processors"}
    assert worst([]) is Level.OK
    assert worst([Finding("a", "b", Level.NOTE, ""), Finding("a", "b", Level.BROKEN, "")]) is Level.BROKEN
