"""Calls of callbacks that the server takes: those of the pages, with values of their types."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from flask import abort

PATH = "/_dash-update-component"


def require_callback(body: bytes, callbacks: Mapping[str, Any]) -> None:
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
