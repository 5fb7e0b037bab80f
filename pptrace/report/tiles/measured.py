"""Tracks of what was measured: ops, communication, and what lies behind them (phases, time without compute in an op)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct

from pptrace.errors import ScheduleError
from pptrace.model.tables import COMPUTE_KINDS, MESSAGES
from pptrace.report.tiles.bubbles import MEANINGS, STATES, SendTimes, gaps_in_ops, idle_by_state
from pptrace.report.tiles.pyramid import Level, make_pyramid
from pptrace.report.tiles.tracks import Array, Tracks, make_tracks
from pptrace.report.tiles.unlabelled import COMPUTE
from pptrace.schedule.actions import Phase, parse_action
from pptrace.slices import slice_of
from pptrace.timeline.windows import phase_spans_of_steps
from pptrace.workflow.analyse import Analysis

OP_CLASSES = ("F", "B", "I", "W", "OVERLAP_F_B", "other")
COMM_CLASSES = ("wait", "transfer", "either")
"""``either``: another side is not in the traces, so that nothing tells waiting from transfer."""
OPS, COMMS, BACK = "ops", "comms", "back"
TABLES = (OPS, COMMS, BACK)
COMPUTE_LANE, _RANGES, _STEPS = 0, 1, 2
STEP_RANGES = "steps"
"""Lane of the ranges of whole steps, which is not drawn."""
PHASES, BUBBLES, GAPS = 0, 1, 2


class Table(Struct, frozen=True, dict=True):
    """Tracks with their pyramid; ``lanes`` and ``texts`` are the names that codes of lanes and of some columns stand for."""

    tracks: Tracks
    lanes: tuple[str, ...]
    texts: Mapping[str, tuple[str, ...]]

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        return make_pyramid(self.tracks)


Picture = Mapping[str, Table]
"""All tables of one source (measured, planned, simulated) on the run's time, from its origin."""


def ops_table(ops: pd.DataFrame, position: Mapping[int, int], origin_ns: int) -> Table:
    """The ops of schema OPS: compute in one lane, other ranges in a second, whole steps in a third."""
    rows = slice_of(ops)
    coded = {name: rows.codes(name) for name in ("kind", "phase", "pair", "source", "clock")}
    kind, kinds = coded["kind"]
    lanes = {**dict.fromkeys((*COMPUTE_KINDS, COMPUTE), COMPUTE_LANE), "STEP": _STEPS}
    lane_of = np.array([lanes.get(name, _RANGES) for name in kinds], dtype=np.int64)
    classes = {name: code for code, name in enumerate(OP_CLASSES)}
    class_of = np.array([classes.get(name, len(OP_CLASSES) - 1) for name in kinds], dtype=np.int64)
    start = rows["start_ns"] - origin_ns
    columns = {name: rows[name] for name in ("step", "stage", "chunk", "microbatch")}
    columns |= {name: codes for name, (codes, _) in coded.items()}
    tracks = make_tracks(
        _positions(rows["rank"], position),
        lane_of[kind],
        start,
        rows["end_ns"] - rows["start_ns"],
        class_of[kind],
        columns=columns,
    )
    return Table(tracks, ("compute", "ranges", STEP_RANGES), {name: texts for name, (_, texts) in coded.items()})


def _positions(ranks: Array, position: Mapping[int, int]) -> Array:
    known = np.array(sorted(position), dtype=np.int64)
    of_known = np.array([position[rank] for rank in known.tolist()], dtype=np.int64)
    return of_known[np.searchsorted(known, ranks)]


def comms_table(comms: pd.DataFrame, position: Mapping[int, int], origin_ns: int) -> Table:
    """The communication of schema COMMS: receives, sends, and a lane for each other axis."""
    rows = slice_of(comms)
    kind, kinds = rows.codes("kind")
    axis, axes = rows.codes("axis")
    direction, directions = rows.codes("direction")
    is_message, is_send = np.isin(kinds, MESSAGES)[kind], np.isin(kinds, "send")[kind]
    lane = np.where(is_message & np.isin(axes, "pp")[axis], is_send.astype(np.int64), axis + 2)
    start, end = rows["start_ns"], rows["end_ns"]
    transfer_start = np.clip(rows["transfer_start_ns"], start, end)
    transfer_end = np.clip(rows["transfer_end_ns"], transfer_start, end)
    tracks = make_tracks(
        _positions(rows["rank"], position),
        lane,
        start - origin_ns,
        end - start,
        np.where(rows["match"] < 0, COMM_CLASSES.index("either"), COMM_CLASSES.index("transfer")),
        second=(transfer_start - start) + (end - transfer_end),
        columns={name: rows[name] for name in ("step", "stage", "microbatch", "peer", "bytes", "match")}
        | {"kind": kind, "axis": axis, "direction": direction}
        | {"before": transfer_start - start, "after": end - transfer_end},
    )
    lanes = ("receives", "sends", *(name or "unknown axis" for name in axes))
    return Table(tracks, lanes, {"kind": kinds, "axis": axes, "direction": directions})


def _back_table(analysis: Analysis, position: Mapping[int, int], origin_ns: int) -> Table:
    """Phases of all ranks, and their time without compute in an op; a bar's class is its phase or state."""
    parts: list[tuple[int, int, int, Array, Array]] = []
    sent, states = SendTimes.of(analysis.data.comms), list(STATES)
    windows: dict[int, list[tuple[int, int, int]]] = {}
    for window in analysis.windows:
        for rank in window.ranks:
            windows.setdefault(rank, []).append((window.step, window.start_ns, window.end_ns))
    for rank, at in position.items():
        steps, starts, ends = np.array(sorted(windows.get(rank, ())), dtype=np.int64).reshape(-1, 3).T
        rows, lane = analysis.data.rows.of_rank(rank), analysis.data.lanes.get(rank)
        for code, edges in phases_of(rows.ops, steps, starts, ends).items():
            parts.append((at, PHASES, code, edges[:, 0], edges[:, 1]))
        for name, edges in idle_by_state(rows, lane, starts, ends, steps, sent).items():
            parts.append((at, BUBBLES, states.index(name), *edges.T))
        for name, edges in gaps_in_ops(rows, lane).items():
            parts.append((at, GAPS, states.index(name), *edges.T))
    return back_table(parts, origin_ns)


def back_table(parts: Sequence[tuple[int, int, int, Array, Array]], origin_ns: int = 0) -> Table:
    """The table of intervals, each set (index of the rank, lane, code of its phase or state, starts, ends)."""
    counts = [len(part[3]) for part in parts]
    positions, lanes, groups = (np.repeat([part[index] for part in parts] or [0], counts or [0]) for index in range(3))
    start, end = (np.concatenate([part[index] for part in parts] or [np.empty(0, np.int64)]) for index in (3, 4))
    tracks = make_tracks(positions, lanes, start - origin_ns, end - start, groups)
    texts = {"phases": tuple(map(str, Phase)), "bubbles": tuple(MEANINGS), "gaps": tuple(STATES)}
    return Table(tracks, ("phases", "bubbles", "gaps"), texts)


def phases_of(ops: Any, steps: Array, starts: Array, ends: Array) -> dict[int, Array]:
    """The times of each phase, of the steps whose ops all have one, shape (steps, 2) by the phase's code."""
    known = ops.among("phase", [str(phase) for phase in Phase])
    low, high = (np.searchsorted(ops["step"], steps, side=side) for side in ("left", "right"))
    before = np.r_[0, np.cumsum(~known)]
    chosen = np.flatnonzero((high > low) & (before[high] == before[low]))
    if not len(chosen):
        return {}
    of_steps = ops.where(np.isin(ops["step"], steps[chosen]))
    index = np.searchsorted(steps[chosen], of_steps["step"])
    spans = phase_spans_of_steps(of_steps, index, starts[chosen].tolist(), ends[chosen].tolist())
    times = np.array([[(span.start_ns, span.end_ns) for span in of_step] for of_step in spans], dtype=np.int64)
    return {code: part[part[:, 1] > part[:, 0]] for code, part in enumerate(times.transpose(1, 0, 2))}


def measured_picture(analysis: Analysis, ops: pd.DataFrame, position: Mapping[int, int], origin_ns: int) -> Picture:
    """Everything that was measured, as tracks; ``ops`` may have more rows than those of the analysis."""
    data = analysis.data
    return {
        OPS: ops_table(ops, position, origin_ns),
        COMMS: comms_table(data.comms, position, origin_ns),
        BACK: _back_table(analysis, position, origin_ns),
    }


def halves_of(pair: str) -> tuple[tuple[str, int, int | None], ...]:
    """(kind, stage, microbatch) of the halves of an overlapped pair; () where the text is none."""
    try:
        parts = parse_action(pair).parts if pair else ()
    except ScheduleError:
        return ()
    return tuple((str(part.kind), part.stage, part.microbatch) for part in parts)
