"""Attribution of a step's time: the plan is replayed with more and more of reality.

    compute        the ops' time without the communication inside them, spread evenly over the ranks
    structural     + the plan, every op of a kind at the same cost
    imbalance      + each stage at its own mean cost
    jitter         + each op at its own cost
    communication  + the measured transfers, and the collectives and exchanges that ops waited for (tp, cp)
    unexplained    + what the last replay does not show

Each part is what its replay adds to the makespan, so the parts sum to the measured span exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.result import Waterfall
from pptrace.model.tables import Int64
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.replay_table import Times
from pptrace.simulator import makespans
from pptrace.slices import Slice
from pptrace.timeline.lanes import Lane, communication_inside_ops, is_inner
from pptrace.timeline.windows import StepWindow


def waterfalls(
    table: PlanTable, ops_ns: Times, communication_ns: Times, transfers_ns: Times, spans_ns: Sequence[int]
) -> tuple[Waterfall, ...]:
    """Attribute steps of one plan, each with a row of the matrices.

    ``ops_ns`` and ``communication_ns`` (the part of an op's time in which it communicated and did not compute) have the shape
    (steps, rows of the table), ``transfers_ns`` (steps, messages of the table).
    """
    computing = ops_ns - communication_ns
    even = computing[:, _first_of_each_key(table)].sum(axis=1) // table.pp
    by_kind = _means(table, computing, table.kind)
    by_stage = _means(table, computing, table.kind * np.int64(table.num_stages) + table.stage)
    uniform, of_stages, of_ops = makespans(table, np.stack((by_kind, by_stage, computing)))
    with_transfers = makespans(table, ops_ns, transfers_ns)
    return tuple(
        Waterfall(
            compute=compute,
            structural=structural - compute,
            imbalance=imbalance - structural,
            jitter=jitter - imbalance,
            communication=communication - jitter,
            host=None,
            unexplained=span - communication,
        )
        for compute, structural, imbalance, jitter, communication, span in zip(
            even.tolist(),
            uniform.tolist(),
            of_stages.tolist(),
            of_ops.tolist(),
            with_transfers.tolist(),
            spans_ns,
            strict=True,
        )
    )


_MOST_CELLS = 2_000_000
"""Steps × ops that are replayed together."""


@dataclass(frozen=True, slots=True)
class RankCosts:
    """What the actions of a plan cost on one rank, ns: of each op measured the index of its window, the row of the plan, its
    time and the communication in it; of each message received the index of the window, the number of the message, its time.
    """

    op_window: Int64
    op_row: Int64
    op_ns: Int64
    communication_ns: Int64
    message_window: Int64
    message: Int64
    message_ns: Int64

    @classmethod
    def of(cls, table: PlanTable, windows: Sequence[StepWindow], rank: int, data: AlignedRun) -> RankCosts:
        """The costs in those of the windows that are of the rank's pipeline."""
        indices = np.array([index for index, window in enumerate(windows) if rank in window.ranks])
        rows = data.rows.of_rank(rank)
        steps = np.array([windows[index].step for index in indices.tolist()])
        measured, op_window = _in_steps(rows.ops, steps, indices)
        planned = _planned_rows(table, measured)
        op_window, planned, measured = op_window[planned >= 0], planned[planned >= 0], measured.where(planned >= 0)
        received, message_window = _in_steps(
            rows.comms.where((rows.comms["kind"] == "recv") & (rows.comms["match"] >= 0)), steps, indices
        )
        message = _planned_messages(table, received)
        return cls(
            op_window,
            planned,
            measured["end_ns"] - measured["start_ns"],
            _inside_ops(rows.comms, measured, data.lanes[rank]),
            message_window[message >= 0],
            message[message >= 0],
            _transfer_ns(received)[message >= 0],
        )

    def of_windows(self, first: int, last: int) -> RankCosts:
        """The costs in the windows from ``first`` to before ``last``, which are counted from 0."""
        ops = (self.op_window >= first) & (self.op_window < last)
        messages = (self.message_window >= first) & (self.message_window < last)
        return RankCosts(
            self.op_window[ops] - first,
            self.op_row[ops],
            self.op_ns[ops],
            self.communication_ns[ops],
            self.message_window[messages] - first,
            self.message[messages],
            self.message_ns[messages],
        )


def waterfalls_of_windows(table: PlanTable, windows: Sequence[StepWindow], data: AlignedRun) -> list[Waterfall | None]:
    """Attribute one step of a pipeline for each window; None where the trace lacks an op of the plan."""
    parts = (windows[first:last] for first, last in _parts_of(table, len(windows)))
    return [
        waterfall
        for part in parts
        for waterfall in _waterfalls_of_part(
            table, part, (RankCosts.of(table, part, rank, data) for rank in ranks_of_windows(part))
        )
    ]


def waterfalls_of_costs(
    table: PlanTable, windows: Sequence[StepWindow], costs: Sequence[RankCosts]
) -> list[Waterfall | None]:
    """The same from the costs of each rank of :func:`ranks_of_windows`, in that order."""
    return [
        waterfall
        for first, last in _parts_of(table, len(windows))
        for waterfall in _waterfalls_of_part(table, windows[first:last], [c.of_windows(first, last) for c in costs])
    ]


def ranks_of_windows(windows: Sequence[StepWindow]) -> tuple[int, ...]:
    """The ranks of some windows, each once, as they come first."""
    return tuple(dict.fromkeys(rank for window in windows for rank in window.ranks))


def _parts_of(table: PlanTable, num_windows: int) -> list[tuple[int, int]]:
    """(first, last) of the windows that are replayed together."""
    size = max(_MOST_CELLS // max(len(table), 1), 1)
    return [(first, min(first + size, num_windows)) for first in range(0, num_windows, size)]


def _waterfalls_of_part(
    table: PlanTable, windows: Sequence[StepWindow], costs: Iterable[RankCosts]
) -> list[Waterfall | None]:
    ops = np.full((len(windows), len(table)), -1, dtype=np.int64)
    communication = np.zeros_like(ops)
    transfers = np.zeros((len(windows), table.num_messages), dtype=np.int64)
    for of_rank in costs:
        ops[of_rank.op_window, of_rank.op_row] = of_rank.op_ns
        communication[of_rank.op_window, of_rank.op_row] = of_rank.communication_ns
        transfers[of_rank.message_window, of_rank.message] = of_rank.message_ns
    is_whole: npt.NDArray[np.bool_] = np.all(ops >= 0, axis=1)
    spans = [window.span_ns for window, whole in zip(windows, is_whole.tolist(), strict=True) if whole]
    attributed = iter(
        waterfalls(table, ops[is_whole], communication[is_whole], transfers[is_whole], spans) if spans else ()
    )
    return [next(attributed) if whole else None for whole in is_whole.tolist()]


def _in_steps(rows: Slice, steps: Int64, indices: Int64) -> tuple[Slice, Int64]:
    """(rows of these steps, for each of them the index that belongs to its step)."""
    order = np.argsort(steps, kind="stable")
    position = np.searchsorted(steps[order], rows["step"])
    inside = position < len(steps)
    inside[inside] = steps[order][position[inside]] == rows["step"][inside]
    return rows.where(inside), indices[order][position[inside]]


def _planned_rows(table: PlanTable, ops: Slice) -> Int64:
    """The row of the plan that each op is; −1 where it is none."""
    kind, kinds = ops.codes("kind")
    code = np.array([Kind(name).code for name in kinds], dtype=np.int64)[kind]
    rows = table.rows_of(code, ops["stage"], ops["microbatch"])
    return np.where((rows >= 0) & (table.kind[rows] == code), rows, -1)


def _planned_messages(table: PlanTable, received: Slice) -> Int64:
    """The message of the plan that each received one is; −1 where it is none."""
    is_forward = received["direction"] == "F"
    producer = np.where(is_forward, Kind.F.code, Kind.B.code)
    stage = received["stage"] + np.where(is_forward, -1, 1)
    slots = table.slots_of(producer, stage, received["microbatch"])
    return np.where(slots >= 0, table.slot_to_message[slots], -1)


def _transfer_ns(received: Slice) -> Int64:
    """What each transfer cost its reader; one posted ahead is seen complete when its reader asks for it."""
    begins = np.maximum(received["transfer_start_ns"], received["asked_ns"])
    durations: Int64 = np.maximum(received["transfer_end_ns"] - begins, 0)
    return durations


def _inside_ops(comms: Slice, ops: Slice, lane: Lane) -> Int64:
    """Time in which each op communicated without compute, in order of step, from the communication of its own step, ns."""
    inside = np.zeros(len(ops), dtype=np.int64)
    if not is_inner(comms).any():
        return inside
    for step in np.unique(ops["step"]).tolist():
        of_step, communication = ops["step"] == step, comms.where(comms["step"] == step)
        inside[of_step] = communication_inside_ops(ops.where(of_step), communication, lane)
    return inside


def _means(table: PlanTable, costs: Times, group: npt.NDArray[np.integer]) -> Times:
    """For each row and step the mean cost of the row's group of ops."""
    first = _first_of_each_key(table)
    members = first[np.argsort(group[first], kind="stable")]
    names, begin, num = np.unique(group[members], return_index=True, return_counts=True)
    means = np.rint(np.add.reduceat(costs[:, members], begin, axis=1) / num).astype(np.int64)
    of_rows: Times = means[:, np.searchsorted(names, group)]
    return of_rows


def _first_of_each_key(table: PlanTable) -> npt.NDArray[np.intp]:
    """The rows, of an op that a measured order has twice the first."""
    first: npt.NDArray[np.intp] = np.unique(table.slot * np.int64(len(Kind)) + table.kind, return_index=True)[1]
    return first
