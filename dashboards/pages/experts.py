"""The experts page: who gets how many routes, who comes last, and what unequal routes cost."""

from __future__ import annotations

from dash import html

from dashboards.components import Node
from dashboards.parts import chart, data_table, empty, guarded, reasons_panel
from dashboards.store import Loaded
from pptrace.analysis.experts.show import expert_tables, gain_of_equal_rows, late_in_most_steps
from pptrace.analysis.experts.types import TrafficMatrix
from pptrace.model.report_table import Amount
from pptrace.report.charts.experts import (
    MOST_RANKS,
    late_steps_chart,
    lateness_chart,
    ranks_in_matrix,
    routes_map,
    rows_chart,
    traffic_map,
)

_NO_ROUTES = "Routes of each expert were not recorded; pptrace's own runtime counts them."
_NO_ROWS = "The calls of experts do not tell how many rows they carry."
_NO_MATCH = "The members of these calls are not known, or have no trace."
_NO_CALLS = "No calls are known that bring rows to experts on other ranks."
_NO_TRAFFIC = "Neither the calls nor counts of routes tell which rank's rows go where; below is why."

_EQUAL = "1 is an equal share of the routes"
_OF_GROUP = "× its group: over the mean of the ranks that share these experts"
_OF_OTHERS = "× others: how long its experts take, over what others take for as many rows"


def layout(loaded: Loaded, *_: object) -> Node:
    return html.Div(guarded(lambda: body(loaded), "Experts", "experts-failed"), id="experts-body")


def body(loaded: Loaded) -> list[Node]:
    """The page; it is of all steps."""
    assert loaded.analysis is not None
    experts = loaded.analysis.report.experts
    if experts is None:
        reason = "Nothing communicates along ep in these traces, and no routes were counted."
        return [empty("No experts", reason, "no-experts")]
    no_rows, no_match = (_NO_ROWS, _NO_MATCH) if experts.calls else (_NO_CALLS, _NO_CALLS)
    of_many = f"; of more than {MOST_RANKS} ranks, those for which others waited longest"
    of_many = of_many if len(experts.ranks) > MOST_RANKS else ""
    late = late_in_most_steps(experts.steps) or "colour: the rank for which the others waited longest"
    traffic = loaded.analysis.expert_traffic
    gain = "" if experts.routing is None else gain_of_equal_rows(experts.routing)
    sentence = [html.P(f"{gain[0].upper()}{gain[1:]}.", className="verdict", id="routing-gain")] if gain else []
    charts = (
        ("Routes of each expert, over the mean of its layer", routes_map(experts), "expert-routes", _NO_ROUTES, _EQUAL),
        ("Rows of each rank's experts", rows_chart(experts), "expert-rows", no_rows, _OF_GROUP + of_many),
        ("Who is waited for", lateness_chart(experts), "expert-lateness", no_match, _OF_OTHERS + of_many),
        ("Who is late, step by step", late_steps_chart(experts), "expert-late-steps", no_match, late),
        ("Rows from rank to rank", traffic_map(traffic), "expert-matrix", _NO_TRAFFIC, _traffic_note(traffic)),
    )
    return [
        *sentence,
        *(chart(*entry) for entry in charts),
        *(data_table(table, table.key) for table in expert_tables(experts, Amount.WHOLE)),
        *reasons_panel(experts.reasons, "experts-reasons"),
    ]


def _traffic_note(matrix: TrafficMatrix | None) -> str:
    """The rows of the picture, and of many ranks which it shows."""
    if matrix is None:
        return ""
    by = "splits of the calls" if matrix.known_from == "splits" else "routes that were counted"
    num, shown = len(set(matrix.source.tolist())), len(ranks_in_matrix(matrix))
    of_many = f"; {shown} of {num:,} ranks, those of the groups with most rows" if shown < num else ""
    return f"forwards of all steps, by {by}{of_many}"
