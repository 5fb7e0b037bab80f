"""Late receives: ops that wait for kernels which still receive what the kernel of the sender has sent.

The message may be under way, or the device of the receiver may run something else: ranks that share a device take turns on it.
Whatever it is, the host has launched all, and neither ops nor transfers show it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.reason import Reason, gains

LATE_RECEIVES = "late receives"
_LEAST_WAIT = 0.25
"""Share of a mean op: shorter ones are how kernels end."""


def late_receives(plans: Sequence[StepMatrix], uncertainty_ns: int | None) -> Reason | None:
    """Waits for receives whose senders are done, and what steps would get back without them.

    None where there are none, and where the clocks of two ranks may be off by as much as is typical of them.
    """
    waits = [costs.receiving["ns"] for costs in plans]
    times = np.concatenate(
        [ns[ns >= _LEAST_WAIT * costs.durations.mean()] for ns, costs in zip(waits, plans, strict=True)]
    )
    if not len(times) or uncertainty_ns is None or np.median(times) <= 2 * uncertainty_ns:
        return None
    return Reason(
        LATE_RECEIVES,
        ("unexplained",),
        {},
        "Late receives: {share} is lost in receive kernels that run on after their data was sent",
        f"{len(times)} ops waited for receive kernels that ended typically {np.median(times) / 1e6:,.2f} ms after the send "
        "kernel: the network delivers late, or the receiver's device was busy with something else; ranks that share a device "
        "take turns on it: give each one of its own",
        gains(plans, (costs.without_late_receives() for costs in plans)),
        {"num_ops": len(times), "typical_ns": round(float(np.median(times)))},
    )
