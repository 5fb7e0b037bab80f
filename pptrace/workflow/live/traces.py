"""Live records as traces of marks, so that their figures are those of any trace (docs/report.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pptrace.live_records.codec import LiveStep
from pptrace.marks import METADATA_KEY
from pptrace.model.tables import COMM_ARGS, MEMORY, empty_table
from pptrace.model.traces import Category, Events, InputFormat, Trace

_NUMBER = re.compile(r" (step|handle|seq)=(\d+)", re.ASCII)
_PER_STEP = 1 << 20
"""Handles and sequence numbers count within a step; those of the next step begin so much higher."""


def trace_of(rank: int, facts: Mapping[str, Any], steps: Sequence[LiveStep]) -> Trace:
    """A trace of these observed steps of one rank, in wall-clock time."""
    names = [name for step in steps for name in _names_of(step)]
    number = {name: index for index, name in enumerate(dict.fromkeys(names))}
    starts = np.concatenate([step.begin_ns for step in steps])
    ends = np.concatenate([step.end_ns for step in steps])
    order = np.lexsort((starts - ends, starts))
    num = len(order)
    host = np.full(num, -1, dtype=np.int64)
    events = Events(
        category=np.full(num, Category.ANNOTATION, dtype=np.int8),
        name_id=np.array([number[name] for name in names], dtype=np.int32)[order],
        start_ns=starts[order] + wall_shift_ns(facts),
        dur_ns=(ends - starts)[order],
        device=host.astype(np.int32),
        stream=host,
        thread=np.zeros(num, dtype=np.int64),
        correlation=host,
        names=tuple(number),
        comm_args=empty_table(COMM_ARGS),
    )
    return Trace(
        path="",
        format=InputFormat.RUN,
        rank=rank,
        producer=METADATA_KEY,
        events=events,
        memory=empty_table(MEMORY),
        metadata=facts,
        distributed={},
        warnings=(),
    )


def wall_shift_ns(facts: Mapping[str, Any]) -> int:
    """Time that is added to a rank's monotonic times to have wall-clock ones, ns; 0 where the facts do not tell."""
    clock = facts.get("clock")
    start = clock.get("start") if isinstance(clock, Mapping) else None
    if not isinstance(start, Mapping):
        return 0
    wall, monotonic = start.get("time_ns"), start.get("perf_counter_ns")
    return wall - monotonic if isinstance(wall, int) and isinstance(monotonic, int) else 0


def _names_of(step: LiveStep) -> list[str]:
    """The names of its ranges with its own number, and with handles and sequence numbers that no other step has."""

    def renumbered(match: re.Match[str]) -> str:
        return f" {match[1]}={step.head.step if match[1] == 'step' else step.head.step * _PER_STEP + int(match[2])}"

    return [_NUMBER.sub(renumbered, name) for name in step.names]
