"""Time between the ops of ranks without a device: ops and calls that begin later than what they need is there.

Where a rank has no device, its host alone says when ops begin: Python between them, garbage collection, input, or a processor
core that other work has. With a device, why it was idle is recorded, and nothing of this is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pptrace.analysis.explain.binding import Bindings
from pptrace.analysis.explain.measured import PostedCalls
from pptrace.analysis.explain.step_times import UNKNOWN, Bool, StepTimes
from pptrace.model.tables import Int64
from pptrace.slices import group_sums


@dataclass(frozen=True, slots=True, eq=False)
class LateOps:
    """Lateness of ops beyond what keeps their ranks from their calls, ns, shape (steps, rows), and how late each call of the
    graph is ``posted``, shape (steps, calls), None without a graph; ``of_ranks`` (steps, pp) is how late each rank was in all,
    and ``is_known`` (steps,) whether that is known.

    What ranks waited for one that had run nothing in the step yet is that one's. All are 0 where ranks have devices, and where
    the transfer of a message is not known, which would look the same.
    """

    before_ops: Int64
    posted: Int64 | None
    of_ranks: Int64
    is_known: Bool


def late_ops(times: StepTimes, bindings: Bindings, chosen: Int64, posted: PostedCalls | None = None) -> LateOps:
    """The late ops of some windows.

    Args:
        times, bindings: of whole windows.
        chosen: the windows to look at.
        posted: of all windows, for replays along a graph.
    """
    is_known = ~times.on_device[chosen] & (times.arrival[chosen] != UNKNOWN).all(axis=1)
    delays = np.where(is_known[:, np.newaxis], (times.start - bindings.ready - bindings.moving)[chosen], 0)
    held = np.minimum(bindings.held[chosen], delays)
    table = times.table
    of_ranks = group_sums(delays - held, table.rank, table.pp)
    window, row = np.nonzero(held)
    np.add.at(of_ranks, (window, table.rank[bindings.held_by[chosen][window, row]]), held[window, row])
    if posted is None:
        return LateOps(delays, None, of_ranks, is_known)
    late, before_posting, of_calls = (
        np.where(is_known[:, np.newaxis], ns[chosen], 0) for ns in (posted.late, posted.before_posting, posted.posted)
    )
    return LateOps(
        delays - before_posting,
        of_calls,
        of_ranks + group_sums(late - before_posting, table.rank, table.pp),
        is_known,
    )
