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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from pptrace.analysis.result import Waterfall
from pptrace.schedule.actions import Key, Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.replay_table import Times
from pptrace.simulator import Costs, makespans
from pptrace.slices import Slice
from pptrace.timeline.lanes import Lane, communication_inside_ops


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What one step's ops and transfers took, ns. ``transfers`` is keyed by the action whose output travels.

    ``within`` is the part of an op's time in which it communicated and did not compute.
    """

    ops: Mapping[Key, int]
    transfers: Mapping[Key, int]
    communication: Mapping[Key, int] = field(default_factory=dict)


def measured_costs(ops: Slice, comms: Slice, lane: Lane | None = None) -> MeasuredCosts:
    """The costs of one rank's step, from its compute ops, its communication and, where given, its lane."""
    named = zip(*(ops[name].tolist() for name in ("kind", "stage", "microbatch")), strict=True)
    keys: list[Key] = [(Kind(kind), stage, mb) for kind, stage, mb in named]
    costs = dict(zip(keys, (ops["end_ns"] - ops["start_ns"]).tolist(), strict=True))
    inner = [] if lane is None else communication_inside_ops(ops, comms, lane).tolist()
    received = comms.where((comms["kind"] == "recv") & (comms["match"] >= 0))
    # A transfer posted ahead is seen complete when its reader asks for it: it has cost what the reader still waited.
    begins = np.maximum(received["transfer_start_ns"], received["asked_ns"])
    durations = np.maximum(received["transfer_end_ns"] - begins, 0).tolist()
    transfers: dict[Key, int] = {}
    messages = zip(*(received[name].tolist() for name in ("direction", "stage", "microbatch")), strict=True)
    for (direction, stage, mb), duration in zip(messages, durations, strict=True):
        if direction == "F":
            transfers[(Kind.F, stage - 1, mb)] = duration
        else:
            transfers[(Kind.B, stage + 1, mb)] = transfers[(Kind.I, stage + 1, mb)] = duration
    return MeasuredCosts(costs, transfers, dict(zip(keys, inner, strict=False)))


def merge_costs(costs: Sequence[MeasuredCosts]) -> MeasuredCosts:
    """Merge the costs of all ranks of a pipeline."""
    return MeasuredCosts(
        dict(chain.from_iterable(rank.ops.items() for rank in costs)),
        dict(chain.from_iterable(rank.transfers.items() for rank in costs)),
        dict(chain.from_iterable(rank.communication.items() for rank in costs)),
    )


def waterfall(plan: Plan, measured: MeasuredCosts, span_ns: int) -> Waterfall | None:
    """Attribute one step; None when the trace lacks an op of the plan, so that it cannot be replayed."""
    keys = [action.key for rank in range(plan.pp) for action in plan.compute_actions(rank)]
    if not set(keys) <= measured.ops.keys():
        return None
    ops = np.array([[measured.ops[key] for key in keys]])
    communication = np.array([[measured.communication.get(key, 0) for key in keys]])
    transfers = Costs(transfers=measured.transfers).latencies(plan.table)
    return waterfalls(plan.table, ops, communication, transfers, [span_ns])[0]


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
