"""Steps that are calls of a schedule, several of which share an update."""

from __future__ import annotations

import numpy as np
import pandas as pd

from pptrace.model.tables import BACKWARD_KINDS
from pptrace.slices import rows_among


def line_of_updates(ops: pd.DataFrame) -> tuple[str, ...]:
    """A line where an optimizer runs in each second step with backwards alone, or rarer, but as often on all ranks that have one.

    Two updates alone tell nothing: one between them may be left out (as where gradients overflow).
    """
    steps = np.unique(ops.loc[rows_among(ops["kind"], BACKWARD_KINDS) & (ops["step"] >= 0), "step"])
    updates = ops[(ops["kind"] == "OPTIMIZER") & ops["step"].isin(steps)]
    gaps = [np.diff(np.searchsorted(steps, np.unique(of_rank))) for _, of_rank in updates.groupby("rank")["step"]]
    rarer = set(np.concatenate(gaps).tolist()) if gaps else set()
    if len(rarer) != 1 or min(rarer) < 2 or max(map(len, gaps)) < 2:
        return ()
    (each,) = rarer
    return (
        f"an optimizer runs in one of {each} steps alone: a step is a call of the schedule, and an update takes {each} of them",
    )
