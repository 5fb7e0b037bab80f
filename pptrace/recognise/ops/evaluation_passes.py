"""Evaluation passes of labelled schedules: forwards only.

``schedule.eval()`` of torch.distributed.pipelining opens the ranges of backwards and of their messages as training does, and
runs nothing inside them.
"""

from __future__ import annotations

import numpy as np

from pptrace.intervals import Int64
from pptrace.model.traces import Category, Events
from pptrace.recognise.ops.infer_from_operators import ENGINE
from pptrace.recognise.ops.label_columns import Bool, Ranges
from pptrace.recognise.ops.label_steps import counted_steps
from pptrace.recognise.ops.tables import LaunchIndex
from pptrace.schedule.actions import Kind

_BACKWARD = [kind.code for kind in (Kind.B, Kind.I, Kind.W, Kind.SEND_B, Kind.RECV_B)]


def without_evaluations(events: Events, ranges: Ranges, launches: LaunchIndex) -> tuple[Ranges, tuple[str, ...]]:
    """Drop passes whose backwards ran nothing; if no pass trained, drop only the backwards. With a warning.

    A stage whose backwards compute nothing (it is frozen, say) receives gradients in them nevertheless.
    """
    is_backward = np.isin(ranges.kind, _BACKWARD)
    if not is_backward.any():
        return ranges, ()
    is_forward = ranges.kind == Kind.F.code
    ran = _ran(events, ranges, launches, np.flatnonzero(is_backward | is_forward))
    if ran[is_backward].all() or not ran[is_forward].any():
        return ranges, ()
    order = np.argsort(ranges.start_ns, kind="stable")
    number = np.empty(len(ranges), dtype=np.int64)
    number[order] = counted_steps(ranges.where(order))
    passes, pass_of = np.unique(number[ranges.has_actions], return_inverse=True)
    of_pass = np.full(len(ranges), -1)
    of_pass[ranges.has_actions] = pass_of

    def has(chosen: Bool) -> Bool:
        return np.bincount(of_pass[chosen], minlength=len(passes)) > 0

    is_evaluation = has(is_backward) & has(is_forward & ran) & ~has(is_backward & ran)
    if not is_evaluation.any():
        return ranges, ()
    left_out = np.append(is_evaluation, False)[of_pass]
    if not is_evaluation.all():
        line = f"left out {is_evaluation.sum()} of {len(passes)} passes as evaluation: their backwards run nothing"
    else:
        left_out &= is_backward
        line = "the ranges of backwards hold nothing: forwards alone ran (evaluation or inference)"
    return ranges.where(~left_out), (line,)


def _ran(events: Events, ranges: Ranges, launches: LaunchIndex, rows: Int64) -> Bool:
    """Return whether anything ran inside each of some ranges: an operator of its thread, autograd's engine on any, or a kernel it
    launched.
    """
    chosen = ranges.where(rows)
    is_operator = events.category == Category.CPU_OP
    engine = np.array([name.startswith(ENGINE) for name in events.names], dtype=bool)[events.name_id] & is_operator
    ran = _any_begins(events.start_ns[engine], chosen.start_ns, chosen.end_ns)
    for thread, operators in events.rows_by_thread(np.flatnonzero(is_operator)).items():
        of_thread = np.flatnonzero(chosen.thread == thread)
        stretch = (chosen.start_ns[of_thread], chosen.end_ns[of_thread])
        ran[of_thread] |= _any_begins(events.start_ns[operators], *stretch)
    for is_communication in (True, False):
        ran |= launches.spans(chosen.start_ns, chosen.end_ns, is_communication).launched
    of_all = np.zeros(len(ranges), dtype=np.bool_)
    of_all[rows] = ran
    return of_all


def _any_begins(times: Int64, starts: Int64, ends: Int64) -> Bool:
    """Return whether any of the times is in each stretch [start, end)."""
    begins: Bool = np.searchsorted(times, starts) != np.searchsorted(times, ends)
    return begins
