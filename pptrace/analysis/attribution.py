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

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import numpy as np

from pptrace.analysis.result import Waterfall
from pptrace.schedule.actions import Key, Kind
from pptrace.simulator.course import ReplayGraph
from pptrace.slices import Slice
from pptrace.timeline.lanes import Lane, communication_inside_ops

G = TypeVar("G", bound=Hashable)


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


def waterfall(course: ReplayGraph, measured: MeasuredCosts, span_ns: int) -> Waterfall | None:
    """Attribute one step; None when the trace lacks an op of the plan, so that it cannot be replayed."""
    keys = [stop.key for stop in course.nodes]
    if not set(keys) <= measured.ops.keys():
        return None
    measured_ops = {key: measured.ops[key] for key in keys}
    without_communication = {key: cost - measured.communication.get(key, 0) for key, cost in measured_ops.items()}
    even = sum(without_communication.values()) // course.plan.pp
    stage_means = _means(without_communication, lambda key: (key[0], key[1]))
    kind_means = _means(without_communication, lambda key: key[0])
    uniform = course.makespan({key: kind_means[key[0]] for key in keys}, {})
    by_stage = course.makespan({key: stage_means[key[0], key[1]] for key in keys}, {})
    by_op = course.makespan(without_communication, {})
    with_transfers = course.makespan(measured_ops, measured.transfers)
    return Waterfall(
        compute=even,
        structural=uniform - even,
        imbalance=by_stage - uniform,
        jitter=by_op - by_stage,
        communication=with_transfers - by_op,
        host=None,
        unexplained=span_ns - with_transfers,
    )


def _means(costs: Mapping[Key, int], group: Callable[[Key], G]) -> dict[G, int]:
    """The mean cost of each group of ops."""
    members: dict[G, list[int]] = {}
    for key, cost in costs.items():
        members.setdefault(group(key), []).append(cost)
    return {name: round(sum(values) / len(values)) for name, values in members.items()}
