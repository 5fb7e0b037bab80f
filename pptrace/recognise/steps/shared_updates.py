"""Steps that are calls of a schedule, several of which share an update."""

from __future__ import annotations

import numpy as np
import pandas as pd

from pptrace.model.tables import BACKWARD_KINDS, as_category
from pptrace.schedule.actions import parse_action
from pptrace.slices import distinct_of, rows_among


def with_whole_updates(ops: pd.DataFrame, comms: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, tuple[str, ...]]:
    """Join the calls of a schedule that share an update to one step, with microbatches numbered on through them; with a line.

    They do where an optimizer runs in each second step with backwards alone, or rarer, but as often on all ranks that have one.
    Steps that are marked as such stay as they are, and so do those of a run that also evaluates, and of a trace that begins or
    ends between two calls of one.

    Args:
        ops, comms: of all ranks (schemas OPS and COMMS).
    """
    steps = np.unique(ops.loc[rows_among(ops["kind"], BACKWARD_KINDS) & (ops["step"] >= 0), "step"])
    updates = ops[(ops["kind"] == "OPTIMIZER") & ops["step"].isin(steps)]
    gaps = [np.diff(np.searchsorted(steps, np.unique(of_rank))) for _, of_rank in updates.groupby("rank")["step"]]
    rarer = set(np.concatenate(gaps).tolist()) if gaps else set()
    if len(rarer) != 1 or min(rarer) < 2 or max(map(len, gaps)) < 2:  # one may be left out, as where gradients overflow
        return ops, comms, ()
    (each,) = rarer
    is_marked = rows_among(ops["kind"], ("STEP",)).any()
    are_whole = (int(np.searchsorted(steps, updates["step"].min())) + 1, len(steps) % each) == (each, 0)
    if is_marked or not are_whole or not ops["step"].isin([-1, *steps]).all():
        line = f"an optimizer runs in one of {each} steps alone: a step is a call of the schedule"
        return ops, comms, (f"{line}, and an update takes {each} of them",)
    number, calls_before = np.divmod(np.arange(len(steps)), each)
    of_step = pd.Series(number, index=steps)
    before = pd.Series(calls_before * (int(ops["microbatch"].max()) + 1), index=steps)

    def joined(table: pd.DataFrame) -> pd.DataFrame:
        step, shift = table["step"].map(of_step), table["step"].map(before)
        is_known = step.notna()
        counts = is_known & (table["microbatch"] >= 0)
        return table.assign(
            step=table["step"].where(~is_known, step.fillna(0).astype("int64")),
            microbatch=table["microbatch"].where(~counts, table["microbatch"] + shift.fillna(0).astype("int64")),
        )

    line = f"{each} calls of a schedule share an update: each step is {each} of them, with microbatches numbered on"
    shift = ops["step"].map(before).fillna(0).astype("int64")
    return joined(ops).assign(pair=_later_pairs(ops["pair"], shift)), joined(comms), (line,)


def _later_pairs(pairs: pd.Series[str], shift: pd.Series[int]) -> pd.Series[str]:
    """Texts of overlapped pairs, "" for other ops, with their microbatches so much later."""
    number, first = distinct_of([pairs, shift])
    each = zip(pairs.iloc[first].tolist(), shift.iloc[first].tolist(), strict=True)
    texts = [str(parse_action(text).later(later)) if text else "" for text, later in each]
    return pd.Series(as_category(np.array(texts, dtype=object)[number]), index=pairs.index)
