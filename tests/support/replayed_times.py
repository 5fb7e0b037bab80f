"""Times of steps as if ranks had run a plan exactly: replayed, not measured."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pptrace.analysis.explain.rank_messages import NEVER
from pptrace.analysis.explain.step_times import StepTimes
from pptrace.schedule.plan_table import NONE, PlanTable
from pptrace.schedule.replay_table import replay_table
from pptrace.slices import Slice
from pptrace.timeline.lanes import INNER_AXES
from pptrace.timeline.windows import StepWindow


def replayed_times(table: PlanTable, durations: npt.ArrayLike, latency_ns: int = 0) -> StepTimes:
    """The times of steps whose ops take ``durations`` (steps, rows) and whose messages take ``latency_ns`` from end to start."""
    work = np.asarray(durations, dtype=np.int64)
    replay = replay_table(table, work, latency_ns)
    start, end = replay.start.astype(np.int64), replay.end.astype(np.int64)
    num_steps = len(work)
    before = np.where(table.position > 0, np.arange(len(table)) - 1, NONE)
    idle_since = np.where(before != NONE, end[:, np.maximum(before, 0)], 0)
    finish = end.max(axis=1)
    entries = np.flatnonzero(table.dep_is_message)
    arrival = end[:, table.dep[entries]] + latency_ns
    asked = idle_since[:, table.dep_reader[entries]]
    nothing = np.zeros_like(start)
    transfer = np.maximum(arrival - np.maximum(asked, end[:, table.dep[entries]]), 0)
    return StepTimes(
        table=table,
        windows=tuple(StepWindow(step, tuple(range(table.pp)), 0, int(finish[step])) for step in range(num_steps)),
        start=start,
        end=end,
        communication=nothing,
        host=nothing,
        stalled=nothing,
        before=np.broadcast_to(before, start.shape).astype(np.int64),
        gap_bubble=start - idle_since,
        gap_exposed=nothing,
        inner_bubble=nothing,
        moved_with=nothing,
        collected=nothing,
        exposed=np.zeros((*start.shape, len(INNER_AXES)), dtype=np.int64),
        tail_bubble=finish[:, np.newaxis] - end[:, table.rank_ptr[1:] - 1],
        sender_is_last=np.ones(arrival.shape, dtype=np.bool_),
        is_early=np.zeros(arrival.shape, dtype=np.bool_),
        arrival=arrival,
        sent=np.full_like(arrival, NEVER),
        received=arrival,
        transfer=transfer,
        recorded=transfer,
        is_whole=np.ones(num_steps, dtype=np.bool_),
        on_device=np.zeros(num_steps, dtype=np.bool_),
        knows_host=np.zeros(num_steps, dtype=np.bool_),
        waits=Slice.empty("window", "rank", "freed", "peer", "ready"),
    )
