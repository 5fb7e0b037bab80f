"""The query of a page's address: what was chosen on it, so that a link shows the same. ``assets/address.js`` writes it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qsl

from dash import Dash, Input, Output, dcc

from dashboards.components import Node, in_browser

Query = Mapping[str, str]
"""Texts by name; of a name that an address has twice the first one."""
NOTHING: Query = {}
_MOST_CHARACTERS = 4_000
_MOST_FIELDS = 50


def query_of(search: str | None) -> Query:
    """The fields of an address; none of one that is no address of a page."""
    try:
        fields = parse_qsl((search or "")[:_MOST_CHARACTERS].removeprefix("?"), max_num_fields=_MOST_FIELDS)
    except ValueError:
        return NOTHING
    return dict(reversed(fields))


def step_of(query: Query) -> int | None:
    """The step that an address asks for."""
    text = query.get("step", "")
    return int(text) if re.fullmatch(r"-?\d{1,15}", text, re.ASCII) else None


def number_of(query: Query, name: str) -> float | None:
    """A number, an int where it is whole; None where there is none."""
    try:
        number = float(query.get(name, ""))
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() else number


def choice_of(query: Query, name: str, choices: Sequence[str]) -> str | None:
    """One of some choices; None where the address has another one, or none."""
    return text if (text := query.get(name)) in choices else None


def keeper(page: str) -> Node:
    """The part of a page through which :func:`keep_fields` keeps its fields, and :func:`keep_step` the step."""
    return dcc.Store(id=f"{page}-address")


def keep_fields(app: Dash, page: str, *fields: str) -> None:
    """Keep the fields of a page in its address once one is changed, by the last part of their ids (``assets/address.js``)."""
    values = (Input(field, "value") for field in fields)
    to = Output(f"{page}-address", "data")
    in_browser(app, "pptraceAddress", "keepFields", to, *values, prevent_initial_call=True)


def keep_step(app: Dash) -> None:
    """Keep the chosen step in the address of every page."""
    of_page = Input("step", "value"), Input("location", "pathname")
    in_browser(app, "pptraceAddress", "keepStep", Output("step-address", "data"), *of_page)
