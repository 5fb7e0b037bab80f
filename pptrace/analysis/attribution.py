"""Attribution of a step's time: the plan is replayed with more and more of reality.

    compute        the ops' time without the communication inside them, spread evenly over the ranks
    structural     + the plan, every op of a kind at the same cost
    imbalance      + each stage at its own mean cost
    jitter         + each op at its own cost
    communication  + the measured transfers, and the collectives and exchanges that ops waited for (tp, cp)
    host           + the time in which the device had nothing to do because the host had not launched it
    unexplained    + what the last replay does not show

Each part is what its replay adds to the makespan, so the parts sum to the measured span exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pptrace.analysis.message_graph import Graph, spans_of
from pptrace.analysis.step_parts import Waterfall
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.replay_table import Times


def waterfalls(
    table: PlanTable,
    computing: Times,
    communication_ns: Times,
    transfers_ns: Times,
    spans_ns: Sequence[int],
    host_ns: Times | None = None,
    knows_host: Sequence[bool] | None = None,
    graph: Graph | None = None,
) -> tuple[Waterfall, ...]:
    """Attribute steps of one plan, each with a row of the matrices, ns.

    Args:
        computing: what ops computed, shape (steps, rows of the table).
        communication_ns: the part of an op's time in which it communicated and did not compute, of the same shape.
        transfers_ns: shape (steps, messages of the table).
        spans_ns: of the steps.
        host_ns: how long each op was kept from its device by the host, before it and in it; None where no device was recorded.
        knows_host: of which steps that is known.
        graph: of the way in which messages hold up ranks, where that is known to matter.
    """
    even = computing[:, _first_of_each_key(table)].sum(axis=1) // table.pp
    by_kind = _means(table, computing, table.kind)
    by_stage = _means(table, computing, table.kind * np.int64(table.num_stages) + table.stage)
    uniform, of_stages, of_ops = (spans_of(table, graph, costs) for costs in (by_kind, by_stage, computing))
    with_transfers = spans_of(table, graph, computing + communication_ns, transfers_ns)
    with_host = with_transfers
    if host_ns is not None and host_ns.any():
        with_host = spans_of(table, graph, computing + communication_ns + host_ns, transfers_ns)
    knows = [host_ns is not None] * len(computing) if knows_host is None else knows_host
    return tuple(
        Waterfall(
            compute=compute,
            structural=structural - compute,
            imbalance=imbalance - structural,
            jitter=jitter - imbalance,
            communication=communication - jitter,
            host=host - communication if is_known else None,
            unexplained=span - (host if is_known else communication),
        )
        for compute, structural, imbalance, jitter, communication, host, is_known, span in zip(
            even.tolist(),
            uniform.tolist(),
            of_stages.tolist(),
            of_ops.tolist(),
            with_transfers.tolist(),
            with_host.tolist(),
            knows,
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
