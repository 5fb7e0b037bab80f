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

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pptrace.analysis.result import Waterfall
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.replay_table import Times
from pptrace.simulator import makespans


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


def _means(table: PlanTable, costs: Times, group: npt.NDArray[np.integer]) -> Times:
    """Mean cost of the group of ops of each row, in each step, ns."""
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
