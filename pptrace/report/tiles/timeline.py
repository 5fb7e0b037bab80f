"""The timeline of a run: every source on one axis of time, cut into tiles on demand.

The simulated step among them has the times that messages between stages took in each step. The ops that a report lists are read
from the tracks: the tables that they came from can then be let go.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.aligned import AlignedRun, RowsByRank
from pptrace.analysis.op_slack import slack_of_ops
from pptrace.analysis.report import Report
from pptrace.analysis.stages.answer import work_of_op
from pptrace.analysis.stages.types import StageOps
from pptrace.analysis.steps.op_rows import OpRows
from pptrace.clock.result import Clock, ClockMethod
from pptrace.model import tables
from pptrace.model.tables import COMPUTE_KINDS, empty_table
from pptrace.report.tiles.cut import Range
from pptrace.report.tiles.encode import group_tile, memory_tile, rank_tile
from pptrace.report.tiles.events import EVENTS, EventStore
from pptrace.report.tiles.kept import Bars
from pptrace.report.tiles.layout import layout_of
from pptrace.report.tiles.measured import COMPUTE_LANE, OPS, Picture, Table, measured_picture
from pptrace.report.tiles.memory import memory_tracks
from pptrace.report.tiles.replayed import CHANGED, PLANNED, SIMULATED, changed_picture, replayed_picture
from pptrace.report.tiles.tracks import Array
from pptrace.report.tiles.unlabelled import ops_with_compute
from pptrace.simulator import Simulation
from pptrace.slices import Slice, Texts, compact
from pptrace.timeline.windows import StepWindow
from pptrace.workflow.analyse import Analysis
from pptrace.workflow.planned_steps import planned_steps


def message_times(comms: pd.DataFrame) -> dict[int, int]:
    """The median time of the messages of each step whose readers waited for all of it, ns; none of steps without messages.

    A message that was under way before its reader asked for it is seen complete when the reader looks, however long ago it came:
    its recorded transfer may be as long as an op, and kept nobody. Where all were under way, what readers still waited counts.

    Args:
        comms: of schema COMMS.
    """
    is_received = (comms["axis"] == "pp") & (comms["kind"] == "recv") & (comms["match"] >= 0)
    names = ["step", "asked_ns", "transfer_start_ns", "transfer_end_ns"]
    received = comms.loc[is_received, names].reset_index(drop=True)
    begin, asked = received["transfer_start_ns"], received["asked_ns"]
    waited = (received["transfer_end_ns"] - begin.where(begin > asked, asked)).clip(lower=0)
    is_whole = begin > asked
    medians: dict[int, float] = {}
    for kept in (waited, waited[is_whole]):
        of_steps = kept.groupby(received["step"]).median()
        medians |= dict(zip(of_steps.index.tolist(), of_steps.tolist(), strict=True))
    return {step: round(median) for step, median in medians.items()}


_NUMBERS, _TEXTS = ("stage", "chunk", "microbatch"), ("kind", "phase", "pair")


class _Times(Struct, frozen=True):
    """The starts of some rows, or their ends, on the run's clock; computed when rows are asked for."""

    origin_ns: int
    start: Array
    length: Array | None = None

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, chosen: Array | slice) -> Array:
        start = self.start[chosen] + self.origin_ns
        return start if self.length is None else start + self.length[chosen]


def with_ops_of_tracks(report: Report, ops: Table, position: Mapping[int, int], origin_ns: int) -> Report:
    """The same report, whose ops hold no other memory than the tracks do; those of a rank that overlap are compact copies."""
    slices: dict[int, Slice] = {}
    steps = []
    for step in report.steps:
        ranks = []
        for rank in step.ranks:
            rows = rank.ops
            if isinstance(rows, OpRows):
                if rank.rank not in slices:
                    slices[rank.rank] = _slice_of(rows.rows, ops, position.get(rank.rank, -1), origin_ns)
                rows = rows.within(slices[rank.rank])
            ranks.append(replace(rank, ops=rows))
        steps.append(replace(step, ranks=tuple(ranks)))
    return replace(report, steps=tuple(steps))


def _slice_of(rows: Slice, ops: Table, at: int, origin_ns: int) -> Slice:
    """The rows of a rank as views of its track, where that has them in their order; else a compact copy."""
    tracks = ops.tracks
    compute = [track for track in tracks.tracks_of([at]).tolist() if tracks.lane[track] == COMPUTE_LANE]
    if len(compute) == 1:
        own = slice(int(tracks.ptr[compute[0]]), int(tracks.ptr[compute[0] + 1]))
        start = _Times(origin_ns, tracks.start[own])
        if np.array_equal(start[:], rows["start_ns"]):
            columns: dict[str, Any] = {name: tracks.columns[name][own] for name in _NUMBERS}
            columns |= {name: Texts(tracks.columns[name][own], ops.texts[name]) for name in _TEXTS}
            return Slice(columns | {"start_ns": start, "end_ns": _Times(origin_ns, start.start, tracks.length[own])})
    copied: dict[str, Any] = {name: compact(rows[name]).copy() for name in (*_NUMBERS, "start_ns", "end_ns")}
    for name in _TEXTS:
        codes, texts = rows.codes(name)
        copied[name] = Texts(compact(codes), texts)
    return Slice(copied)


K = TypeVar("K")
V = TypeVar("V")
MEASURED = "measured"
MOST_KEPT_OPS = 2_000_000
"""Runs of more ops keep their tracks alone: their tables would take more memory than all else."""
_KEPT_STEPS = 6


class Timeline:
    """All bars of a run in tracks. Usable from any thread."""

    def __init__(self, analysis: Analysis, bars: Bars | None = None) -> None:
        """Make the tracks of an analysis, or take ``bars`` that were made of it."""
        is_new, bars = bars is None, bars or bars_of(analysis)
        self.bars = bars
        self.windows = analysis.windows
        self.schedule, self.mesh, self.report = analysis.schedule, analysis.mesh, analysis.report
        self.origin_ns, self.layout, self.measured, self.memory = (
            bars.origin_ns,
            bars.layout,
            bars.measured,
            bars.memory,
        )
        self.is_light = analysis.num_ops > MOST_KEPT_OPS
        self._analysis = None if self.is_light else analysis
        self.events = EventStore(self._analysis, self.layout.position, self.origin_ns)
        if self.is_light and is_new:  # what was kept is in no other table
            ops = self.measured[OPS]
            self.report = with_ops_of_tracks(analysis.report, ops, self.layout.position, self.origin_ns)
        self._lock = threading.Lock()
        self._replayed: OrderedDict[tuple[str, int], Picture | None] = OrderedDict()
        self._changes: OrderedDict[str, Simulation] = OrderedDict()
        self._critical: OrderedDict[int, pd.DataFrame] = OrderedDict()

    @cached_property
    def spans(self) -> Mapping[int, tuple[int, int]]:
        """(first start, last end) of the windows of each step; without a pipeline each rank's window is its own."""
        spans: dict[int, tuple[int, int]] = {}
        for window in self.windows or self.report.steps:
            low, high = spans.get(window.step, (window.start_ns, window.end_ns))
            spans[window.step] = min(low, window.start_ns), max(high, window.end_ns)
        return spans

    @property
    def first_step(self) -> int | None:
        """The step to begin with, as the header does; of steps that no report has, the first."""
        typical = self.report.typical_step
        return typical.step if typical is not None else min(self.spans, default=None)

    def windows_of(self, step: int) -> tuple[StepWindow, ...]:
        return tuple(window for window in self.windows if window.step == step)

    def picture(self, source: str, step: int) -> Picture | None:
        """The bars of a source; planned and simulated ones are those of a step, None where it has no plan, or no such source.

        Raises:
            KeyError: a change (a name that begins with :data:`~pptrace.report.tiles.replayed.CHANGED`) that was not added.
        """
        if source not in (PLANNED, SIMULATED) and not source.startswith(CHANGED):
            return self.measured if source == MEASURED else None
        with self._lock:
            return _kept(self._replayed, (source, step), lambda: self._replay(source, step))

    def table(self, source: str, step: int, name: str, rank: int) -> Table:
        """A table of a picture, or the events of a rank, which are measured alone.

        Raises:
            LookupError: there is no such picture, table or rank.
        """
        if name == EVENTS and source == MEASURED:
            return self.events.of(self.layout.position[rank])
        picture = self.picture(source, step)
        if picture is None or rank not in self.layout.position:
            raise LookupError(f"{source} {name} {rank}")
        return picture[name]

    def has_change(self, source: str) -> bool:
        """Return whether a change is kept."""
        with self._lock:
            return source in self._changes

    def add_change(self, source: str, simulation: Simulation) -> None:
        """Keep the replay of a step after a change, as the source of this name."""
        with self._lock:
            _kept(self._changes, source, lambda: simulation)

    def _replay(self, source: str, step: int) -> Picture | None:
        plan, windows = self.schedule.plan_of(step), self.windows_of(step)
        if source.startswith(CHANGED):
            change = self._changes[source]
            return (
                changed_picture(change, windows, self.layout.position, self.mesh, self.origin_ns) if windows else None
            )
        if plan is None or not windows:
            return None
        return replayed_picture(source, plan, windows, self.bars, self.mesh)

    def work_of_op(self, rank: int, start_ns: int, end_ns: int) -> StageOps | None:
        """The work of an op of a rank, by its times from the origin; None where that is not known, or ops are not kept."""
        if self._analysis is None:
            return None
        return work_of_op(rank, start_ns + self.origin_ns, end_ns + self.origin_ns, self._analysis.data)

    def slack(self, step: int) -> pd.DataFrame | None:
        """The ops of a step with ``slack_ns`` and ``on_path`` (1, 0), −1 where unknown; None where the run's ops are not kept."""
        analysis = self._analysis
        if analysis is None:
            return None
        with self._lock:
            return _kept(self._critical, step, lambda: self._slack_of(step, analysis))

    def _slack_of(self, step: int, analysis: Analysis) -> pd.DataFrame:
        data = analysis.data
        of_step = data.ops["step"] == step
        ops = data.ops[of_step].reset_index(drop=True)
        comms = data.comms[data.comms["step"] == step].reset_index(drop=True)
        part = replace(data, ops=ops, comms=comms, rows=RowsByRank(ops, comms))
        slack = slack_of_ops(planned_steps(self.windows_of(step), part, analysis), part)
        return ops.assign(slack_ns=slack.slack_ns, on_path=slack.on_critical_path)

    def tile(self, source: str, step: int, order: str, block: int, time: Range) -> bytes:
        """The tile of a block of ranks: a section for each table.

        Raises:
            LookupError: there is no such source, order or block.
        """
        picture = self.require_picture(source, step)
        return rank_tile(picture, self.layout.blocks(order)[block], time)[0]

    def memory_tile(self, order: str, block: int, time: Range) -> bytes:
        """The tile of the memory of a block of ranks: the most bytes in each bucket, of those that have memory events.

        Raises:
            LookupError: there is no such order or block.
        """
        return memory_tile(self.memory, self.layout.blocks(order)[block], time)

    def group_tile(self, source: str, step: int, order: str, time: Range) -> bytes:
        """The tile of all groups of an order: of each, the shares of its ranks' time in each class of ops by bucket.

        Raises:
            LookupError: there is no such source or order.
        """
        return group_tile(self.require_picture(source, step), self.layout.orders[order], time)

    def require_picture(self, source: str, step: int) -> Picture:
        """The bars of a source.

        Raises:
            LookupError: the step has no plan, or there is no such source.
        """
        picture = self.picture(source, step)
        if picture is None:
            raise LookupError(source)
        return picture


def bars_of(analysis: Analysis) -> Bars:
    """All that was measured as tracks, with their mipmaps."""
    data, ops = analysis.data, ops_with_compute(analysis.data)
    origin_ns = min((int(table["start_ns"].min()) for table in (ops, data.comms) if len(table)), default=0)
    ranks = {*pd.unique(ops["rank"]).tolist(), *pd.unique(data.comms["rank"]).tolist()}
    layout = layout_of(ranks, analysis.mesh, stages_of_ranks(ops))
    measured = measured_picture(analysis, ops, layout.position, origin_ns)
    for table in measured.values():
        table.levels  # noqa: B018  made now, not by the first who asks
    memory = memory_tracks(data.memory, layout.position, origin_ns)
    return Bars(origin_ns, layout, measured, memory, message_times(data.comms))


def without_tables(analysis: Analysis, report: Report) -> Analysis:
    """An analysis with its report alone: what tracks have is in no table any more."""
    ops, comms, memory = map(empty_table, (tables.OPS, tables.COMMS, tables.MEMORY))
    data = AlignedRun(ops, comms, memory, RowsByRank(ops, comms), {}, {}, Clock(ClockMethod.NONE, {}, None))
    parts = (analysis.schedule, analysis.mesh, analysis.windows)
    return Analysis(report, data, *parts, run=analysis.run, expert_traffic=analysis.expert_traffic)


def _kept(cache: OrderedDict[K, V], key: K, make: Callable[[], V]) -> V:
    if key not in cache:
        cache[key] = make()
        while len(cache) > _KEPT_STEPS:
            cache.popitem(last=False)
    cache.move_to_end(key)
    return cache[key]


def stages_of_ranks(ops: pd.DataFrame) -> Mapping[int, tuple[int, ...]]:
    compute = ops[ops["kind"].isin(COMPUTE_KINDS) & (ops["stage"] >= 0)]
    distinct = compute[["rank", "stage"]].drop_duplicates()
    stages: dict[int, list[int]] = {}
    for rank, stage in zip(distinct["rank"].tolist(), distinct["stage"].tolist(), strict=True):
        stages.setdefault(rank, []).append(stage)
    return {rank: tuple(sorted(of_rank)) for rank, of_rank in stages.items()}
