"""Several replicas of one model as one engine.

`pool.py` is the engine, `turn.py` one turn on its way over the replicas, `dispatch.py` which replica takes it and who
waits, `pacing.py` how many run at once, `replica.py` what is known of one replica, `watching.py` how one leaves and comes
back, `combining.py` what the replicas are together, `metrics.py` the figures.
"""

from towline.engines.pool.pool import Pool
from towline.engines.pool.replica import Replica

__all__ = ["Pool", "Replica"]
