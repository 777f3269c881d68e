"""When two sessions are the same data."""

from __future__ import annotations

import hashlib
from enum import StrEnum

import numpy as np

from towline.datasets.conversation import trained_traces
from towline.schema import Trajectory


class Duplicates(StrEnum):
    """What makes a session of a task a duplicate of an earlier one."""

    TRAINED = "trained"
    """The model sampled the same tokens. What it saw may differ in times, names and paths."""
    WHOLE = "whole"
    """Context and sampled tokens are the same."""
    KEEP = "keep"
    """Nothing does: all are kept."""


def fingerprint(trajectory: Trajectory, how: Duplicates) -> str:
    """Equal for sessions that are duplicates of each other."""
    digest = hashlib.sha256()
    parts = [trajectory.group_id, str(trajectory.metadata.get("harness", ""))]
    if how is Duplicates.KEEP:
        parts.append(trajectory.session_id)
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode("utf-8", "surrogatepass"))
    for trace in trained_traces(trajectory):
        mask = trace.loss_mask == 1
        tokens = trace.token_ids if how is Duplicates.WHOLE else trace.token_ids[mask]
        for array in (tokens, trace.turn_ids[mask] if how is Duplicates.TRAINED else trace.loss_mask):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
