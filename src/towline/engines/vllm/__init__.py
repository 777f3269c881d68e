"""vLLM as the engine: token ids in, ids and logprobs out, weights replaced by its own endpoints.

`engine.py` is the interface, `wire.py` the bodies that go out and the events that come back on either route, `probing.py`
what a server is asked before it is used, `scoring.py` the logprobs of ids that were not sampled, `media.py` images.
"""

from towline.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
