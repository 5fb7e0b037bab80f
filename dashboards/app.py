"""The Dash app: a fixed header, and below it one page."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update

from dashboards import exports
from dashboards.address import NOTHING, Query, keep_step, keeper, query_of, step_of
from dashboards.answers import Answers
from dashboards.components import Node, fact
from dashboards.guard import guard
from dashboards.pages import (
    bubbles,
    communication,
    compare,
    experts,
    hang,
    live,
    memory,
    overview,
    problem,
    schedules,
    stages,
    steps,
    timeline,
)
from dashboards.routes import add_metrics, add_routes, address_of_asset
from dashboards.store import Loaded, Store
from pptrace.model.units import counted, milliseconds, uncertainty
from pptrace.report.recording import damage_in, name_of, place_of
from pptrace.report.tables import warning_lines


@dataclass(frozen=True, slots=True)
class Page:
    """A page by its name in the header. Its layout takes what is loaded, the answers, and the query of the address.

    ``needs_report``: without an analysis the reason is shown in its place.
    """

    name: str
    layout: Callable[..., Node]
    needs_report: bool = True


PAGES: Mapping[str, Page] = {
    "/": Page("Overview", overview.layout),
    "/timeline": Page("Timeline", timeline.layout),
    "/steps": Page("Steps", steps.layout),
    "/bubbles": Page("Bubbles", bubbles.layout),
    "/communication": Page("Communication", communication.layout),
    "/memory": Page("Memory", memory.layout),
    "/stages": Page("Stages", stages.layout),
    "/experts": Page("Experts", experts.layout),
    "/compare": Page("Compare", compare.layout),
    "/live": Page("Live", live.layout, needs_report=False),
    "/hang": Page("Hang", hang.layout, needs_report=False),
    "/schedules": Page("Schedules", schedules.layout, needs_report=False),
}
_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>{%metas%}<title>{%title%}</title>{%favicon%}{%css%}<link rel="stylesheet" href="timeline.css"></head>
<body>{%app_entry%}{%config%}{%scripts%}{%renderer%}</body>
</html>
"""
_STORE = "pptrace store"
_CLOCKS = {
    "single-rank": "one rank",
    "same-host": "one host",
    "same-session": "one recording",
    "one-file": "one file",
    "message-bounds": "aligned by messages",
    "op-order": "aligned by the order of ops",
    "none": "not related",
}


def create_app(
    paths: Sequence[Path],
    hosts: Sequence[str] = (),
    other: Path | None = None,
    secret: str | None = None,
    has_metrics: bool = False,
    as_recorded: bool = False,
) -> Dash:
    """The dashboard of some traces or of a run directory. Nothing is read before the first request, or :func:`begin_reading`.

    ``hosts`` are names under which it may be asked for, besides addresses and this machine's own name; ``other`` is a second run
    to compare with. Only who knows the ``secret``, where there is one, is answered.
    With ``has_metrics`` it answers Prometheus. ``as_recorded``: figures are those of the recording.
    """
    app = Dash(
        __name__,
        title="pptrace",
        update_title="",
        assets_folder=str(Path(__file__).parent / "assets"),
        external_scripts=[address_of_asset("timeline.js")],
        serve_locally=True,
        suppress_callback_exceptions=True,
        index_string=_INDEX.replace("timeline.css", address_of_asset("timeline.css")),
    )
    store = Store(paths, as_recorded)
    second = None if other is None else Store([other], as_recorded)
    answers = Answers(store, second, is_secret=secret is not None)
    app.layout = _shell()
    _register(app, store, answers)
    for page in (overview, timeline, steps, bubbles, communication, stages, compare, live, schedules):
        page.register(app, store, answers)
    exports.register(app, answers)
    keep_step(app)
    add_routes(app.server, store, answers)
    add_metrics(app.server, store, are_wanted=has_metrics)
    guard(app, hosts, secret)
    app.server.extensions[_STORE] = store
    return app


def begin_reading(app: Dash) -> None:
    """Read the run in a thread of its own, while a browser opens: the first request waits for the rest alone."""
    threading.Thread(target=app.server.extensions[_STORE].get, name="first reading", daemon=True).start()


def _shell() -> Node:
    choice = html.Label(
        [html.Span("Step"), dcc.Dropdown(id="step", clearable=False, searchable=False, options=[])],
        id="step-box",
        className="step-box hidden",
    )
    header = html.Header(
        [
            html.H1([html.Span("pptrace", className="brand"), html.Span(id="run-title", className="run-title")]),
            html.Nav([dcc.Link(page.name, href=path, id=f"to-{page.name.lower()}") for path, page in PAGES.items()]),
            choice,
        ]
    )
    loading: Any = {"page": "children", "overview-body": "children"}
    page = dcc.Loading(
        html.Main(id="page", tabIndex=-1),
        delay_show=400,
        type="dot",
        color="#2C7A8C",
        parent_className="loading",
        target_components=loading,
    )
    label: Any = {"aria-label": "Facts about the run"}
    facts = html.Section(id="facts", className="facts", **label)
    opening = html.Div(id="opening", role="status")
    skip = html.A("Skip to the page", href="#page", className="skip")
    return html.Div(
        [dcc.Location(id="location"), keeper("step"), skip, header, facts, opening, page, exports.whole_run()],
        id="app",
    )


def _register(app: Dash, store: Store, answers: Answers) -> None:
    @app.callback(
        Output("run-title", "children"),
        Output("facts", "children"),
        Output("step", "options"),
        Output("step", "value"),
        Output("step-box", "className"),
        Output("whole-run", "className"),
        Input("location", "pathname"),
        State("location", "search"),
        State("step", "value"),
    )
    def describe(_path: str, search: str | None, step: int | None) -> Any:
        loaded = store.get()
        options = [
            {"label": f"{entry.step}  ·  {milliseconds(entry.length_ns)} ms", "value": entry.step}
            for entry in loaded.steps
        ]
        wanted = step_of(query_of(search))
        if loaded.step(wanted):
            chosen: Any = no_update if wanted == step else wanted
        else:
            # Pages begin with the step that the first sentence speaks of.
            typical = None if loaded.analysis is None else loaded.analysis.report.typical_step
            chosen = no_update if loaded.step(step) else None if typical is None else typical.step
        box, files = "step-box" if options else "step-box hidden", "gone" if loaded.analysis is None else ""
        return loaded.title, _facts(loaded), options, chosen, box, files

    @app.callback(
        Output("page", "children"),
        *(Output(f"to-{page.name.lower()}", "className") for page in PAGES.values()),
        Input("location", "pathname"),
        State("location", "search"),
    )
    def show(path: str, search: str | None) -> Any:
        current = path or "/"
        marks = ("here" if path == current else "" for path in PAGES)
        return page_at(current, store.get(), answers, query_of(search)), *marks


def page_at(path: str, loaded: Loaded, answers: Answers, query: Query = NOTHING) -> Node:
    """The page of an address."""
    page = PAGES.get(path)
    if page is None:
        return problem.no_page(path)
    if page.needs_report and loaded.analysis is None:
        return problem.layout(loaded)
    return page.layout(loaded, answers, query)


def _facts(loaded: Loaded) -> list[Node]:
    if loaded.analysis is None:
        return []
    report = loaded.analysis.report
    sizes = {axis: size for axis, size in report.mesh.axes.items() if axis != "vpp"}
    mesh = " × ".join(
        f"{name} {size}" for name, size in sizes.items() if size is not None and (size > 1 or name == "pp")
    )
    ranks = f"{report.mesh.num_ranks}" + (f" ({mesh})" if mesh else "")
    num_read, files = len(report.inputs), "\n".join(item.path for item in report.inputs)
    read = [fact("read", counted(num_read, "trace"), files)] if num_read != report.mesh.num_ranks else []
    schedule, clock = report.schedule, report.clock
    known = (("p", report.mesh.pp), ("m", schedule.num_microbatches), ("v", schedule.num_chunks))
    of_schedule = " ".join(f"{name}={size}" for name, size in known if size is not None)
    plan = f"{schedule.title} · {of_schedule}" if of_schedule else schedule.title
    method = _CLOCKS.get(clock.method, clock.method)
    off = f" {uncertainty(clock.uncertainty_ns)}" if clock.uncertainty_ns else ""
    of_clock = f"method: {clock.method}; how far the ranks' clocks may differ after alignment"
    causes, lacking = [root.title for root in report.root_causes], warning_lines(report)
    quality = ("complete", "nothing that a figure needs is missing")
    if causes or lacking:
        counts = [counted(len(causes), "root cause")] * bool(causes) + [counted(len(lacking), "warning")] * bool(
            lacking
        )
        quality = (", ".join(counts), "\n".join([*causes, *lacking]))
    damage = damage_in(report.recording)
    of_damage = [f"{name_of(entry)}: {entry.count:,} ({place_of(entry)}): {entry.affects}" for entry in damage]
    recording = fact("recording", f"damaged: {', '.join(map(name_of, damage))}", "\n".join(of_damage))
    return [
        fact("framework", report.framework),
        fact("schedule", plan, f"p ranks, m microbatches, v chunks a rank; source: {schedule.source}"),
        fact("ranks", ranks, files),
        fact("clock", f"{method}{off}", of_clock),
        *read,
        fact("quality", *quality),
        *([recording] if damage else []),
        *_run_facts(loaded),
    ]


def _run_facts(loaded: Loaded) -> list[Node]:
    run = loaded.run
    facts = [fact("script", str(run["script"]))] if run.get("script") else []
    if run.get("started_at"):
        facts.append(fact("started", str(run["started_at"])[:16].replace("T", " ")))
    if run.get("status") not in (None, "ok"):
        facts.append(fact("run", str(run["status"]), "run.json says how the run ended"))
    return facts
