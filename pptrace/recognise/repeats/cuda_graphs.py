"""CUDA graphs: what the host does in a capture is recorded into a graph and not run, so that it is no step; and steps of a host
that runs ahead of its device, where graphs are the steps, last as long as the device takes.

Launching a graph takes a host much less time than running it takes the device. Where nothing in the step waits for the device,
the range of a step tells how long launching took, and later ranges, which wait until a launch can be queued, how long others
took.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from pptrace.intervals import EMPTY, Int64, find_interval, reduce_ranges, union
from pptrace.model.categories import as_category
from pptrace.model.device import DeviceWork, Rows
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.model.traces import Bool, Category, Events
from pptrace.slices import rows_among

_BEGINS = re.compile(r"StreamBeginCapture")
_ENDS = re.compile(r"StreamEndCapture")
_CAPTURES = re.compile(r"Stream(?:Begin|End)Capture|GraphInstantiate")
_AHEAD = 0.1
"""Share of a step by which its work ends after its range, at the median, before the host counts as ahead."""
_MOST_BETWEEN = 0.5
"""Steps of which the next one begins later than this share of a step after the end are not taken as adjacent."""


def capture_times(events: Events) -> Int64:
    """Times in which a stream was captured or a captured graph was made ready, as a set of intervals.

    A capture lasts from its begin to the end that follows it, on whatever thread; one of which only one end was recorded begins
    or ends with the trace.
    """
    rows = events.rows_named(_CAPTURES, Category.RUNTIME)
    if not len(rows):
        return EMPTY
    starts, ends = events.start_ns[rows], events.ends_of(rows)
    begun, ended = (events.named(pattern, rows)[events.name_id[rows]] for pattern in (_BEGINS, _ENDS))
    opened, closed = starts[begun], ends[ended]
    last = max(int(events.start_ns[-1]), int(ends.max()))
    until = np.append(closed, last)[np.searchsorted(closed, opened, side="right")]
    if len(closed) and (not len(opened) or opened[0] > closed[0]):
        opened, until = np.append(opened, events.start_ns[0]), np.append(until, closed[0])
    return union(np.append(starts, opened), np.append(ends, until))


def outside_captures(events: Events, rows: Rows) -> Rows:
    """The events that do not begin in a capture."""
    captures, times = capture_times(events), events.start_ns[rows]
    return rows[find_interval(captures[:, 0], captures[:, 1], times, until=times) < 0]


def capturing_steps(ops: pd.DataFrame, captures: Int64) -> tuple[int, ...]:
    """Numbers of the steps in which a capture lies, wholly or in part.

    A step lasts as long as its own range, and without one from its first op or span to its last.
    """
    if not len(captures):
        return ()
    of_steps = ops[ops["step"] >= 0]
    ranges = of_steps[rows_among(of_steps["kind"], ("STEP",))]
    bounds = (ranges if len(ranges) else of_steps).groupby("step").agg(start=("start_ns", "min"), end=("end_ns", "max"))
    start, end = bounds["start"].to_numpy(), bounds["end"].to_numpy()
    holds = find_interval(captures[:, 0], captures[:, 1], end - 1, until=start + 1) >= 0
    return tuple(int(step) for step in bounds.index[holds])


def without_steps(table: pd.DataFrame, steps: tuple[int, ...]) -> pd.DataFrame:
    """The rows of all other steps."""
    return table[~table["step"].isin(steps)].reset_index(drop=True) if steps else table


def with_steps_on_device(ops: pd.DataFrame, work: DeviceWork) -> pd.DataFrame:
    """The ops with ranges of steps from the first work that each launched to the first work of the next.

    They stay as they are where ops tell the times of steps, where graphs make up less than half of the device time, where the
    host waits for the device in each step, and where a step launched nothing.
    """
    rows = np.flatnonzero(rows_among(ops["kind"], ("STEP",)))
    if len(rows) < 2 or not len(work) or rows_among(ops["kind"], COMPUTE_KINDS).any():
        return ops
    starts, ends = ops["start_ns"].to_numpy()[rows], ops["end_ns"].to_numpy()[rows]
    order = np.argsort(starts, kind="stable")
    rows, starts, ends = rows[order], starts[order], ends[order]
    launched = work.launch_order
    low, high = (np.searchsorted(work.launch_ns[launched], times) for times in (starts, ends))
    if (low == high).any() or not _mostly_graphs(work, launched, low, high):
        return ops
    begins = reduce_ranges(np.minimum, work.start_ns[launched], low, high)
    last = reduce_ranges(np.maximum, work.end_ns[launched], low, high)
    if np.median(last - ends) <= _AHEAD * np.median(last - begins) or (np.diff(begins) <= 0).any():
        return ops
    is_next = starts[1:] - ends[:-1] <= _MOST_BETWEEN * np.median(last - begins)
    until = np.where(np.append(is_next, False), np.append(begins[1:], 0), np.maximum(last, ends))
    new_starts, new_ends = (ops[name].to_numpy(copy=True) for name in ("start_ns", "end_ns"))
    clock = ops["clock"].astype(object).to_numpy(copy=True)
    new_starts[rows], new_ends[rows], clock[rows] = begins, until, "device"
    return ops.assign(start_ns=new_starts, end_ns=new_ends, clock=as_category(clock))


def _mostly_graphs(work: DeviceWork, launched: Int64, low: Int64, high: Int64) -> bool:
    """Return whether most of the device time launched in the steps is that of graphs: of calls that launched several works."""
    of_steps = np.zeros(len(launched) + 1, dtype=np.int64)
    np.add.at(of_steps, low, 1)
    np.add.at(of_steps, high, -1)
    chosen = launched[np.cumsum(of_steps)[:-1] > 0]
    _, call, count = np.unique(work.launch_ns[chosen], return_inverse=True, return_counts=True)
    is_graph: Bool = count[call.reshape(-1)] > 1
    took = work.end_ns[chosen] - work.start_ns[chosen]
    return bool(2 * took[is_graph].sum() > took.sum())
