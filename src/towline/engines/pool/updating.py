"""New weights for every replica.

Either one replica at least takes them, and they are the pool's, or none does and the pool stays at those it had. A replica
that could not take them leaves: it comes back with the pool's weights, whichever these are then.
"""

from __future__ import annotations

import asyncio

from towline.engines.base import Engine, EngineGone
from towline.engines.pool.membership import Membership
from towline.engines.pool.replica import Replica, Weights
from towline.errors import EngineError

_VOUCH = 1.0
"""Seconds that an engine has to say that it is not paused."""


async def update(members: Membership, weights: Weights) -> None:
    async with members.updating:
        before = members.weights
        async with members.changing:
            members.weights = weights
            serving = members.serving
            failed = await _give(members, serving, weights)
            taken = len(failed) < len(serving)
            if serving and not taken:
                members.weights = before
            for replica, error in failed.items():
                if not taken and await _vouches(replica.engine, error):
                    continue
                replica.unsure = True
                members.lose(replica, f"it could not take the weights of version {weights.version}: {error}")
            members.end_strays()
        # Where nobody serves, whoever comes back first is given these weights, and tells whether they can be used.
        taken = taken or (not serving and await members.inhabited())
        if not taken:
            if members.weights == weights:
                members.weights = before
            reasons = "; ".join(f"{replica.name}: {error}" for replica, error in failed.items()) or members.troubles()
            raise EngineError(f"no replica took the weights of version {weights.version}: {reasons}")
        members.version = weights.version


async def _give(members: Membership, replicas: list[Replica], weights: Weights) -> dict[Replica, BaseException]:
    """Give the weights to all at once; the failures."""
    assert weights.folder is not None
    calls = (replica.do(replica.engine.update_weights(weights.folder, weights.version)) for replica in replicas)
    for replica in replicas:
        replica.updating = True
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for replica in replicas:
        replica.updating = False
    members.stir()
    return {r: o for r, o in zip(replicas, outcomes, strict=True) if isinstance(o, BaseException)}


async def _vouches(engine: Engine, error: BaseException) -> bool:
    """Whether an engine that refused weights goes on with those it had: one that is not sure of them stays paused."""
    if not isinstance(error, EngineError) or isinstance(error, EngineGone):
        return False
    try:
        async with asyncio.timeout(_VOUCH):
            await engine.ready()
    except (TimeoutError, EngineError):
        return False
    return True
