"""Places on the device's timeline of ops that launch nothing.

The input gradient of a first stage needs none: torch's runtime runs the op, and nothing of it on the device. The host runs
ahead, so that the times of its range lie before the device work of ops that the rank ran first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.model.device import DeviceWork
from pptrace.model.tables import COMPUTE_KINDS, UNKNOWN, Int64
from pptrace.recognise.ops.tables import LaunchIndex
from pptrace.schedule.actions import Kind
from pptrace.slices import last_like, rows_among


def with_places_on_device(ops: pd.DataFrame, comms: pd.DataFrame, work: DeviceWork) -> pd.DataFrame:
    """The ops of one rank, of which those that launch nothing take no time, where the device came to them: when the host
    had begun them, the compute launched before them was over, and their message was there.

    Only ops of a kind and stage that never launches are moved, and only up to later compute: where other ops of the
    kind have kernels, or none follows, device events may be lost, and the host's times stay. Their ``clock`` stays "host",
    since no device event shows them.
    """
    rows = _launching_nothing(ops) if len(work) else np.empty(0, dtype=np.int64)
    if not len(rows):
        return ops
    start, end = ops["start_ns"].to_numpy(copy=True), ops["end_ns"].to_numpy(copy=True)
    before, after, is_followed = LaunchIndex(work).compute_around(start[rows], end[rows])
    rows, before, after = rows[is_followed], before[is_followed], after[is_followed]
    reached = np.maximum(np.maximum(start[rows], before), _arrivals(ops.iloc[rows], comms))
    start[rows] = end[rows] = np.minimum(reached, after)
    return ops.assign(start_ns=start, end_ns=end)


def _launching_nothing(ops: pd.DataFrame) -> Int64:
    """Rows of ops of which none of the same kind and stage launched anything."""
    is_compute, on_device = rows_among(ops["kind"], COMPUTE_KINDS), rows_among(ops["clock"], ("device",))
    if not (is_compute & ~on_device).any():
        return np.empty(0, dtype=np.int64)
    number = ops.groupby(["kind", "stage", "chunk"], observed=True, sort=False).ngroup().to_numpy()
    launches = np.bincount(number, weights=on_device) > 0
    return np.flatnonzero(is_compute & ~launches[number])


def _arrivals(ops: pd.DataFrame, comms: pd.DataFrame) -> Int64:
    """Ends of the kernels that received what each op reads; 0 where it reads no message or none is known."""
    received = comms[rows_among(comms["kind"], ("recv",)) & rows_among(comms["clock"], ("device",))]
    read = _reading(ops, rows_among(ops["kind"], (Kind.F,)))
    moved = _reading(received, rows_among(received["direction"], ("F",)))
    return np.append(received["end_ns"].to_numpy(), 0)[last_like(read, moved)]


def _reading(table: pd.DataFrame, is_forward: npt.NDArray[np.bool_]) -> list[npt.NDArray[Any]]:
    """Columns that an op and its message share. Messages have a chunk only where no label names the stage."""
    step, stage, chunk, microbatch = (table[name].to_numpy() for name in ("step", "stage", "chunk", "microbatch"))
    return [step, stage, np.where(stage < 0, chunk, UNKNOWN), microbatch, is_forward]
