"""Waits inside ops that follow: pipelines of a step meet in collectives inside their ops (tp, buckets of DDP, FSDP).

Where an op waits there for one of another pipeline, and that one begins sooner or computes less, it waits so much less.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.model.tables import Int64
from pptrace.slices import Slice, last_like

_MOST_ROUNDS = 3
"""Waits that follow make others follow."""


def with_following_waits(costs: StepMatrix, changed: StepMatrix) -> StepMatrix:
    """The costs as they were ``changed``, with what ops wait for in collectives as much less as the change makes it."""
    waits, late_window = waits_with_late_windows(costs)
    if not len(waits):
        return changed
    own, late = (waits["window"], waits["row"]), (late_window, waits["late_row"])
    shorter = costs.durations.astype(np.int64) - changed.durations
    longer = np.clip(shorter[late] - shorter[own], 0, waits["longer"])
    already, saved, following = waits["ns"] - waits["longer"], longer, changed
    for _ in range(_MOST_ROUNDS):
        sooner, before = costs.starts - following.starts, saved
        saved = longer + np.clip(sooner[late] - sooner[own], 0, already)
        less = np.zeros(shorter.shape, dtype=np.int64)
        np.add.at(less, own, saved)
        less = np.minimum(less, np.minimum(changed.inner, changed.durations))
        following = replace(changed, durations=changed.durations - less)
        if np.array_equal(saved, before):
            break
    left = waits.with_columns({"ns": waits["ns"] - saved, "longer": waits["longer"] - longer})
    return replace(following, inner=changed.inner - less, waits=left.where(left["ns"] > 0))


def waits_with_late_windows(costs: StepMatrix) -> tuple[Slice, Int64]:
    """(the waits for ops in windows of the costs, these windows)."""
    waits, pp = costs.waits, costs.ranks.shape[1]
    members = (np.repeat(costs.step, pp), costs.ranks.ravel())
    found = last_like((costs.step[waits["window"]], waits["rank"]), members)
    is_known = found >= 0
    return waits.where(is_known), found[is_known] // pp
