"""Requests that the dashboard answers: for this machine by its own names, from its own pages, of a bounded size."""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from dash import Dash
from flask import Response, abort, request

MOST_REQUEST_BYTES = 2**20
_CALLBACK = "/_dash-update-component"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def guard(app: Dash, hosts: Iterable[str] = ()) -> None:
    """Refuse what no page of this dashboard asks.

    A name that another's DNS gives to this machine is no name of it (DNS rebinding): the Host has to be an address,
    ``localhost``, the machine's own name, or one of ``hosts``. A request that another page makes has an Origin that is not
    this Host.
    """
    server = app.server
    known = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}
    server.config["MAX_CONTENT_LENGTH"] = MOST_REQUEST_BYTES

    def check() -> None:
        if not is_known(request.host, known):
            abort(403, "this dashboard is not served under that name; use its address, or start it with --host NAME")
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc.lower() != request.host.lower():
            abort(403, "asked by a page of another origin")
        if request.path == _CALLBACK and request.method == "POST":
            _require_callback(request.get_data(cache=True), app.callback_map)

    def add_headers(response: Response) -> Response:
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    server.before_request(check)
    server.after_request(add_headers)


def is_known(host: str, known: Iterable[str]) -> bool:
    """Return whether a Host header, with or without a port, is an address or one of the known names."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name in known:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _require_callback(body: bytes, callbacks: Mapping[str, Any]) -> None:
    """Refuse what is no call of one of the app's callbacks with values of their types."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        abort(400, "expected JSON")
    if not isinstance(asked, dict) or asked.get("output") not in list(callbacks):
        abort(400, "expected a call of a callback of this dashboard")
    callback = callbacks[asked["output"]]
    is_call = (
        _are_dependencies(asked.get("outputs"), None)
        and _are_dependencies(asked.get("inputs"), callback["inputs"])
        and _are_dependencies(asked.get("state", []), callback["state"])
        and _are_texts(asked.get("changedPropIds", []))
    )
    if not is_call:
        abort(400, "expected outputs, inputs and state as the page has them")


def _are_dependencies(entries: Any, expected: Sequence[Mapping[str, str]] | None) -> bool:
    """Return whether entries are {id, property}, with a value of its type where they are the ``expected`` ones."""
    rows = [entries] if isinstance(entries, dict) else entries
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return False
    names = [(row.get("id"), row.get("property")) for row in rows]
    if expected is None:
        return all(isinstance(part, str) for name in names for part in name)
    wanted = [(entry["id"], entry["property"]) for entry in expected]
    return names == wanted and all(_is_value(row["id"], row.get("value")) for row in rows)


def _is_value(name: str, value: Any) -> bool:
    """Return whether a component may have a value: steps and sizes are numbers, all else is text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "step":
        return value is None or isinstance(value, int)
    if name.endswith("-tick"):
        return value is None or isinstance(value, int)
    if name.startswith("plan-") and name != "plan-schedule":
        return value is None or is_number
    return value is None or isinstance(value, str)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
