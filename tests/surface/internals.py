"""The only imports of Towline's insides that the frozen surface needs: if something moves, these lines move with it."""

from __future__ import annotations

from towline.config import Settings
from towline.dialects.registry import all_dialects
from towline.engines.pool.pool import replica_metrics as engine_figures
from towline.evaluators import registry as _evaluators
from towline.evaluators.base import EvaluatorOptions
from towline.gateway.control import ControlApi
from towline.gateway.journal import replay
from towline.server.metrics import ServerMetrics

__all__ = ["ControlApi", "EvaluatorOptions", "ServerMetrics", "Settings", "all_dialects", "engine_figures", "replay"]
assert _evaluators  # imported, so that every kind of options is defined
