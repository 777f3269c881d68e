"""Every route of the service: method, path, a body, and the roles that may call it."""

from __future__ import annotations

from typing import Any

S, C, A = "submit", "consume", "admin"
ROUTES: list[tuple[str, str, Any, set[str]]] = [
    ("POST", "/v1/tasks", [], {S, A}),
    ("GET", "/v1/tasks", None, {S, C, A}),
    ("GET", "/v1/tasks/{task_id}", None, {S, C, A}),
    ("DELETE", "/v1/tasks/{task_id}", None, {S, A}),
    ("GET", "/v1/sessions", None, {S, C, A}),
    ("GET", "/v1/sessions/{session_id}", None, {S, C, A}),
    ("GET", "/v1/sessions/{session_id}/log", None, {C, A}),
    ("GET", "/v1/sessions/{session_id}/trajectory", None, {C, A}),
    ("POST", "/v1/trajectories", {"session_ids": []}, {C, A}),
    ("GET", "/v1/results", None, {C, A}),
    ("POST", "/v1/results", {"consumer": "c"}, {C, A}),
    ("POST", "/v1/results/release", {"consumer": "c"}, {C, A}),
    ("POST", "/v1/results/ack", {"consumer": "c", "result_ids": []}, {C, A}),
    ("GET", "/v1/events", None, {S, C, A}),
    ("GET", "/v1/pacing", None, {S, C, A}),
    ("GET", "/v1/policy", None, {S, C, A}),
    ("POST", "/v1/policy/pause", {}, {A}),
    ("POST", "/v1/policy/resume", {}, {A}),
    ("POST", "/v1/policy/version", {}, {A}),
    ("POST", "/v1/policy/weights", {"folder": "/none", "version": 1}, {A}),
    ("GET", "/v1/nodes", None, {S, C, A}),
    ("POST", "/v1/nodes/{name}/drain", None, {A}),
    ("POST", "/v1/nodes/{name}/undrain", None, {A}),
    ("GET", "/v1/stragglers", None, {S, C, A}),
    ("GET", "/v1/keys", None, {A}),
    ("POST", "/v1/keys", {"roles": ["submit"]}, {A}),
    ("DELETE", "/v1/keys/{key_id}", None, {A}),
    ("GET", "/metrics", None, {S, C, A}),
    ("GET", "/healthz", None, {S, C, A, "nobody", "stranger"}),
    ("GET", "/livez", None, {S, C, A, "nobody", "stranger"}),
]
