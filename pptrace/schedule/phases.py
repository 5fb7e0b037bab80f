"""Warmup, steady and cooldown from the order of actions, for plans without tagged phases."""

from __future__ import annotations

from dataclasses import replace

from pptrace.schedule.actions import Kind, Phase
from pptrace.schedule.plan import Plan

_BACKWARD = (Kind.B, Kind.I)


def tag_phases(plan: Plan) -> Plan:
    """Tag each rank's actions by order.

    The warmup ends with the last forward before the forward that precedes the first backward (so that 1F1B's last warmup
    rule holds: a forward directly followed by its pair's backward is steady); the cooldown begins after the backward
    that follows the last forward. When all forwards come before all backwards there is no steady phase, unless the rank
    runs a single forward and a single backward, which is a pair.
    """
    rows = []
    for row in plan.ranks:
        phases = phases_by_order([action.kind for action in row])
        tagged = (
            replace(action, phase=phase, parts=tuple(replace(part, phase=phase) for part in action.parts))
            for action, phase in zip(row, phases, strict=True)
        )
        rows.append(tuple(tagged))
    return replace(plan, ranks=tuple(rows))


def phases_by_order(kinds: list[Kind]) -> list[Phase]:
    """The phase of each action of one rank, from its kinds in order of execution."""
    overlaps = [index for index, kind in enumerate(kinds) if kind is Kind.OVERLAP_F_B]
    forwards = [index for index, kind in enumerate(kinds) if kind is Kind.F] + overlaps
    backwards = [index for index, kind in enumerate(kinds) if kind in _BACKWARD] + overlaps
    if not forwards or not backwards:
        return [Phase.WARMUP if kind is Kind.F else Phase.COOLDOWN for kind in kinds]
    first_backward, last_forward = min(backwards), max(forwards)
    if last_forward < first_backward and len(forwards) > 1:
        steady = range(first_backward, first_backward)  # all forwards, then all backwards
    else:
        before = [index for index in forwards if index <= first_backward]
        after = [index for index in backwards if index >= last_forward]
        steady = range(before[-1] if before else first_backward, (after[0] if after else last_forward) + 1)
    return [
        Phase.WARMUP if index < steady.start else Phase.STEADY if index < steady.stop else Phase.COOLDOWN
        for index in range(len(kinds))
    ]
