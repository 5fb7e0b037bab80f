"""The live page: the last steps of a run that goes on, without a reload."""

from __future__ import annotations

from statistics import median
from typing import Any

from dash import Dash, Input, Output, State, dcc, html
from dash.exceptions import PreventUpdate

from dashboards.components import Node, lines, tile
from dashboards.live import LiveSteps, LiveWindow
from dashboards.parts import chart, empty, guarded
from dashboards.store import Store
from pptrace.analysis.slow_rank import SlowRank
from pptrace.model.units import counted, milliseconds
from pptrace.report.charts.live import live_paces_chart, live_ranks_chart, live_steps_chart
from pptrace.report.live import new_notes, slow_rank_text

_EVERY_MS = 1000
_RECENT = 3
_NOTHING = "nothing"
_NO_COMPUTE = "No step has been observed yet of which the compute is known."
_NO_PARTS = "The parts of a step are shown of at most 48 ranks, when all of them are known."
_SKIPPED = "Every fifth step is not observed, so that the others show what observing costs."
_ADVICE = (
    "pptrace run --live writes a record of each step while the run goes on. To see one here, start",
    "pptrace run --live -o RUN_DIR -n 2 -m instrument.examples.train_gpt --pp 2 --steps 2000",
    "and, while it goes on, pptrace dashboard RUN_DIR",
)


def layout(*_: object) -> Node:
    return html.Div(
        [
            dcc.Interval(id="live-tick", interval=_EVERY_MS),
            dcc.Store(id="live-shown", data=""),
            html.Div(id="live-body"),
        ]
    )


def register(app: Dash, store: Store, *_: object) -> None:
    live: LiveSteps = store.live

    @app.callback(
        Output("live-body", "children"),
        Output("live-shown", "data"),
        Output("live-tick", "disabled"),
        Input("live-tick", "n_intervals"),
        State("live-shown", "data"),
        running=[(Output("live-tick", "max_intervals"), 0, -1)],  # a question drops the answer of the one before
    )
    def show(_tick: int | None, shown: str | None) -> Any:
        window = live.get()
        state = _NOTHING if window is None else window.state
        if state == shown:
            raise PreventUpdate
        if window is None:
            status = store.get().run.get("status")
            reason = "The run has written none so far." if status == "running" else "This run kept none."
            return [empty("No live records", reason, "no-live", *_ADVICE)], state, False
        return guarded(lambda: body(window), "Live", "live-failed"), state, window.is_over


def body(window: LiveWindow) -> list[Node]:
    """The page of these steps."""
    if not window.steps:
        reason = (
            "The run has ended, and its ranks wrote no step." if window.is_over else "No step has ended on all ranks."
        )
        return [empty("No steps yet", reason, "live-waiting")]
    steps = window.steps
    recent = {slow.rank: slow for step in steps[-_RECENT:] for slow in step.slow_ranks}
    noted = set[str]()
    notes = [note for step in steps for note in new_notes(step, noted)]
    notes += filter(None, [window.early_end])
    notes = notes or [f"{counted(len(steps), 'step')} shown. {_SKIPPED}"]
    return [
        _alarm(steps[-1].slow_ranks or tuple(recent.values())),
        _tiles(window),
        chart("Length of the last steps", live_steps_chart(steps), "live-steps", ""),
        chart("Compute of each rank against its usual one", live_paces_chart(steps), "live-paces", _NO_COMPUTE),
        chart("The last observed step", live_ranks_chart(steps), "live-ranks", _NO_PARTS),
        lines(notes, "live-notes"),
    ]


def _alarm(slow_ranks: tuple[SlowRank, ...]) -> Node:
    if not slow_ranks:
        return html.Section(html.P("No slow rank."), id="live-alarm", className="panel problem quiet", role="status")
    texts = [html.P(html.Strong(slow_rank_text(slow).capitalize())) for slow in slow_ranks]
    return html.Section(texts, id="live-alarm", className="panel problem hang", role="alert")


def _tiles(window: LiveWindow) -> Node:
    steps, last = window.steps, window.steps[-1]
    usual = median(step.step_ns for step in steps)
    deviation = "–" if last.deviation is None else f"{last.deviation:+.1%}"
    slowest = next((step for step in reversed(steps) if step.slowest_rank is not None), None)
    measured, own = window.cost.measured, window.cost.own
    error = "interval not known yet"
    if measured is not None and measured.low is not None and measured.high is not None:
        error = f"{measured.low:+.1%} to {measured.high:+.1%}"
    cost = "–" if measured is None else f"{measured.share:+.2%}"
    detail = error if own is None else f"{error}; {own:.2%} counted"
    meaning = "by unobserved steps in between, with its 95 % interval; and what ranks counted as their own time"
    rank, when = ("–", "") if slowest is None else (f"rank {slowest.slowest_rank}", f"in step {slowest.step}")
    length, typical = f"{milliseconds(last.step_ns)} ms", f"usual {milliseconds(round(usual))} ms"
    tiles = (
        ("Last step", str(last.step), window.status or "running", "all ranks have ended it", "live-last"),
        ("Length", length, typical, "of the last step", "live-length"),
        ("Deviation", deviation, "from the steps before", "last step over their median", "live-deviation"),
        ("Computed longest", rank, when, "in the last observed step", "live-slowest"),
        ("Cost of observing", cost, detail, meaning, "live-cost"),
    )
    return html.Div([tile(*entry) for entry in tiles], className="tiles")
