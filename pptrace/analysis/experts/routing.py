"""Costs of unequal routes: how much earlier exchanges with experts would end if each rank's experts had equally many rows.

Between the call that brings rows and the one that takes them back a rank computes its experts, in a time that grows with its
rows. With the mean of its group's rows it would enter the second call earlier or later by what the difference takes; the call
begins when the last member is there. What it begins earlier by, all members' ops are shorter.

Of no account: what the calls themselves take, which is communication, and what members that came late did before the layer.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.model.tables import UNKNOWN, Floats, Int64
from pptrace.schedule.needs import Output
from pptrace.schedule.plan_table import PlanTable
from pptrace.slices import Slice, distinct_of, last_like, reduce_groups


def time_in_experts(exchanges: Slice) -> Int64:
    """For how long a rank computed between both calls of each exchange, ns."""
    between: Int64 = np.maximum(exchanges["back_start_ns"] - exchanges["begin_ns"], 0)
    return between


def time_per_row(exchanges: Slice) -> Floats:
    """The time that one more row takes the experts of each exchange, ns: by direction, from exchanges with few and with many
    rows.

    The slope between the medians of both halves, so that single slow ones do not count; at most what a row takes if all time is
    spent on rows, at least 0.
    """
    slopes = np.zeros(len(exchanges))
    took, rows = time_in_experts(exchanges), exchanges["rows"]
    direction = 2 * exchanges["backward"] + exchanges["again"]
    for value in np.unique(direction).tolist():
        same = np.flatnonzero((direction == value) & (rows >= 0))
        slopes[same] = _slope(rows[same], took[same])
    return slopes


def _slope(rows: Int64, took: Int64) -> float:
    if not len(rows) or rows.min() == rows.max():
        return 0.0
    is_many = rows > np.median(rows)
    if not is_many.any():
        is_many = rows >= np.median(rows)
    few, many = ((np.median(rows[half]), np.median(took[half])) for half in (~is_many, is_many))
    most = float(took.sum() / max(rows.sum(), 1))
    return float(np.clip((many[1] - few[1]) / max(many[0] - few[0], 1), 0.0, most))


def groups_of(exchanges: Slice) -> tuple[Int64, Int64]:
    """(number of the group of ranks that exchanged with each other, −1 where that is not known, members of each group).

    Those who meet in the second call also met in the first.
    """
    out, back = exchanges["out_match"], exchanges["back_match"]
    known = np.flatnonzero((out >= 0) & (back >= 0))
    group = np.full(len(exchanges), UNKNOWN)
    if len(known):
        group[known], _ = distinct_of([exchanges["step"][known], out[known], back[known]])
    size = np.bincount(group[known], minlength=1)
    group[(group >= 0) & (size[group] < 2)] = UNKNOWN
    return group, size


def mean_rows(exchanges: Slice) -> Floats:
    """The mean of the rows of each exchange's group; NaN where it is not known."""
    group, size = groups_of(exchanges)
    known = np.flatnonzero(group >= 0)
    total = reduce_groups(np.add, exchanges["rows"][known], group[known], len(size))
    is_whole = np.ones(len(size), dtype=np.bool_)
    is_whole[group[known[exchanges["rows"][known] < 0]]] = False
    mean = np.full(len(exchanges), np.nan)
    mean[known] = np.where(is_whole, total / np.maximum(size, 1), np.nan)[group[known]]
    return mean


def shortened(exchanges: Slice) -> Slice:
    """Changes of each exchange with equal rows, ns: its op is shorter by ``ns``, its rank computes less by ``compute``
    (negative: more), and the member with most rows is ahead of the next one's rows by ``lead``.
    """
    group, size = groups_of(exchanges)
    compute = time_per_row(exchanges) * (exchanges["rows"] - mean_rows(exchanges))
    known = np.flatnonzero((group >= 0) & ~np.isnan(compute))
    of, enters = group[known], exchanges["back_start_ns"][known].astype(np.float64)
    origin = enters.min(initial=0.0)
    last, last_if_equal = (np.full(len(size), -np.inf) for _ in range(2))
    np.maximum.at(last, of, enters - origin)
    np.maximum.at(last_if_equal, of, enters - origin - compute[known])
    columns = {name: np.zeros(len(exchanges), dtype=np.int64) for name in _CHANGES}
    columns["ns"][known] = np.rint(last[of] - last_if_equal[of])
    columns["compute"][known] = np.rint(compute[known])
    columns["lead"][known] = np.rint(_leads(compute[known], of, len(size))[of])
    return Slice(columns)


_CHANGES = ("ns", "compute", "lead")


def _leads(compute: Floats, of: Int64, num_groups: int) -> Floats:
    """The distance of the largest value of each group from its second largest."""
    order = np.lexsort((-compute, of))
    leads = np.zeros(num_groups)
    is_first = np.diff(of[order], prepend=-1) != 0
    first = np.flatnonzero(is_first)
    second = np.minimum(first + 1, max(len(order) - 1, 0))
    has_second = of[order[second]] == of[order[first]]
    leads[of[order[first]]] = np.where(has_second, compute[order[first]] - compute[order[second]], 0.0)
    return leads


class Routing(Struct, frozen=True, eq=False):
    """Exchanges of all ranks, and what equal rows would change of each (:func:`shortened`)."""

    exchanges: Slice
    change: Slice

    @classmethod
    def of(cls, exchanges: Slice) -> Routing | None:
        """The changes of all exchanges; None without any."""
        return cls(exchanges, shortened(exchanges)) if len(exchanges) else None

    def in_costs(self, costs: StepMatrix) -> StepMatrix:
        """The costs with what equal rows would change of each op (``routed``)."""
        return replace(costs, routed=self.of_windows(costs.table, costs.ranks, costs.step))

    def of_windows(self, table: PlanTable, ranks: Int64, steps: Int64) -> Slice:
        """The changes of the ops of a plan, by window and row.

        Args:
            table: of the plan.
            ranks: shape (windows, pp), the global ranks of each window in pipeline order.
            steps: shape (windows,), their numbers.
        """
        exchanges, change = self.exchanges, self.change
        members = [ranks.ravel(), np.repeat(steps, table.pp)]
        window = last_like([exchanges["rank"], exchanges["step"]], members) // table.pp  # −1 stays
        stage, microbatch, output = (exchanges[f"op_{name}"] for name in ("stage", "microbatch", "output"))
        is_planned = (window >= 0) & (stage >= 0) & (stage < table.num_stages)
        is_planned &= (microbatch >= 0) & (microbatch < table.num_microbatches) & (change["ns"] != 0)
        slot = (stage * table.num_microbatches + microbatch) * len(Output) + output
        row = table.slot_to_row[np.where(is_planned, slot, 0)]
        chosen = np.flatnonzero(is_planned & (row >= 0))
        key = window[chosen] * len(table) + row[chosen]
        places, number = np.unique(key, return_inverse=True)
        sums = {name: reduce_groups(np.add, change[name][chosen], number, len(places)) for name in _CHANGES}
        return Slice({"window": places // len(table), "row": places % len(table), **sums})
