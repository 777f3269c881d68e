"""Fixtures of the gateway's tests. The codec is loaded once: that takes longer than most tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from support.gateway.gateway_rig import Rig, Start, running_gateway
from towline.tokens.codec import ModelCodec
from towline.tokens.loading import load_codec


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the command line runs the gateway in."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def codec(assets: Path) -> ModelCodec:
    return load_codec(assets / "tokenizers" / "qwen3")


@pytest.fixture
def start(codec: ModelCodec, tmp_path: Path) -> Start:
    """`async with start(script, **settings) as rig`; on one data folder a test."""

    def begin(*arguments: Any, **options: Any) -> AbstractAsyncContextManager[Rig]:
        return partial(running_gateway, codec, tmp_path / "data")(*arguments, **options)

    return begin
