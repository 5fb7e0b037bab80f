"""The one matrix of measured steps: a row per step of a pipeline (a window), a column per row of the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field, structs
from msgspec.structs import replace

from pptrace.model.tables import Bool, Floats, Int64
from pptrace.schedule.actions import Kind
from pptrace.schedule.message_graph import Graph, spans_of
from pptrace.schedule.needs import OUTPUT_OF, Output
from pptrace.schedule.plan import Plan
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.replay_table import replay_table
from pptrace.slices import Slice

_T = TypeVar("_T")

RECEIVES = (Kind.RECV_F.code, Kind.RECV_B.code)
"""The kinds of messages: what their readers do."""
OUTSIDE = ("window", "pp_rank", "side", "name", "match", "start", "end", "work")
_CELLS = 1 << 19


def _no_rows(*names: str, texts: Sequence[str] = ()) -> Callable[[], Slice]:
    return partial(Slice.empty, *names, texts=texts)


class StepMatrix(Struct, frozen=True, eq=False, kw_only=True, dict=True):
    """Costs of the ops and messages of one plan in some windows, ns, and how late they were.

    Whoever asks what steps would be without something replaces columns; :attr:`lengths` replays the steps.

    Of windows, shape (windows,): ``step`` is the number of its step, ``spans`` its length, and ``ranks`` (windows, pp) its global
    ranks in pipeline order. The windows of a step stand one after the other.

    Of ops, shape (windows, rows): ``durations``; ``inner``, the part of it in which an op communicated and did not compute;
    ``exposed``, (windows, rows, axes), the transfers in it along each of ``INNER_AXES`` (None: not looked for);
    ``delays``, how late it began when all that it needs was there and nothing was being fetched; ``moving``, how long transfers
    kept its rank from it then, as receives that begin late and sends that block do, the longest of them with ``moved_with``
    (:func:`pptrace.analysis.stragglers.communication.peer_bit`). Garbage collections took ``collected_before`` of what ops were
    late, and ``collected_inside`` of their durations.

    Of messages, shape (windows, messages): ``transfers``, their cost for their readers, −1 where their ends were not matched. One
    of which the sender came last (``sender_is_last``) takes it from its sender's end on; of others it is part of ``moving``.

    Tables, whose rows have the index of their ``window``, and none where nothing was found: ``outside``, what ranks did before
    and after their ops (:mod:`pptrace.analysis.stragglers.outside`); ``holds``, ops that waited in collectives
    (:func:`pptrace.analysis.explain.inner_waits.holds_of`); ``waits``, all of what they waited there for an op of another
    pipeline; ``moved_together``, what messages cost by the trace alone, where
    several that were posted together are taken to be moved one by one; ``held_by_starts``, parts of delays in which an op's rank
    waited in a message for one that had run nothing in the step yet, whose first row is ``by``; ``receiving``, parts of delays in
    which a kernel still received what an op reads, whose sender was done; ``routed``, what would change of ops if all experts had
    equally many rows (:mod:`pptrace.analysis.experts.routing`).

    ``graph`` is that of the way in which the run sends and receives (:mod:`pptrace.analysis.explain.explain`), None for
    replays with the waits that were measured. Along it ``posted`` (windows, calls) is how long after what its rank did before it
    each call was posted, and ``before_posting`` (windows, rows) the part of an op's delay that these take; None without one.
    """

    table: PlanTable
    step: Int64
    ranks: Int64
    spans: Int64
    durations: Int64
    inner: Int64
    delays: Int64
    moving: Int64
    moved_with: Int64
    collected_before: Int64
    collected_inside: Int64
    transfers: Int64
    sender_is_last: Bool
    outside: Slice = field(default_factory=_no_rows(*OUTSIDE, texts=("name",)))
    holds: Slice = field(default_factory=_no_rows("window", "row", "rank", "ns", "is_late"))
    moved_together: Slice = field(default_factory=_no_rows("window", "message", "ns"))
    waits: Slice = field(default_factory=_no_rows("window", "row", "ns", "longer", "rank", "late_row"))
    held_by_starts: Slice = field(default_factory=_no_rows("window", "row", "ns", "by"))
    receiving: Slice = field(default_factory=_no_rows("window", "row", "ns"))
    routed: Slice = field(default_factory=_no_rows("window", "row", "ns", "compute", "lead"))
    plan: Plan | None = None
    graph: Graph | None = None
    posted: Int64 | None = None
    before_posting: Int64 | None = None
    exposed: Int64 | None = None

    @cached_property
    def message_kind(self) -> Int64:
        """The kind of each message: the code of RECV_F or RECV_B."""
        output = self.table.messages[2] % len(Output)
        return np.where(output == OUTPUT_OF[Kind.F], *RECEIVES).astype(np.int64)

    @cached_property
    def cells(self) -> tuple[Int64, Int64]:
        """(kind and stage of each cell as one number, the cell of each row)."""
        key = self.table.kind.astype(np.int64) * self.table.num_stages + self.table.stage
        cells, of_row = np.unique(key, return_inverse=True)
        return cells, of_row

    @cached_property
    def own(self) -> Int64:
        """The durations without what ops wait in collectives for those of other pipelines, shape (windows, rows), ns."""
        if not len(self.waits):
            return self.durations
        waited = np.zeros(self.durations.shape, dtype=np.int64)
        np.add.at(waited, (self.waits["window"], self.waits["row"]), self.waits["ns"])
        return self.durations - np.minimum(waited, self.inner)

    @cached_property
    def typical_cells(self) -> Floats:
        """The median cost of each cell over all steps in each pipeline, shape (windows, cells): the same in all its windows, ns.

        What ops wait for other members of collectives is not their cost.
        """
        cells, of_row = self.cells
        typical = np.empty((len(self.step), len(cells)))
        for windows in self.of_pipelines():
            durations = self.own[windows]
            for cell in range(len(cells)):
                typical[windows, cell] = np.median(durations[:, of_row == cell])
        return typical

    def of_pipelines(self) -> list[Int64]:
        """The windows of each pipeline."""
        return [windows for _, windows in pipelines_of(self.ranks)]

    def every(self, stride: int) -> StepMatrix:
        """The costs of every ``stride``-th step."""
        if stride == 1:
            return self
        return self.of_windows(np.flatnonzero(np.isin(self.step, np.unique(self.step)[::stride])))

    def of_windows(self, windows: Int64) -> StepMatrix:
        """The costs of some windows, in their order."""
        columns: dict[str, Any] = {name: column[windows] for name, column in self._members(np.ndarray).items()}
        rows: dict[str, Any] = {name: rows_of_windows(rows, windows) for name, rows in self._members(Slice).items()}
        return replace(self, **columns, **rows)

    def _members(self, kind: type[_T]) -> dict[str, _T]:
        """The columns, or the tables, by name."""
        members = structs.asdict(self)
        return {name: member for name, member in members.items() if isinstance(member, kind)}

    def compact(self) -> StepMatrix:
        """The same costs in as few bytes as they need: those of all steps are kept."""
        columns: dict[str, Any] = {name: _compact(column) for name, column in self._members(np.ndarray).items()}
        return replace(self, **columns | {"step": self.step, "ranks": self.ranks, "spans": self.spans})

    def parts(self) -> Iterator[slice]:
        """The windows in parts, so that what is made of each takes little memory."""
        most = max(1, _CELLS // max(1, len(self.table)))
        return (slice(begin, begin + most) for begin in range(0, len(self.step), most))

    @cached_property
    def lengths(self) -> Int64:
        """The length of each replayed step, ns: that of the pipeline that takes longest."""
        return longest_of_steps(self.step, self.window_lengths)

    @cached_property
    def window_lengths(self) -> Int64:
        """The length of each replayed window, ns. Along a graph, that says what messages keep their ranks from."""
        spans = np.empty(len(self.step), dtype=np.int64)
        for part in self.parts():
            spans[part] = spans_of(self.table, self.graph, *self._replayed(part))
        return spans

    @cached_property
    def starts(self) -> Int64:
        """The start of each replayed op, shape (windows, rows), ns."""
        starts = np.empty(self.durations.shape, dtype=np.int64)
        for part in self.parts():
            taken, messages, posted = self._replayed(part)
            if self.graph is None:
                starts[part] = replay_table(self.table, taken, messages).end - self.durations[part]
            else:
                starts[part] = self.graph.ends(taken, messages, posted) - self.durations[part]
        return starts

    def _replayed(self, part: slice) -> tuple[Int64, Int64, Int64 | None]:
        """Times of some windows for their replay: of ops with what is before them, of messages, lateness of calls."""
        taken = self.durations[part].astype(np.int64) + self.delays[part]
        of_messages = np.maximum(self.transfers[part], 0).astype(np.int64)
        if self.graph is None:
            return taken + self.moving[part], np.where(self.sender_is_last[part], of_messages, 0), None
        if self.before_posting is not None:
            taken -= self.before_posting[part]
        return taken, of_messages, None if self.posted is None else self.posted[part]

    @cached_property
    def lateness(self) -> Int64:
        """Time of ranks between their ops, shape (windows, rows), ns: the delays and, in replays that tell when messages are
        posted, what kept a rank from its calls, while others may have kept it from its ops.

        What is before an op is its own, and what is behind the last one of a rank that one's.
        """
        if self.posted is None or self.before_posting is None:
            return self.delays
        return self.delays.astype(np.int64) - self.before_posting + self._by_row(self.posted)

    def with_lateness(self, late: Int64) -> StepMatrix:
        """The same if ranks were as late as this: what is less than was measured is that much less of every part before an op."""
        if self.posted is None:
            return replace(self, delays=late)
        assert self.graph is not None
        left = np.divide(late, self.lateness, out=np.ones(late.shape), where=self.lateness > 0)
        posted = np.floor(self.posted * left[:, self.graph.call_row]).astype(np.int64)
        delays = np.maximum(late - self._by_row(posted), 0)
        return replace(self, delays=delays, posted=posted, before_posting=np.zeros_like(delays))

    def _by_row(self, of_calls: Int64) -> Int64:
        """The sum of some times of calls before each op, shape (windows, rows)."""
        assert self.graph is not None
        return sums_by_row(of_calls, self.graph.call_row, len(self.table))

    def held(self, where: Bool) -> Int64:
        """Time by which each op would be shorter without some of the ``holds``, shape (windows, rows), ns."""
        total = np.zeros(self.durations.shape, dtype=np.int64)
        np.add.at(total, (self.holds["window"][where], self.holds["row"][where]), self.holds["ns"][where])
        return np.minimum(total, self.durations)

    def waits_for(self, late: Int64) -> Int64:
        """Parts of delays in which ranks waited for others that had run nothing in the step yet because they were so late before
        their first ops, shape (windows, rows), ns.
        """
        held = self.held_by_starts
        ns = np.minimum(held["ns"], late[held["window"], held["by"]])
        return self.spread(held.with_columns({"ns": ns}))

    def spread(self, rows: Slice, name: str = "ns") -> Int64:
        """A column of a table with a row per op as a matrix (windows, rows); 0 where it has none."""
        matrix = np.zeros(self.durations.shape, dtype=np.int64)
        matrix[rows["window"], rows["row"]] = rows[name]
        return matrix

    def as_recorded(self) -> StepMatrix:
        """The same costs with transfers as the trace has them: each of several posted together until it was seen complete."""
        if not len(self.moved_together):
            return self
        transfers = self.transfers.astype(np.int64)
        transfers[self.moved_together["window"], self.moved_together["message"]] = self.moved_together["ns"]
        return replace(self, transfers=transfers, moved_together=self.moved_together.where(slice(0)))

    @property
    def has_collections(self) -> bool:
        """Return whether garbage collections took time of any op, or before it."""
        return bool(self.collected_before.any() or self.collected_inside.any())

    def without_collections(self) -> StepMatrix:
        """The same costs without what garbage collections took."""
        if not self.has_collections:
            return self
        none = np.zeros_like(self.collected_before)
        waited = self.waits_for(self.collected_before)
        later = self.with_lateness(np.maximum(self.lateness - self.collected_before - waited, 0))
        held = self.held_by_starts
        left = held.with_columns({"ns": held["ns"] - waited[held["window"], held["row"]]})
        durations = self.durations - self.collected_inside
        return replace(
            later,
            durations=durations,
            collected_before=none,
            collected_inside=none,
            held_by_starts=left.where(left["ns"] > 0),
        )

    def without_late_receives(self) -> StepMatrix:
        """The same costs as if kernels had received messages as soon as their senders were done."""
        if not len(self.receiving):
            return self
        later = self.with_lateness(np.maximum(self.lateness - self.spread(self.receiving), 0))
        return replace(later, receiving=self.receiving.where(slice(0)))

    def with_equal_routes(self) -> StepMatrix:
        """The same costs if all experts had equally many rows."""
        if not len(self.routed):
            return self
        shorter = np.minimum(self.spread(self.routed), self.durations)
        waits = shorter - self.spread(self.routed, "compute")
        held = self.held(np.ones(len(self.holds), dtype=np.bool_))
        left = 1 - np.clip(self.spread(self.routed, "lead") / np.maximum(held, 1), 0, 1)
        holds, left_waits = (
            rows.with_columns(
                {
                    name: np.rint(rows[name] * left[rows["window"], rows["row"]]).astype(np.int64)
                    for name in ("ns", "longer")
                    if name in rows.columns
                }
            )
            for rows in (self.holds, self.waits)
        )
        return replace(
            self,
            durations=self.durations - shorter,
            inner=np.clip(self.inner - waits, 0, self.durations - shorter),
            holds=holds.where(holds["ns"] > 0),
            waits=left_waits.where(left_waits["ns"] > 0),
            routed=self.routed.where(slice(0)),
        )


def pipelines_of(ranks: Int64) -> list[tuple[tuple[int, ...], Int64]]:
    """(global ranks, windows) of every pipeline, from the global ranks of each window, shape (windows, pp)."""
    pipelines, number = np.unique(ranks, axis=0, return_inverse=True)
    return [(tuple(one), np.flatnonzero(number.ravel() == index)) for index, one in enumerate(pipelines.tolist())]


def joined(parts: Iterable[StepMatrix]) -> tuple[StepMatrix, ...]:
    """The costs by plan, those of one plan together, in order of step and ranks."""
    of_table: dict[int, list[StepMatrix]] = {}
    for part in parts:
        of_table.setdefault(id(part.table), []).append(part)
    plans = []
    for same in of_table.values():
        before = np.cumsum([0, *(len(part.step) for part in same)]).tolist()
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in same]) for name in same[0]._members(np.ndarray)
        }
        rows: dict[str, Any] = {}
        for name in same[0]._members(Slice):
            tables = zip((getattr(part, name) for part in same), before, strict=False)
            rows[name] = in_order([table.with_columns({"window": table["window"] + first}) for table, first in tables])
        every = replace(same[0], **columns, **rows)
        order = np.lexsort((every.ranks[:, 0], every.step))
        plans.append(every if (np.diff(order) == 1).all() else every.of_windows(order))
    return tuple(plans)


def _compact(times: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if times.dtype == np.bool_:
        return times
    least, most = (int(times.min()), int(times.max())) if times.size else (0, 0)
    for dtype in (np.int8, np.int32):
        if np.iinfo(dtype).min <= least and most <= np.iinfo(dtype).max:
            return times.astype(dtype)
    return times


def usual_plan(plans: Sequence[StepMatrix]) -> StepMatrix | None:
    """The costs of the plan that most steps of a run have; None where no step has one."""
    known = [costs for costs in plans if len(costs.step) and costs.plan is not None]
    return max(known, key=lambda part: len(np.unique(part.step)), default=None)


def in_order(parts: Sequence[Slice]) -> Slice:
    """The rows of several parts together, in order of their windows."""
    rows = Slice.joined(parts)
    order = np.argsort(rows["window"], kind="stable")
    return Slice({name: column[order] for name, column in rows.columns.items()})


def rows_of_windows(rows: Slice, windows: Int64) -> Slice:
    """The rows of some windows, which get the numbers that these have in ``windows``."""
    order = np.argsort(windows)
    position = np.searchsorted(windows, rows["window"], sorter=order)
    number = order[np.minimum(position, len(windows) - 1)] if len(windows) else np.zeros(len(rows), dtype=np.int64)
    is_kept = windows[number] == rows["window"] if len(windows) else np.zeros(len(rows), dtype=np.bool_)
    kept = rows.where(is_kept)
    return in_order([kept.with_columns({"window": number[is_kept]})])


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
    return np.maximum.reduceat(spans, np.flatnonzero(np.diff(step, prepend=step[0] - 1)))
