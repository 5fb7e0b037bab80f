"""Requests that the dashboard answers: for this machine by its own names, from its own pages, of a bounded size, and calls of its
callbacks with values of their types.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import urlsplit

from dash import Dash
from dash.exceptions import DependencyException
from flask import Request, Response, abort, request
from werkzeug.exceptions import HTTPException, NotFound

from dashboards import policy
from dashboards.access import Access

MOST_REQUEST_BYTES = 2**20
_CALLBACKS = "/_dash-update-component"
_HOST = re.compile(r"(?:[\w.-]+|\[[\w:.%]+\])(?::\d{1,5})?")
"""A Host header: a name, an IPv4 address or one of IPv6 in brackets, with one port or none."""


def guard(app: Dash, hosts: Iterable[str] = (), secret: str | None = None) -> None:
    """Refuse what no page of this dashboard asks, and whoever does not know the secret, where there is one.

    A name that another's DNS gives to this machine is no name of it (DNS rebinding): the Host has to be an address,
    ``localhost``, the machine's own name, or one of ``hosts``. A request that another page makes has an Origin that is not
    this scheme, host and port, or says so in Sec-Fetch-Site; a link to a page may be followed from anywhere.

    Call it when all callbacks are registered: the policy of the pages names their scripts.
    """
    server = app.server
    known = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}
    access = None if secret is None else Access(secret)
    of_pages = policy.of_pages(app.csp_hashes())
    server.config["MAX_CONTENT_LENGTH"] = MOST_REQUEST_BYTES

    def check() -> Response | None:
        if not _HOST.fullmatch(request.environ.get("HTTP_HOST", request.host)):
            abort(400, "the Host header is malformed; expected NAME or NAME:PORT, once")
        if not is_known(request.host, known):
            abort(403, "this dashboard is not served under that name; use its address, or start it with --host NAME")
        if not _is_own_page(request):
            abort(403, "asked by a page of another origin")
        if access is not None and (refusal := access.refuse(request)) is not None:
            return refusal
        if request.path == _CALLBACKS and request.method == "POST":
            _require_callback(request.get_data(cache=True), app.callback_map)
        return None

    def add_headers(response: Response) -> Response:
        is_page = response.mimetype == "text/html" and "Content-Disposition" not in response.headers
        response.headers.setdefault("Content-Security-Policy", of_pages if is_page else policy.FILE)
        for name, value in policy.HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    server.before_request(check)
    server.after_request(add_headers)
    server.register_error_handler(HTTPException, _explain)
    server.register_error_handler(
        DependencyException, lambda _error: _explain(NotFound())
    )  # a script that no page loads


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


def _is_own_page(wanted: Request) -> bool:
    """Return whether a request is one of this dashboard's pages, of a program, or of somebody who follows a link."""
    origin = wanted.headers.get("Origin")
    if origin is not None and origin.lower() != f"{wanted.scheme}://{wanted.host}".lower():
        return False
    site = wanted.headers.get("Sec-Fetch-Site", "none")
    is_visit = wanted.method == "GET" and (
        wanted.headers.get("Sec-Fetch-Mode") == "navigate" and wanted.headers.get("Sec-Fetch-Dest") == "document"
    )
    return site in ("none", "same-origin") or is_visit


def _require_callback(body: bytes, callbacks: Mapping[str, Any]) -> None:
    """Refuse what is no call of one of the app's callbacks with values of their types.

    Callbacks that the browser answers itself are none of the server's.
    """
    try:
        call = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        abort(400, "expected JSON")
    callback = (
        callbacks.get(output) if isinstance(call, dict) and isinstance(output := call.get("output"), str) else None
    )
    if callback is None or "callback" not in callback:
        abort(400, "expected a call of a callback of this dashboard")
    is_call = (
        _are_dependencies(call.get("outputs"), None)
        and _are_dependencies(call.get("inputs"), callback["inputs"])
        and _are_dependencies(call.get("state", []), callback["state"])
        and isinstance(changed := call.get("changedPropIds", []), list)
        and all(isinstance(name, str) for name in changed)
    )
    if not is_call:
        abort(400, "expected outputs, inputs and state as the page has them")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _are_dependencies(entries: Any, expected: Sequence[Mapping[str, str]] | None) -> bool:
    """Return whether entries are {id, property}, with a value of its type where they are the ``expected`` ones."""
    rows = [entries] if isinstance(entries, dict) else entries
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return False
    names = [(row.get("id"), row.get("property")) for row in rows]
    if expected is None:
        return all(isinstance(part, str) for name in names for part in name)
    wanted = [(entry["id"], entry["property"]) for entry in expected]
    return names == wanted and all(_is_value(*name, row.get("value")) for name, row in zip(names, rows, strict=True))


_MOST_CLICKS = 1_000_000
"""Clicks of a person on one button, at most."""


def _is_value(name: str, part: str, value: Any) -> bool:
    """Return whether a part of a component may have a value: steps, clicks and sizes are numbers, all else is text."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if part == "n_clicks":
        return value is None or (is_whole and 0 <= value <= _MOST_CLICKS)
    if name == "step" or name.endswith("-tick"):
        return value is None or is_whole
    if name.startswith("plan-") and name != "plan-schedule":
        return value in (None, "") or is_whole or (isinstance(value, float) and math.isfinite(value))
    return value is None or isinstance(value, str)


def _explain(error: HTTPException) -> Response:
    """One line of text: what is refused, and why."""
    answer = Response(f"{error.code} {error.name}: {error.description}\n", error.code, mimetype="text/plain")
    for name, value in error.get_headers():
        if name.lower() not in ("content-type", "content-length"):
            answer.headers[name] = value
    return answer
