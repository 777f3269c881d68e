"""`towline doctor` over the real vLLM: what it is, what it captures, and both skew and cache hits as measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.engines.vllm_server import Server
from support.harnesses.harness_rig import qwen3
from towline.cli.doctor import Level
from towline.cli.doctor import engine as model
from towline.config import GatewaySettings
from towline.engines.pool import EnginePool
from towline.engines.vllm import VllmEngine
from towline.gateway.gateway import Gateway


async def test_the_doctor_names_the_engine_and_measures_skew_and_cache_hits(
    engine: VllmEngine, server: Server, tmp_path: Path, measured: Callable[..., None]
) -> None:
    settings = GatewaySettings(port=0, control_port=0, data=tmp_path)
    gateway = Gateway(EnginePool({"one": VllmEngine(server.url)}), qwen3(), settings, model="tiny")
    found = {one.name: one for one in await model.check_engine(gateway, qwen3(), "vllm")}
    assert {one.level for one in found.values()} == {Level.OK}
    assert "capture level tokens" in found["vllm"].message
    assert "route /inference/v1/generate" in found["vllm"].message
    assert found["a conversation"].values["turns"] >= 3
    # What a random model samples is nothing that a tokenizer would write.
    skew = found["re-tokenisation skew"].values["plain_difference"]
    assert 0 < skew < 1
    caching = found["prefix caching"]
    assert caching.message.startswith("on: ")
    assert sum(caching.values["cached"]) > 0
    measured(skew=skew, reused=caching.values["reused"] / caching.values["reusable"])
