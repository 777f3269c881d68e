"""vLLM as the engine: token ids in, ids and logprobs out, weights replaced through its own endpoints.

`engine.py` is the engine, `wire.py` the requests and responses of either route, images included. What it shares with
SGLang is one folder up: `remote.py` and `server_checks.py`.
"""

from towline.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
