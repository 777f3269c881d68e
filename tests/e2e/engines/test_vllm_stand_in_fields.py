"""The stand-in of `tests/engines` says nothing that the real vLLM does not say: its fields are there, and of the same kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from support.engines import vllm_stand_in
from support.engines.vllm_server import Server
from towline.engines.base import SampleRequest
from towline.engines.embedded import DecoderConfig, create_decoder, save_decoder
from towline.engines.vllm import wire
from towline.engines.vllm.wire import VllmRoute

PROMPT = np.arange(1, 41, dtype=np.int32)
OUTSIDE = np.array([999_999], np.int32)


def bodies() -> dict[str, tuple[str, dict[str, Any] | None]]:
    """By name: a path and what to post there, or nothing to get it."""
    asked: dict[str, tuple[str, dict[str, Any] | None]] = {
        path: (path, None) for path in ("/version", "/v1/models", "/is_paused", "/weight_info")
    }
    asked["info"] = ("/server_info?config_format=json", None)
    for route in VllmRoute:
        stopped = SampleRequest(PROMPT, 4, stop_ids=frozenset({3}), stop_strings=("x",), seed=1)
        asked[f"{route} stream"] = (route, wire.turn_body(route, "tiny", stopped, 4, "salt"))
        params = wire.sampling_params(0.7) | {"logprobs": 2, "logprob_token_ids": [7, 0]}
        asked[f"{route} one"] = (route, wire.single_token_body(route, "tiny", PROMPT, params, "salt"))
        asked[f"{route} outside"] = (route, wire.single_token_body(route, "tiny", OUTSIDE, params, "salt"))
        asked[f"{route} other model"] = (route, wire.single_token_body(route, "other", PROMPT, params, "salt"))
    return asked


async def ask(url: str, path: str, body: dict[str, Any] | None) -> tuple[int, list[Any]]:
    """The status, and the answer or its events."""
    method = "GET" if body is None else "POST"
    async with aiohttp.ClientSession() as http, http.request(method, url + path, json=body) as response:
        data = await response.read()
        if not body or not body.get("stream"):
            return response.status, [orjson.loads(data)]
        lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
        assert lines[-1] == b"[DONE]"
        return response.status, [orjson.loads(line) for line in lines[:-1]]


def kind(value: Any) -> str:
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def fields(value: Any, at: str = "") -> set[str]:
    """Every field with the kind of its value. Names that are data, such as ids, and what is null, are left out."""
    if isinstance(value, dict):
        named = {("token_id:N" if name.startswith("token_id:") else name): inner for name, inner in value.items()}
        return set().union(*(fields(inner, f"{at}.{name}") for name, inner in named.items()))
    if isinstance(value, list):
        return set().union(*(fields(inner, f"{at}[]") for inner in value))
    return set() if value is None else {f"{at}: {kind(value)}"}


async def test_every_field_of_the_stand_in_is_one_of_the_real_server(server: Server, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = DecoderConfig("qwen3", 96, **sizes, num_key_value_heads=1, head_dim=8, initializer_range=0.5)
    save_decoder(create_decoder(config, 0), tmp_path)
    async with vllm_stand_in.served(vllm_stand_in.VllmStandIn(tmp_path)) as url:
        for name, (path, body) in bodies().items():
            real, told = await ask(server.url, path, body)
            status, made = await ask(url, path, body)
            assert status == real, name
            assert fields(made) <= fields(told), name
