"""Costs of one step by action: what the analysis computes from columns for all steps together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pptrace.schedule.actions import Key, Kind
from pptrace.slices import Slice
from pptrace.timeline.lanes import Lane, communication_inside_ops


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Time of one step's ops and transfers, ns. ``transfers`` is keyed by the action whose output travels.

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
