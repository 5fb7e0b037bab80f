"""Captures of CUDA graphs: what the host does in one is recorded into a graph and not run, so that it is no step."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.intervals import Int64, union
from pptrace.model.traces import Category, Events
from pptrace.slices import rows_among

Bool = npt.NDArray[np.bool_]

_BEGINS = re.compile(r"StreamBeginCapture")
_ENDS = re.compile(r"StreamEndCapture")
_CAPTURES = re.compile(r"Stream(?:Begin|End)Capture|GraphInstantiate")


def capture_times(events: Events) -> Int64:
    """Times in which a stream was captured or a captured graph was made ready, as a set of intervals.

    A capture lasts from its begin to the end that follows it, on whatever thread; one of which only one end was recorded begins
    or ends with the trace.
    """
    rows = _calls(events, _CAPTURES)
    if not len(rows):
        return np.empty((0, 2), dtype=np.int64)
    starts, ends = events.start_ns[rows], events.ends_of(rows)
    begun, ended = _is_named(events, rows, _BEGINS), _is_named(events, rows, _ENDS)
    first, last = int(events.start_ns[0]), int(events.start_ns[-1])
    opened, closed = starts[begun], ends[ended]
    index = np.searchsorted(closed, opened, side="right")
    spans = [np.stack((opened, np.append(closed, max(last, int(ends.max())))[index]), axis=1)]
    if len(closed) and (not len(opened) or opened[0] > closed[0]):
        spans.append(np.array([(first, closed[0])], dtype=np.int64))
    rows_of_all = np.concatenate((np.stack((starts, ends), axis=1), *spans))
    return union(rows_of_all[:, 0], rows_of_all[:, 1])


def capturing_steps(ops: pd.DataFrame, captures: Int64) -> tuple[int, ...]:
    """Numbers of the steps in which a capture lies, wholly or in part.

    A step lasts as long as its own range, and without one from its first op or span to its last.
    """
    if not len(captures):
        return ()
    numbered = ops[ops["step"] >= 0]
    ranges = numbered[rows_among(numbered["kind"], ("STEP",))]
    chosen = ranges if len(ranges) else numbered
    bounds = chosen.groupby("step").agg(start=("start_ns", "min"), end=("end_ns", "max"))
    before = np.searchsorted(captures[:, 0], bounds["end"].to_numpy(), side="left")
    holds = (before > 0) & (captures[np.maximum(before - 1, 0), 1] > bounds["start"].to_numpy())
    return tuple(int(step) for step in bounds.index[holds])


def without_steps(table: pd.DataFrame, steps: tuple[int, ...]) -> pd.DataFrame:
    """The rows of all other steps."""
    return table[~table["step"].isin(steps)].reset_index(drop=True) if steps else table


def _calls(events: Events, pattern: re.Pattern[str]) -> Int64:
    has_pattern = np.array([bool(pattern.search(name)) for name in events.names], dtype=np.bool_)
    if not has_pattern.any():
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero((events.category == Category.RUNTIME) & has_pattern[events.name_id])


def _is_named(events: Events, rows: Int64, pattern: re.Pattern[str]) -> Bool:
    return np.array([bool(pattern.search(events.names[index])) for index in events.name_id[rows]], dtype=np.bool_)
