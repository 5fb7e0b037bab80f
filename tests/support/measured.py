"""Costs of steps made to order, as the analysis has them after reading."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.schedule.plan_table import PlanTable


def measured_costs(
    table: PlanTable, durations: npt.ArrayLike, transfers: npt.ArrayLike = 0, delays: npt.ArrayLike = 0
) -> StepMatrix:
    """Costs of the shape (steps, pipelines, rows) or (…, messages); the ranks of pipeline d are d, d + pipelines, …"""
    taken = np.asarray(durations, dtype=np.int64)
    num_steps, num_pipelines, num_rows = taken.shape
    num_windows = num_steps * num_pipelines
    ranks = np.arange(num_pipelines)[:, np.newaxis] + np.arange(table.pp) * num_pipelines
    messages = np.broadcast_to(np.asarray(transfers), (num_steps, num_pipelines, table.num_messages))
    late = np.broadcast_to(np.asarray(delays), taken.shape)
    none = np.zeros((num_windows, num_rows), dtype=np.int8)  # as few bytes as they need
    return StepMatrix(
        table=table,
        step=np.repeat(np.arange(num_steps), num_pipelines),
        ranks=np.tile(ranks, (num_steps, 1)),
        spans=np.zeros(num_windows, dtype=np.int64),
        durations=taken.reshape(num_windows, num_rows),
        inner=none,
        delays=late.reshape(num_windows, num_rows).astype(np.int64),
        moving=none,
        moved_with=none,
        collected_before=none,
        collected_inside=none,
        transfers=messages.reshape(num_windows, table.num_messages).astype(np.int64),
        sender_is_last=np.ones((num_windows, table.num_messages), dtype=np.bool_),
    )
