"""The embedded engine: sampling from a small model in this process, and the model itself.

`engine.py` is the interface, `loop.py` the thread that computes, `scheduler.py` which turns run in a step, `batch.py` what
one step computes, `turn.py` one turn (where stop strings apply and the policy version is stamped), `cache.py` the prefix
cache, `runner.py` the incremental forward pass and the sampling, `config.py` and `model.py` the plain,
differentiable decoder that they all agree with. Importing this package imports torch; nothing outside it does so at
module level.
"""

from towline.engines.embedded.config import DecoderConfig, RopeScaling
from towline.engines.embedded.engine import EmbeddedEngine
from towline.engines.embedded.loop import EmbeddedStats
from towline.engines.embedded.model import Decoder, create_decoder, load_decoder, save_decoder

load = load_decoder
"""The name that the README of an audit's evidence folder may import."""

__all__ = [
    "Decoder",
    "DecoderConfig",
    "EmbeddedEngine",
    "EmbeddedStats",
    "RopeScaling",
    "create_decoder",
    "load",
    "load_decoder",
    "save_decoder",
]
