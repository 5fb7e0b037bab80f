"""Costs of the ops and messages of whole steps, as matrices: a row per step of a pipeline, a column per row of the plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.analysis.message_graph import Graph
from pptrace.analysis.stragglers.outside import in_order, nothing_outside, of_windows
from pptrace.model.tables import Int64
from pptrace.schedule.actions import Kind
from pptrace.schedule.needs import OUTPUT_OF, Output
from pptrace.schedule.plan import Plan
from pptrace.schedule.plan_table import PlanTable
from pptrace.slices import Slice

Bool = npt.NDArray[np.bool_]

RECEIVES = (Kind.RECV_F.code, Kind.RECV_B.code)
"""The kinds of messages: what their readers do."""
_CELLS = 1 << 19


def none_moved_together() -> Slice:
    """A table of messages posted together without rows."""
    return Slice({name: np.zeros(0, dtype=np.int64) for name in ("window", "message", "ns")})


def nothing_held() -> Slice:
    """A table of holds without rows."""
    return Slice({name: np.zeros(0, dtype=np.int64) for name in ("window", "row", "rank", "ns", "is_late")})


def none_held_by_starts() -> Slice:
    """A table of waits for ranks that began late without rows."""
    return Slice({name: np.zeros(0, dtype=np.int64) for name in ("window", "row", "ns")})


def nothing_received_late() -> Slice:
    """A table of waits for receives whose senders are done without rows."""
    return Slice({name: np.zeros(0, dtype=np.int64) for name in ("window", "row", "ns")})


def nothing_routed() -> Slice:
    """A table of what equal routes would change without rows."""
    return Slice({name: np.zeros(0, dtype=np.int64) for name in ("window", "row", "ns", "compute", "lead")})


@dataclass(frozen=True, eq=False)
class MeasuredCosts:
    """Costs in windows of one plan, ns: ``durations`` (windows, rows), ``transfers`` (windows, messages) to their readers.

    ``delays`` (windows, rows) is how late each op began, when all that it needs was there and nothing was being fetched;
    ``inner`` (windows, rows) is the part of its duration in which it communicated and did not compute. ``collected_before`` and
    ``collected_inside`` (windows, rows) are the parts of lateness and durations that garbage collections took.
    A message of which the sender came last (``sender_is_last``) takes its transfer from its sender's end on. Of others it is part
    of ``moving`` (windows, rows): how long transfers kept a rank from each op when all that the op needs was there, as receives
    that begin late and sends that block do. The longest of them were with ``moved_with``
    (:func:`pptrace.analysis.stragglers.links.peer_bit`).
    ``holds`` are ops that waited in collectives (:func:`pptrace.analysis.explain.inner_waits.holds_of`).
    ``routed`` is what would change of ops if all experts had equally many rows (:mod:`pptrace.analysis.experts.routing`).
    ``moved_together`` (``window``, ``message``, ``ns``) is what messages cost their readers by the trace alone, where several
    that were posted together are taken to be moved one by one.
    ``held_by_starts`` (``window``, ``row``, ``ns``) are the parts of delays in which an op's rank waited in a message for one
    that had run nothing in the step yet.
    ``receiving`` (``window``, ``row``, ``ns``) are the parts of delays in which a kernel still received what an op reads, whose
    sender was done.
    ``outside`` is what the ranks did before and after their ops (:mod:`pptrace.analysis.stragglers.outside`).
    ``posted`` (windows, calls of the graph) is how long after what its rank did before it each call was posted, and
    ``before_posting`` (windows, rows) the part of an op's delay that these take; None without a graph.
    ``step`` is the number of each window's step, ``ranks`` (windows, pp) its global ranks in pipeline order, ``spans`` (windows,)
    its length. A transfer of a message whose ends were not matched is −1. ``graph`` is that of the way in which the run sends and
    receives (:mod:`pptrace.analysis.stragglers.messaging`), None for replays with the waits that were measured.
    """

    table: PlanTable
    step: Int64
    ranks: Int64
    durations: Int64
    transfers: Int64
    delays: Int64
    sender_is_last: Bool
    moving: Int64
    moved_with: Int64
    inner: Int64
    collected_before: Int64
    collected_inside: Int64
    spans: Int64
    outside: Slice = field(default_factory=nothing_outside)
    holds: Slice = field(default_factory=nothing_held)
    moved_together: Slice = field(default_factory=none_moved_together)
    held_by_starts: Slice = field(default_factory=none_held_by_starts)
    receiving: Slice = field(default_factory=nothing_received_late)
    routed: Slice = field(default_factory=nothing_routed)
    plan: Plan | None = None
    graph: Graph | None = None
    posted: Int64 | None = None
    before_posting: Int64 | None = None

    @cached_property
    def lateness(self) -> Int64:
        """Time of ranks between their ops, shape (windows, rows), ns: the delays and, in replays that tell when messages are
        posted, what kept a rank from its calls, while others may have kept it from its ops.

        What is before an op is its own, and what is behind the last one of a rank that one's.
        """
        if self.posted is None or self.before_posting is None:
            return self.delays
        return self.delays.astype(np.int64) - self.before_posting + self._by_row(self.posted)

    def posted_if(self, late: Int64, windows: slice) -> tuple[Int64, Int64 | None]:
        """(the delay of each op, how late each call is posted) if ranks are as late in some windows as ``late`` says.

        What is less of it than was measured is that much less of every part before an op.
        """
        if self.posted is None or self.before_posting is None:
            return late, None
        assert self.graph is not None
        measured = self.lateness[windows]
        left = np.divide(late, measured, out=np.ones(measured.shape), where=measured > 0)
        posted = np.floor(self.posted[windows] * left[:, self.graph.call_row]).astype(np.int64)
        return np.maximum(late - self._by_row(posted), 0), posted

    def _by_row(self, of_calls: Int64) -> Int64:
        """The sum of some times of calls before each op, shape (windows, rows)."""
        assert self.graph is not None
        return sums_by_row(of_calls, self.graph.call_row, len(self.table))

    @cached_property
    def reader(self) -> Int64:
        """The row of the plan that reads each message."""
        rows: Int64 = self.table.dep_reader[self.table.dep_is_message].astype(np.int64)
        return rows

    @cached_property
    def message_kind(self) -> Int64:
        """The kind of each message: the code of RECV_F or RECV_B."""
        output = self.table.dep_slot[self.table.dep_is_message] % len(Output)
        kinds: Int64 = np.where(output == OUTPUT_OF[Kind.F], *RECEIVES).astype(np.int64)
        return kinds

    @cached_property
    def cells(self) -> tuple[Int64, Int64]:
        """(kind and stage of each cell as one number, the cell of each row)."""
        key = self.table.kind.astype(np.int64) * self.table.num_stages + self.table.stage
        cells, of_row = np.unique(key, return_inverse=True)
        return cells, of_row

    @cached_property
    def typical_cells(self) -> npt.NDArray[np.float64]:
        """The median cost of each cell over all steps in each pipeline, shape (windows, cells): the same in all its windows, ns.

        What ops wait for other members of collectives is not their cost.
        """
        cells, of_row = self.cells
        own = self.durations
        if len(self.holds):
            own = own - self.held(self.holds["is_late"] == 0)
        typical = np.empty((len(self.step), len(cells)))
        for windows in self.of_pipelines():
            durations = own[windows]
            for cell in range(len(cells)):
                typical[windows, cell] = np.median(durations[:, of_row == cell])
        return typical

    def of_pipelines(self) -> list[Int64]:
        """The windows of each pipeline."""
        _, number = np.unique(self.ranks, axis=0, return_inverse=True)
        return [np.flatnonzero(number.ravel() == index) for index in range(int(number.max(initial=-1)) + 1)]

    def every(self, stride: int) -> MeasuredCosts:
        """The costs of every ``stride``-th step."""
        if stride == 1:
            return self
        return self.of_windows(np.flatnonzero(np.isin(self.step, np.unique(self.step)[::stride])))

    def of_windows(self, windows: Int64) -> MeasuredCosts:
        """The costs of some windows, in their order."""
        columns: dict[str, Any] = {name: getattr(self, name)[windows] for name in (*_MATRICES, *self._calls)}
        rows: dict[str, Any] = {name: of_windows(getattr(self, name), windows) for name in _SPARSE}
        return MeasuredCosts(self.table, **columns, **rows, plan=self.plan, graph=self.graph)

    @property
    def _calls(self) -> tuple[str, ...]:
        """The matrices that are not always there, if they are."""
        return () if self.posted is None else ("posted", "before_posting")

    def held(self, where: Bool) -> Int64:
        """Time by which each op would be shorter without some of the ``holds``, shape (windows, rows), ns."""
        total = np.zeros(self.durations.shape, dtype=np.int64)
        np.add.at(total, (self.holds["window"][where], self.holds["row"][where]), self.holds["ns"][where])
        return np.minimum(total, self.durations)

    def as_recorded(self) -> MeasuredCosts:
        """The same costs with transfers as the trace has them: each of several posted together until it was seen complete."""
        if not len(self.moved_together):
            return self
        transfers = self.transfers.astype(np.int64)
        transfers[self.moved_together["window"], self.moved_together["message"]] = self.moved_together["ns"]
        return replace(self, transfers=transfers, moved_together=none_moved_together())

    @property
    def has_collections(self) -> bool:
        """Return whether garbage collections took time of any op, or before it."""
        return bool(self.collected_before.any() or self.collected_inside.any())

    def without_collections(self) -> MeasuredCosts:
        """The same costs without what garbage collections took."""
        none = np.zeros_like(self.collected_before)
        delays, posted = self.posted_if(self.lateness - self.collected_before, slice(None))
        return replace(
            self,
            durations=self.durations - self.collected_inside,
            delays=delays,
            posted=posted,
            before_posting=None if posted is None else none,
            collected_before=none,
            collected_inside=none,
        )

    def without_late_receives(self) -> MeasuredCosts:
        """The same costs as if kernels had received messages as soon as their senders were done."""
        if not len(self.receiving):
            return self
        receiving = np.zeros(self.durations.shape, dtype=np.int64)
        receiving[self.receiving["window"], self.receiving["row"]] = self.receiving["ns"]
        delays, posted = self.posted_if(np.maximum(self.lateness - receiving, 0), slice(None))
        before = None if posted is None else np.zeros_like(receiving)
        return replace(self, delays=delays, posted=posted, before_posting=before, receiving=nothing_received_late())

    def with_routed(self, routed: Slice) -> MeasuredCosts:
        """The same costs with what equal routes would change of them."""
        return replace(self, routed=routed)

    def of_routes(self, name: str) -> Int64:
        """A column of ``routed`` as a matrix (windows, rows)."""
        total = np.zeros(self.durations.shape, dtype=np.int64)
        total[self.routed["window"], self.routed["row"]] = self.routed[name]
        return total

    def with_equal_routes(self) -> MeasuredCosts:
        """The same costs if all experts had equally many rows."""
        if not len(self.routed):
            return self
        shorter = np.minimum(self.of_routes("ns"), self.durations)
        waits = shorter - self.of_routes("compute")
        held = self.held(np.ones(len(self.holds), dtype=np.bool_))
        left = 1 - np.clip(self.of_routes("lead") / np.maximum(held, 1), 0, 1)
        holds = {**self.holds.columns}
        holds["ns"] = np.rint(holds["ns"] * left[holds["window"], holds["row"]]).astype(np.int64)
        return replace(
            self,
            durations=self.durations - shorter,
            inner=np.clip(self.inner - waits, 0, self.durations - shorter),
            holds=Slice(holds).where(holds["ns"] > 0),
            routed=nothing_routed(),
        )

    def parts(self) -> Iterator[slice]:
        """The windows in parts, so that what is made of each takes little memory."""
        most = max(1, _CELLS // max(1, len(self.table)))
        return (slice(begin, begin + most) for begin in range(0, len(self.step), most))


def joined(parts: Iterable[MeasuredCosts]) -> tuple[MeasuredCosts, ...]:
    """The costs by plan, those of one plan together, in order of step and ranks."""
    of_table: dict[int, list[MeasuredCosts]] = {}
    for part in parts:
        of_table.setdefault(id(part.table), []).append(part)
    plans = []
    for same in of_table.values():
        before = np.cumsum([0, *(len(part.step) for part in same)])
        rows: dict[str, Any] = {name: _renumbered([getattr(part, name) for part in same], before) for name in _SPARSE}
        names = (*_MATRICES, *same[0]._calls)
        columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in same]) for name in names}
        every = MeasuredCosts(same[0].table, **columns, **rows, plan=same[0].plan)
        order = np.lexsort((every.ranks[:, 0], every.step))
        plans.append(every if (np.diff(order) == 1).all() else every.of_windows(order))
    return tuple(plans)


def _renumbered(parts: list[Slice], before: Int64) -> Slice:
    """The rows of several parts, each after as many windows as are before it."""
    return in_order(
        [
            Slice({**part.columns, "window": part["window"] + first})
            for part, first in zip(parts, before.tolist(), strict=False)
        ]
    )


_SPARSE = ("outside", "holds", "moved_together", "held_by_starts", "receiving", "routed")
_MATRICES = (
    "step",
    "ranks",
    "durations",
    "transfers",
    "delays",
    "sender_is_last",
    "moving",
    "moved_with",
    "inner",
    "collected_before",
    "collected_inside",
    "spans",
)


def sums_by_row(of_calls: Int64, row: Int64, num_rows: int) -> Int64:
    """Sums of times of calls, shape (windows, calls), by the row that each belongs to, shape (windows, rows)."""
    order = np.argsort(row, kind="stable")
    totals = np.zeros((len(of_calls), num_rows), dtype=np.int64)
    if len(row):
        first = np.flatnonzero(np.diff(row[order], prepend=-1))
        totals[:, row[order][first]] = np.add.reduceat(of_calls[:, order], first, axis=1, dtype=np.int64)
    return totals


def longest_of_steps(step: Int64, spans: Int64) -> Int64:
    """The longest window of each step, ns; the windows of a step stand one after the other."""
    longest: Int64 = np.maximum.reduceat(spans, np.flatnonzero(np.diff(step, prepend=step[0] - 1)))
    return longest
