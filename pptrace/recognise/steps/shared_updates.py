"""Steps that are calls of a schedule, several of which share an update."""

from __future__ import annotations

import numpy as np
import pandas as pd

from pptrace.model.tables import COMPUTE_KINDS
from pptrace.slices import rows_among


def line_of_updates(ops: pd.DataFrame) -> tuple[str, ...]:
    """A line where an optimizer runs in each second step alone, or rarer, but as often on all ranks that have one."""
    updates = ops[(ops["kind"] == "OPTIMIZER") & (ops["step"] >= 0)]
    rarer = {int(gap) for _, steps in updates.groupby("rank")["step"] for gap in np.diff(np.unique(steps))}
    if len(rarer) != 1 or min(rarer) < 2 or not rows_among(ops["kind"], COMPUTE_KINDS).any():
        return ()
    (each,) = rarer
    return (
        f"an optimizer runs in one of {each} steps alone: a step is a call of the schedule, and an update takes {each} of them",
    )
