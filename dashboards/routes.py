"""Routes of the server for the timeline (tiles, bars, journeys, search) and for Prometheus. They only read what was opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from flask import Flask, Response, abort, jsonify, request

from dashboards.answers import Answers
from dashboards.store import Store
from dashboards.tiles.bars import Place, aligned_at, bar_at
from dashboards.tiles.changed import CHANGED
from dashboards.tiles.cut import NUM_BUCKETS, Range
from dashboards.tiles.details import OP_NAMES, details
from dashboards.tiles.events import CLASS_NAMES, EVENTS
from dashboards.tiles.journey import journey
from dashboards.tiles.layout import BLOCK
from dashboards.tiles.measured import BACK, BUBBLES, COMMS, GAPS, OP_CLASSES, OPS, PHASES, TABLES
from dashboards.tiles.replayed import PLANNED, SIMULATED
from dashboards.tiles.search import search
from dashboards.tiles.sums import sums_of
from dashboards.tiles.timeline import MEASURED, Timeline
from dashboards.tiles.unlabelled import COMPUTE as UNLABELLED
from dashboards.wishes import address_of, wishes_of
from pptrace.errors import PptraceError
from pptrace.report.colours import COMMUNICATION, COMPUTE, KIND_COLOURS, MEMORY, OTHER, PART_COLOURS, ink, shade
from pptrace.report.metrics import CONTENT_TYPE, live_metrics_of, metrics_of
from pptrace.schedule.registry import SCHEDULES

_MOST_SHIFT = 50
_MOST_RANKS = 64
"""Ranks whose events are searched or summed at once."""
_MOST_DIGITS = 10
_EVENT_COLOURS = ("#5B84B1", "#9C8ABF", "#C2A14D", "#8C97A6", COMPUTE, COMMUNICATION, MEMORY, "#7A4FA3", OTHER)
"""Colours of events, by their class."""
_CACHED = "private, max-age=3600, immutable"
_BYTES = "application/octet-stream"


def add_routes(server: Flask, store: Store, answers: Answers) -> None:
    """Add the routes below ``/timeline-data/``; each but the first two has the token of the data that the page shows."""

    def timeline_of(token: str) -> Timeline:
        timeline = store.timeline(token)
        if timeline is None:
            abort(409, "the files have changed; reload the page")
        return timeline

    def with_change(token: str, source: str) -> Timeline:
        """The timeline, with a change that it has let go of, or that a server was asked for which has ended since."""
        timeline = timeline_of(token)
        if source.startswith(CHANGED) and not timeline.has_change(source):
            _change(timeline, answers, dict(parse_qsl(source.removeprefix(CHANGED))))
        return timeline

    def add(rule: str, answer: Callable[..., Any]) -> None:
        server.add_url_rule(f"/timeline-data/{rule}", f"timeline {rule}", _or_not_found(answer), methods=["GET"])

    def opening() -> Any:
        return jsonify(asdict(store.opening))

    def about() -> Any:
        loaded = store.get()
        timeline = store.timeline(loaded.token)
        return jsonify(None if timeline is None else {"token": loaded.token, **_about(timeline, answers)})

    def tile(token: str, source: str, step: int, order: str, block: int, shift: int, index: int) -> Response:
        answer = with_change(token, source).tile(source, step, order, block, _range(shift, index))
        return _cached(answer)

    def groups(token: str, source: str, step: int, order: str, shift: int, index: int) -> Response:
        return _cached(with_change(token, source).group_tile(source, step, order, _range(shift, index)))

    def memory(token: str, order: str, block: int, shift: int, index: int) -> Response:
        return _cached(timeline_of(token).memory_tile(order, block, _range(shift, index)))

    def whatif(token: str) -> Any:
        return jsonify(_change(timeline_of(token), answers, request.args))

    def critical(token: str, step: int) -> Any:
        return jsonify(_critical(timeline_of(token), step))

    def hops(token: str, source: str, step: int, rank: int, microbatch: int) -> Any:
        return jsonify(journey(with_change(token, source), source, step, rank, microbatch))

    def bar(token: str, source: str, step: int, table: str, row: int) -> Any:
        return jsonify(details(with_change(token, source), source, step, table, row))

    def lanes(token: str, at: int) -> Any:
        return jsonify(timeline_of(token).events.of(at).describe())

    def events(token: str, at: int, shift: int, index: int) -> Response:
        return _cached(timeline_of(token).events.of(at).tile(_range(shift, index)))

    def event(token: str, rank: int, row: int) -> Any:
        return jsonify(details(timeline_of(token), MEASURED, 0, EVENTS, row, rank))

    def at(token: str, **place: Any) -> Any:
        return jsonify(bar_at(with_change(token, place["source"]), Place(**place)))

    def align(token: str, **place: Any) -> Any:
        return jsonify(aligned_at(with_change(token, place["source"]), Place(**place)))

    def find(token: str) -> Any:
        timeline = timeline_of(token)
        ranks = [at for at in _numbers(request.args.get("events", "")) if at in timeline.events.ranks]
        from_ns = request.args.get("from", 0, type=int)
        return jsonify(search(timeline, request.args.get("q", ""), ranks[:_MOST_RANKS], from_ns))

    def sums(token: str, source: str, step: int, begin: int, end: int) -> Any:
        timeline = with_change(token, source)
        everyone = range(len(timeline.layout.rows))
        wanted = _numbers(request.args["ranks"]) if "ranks" in request.args else everyone
        opened = [at for at in _numbers(request.args.get("events", "")) if at in timeline.events.ranks][:_MOST_RANKS]
        ranks = [at for at in wanted if at in everyone]
        return jsonify(sums_of(timeline, source, step, ranks, opened, begin, max(end, begin)))

    where = "<token>/<source>/<int(signed=True):step>"
    add("opening", opening)
    add("about", about)
    add(f"tile/{where}/<order>/<int:block>/<int:shift>/<int:index>", tile)
    add(f"groups/{where}/<order>/<int:shift>/<int:index>", groups)
    add("memory/<token>/<order>/<int:block>/<int:shift>/<int:index>", memory)
    add("whatif/<token>", whatif)
    add("critical/<token>/<int(signed=True):step>", critical)
    add(f"journey/{where}/<int(signed=True):rank>/<int:microbatch>", hops)
    add(f"bar/{where}/<table>/<int:row>", bar)
    place = "<table>/<int(signed=True):rank>/<int:lane>/<int(signed=True):start_ns>"
    add(f"at/{where}/{place}", at)
    add(f"align/{where}/{place}", align)
    add("find/<token>", find)
    add(f"sums/{where}/<int(signed=True):begin>/<int(signed=True):end>", sums)
    add("lanes/<token>/<int:at>", lanes)
    add("events/<token>/<int:at>/<int:shift>/<int(signed=True):index>", events)
    add("event/<token>/<int(signed=True):rank>/<int:row>", event)


def add_metrics(server: Flask, store: Store) -> None:
    """Add ``/metrics`` for Prometheus: the report of what was opened, read anew where its files have changed, and the last
    steps of a run that goes on.
    """

    def metrics() -> Response:
        analysis = store.get().analysis
        text = metrics_of(None if analysis is None else analysis.report)
        if (live := store.live.get()) is not None:
            text += live_metrics_of(live.steps, live.cost)
        return Response(text, content_type=CONTENT_TYPE, headers={"Cache-Control": "no-store"})

    server.add_url_rule("/metrics", view_func=metrics, methods=["GET"])


def refuse_metrics(server: Flask) -> None:
    """Answer ``/metrics`` with what it takes to have them: a page in their place would puzzle a Prometheus server."""

    def metrics() -> Response:
        abort(404, "Prometheus is answered by a dashboard that was started with --metrics")

    server.add_url_rule("/metrics", view_func=metrics, methods=["GET"])


def _or_not_found(answer: Callable[..., Any]) -> Callable[..., Any]:
    def answered(**parts: Any) -> Any:
        try:
            return answer(**parts)
        except LookupError:
            abort(404)

    return answered


def _numbers(text: str) -> list[int]:
    """The whole numbers of a text such as ``0.3.7``."""
    return [int(part) for part in text.split(".") if part.isascii() and part.isdigit() and len(part) < _MOST_DIGITS]


def _range(shift: int, index: int) -> Range:
    if shift > _MOST_SHIFT or (abs(index) + 1) * NUM_BUCKETS << shift >= 2**62:
        abort(404)
    return Range(shift, index)


def _cached(content: bytes) -> Response:
    return Response(content, mimetype=_BYTES, headers={"Cache-Control": _CACHED})


def _about(timeline: Timeline, answers: Answers) -> dict[str, Any]:
    why_not = answers.why_no_prediction()
    layout, tables = timeline.layout, timeline.measured.tables
    has_plan = any(timeline.schedule.plan_of(step) is not None for step in timeline.spans)
    return {
        "span": timeline.span_ns,
        "numBars": {name: len(tables[name].tracks) for name in TABLES},
        "ranks": [
            {"rank": row.rank, "pipeline": row.pipeline, "place": row.pp_rank, "stages": row.stages}
            for row in layout.rows
        ],
        "orders": {name: [[label, at] for label, at in groups] for name, groups in layout.orders.items()},
        "block": BLOCK,
        "buckets": NUM_BUCKETS,
        "steps": [
            [step, low - timeline.origin_ns, high - timeline.origin_ns]
            for step, (low, high) in sorted(timeline.spans.items())
        ],
        "tables": {
            name: {
                "lanes": tables[name].lanes,
                "depths": {tables[name].lanes[lane]: depth for lane, depth in tables[name].tracks.depths.items()},
                "depthsOfRanks": tables[name]
                .tracks.depths_of_ranks(len(layout.rows), len(tables[name].lanes))
                .tolist(),
                "texts": {key: texts for key, texts in tables[name].texts.items() if key != "pair"},
            }
            for name in TABLES
        },
        "sources": [*((PLANNED, SIMULATED) if has_plan else ()), MEASURED],
        "palette": _palette(timeline),
        "opClasses": OP_CLASSES,
        "phases": _seen(timeline, "phases", (PHASES,)),
        "causes": _seen(timeline, "bubbles", (BUBBLES, GAPS)),
        "colours": {
            **KIND_COLOURS,
            "transfer": COMMUNICATION,
            "either": OTHER,
            "other": OTHER,
            "host": PART_COLOURS["host"],
            "memory": MEMORY,
        },
        "kindNames": OP_NAMES,
        "hasPipeline": bool(timeline.windows),
        "mostBytes": timeline.most_bytes,
        "haveMemory": list(timeline.memory),
        "haveEvents": list(timeline.events.ranks),
        "eventClasses": [
            [name, [(fill, ink(fill)) for fill in (shade(colour, index, 4) for index in range(3))]]
            for name, colour in zip(CLASS_NAMES, _EVENT_COLOURS, strict=True)
        ],
        "hasUnmatched": bool((tables[COMMS].tracks.columns["match"] < 0).any()),
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


def _seen(timeline: Timeline, name: str, lanes: tuple[int, ...]) -> list[str]:
    """The phases, or the states of ranks that compute in no op, that the run has."""
    table = timeline.measured.tables[BACK]
    is_meant = np.repeat(np.isin(table.tracks.lane, lanes), np.diff(table.tracks.ptr))
    return [table.texts[name][code] for code in np.unique(table.tracks.group[is_meant]).tolist()]


def _palette(timeline: Timeline) -> dict[str, list[tuple[str, str]]]:
    """(fill, ink on it) of each kind of op, for each chunk."""
    chunks = timeline.measured.tables[OPS].tracks.columns["chunk"]
    num_chunks = max(int(chunks.max()) + 1 if len(chunks) else 1, 1)
    seen = timeline.measured.tables[OPS].texts["kind"]
    colours = {**dict.fromkeys(seen, OTHER), **KIND_COLOURS}
    if UNLABELLED in seen:
        colours |= {UNLABELLED: COMPUTE, OP_CLASSES[-1]: COMPUTE}
    fills = {
        kind: [shade(colour, chunk, num_chunks) for chunk in range(num_chunks)] for kind, colour in colours.items()
    }
    return {kind: [(fill, ink(fill)) for fill in of_kind] for kind, of_kind in fills.items()}


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
