"""Routes of the server for the timeline (tiles, bars, journeys, search) and for Prometheus. They only read what was opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from hashlib import blake2b
from typing import Any
from urllib.parse import parse_qsl

from flask import Flask, Response, abort, jsonify, request

from dashboards.answers import Answers
from dashboards.store import Store
from dashboards.wishes import address_of, wishes_of
from pptrace.errors import PptraceError
from pptrace.report.metrics import CONTENT_TYPE, live_metrics_of, metrics_of
from pptrace.report.tiles.about import describe
from pptrace.report.tiles.bars import Place, aligned_at, bar_at
from pptrace.report.tiles.cut import NUM_BUCKETS, Range
from pptrace.report.tiles.details import details
from pptrace.report.tiles.events import EVENTS, describe_lanes, events_tile
from pptrace.report.tiles.journey import journey
from pptrace.report.tiles.replayed import CHANGED, PLANNED, SIMULATED
from pptrace.report.tiles.scripts import script, style
from pptrace.report.tiles.search import search
from pptrace.report.tiles.sums import sums_of
from pptrace.report.tiles.timeline import MEASURED, Timeline
from pptrace.schedule.registry import SCHEDULES

_MOST_SHIFT = 50
_MOST_RANKS = 64
"""Ranks whose events are searched or summed at once."""
_MOST_DIGITS = 10
_CACHED = {"Cache-Control": "private, max-age=3600, immutable"}
_BYTES = "application/octet-stream"


_STEP = "<token>/<source>/<int(signed=True):step>"
_PLACE = "<table>/<int(signed=True):rank>/<int:lane>/<int(signed=True):start_ns>"
_ROUTES: Mapping[str, Callable[..., Any]] = {
    f"tile/{_STEP}/<order>/<int:block>/<int:shift>/<int:index>": Timeline.tile,
    f"groups/{_STEP}/<order>/<int:shift>/<int:index>": Timeline.group_tile,
    "memory/<token>/<order>/<int:block>/<int:shift>/<int:index>": Timeline.memory_tile,
    "critical/<token>/<int(signed=True):step>": lambda timeline, step: _critical(timeline, step),
    f"journey/{_STEP}/<int(signed=True):rank>/<int:microbatch>": journey,
    f"bar/{_STEP}/<table>/<int:row>": details,
    f"at/{_STEP}/{_PLACE}": lambda timeline, **place: bar_at(timeline, Place(**place)),
    f"align/{_STEP}/{_PLACE}": lambda timeline, **place: aligned_at(timeline, Place(**place)),
    "find/<token>": lambda timeline: search(
        timeline, request.args.get("q", ""), _opened(timeline), request.args.get("from", 0, type=int)
    ),
    f"sums/{_STEP}/<int(signed=True):begin>/<int(signed=True):end>": lambda timeline, source, step, begin, end: sums_of(
        timeline, source, step, _chosen(timeline), _opened(timeline), begin, max(end, begin)
    ),
    "lanes/<token>/<int:at>": lambda timeline, at: describe_lanes(timeline.events.of(at)),
    "events/<token>/<int:at>/<int:shift>/<int(signed=True):index>": lambda timeline, at, time: events_tile(
        timeline.events.of(at), time
    ),
    "event/<token>/<int(signed=True):rank>/<int:row>": lambda timeline, rank, row: details(
        timeline, MEASURED, 0, EVENTS, row, rank
    ),
}
"""Answer what is asked of the timeline: bytes of the tile of a ``time``, or values of JSON. A LookupError is answered as not
found.
"""


_ASSETS: Mapping[str, tuple[str, Callable[[], str]]] = {
    "timeline.js": ("text/javascript", script),
    "timeline.css": ("text/css", style),
}


def address_of_asset(name: str) -> str:
    """The address of the timeline's script or style sheet: another one where its text is another, so that browsers keep it."""
    _, text_of = _ASSETS[name]
    return f"/timeline-data/{name}?m={blake2b(text_of().encode(), digest_size=8).hexdigest()}"


def add_routes(server: Flask, store: Store, answers: Answers) -> None:
    """Add the routes below ``/timeline-data/``; each but the first two has the token of the data that the page shows."""

    def add(rule: str, answer: Callable[..., Any]) -> None:
        server.add_url_rule(f"/timeline-data/{rule}", f"timeline {rule}", answer, methods=["GET"])

    def about() -> Any:
        loaded = store.get()
        timeline = store.timeline(loaded.token)
        return jsonify(None if timeline is None else {"token": loaded.token, **_about(timeline, answers)})

    def of_timeline(make: Callable[..., Any]) -> Callable[..., Any]:
        def answer(token: str, **parts: Any) -> Any:
            timeline, source = store.timeline(token), parts.get("source", "")
            if timeline is None:
                abort(409, "the files have changed; reload the page")
            try:
                if source.startswith(CHANGED) and not timeline.has_change(source):
                    # It was let go of, or made by a server that has ended since.
                    _change(timeline, answers, dict(parse_qsl(source.removeprefix(CHANGED))))
                if "shift" in parts:
                    parts["time"] = _range(parts.pop("shift"), parts.pop("index"))
                content = make(timeline, **parts)
            except LookupError:
                abort(404)
            return (
                Response(content, mimetype=_BYTES, headers=_CACHED) if isinstance(content, bytes) else jsonify(content)
            )

        return answer

    for name, (mime, text_of) in _ASSETS.items():
        add(name, lambda mime=mime, text_of=text_of: Response(text_of(), mimetype=mime, headers=_CACHED))
    add("opening", lambda: jsonify(asdict(store.opening)))
    add("about", about)
    add("whatif/<token>", of_timeline(lambda timeline: _change(timeline, answers, request.args)))
    for rule, make in _ROUTES.items():
        add(rule, of_timeline(make))


def add_metrics(server: Flask, store: Store, *, are_wanted: bool) -> None:
    """Add ``/metrics`` for Prometheus: the report of what was opened, read anew where its files have changed, and the last
    steps of a run that goes on. Where they are not wanted it says what it takes to have them: a page in their place would
    puzzle a Prometheus server.
    """

    def metrics() -> Response:
        if not are_wanted:
            abort(404, "Prometheus is answered by a dashboard that was started with --metrics")
        analysis = store.get().analysis
        text = metrics_of(None if analysis is None else analysis.report)
        if (live := store.live.get()) is not None:
            text += live_metrics_of(live.steps, live.cost)
        return Response(text, content_type=CONTENT_TYPE, headers={"Cache-Control": "no-store"})

    server.add_url_rule("/metrics", view_func=metrics, methods=["GET"])


def _numbers(text: str) -> list[int]:
    """The whole numbers of a text such as ``0.3.7``."""
    return [int(part) for part in text.split(".") if part.isascii() and part.isdigit() and len(part) < _MOST_DIGITS]


def _opened(timeline: Timeline) -> list[int]:
    """The ranks whose events are open on the page."""
    return [at for at in _numbers(request.args.get("events", "")) if at in timeline.events.ranks][:_MOST_RANKS]


def _chosen(timeline: Timeline) -> list[int]:
    """The ranks that are asked for; all where none are named."""
    everyone = range(len(timeline.layout.rows))
    named = _numbers(request.args["ranks"]) if "ranks" in request.args else everyone
    return [at for at in named if at in everyone]


def _range(shift: int, index: int) -> Range:
    if shift > _MOST_SHIFT or (abs(index) + 1) * NUM_BUCKETS << shift >= 2**62:
        abort(404)
    return Range(shift, index)


def _about(timeline: Timeline, answers: Answers) -> dict[str, Any]:
    why_not = answers.why_no_prediction()
    has_plan = any(timeline.schedule.plan_of(step) is not None for step in timeline.spans)
    return {
        **describe(timeline.bars, timeline.spans, timeline.first_step, has_pipeline=bool(timeline.windows)),
        "sources": [*((PLANNED, SIMULATED) if has_plan else ()), MEASURED],
        "haveEvents": list(timeline.events.ranks),
        "schedules": [] if why_not else list(SCHEDULES),
        "noWhatif": why_not,
    }


def _change(timeline: Timeline, answers: Answers, form: Mapping[str, str]) -> dict[str, Any]:
    """The name of the source that is a step after a change, with its length; or why it cannot be predicted."""
    try:
        wishes = wishes_of(form)
        if not wishes:
            raise PptraceError("no such change")
        predictions = answers.whatif(wishes)
        if not predictions.result.scenarios:
            raise PptraceError("; ".join(predictions.result.warnings[-1:]) or "no such change")
        change = predictions.study.picture(predictions.changes[0][1])
    except PptraceError as err:
        return {"source": "", "reason": str(err)}
    source = CHANGED + address_of(form)
    timeline.add_change(source, change)
    kinds = sorted(set(change.ops()["kind"].astype(str)))
    return {"source": source, "name": predictions.result.scenarios[0].name, "kinds": kinds, "reason": ""}


def _critical(timeline: Timeline, step: int) -> dict[str, Any]:
    """The ops of a step's critical path in order of time, as [index of the rank, start, length]; or why they are not known."""
    if not timeline.windows_of(step):
        return {"ops": [], "reason": "not known: these are no steps of a pipeline"}
    slack = timeline.slack(step)
    if slack is None:
        return {"ops": [], "reason": "not kept for a run of so many ops; pptrace analyze --ops has it"}
    on_path = slack[slack["on_path"] > 0].sort_values("start_ns", kind="stable")
    if on_path.empty:
        return {"ops": [], "reason": "not known: the step lacks ops of its plan, or its ranks' times do not compare"}
    at = on_path["rank"].map(dict(timeline.layout.position)).tolist()
    start = (on_path["start_ns"] - timeline.origin_ns).tolist()
    length = (on_path["end_ns"] - on_path["start_ns"]).tolist()
    return {"ops": list(zip(at, start, length, strict=True)), "reason": ""}
