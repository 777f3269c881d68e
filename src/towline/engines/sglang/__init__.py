"""SGLang: `engine.py` is the engine, `wire.py` its server's JSON."""

from towline.engines.sglang.engine import SglangEngine

__all__ = ["SglangEngine"]
