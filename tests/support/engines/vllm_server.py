"""The real vLLM in processes of its own, on tiny random models with the real qwen3 tokenizer.

The program is that of `requirements/vllm.sh`; `TOWLINE_VLLM` names its environment. Every server is ended, by the process
group that was started here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from towline import assets
from towline.engines.embedded import DecoderConfig, create_decoder, save_decoder
from towline.tokens.tokenizer import Tokenizer

ENVIRONMENT = os.environ.get("TOWLINE_VLLM", "")
"""Read while tests are collected, before the user's settings are out of sight."""
CONTEXT = 32_768
STARTING = 600
"""Seconds after which a server is taken not to start: two cores may be shared with others."""
STEERABLE = ("--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--enable-prompt-tokens-details")


def shape(vocabulary: int, *, tied: bool = False) -> DecoderConfig:
    """Wide enough in its weights that every token depends on those before it."""
    return DecoderConfig(
        model_type="qwen3",
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )


def make_model(folder: Path, seed: int, *, tied: bool = False) -> Path:
    """A random model with the real tokenizer beside it."""
    tokenizer = assets.tokenizer("qwen3")
    save_decoder(create_decoder(shape(Tokenizer.load(tokenizer).size, tied=tied), seed), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    return folder


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    async def ready(self) -> None:
        """Wait until it answers; raise with its log if it exits instead."""
        async with aiohttp.ClientSession() as http:
            for _ in range(STARTING):
                assert self.process.poll() is None, f"vLLM ended:\n{self.tail()}"
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with http.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(5)) as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(1)
        raise TimeoutError(f"vLLM did not start:\n{self.tail()}")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        """Kill all its processes at once, as a failing machine would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


@contextlib.contextmanager
def serving(model: Path, log: Path, *arguments: str, dev_mode: bool = True) -> Iterator[Server]:
    """A server that has been started, and is ended afterwards. It may not answer yet."""
    assert ENVIRONMENT, "TOWLINE_VLLM names no environment with vLLM; run: make test-engines"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {
        "VLLM_SERVER_DEV_MODE": str(int(dev_mode)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [f"{ENVIRONMENT}/bin/vllm", "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", str(CONTEXT)]
    command += ["--max-num-seqs", "16", "--enforce-eager", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **own}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        yield server
    finally:
        server.kill()


@contextlib.asynccontextmanager
async def served(model: Path, log: Path, *arguments: str, dev_mode: bool = True) -> AsyncIterator[Server]:
    """A server that answers."""
    with serving(model, log, *arguments, dev_mode=dev_mode) as server:
        await server.ready()
        yield server
