"""Messages between the server and a node host: JSON over one WebSocket per host.

The server calls (`{"id", "call", "args"}`) and the host answers (`{"id", "result"}` or `{"id", "error"}`) or reports
something by itself (`{"report", …}`). Neither side trusts the other's memory: a session is submitted again until the host
knows it, and its outcome is reported again until the server has discarded it, so a broken connection loses nothing.
Errors travel with the boundary that they are attributed to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from prometheus_client import Metric
from prometheus_client.samples import Sample

from towline.cluster.runner import InvalidTask, LogNotFound, SessionOutcome, Stored, StoreRequest
from towline.cluster.segments import SegmentSlice
from towline.errors import TowlineError
from towline.schema import FailureReason, SchemaError, Session, SessionState, SessionSummary

PATH = "/host"
HEARTBEAT = 20.0
"""Seconds between two pings; a peer that does not answer within half of it is disconnected."""
LARGEST = 256 * 2**20
"""Maximum size of a message in bytes."""


class HostError(TowlineError):
    """A node host could not do what the server asked for."""

    def __init__(self, message: str, failure: str = "node"):
        super().__init__(message)
        self.failure = failure


def dump_error(error: BaseException) -> dict[str, Any]:
    message = str(error) or repr(error)
    if isinstance(error, InvalidTask):
        return {"kind": "task", "message": message, "field": error.field}
    if isinstance(error, LogNotFound):
        return {"kind": "log", "names": error.names}
    if isinstance(error, OSError):
        return {"kind": "os", "message": message}
    return {"kind": "error", "message": message, "failure": getattr(error, "failure", "internal")}


def load_error(error: Mapping[str, Any]) -> Exception:
    match error["kind"]:
        case "task":
            return InvalidTask(error["field"], error["message"])
        case "log":
            return LogNotFound(list(error["names"]))
        case "os":
            return OSError(error["message"])
    return HostError(error["message"], error.get("failure", "internal"))


def dump_outcome(outcome: SessionOutcome) -> dict[str, Any]:
    fields = {name: getattr(outcome, name) for name in SessionOutcome.__slots__ if name not in ("session", "summary")}
    return {
        **fields,
        "session": outcome.session.model_dump(mode="json"),
        "summary": outcome.summary.model_dump(mode="json"),
    }


def load_outcome(fields: Mapping[str, Any]) -> SessionOutcome:
    session, summary = Session.model_validate(fields["session"]), SessionSummary.model_validate(fields["summary"])
    return SessionOutcome(**{**fields, "session": session, "summary": summary})


def dump_request(request: StoreRequest) -> dict[str, Any]:
    return asdict(request)


def load_request(fields: Mapping[str, Any]) -> StoreRequest:
    state, failure = fields["state"], fields["failure"]
    return StoreRequest(
        fields["session_id"],
        None if state is None else SessionState(state),
        None if failure is None else FailureReason(failure),
        fields["error"],
    )


def dump_stored(stored: Stored) -> dict[str, Any]:
    return asdict(stored) if isinstance(stored, SegmentSlice) else {"error": str(stored)}


def load_stored(fields: Mapping[str, Any]) -> Stored:
    return SchemaError(fields["error"]) if "error" in fields else SegmentSlice(**fields)


def dump_metric(metric: Metric) -> dict[str, Any]:
    samples = [[sample.name, sample.labels, sample.value] for sample in metric.samples]
    return {"name": metric.name, "help": metric.documentation, "type": metric.type, "samples": samples}


def merge_metrics(by_node: Mapping[str, list[dict[str, Any]]]) -> list[Metric]:
    """The metrics of several nodes as one family per name; with more than one node, each sample names its node."""
    families: dict[str, Metric] = {}
    for node, metrics in by_node.items():
        for one in metrics:
            family = families.setdefault(one["name"], Metric(one["name"], one["help"], one["type"]))
            extra = {"node": node} if len(by_node) > 1 else {}
            family.samples += [Sample(name, labels | extra, value) for name, labels, value in one["samples"]]
    return list(families.values())
