"""Texts about one bar, shown when the pointer is on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pptrace.model import units
from pptrace.model.units import milliseconds, num_bytes, percent
from pptrace.report.colours import KIND_NAMES
from pptrace.report.tiles.bubbles import STATES
from pptrace.report.tiles.events import CLASS_NAMES, EVENTS
from pptrace.report.tiles.journey import journey
from pptrace.report.tiles.measured import BACK, COMMS, GAPS, OPS, Table
from pptrace.report.tiles.replayed import PLANNED
from pptrace.report.tiles.timeline import MEASURED, Timeline
from pptrace.report.tiles.unlabelled import COMPUTE

Lines = list[tuple[str, str]]
OP_NAMES = {**KIND_NAMES, COMPUTE: "Compute"}
_SOURCES = {"label": "from its label", "inferred": "inferred", "simulated": "simulated"}


def details(timeline: Timeline, source: str, step: int, table: str, row: int, rank: int | None = None) -> Lines:
    """(name, value) of what is known of a bar; the first has no name and is its title. Events have rows by ``rank``.

    Raises:
        LookupError: there is no such bar.
    """
    of_table = timeline.table(source, step, table, timeline.layout.rows[0].rank if rank is None else rank)
    tracks = of_table.tracks
    if not 0 <= row < len(tracks):
        raise LookupError(f"{source} {table} {row}")
    track = tracks.track_of(row)
    at, start, length = int(tracks.rank[track]), int(tracks.start[row]), int(tracks.length[row])
    title = title_of(table, of_table, row)
    lines: Lines = [("", title), ("rank", str(timeline.layout.rows[at].rank)), ("length", f"{milliseconds(length)} ms")]
    if table == OPS:
        lines += _of_op(timeline, source, of_table, row, at, start)
        if source == MEASURED and of_table.lanes[int(tracks.lane[track])] == "compute":
            lines += _of_work(timeline, at, start, start + length)
            lines += _of_gaps(timeline, at, start, start + length)
    elif table == COMMS:
        lines += _of_comm(of_table, row)
    elif table == EVENTS:
        lines += [("on", of_table.lanes[int(tracks.lane[track])]), ("kind", CLASS_NAMES[int(tracks.group[row])])]
    else:
        name = of_table.texts[of_table.lanes[int(tracks.lane[track])]][int(tracks.group[row])]
        lines += [("why", STATES[name])] if name in STATES else []
    return lines


def title_of(name: str, table: Table, row: int) -> str:
    """The title of a bar of the table of this name."""
    return _TITLES[name](table, row)


def _op_title(table: Table, row: int) -> str:
    columns = table.tracks.columns
    pair = str(table.texts["pair"][int(columns["pair"][row])])
    if pair:
        return pair
    kind, microbatch = table.texts["kind"][int(columns["kind"][row])], int(columns["microbatch"][row])
    return f"{OP_NAMES.get(kind, kind)}{f' of microbatch {microbatch}' if microbatch >= 0 else ''}"


def _of_op(timeline: Timeline, source: str, table: Table, row: int, at: int, start: int) -> Lines:
    columns = table.tracks.columns
    known = {name: int(columns[name][row]) for name in ("stage", "chunk", "step")}
    lines: Lines = [(name, str(value)) for name, value in known.items() if value >= 0]
    phase = table.texts["phase"][columns["phase"][row]]
    lines += [("phase", phase)] if phase else []
    kind, microbatch = table.texts["kind"][columns["kind"][row]], int(columns["microbatch"][row])
    rank = timeline.layout.rows[at].rank
    if microbatch >= 0 and source != PLANNED:
        for hop in journey(timeline, source, known["step"], rank, microbatch):
            if hop["row"] == row and hop["table"] == OPS and hop["late_ns"] is not None:
                late, longer = (f"{hop[name] / 1e6:+,.3f} ms" for name in ("late_ns", "longer_ns"))
                lines.append(("than in the plan", f"{late} later, {longer} longer"))
                break
    if source == MEASURED:
        lines += _of_slack(timeline, known["step"], at, start)
        step = next((step for step in timeline.report.steps if step.step == known["step"]), None)
        for op in () if step is None or step.blame is None else step.blame.ops:
            if (op.rank, op.kind, op.stage, op.microbatch) == (rank, kind, known["stage"], microbatch):
                lines.append(("blamed for", f"{milliseconds(op.ns)} ms of bubbles"))
    return lines


_MOST_KINDS = 3
"""Kinds of work, and parts of the model, that a bar's text has."""


def _of_work(timeline: Timeline, at: int, start: int, end: int) -> Lines:
    """The most of an op's work, by kind of work and by part of the model, with the FLOP/s of what multiplies."""
    ops = timeline.work_of_op(timeline.layout.rows[at].rank, start, end)
    lines: Lines = []
    if ops is None:
        return lines
    for word, parts in (("in it, ", ops.classes), ("part ", ops.parts)):
        for part in [part for part in parts if part.name][:_MOST_KINDS]:
            rate = f", {units.flops(part.flops / part.ns * 1e9)}FLOP/s" if part.flops and part.ns else ""
            share = percent(part.ns / max(ops.compute_ns, 1))
            lines.append((f"{word}{part.name}", f"{milliseconds(part.ns)} ms, {share}{rate}"))
    return lines


def _of_gaps(timeline: Timeline, at: int, start: int, end: int) -> Lines:
    """The time in an op in which its rank did not compute, by what it did."""
    tracks = timeline.measured[BACK].tracks
    lengths = dict.fromkeys(STATES, 0)
    for track in tracks.of_rank.get(at, ()):
        if tracks.lane[track] == GAPS:
            rows = slice(tracks.ptr[track], tracks.ptr[track + 1])
            begins, ends = tracks.start[rows], tracks.start[rows] + tracks.length[rows]
            inside = np.maximum(np.minimum(ends, end) - np.maximum(begins, start), 0)
            for code, name in enumerate(STATES):
                lengths[name] += int(inside[tracks.group[rows] == code].sum())
    return [(f"in it, {name}", f"{milliseconds(ns)} ms") for name, ns in lengths.items() if ns]


def _of_slack(timeline: Timeline, step: int, at: int, start: int) -> Lines:
    slack = timeline.slack(step)
    if slack is None:
        return []
    rank = timeline.layout.rows[at].rank
    own: Any = slack[(slack["rank"] == rank) & (slack["start_ns"] == start + timeline.origin_ns)]
    lines: Lines = []
    for op in own.head(1).itertuples():
        if op.source:
            lines.append(("known", _SOURCES.get(op.source, op.source) + (f", {op.clock} clock" if op.clock else "")))
        if op.on_path > 0:
            lines.append(("critical path", "on it: any delay makes the step longer"))
        elif op.slack_ns >= 0:
            lines.append(("slack", f"{milliseconds(op.slack_ns)} ms before the step gets longer"))
    return lines


_MESSAGES = {"send": "Send to rank {peer}", "recv": "Receive from rank {peer}"}


def _comm_title(table: Table, row: int) -> str:
    columns = table.tracks.columns
    kind, peer = str(table.texts["kind"][int(columns["kind"][row])]), int(columns["peer"][row])
    return _MESSAGES.get(kind, kind).format(peer=peer if peer >= 0 else "?") if kind in _MESSAGES else kind


def _of_comm(table: Table, row: int) -> Lines:
    columns = table.tracks.columns
    waits = int(columns["before"][row]) + int(columns["after"][row])
    moves = int(table.tracks.length[row]) - waits
    axis, direction = table.texts["axis"][columns["axis"][row]], table.texts["direction"][columns["direction"][row]]
    lines: Lines = [("axis", axis or "unknown")]
    lines += [("carries", {"F": "activations", "B": "gradients"}.get(direction, direction))] if direction else []
    lines += [(name, str(int(columns[name][row]))) for name in ("microbatch", "step") if int(columns[name][row]) >= 0]
    if int(columns["match"][row]) < 0:
        return [*lines, ("other side", "not in the trace: waiting and transfer cannot be distinguished")]
    lines += [("waits", f"{milliseconds(waits)} ms"), ("transfers", f"{milliseconds(moves)} ms")]
    size = int(columns["bytes"][row])
    if size > 0:
        lines.append(("bytes", num_bytes(size) + (f", {size / moves:,.2f} GB/s" if moves > 0 else "")))
    return lines


def _back_title(table: Table, row: int) -> str:
    tracks = table.tracks
    lane = table.lanes[int(tracks.lane[tracks.track_of(row)])]
    name = table.texts[lane][int(tracks.group[row])]
    words = f"{name[:1].upper()}{name[1:]}"
    return {"phases": name, "bubbles": words, "gaps": f"{words}, in an op"}[lane]


_TITLES: Mapping[str, Callable[[Table, int], str]] = {
    OPS: _op_title,
    COMMS: _comm_title,
    BACK: _back_title,
    EVENTS: lambda table, row: str(table.texts["name"][int(table.tracks.columns["name"][row])]),
}
