"""Evaluation passes of labelled schedules: forwards only.

``schedule.eval()`` of torch.distributed.pipelining opens the ranges of backwards and of their messages as training does, and
runs nothing inside them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pptrace.intervals import Int64
from pptrace.model.tables import Category, Events
from pptrace.recognise.ops.labelled_ranges import Range, counted_steps
from pptrace.recognise.ops.tables import LaunchIndex
from pptrace.schedule.actions import Kind

_BACKWARD = frozenset({Kind.B, Kind.I, Kind.W, Kind.SEND_B, Kind.RECV_B})
_ENGINE = "autograd::engine::evaluate_function"


def without_evaluations(
    events: Events, ranges: Sequence[Range], launches: LaunchIndex
) -> tuple[list[Range], tuple[str, ...]]:
    """Drop passes whose backwards ran nothing; if no pass trained, drop only the backwards. With a warning.

    A stage whose backwards compute nothing (it is frozen, say) receives gradients in them nevertheless.
    """
    ordered = sorted(ranges, key=lambda entry: entry.start_ns)
    if not any(entry.kind in _BACKWARD for entry in ordered):
        return list(ranges), ()
    passes: dict[int, list[Range]] = {}
    for entry, counted in zip(ordered, counted_steps(ordered), strict=True):
        if entry.label.actions:
            passes.setdefault(counted.step, []).append(entry)
    inside = _Inside(events, launches)
    trained = [ranges_of_pass for ranges_of_pass in passes.values() if not _is_evaluation(ranges_of_pass, inside)]
    evaluated = [ranges_of_pass for ranges_of_pass in passes.values() if _is_evaluation(ranges_of_pass, inside)]
    if not evaluated:
        return list(ranges), ()
    if trained:
        left_out = {id(entry) for ranges_of_pass in evaluated for entry in ranges_of_pass}
        line = f"left out {len(evaluated)} of {len(passes)} passes as evaluation: their backwards run nothing"
    else:
        left_out = {id(entry) for ranges_of_pass in evaluated for entry in ranges_of_pass if entry.kind in _BACKWARD}
        line = "the ranges of backwards hold nothing: forwards alone ran (evaluation or inference)"
    return [entry for entry in ranges if id(entry) not in left_out], (line,)


def _is_evaluation(ranges: Sequence[Range], inside: _Inside) -> bool:
    """Whether a pass ran operators in forwards, but neither operators nor messages in its backwards."""
    backwards = [entry for entry in ranges if entry.kind in _BACKWARD]
    forwards = [entry for entry in ranges if entry.kind is Kind.F]
    return bool(backwards) and any(map(inside.ran, forwards)) and not any(map(inside.ran, backwards))


class _Inside:
    """Whether anything ran inside a range: an operator of its thread, autograd's engine on any, or a kernel it launched."""

    def __init__(self, events: Events, launches: LaunchIndex) -> None:
        self._launches = launches
        is_operator = events.category == Category.CPU_OP
        engine = np.array([name.startswith(_ENGINE) for name in events.names], dtype=bool)[events.name_id] & is_operator
        self._engine = events.start_ns[engine]
        self._threads: dict[int, Int64] = {
            thread: events.start_ns[is_operator & (events.thread == thread)]
            for thread in np.unique(events.thread[is_operator]).tolist()
        }

    def ran(self, entry: Range) -> bool:
        for starts in (self._threads.get(entry.thread), self._engine):
            if starts is not None and np.diff(np.searchsorted(starts, (entry.start_ns, entry.end_ns)))[0]:
                return True
        return any(
            self._launches.span(entry.start_ns, entry.end_ns, communication=is_comm) for is_comm in (True, False)
        )
