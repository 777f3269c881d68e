"""What several replicas are together: the least of what each can do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from towline.engines.base import Capture, EngineInfo
from towline.errors import EngineError

_WEAKEST_LAST = list(Capture)


def combine(infos: Mapping[str, EngineInfo]) -> EngineInfo:
    """The smallest context and the weakest capture. Replicas with different vocabularies are not of one model; one that
    cannot tell its own (0) may be."""
    sizes = {info.vocabulary for info in infos.values() if info.vocabulary}
    if len(sizes) > 1:
        told = ", ".join(f"{name}: {info.vocabulary}" for name, info in infos.items())
        raise EngineError(f"the replicas have different vocabularies ({told}): a pool is for replicas of one model")
    details: dict[str, str] = {"replicas": str(len(infos))}
    for key in dict.fromkeys(key for info in infos.values() for key in info.details):
        details[key] = _told(info.details.get(key, "unknown") for info in infos.values())
    return EngineInfo(
        name=_told(info.name for info in infos.values()),
        capture=max((info.capture for info in infos.values()), key=_WEAKEST_LAST.index),
        context=min(info.context for info in infos.values()),
        vocabulary=max(sizes, default=0),
        details=details,
    )


def _told(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
