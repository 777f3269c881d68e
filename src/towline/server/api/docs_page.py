"""`/docs`: the routes of the service as one page. It loads nothing and runs no script, so it works offline."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from typing import Any

from starlette.responses import HTMLResponse

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h2 { margin-top: 2rem; text-transform: capitalize; } details { border-bottom: 1px solid #ddd; padding: .4rem 0; }
summary { cursor: pointer; } code { font: 13px ui-monospace, monospace; } table { border-collapse: collapse; }
td { padding: .15rem 1rem .15rem 0; vertical-align: top; } .method { display: inline-block; width: 4.5rem; }
.deprecated code { text-decoration: line-through; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #e6e6e6; } a { color: #8ab4f8; } }
"""
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def docs_page(schema: dict[str, Any]) -> HTMLResponse:
    """The page of an OpenAPI schema."""
    info = schema["info"]
    groups: dict[str, list[str]] = {}
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            for tag in route.get("tags", ["other"])[:1]:
                groups.setdefault(tag, []).append(_route(method, path, route))
    parts = [f"<h2>{escape(tag)}</h2>{''.join(routes)}" for tag, routes in groups.items()]
    page = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<meta name='viewport' content='width=device-width'><title>{escape(info['title'])} API</title>"
        f"<style>{_STYLE}</style></head><body><h1>{escape(info['title'])} {escape(info['version'])}</h1>"
        f"<p>{escape(info.get('summary', ''))} Machine-readable: <a href='/openapi.json'>openapi.json</a>. "
        "Every route but /healthz, /livez, /openapi.json and /docs needs <code>Authorization: Bearer tlk-…</code>.</p>"
        f"{''.join(parts)}</body></html>"
    )
    return HTMLResponse(page, headers={"content-security-policy": _POLICY})


def _route(method: str, path: str, route: dict[str, Any]) -> str:
    rows = [
        f"<tr><td><code>{escape(one['name'])}</code></td><td>{escape(one['in'])}</td>"
        f"<td>{'required' if one.get('required') else ''}</td><td>{escape(one.get('description', ''))}</td></tr>"
        for one in route.get("parameters", [])
    ]
    if "requestBody" in route:
        kinds = route["requestBody"].get("content", {})
        names = ", ".join(f"{kind}: {_name(content.get('schema', {}))}" for kind, content in kinds.items())
        rows.append(f"<tr><td>body</td><td></td><td></td><td>{escape(names)}</td></tr>")
    classes = " class='deprecated'" if route.get("deprecated") else ""
    return (
        f"<details{classes}><summary><code class='method'>{escape(method.upper())}</code>"
        f"<code>{escape(path)}</code></summary>"
        f"<p>{escape(route.get('description') or route.get('summary', ''))}</p><table>{''.join(rows)}</table></details>"
    )


def _name(schema: dict[str, Any]) -> str:
    """The name of a schema, as a reader looks it up in openapi.json."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(map(_name, schema[several]))
    if schema.get("type") == "array":
        return f"list of {_name(schema.get('items', {}))}"
    return str(schema.get("type", "any"))
