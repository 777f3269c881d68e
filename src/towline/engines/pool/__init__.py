"""Several replicas of one model as one engine.

`pool.py` is the engine, with failover and metrics, `dispatch.py` which replica takes a turn and which turns wait,
`replica.py` what is known of one replica and how many turns it may run at once, `membership.py` how replicas leave and get
new weights, `monitor.py` how one comes back, `upstreams.py` which replicas there are.
"""

from towline.engines.pool.pool import EnginePool
from towline.engines.pool.replica import Replica
from towline.engines.pool.upstreams import Upstreams

__all__ = ["EnginePool", "Replica", "Upstreams"]
