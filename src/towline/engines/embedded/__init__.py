"""The embedded engine: sampling from a small model in this process, and the model itself.

`engine.py` is the interface, `loop.py` the thread that computes, `scheduler.py` who runs in a step, `cache.py` what is
kept between turns, `runner.py` the incremental forward pass, `sampler.py` the draw, and `model.py` the plain,
differentiable decoder that they all agree with. Importing this package imports torch; nothing outside it does so at
module level.
"""

from towline.engines.embedded.config import DecoderConfig, RopeScaling
from towline.engines.embedded.engine import EmbeddedEngine
from towline.engines.embedded.loop import Stats
from towline.engines.embedded.model import Decoder, create, load, save

__all__ = ["Decoder", "DecoderConfig", "EmbeddedEngine", "RopeScaling", "Stats", "create", "load", "save"]
