"""Microbatches of steps in which a schedule runs several times, as where gradients are accumulated: labels count those of each
run from 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from msgspec.structs import replace

from pptrace.model.join_tables import join_ranks
from pptrace.model.tables import COMPUTE_KINDS, OPS, Bool
from pptrace.model.wording import as_ranges, counted
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.slices import rows_among

_OP = ["step", "kind", "stage", "chunk", "microbatch"]
_MESSAGE = [*_OP, "direction", "axis", "peer"]


def with_runs_numbered(ranks: Sequence[RecognisedRank]) -> tuple[list[RecognisedRank], tuple[str, ...]]:
    """Number microbatches on through the runs of a step, on all ranks alike; with a line.

    Nothing is numbered in a step whose ops do not all run equally often on all ranks, as where some are recomputed, nor in one
    with overlapped pairs.
    """
    ops = join_ranks([(recognised.number, recognised.ops) for recognised in ranks], OPS)
    ops = ops[_is_counted(ops)]
    sizes = ops.groupby(["rank", *_OP], observed=True).size().reset_index(name="runs")
    if not len(sizes) or sizes["runs"].max() < 2:
        return list(ranks), ()
    by_step = sizes.groupby("step")["runs"].agg(["min", "max"])
    has_pairs = ops.loc[ops["pair"] != "", "step"].unique()
    chosen = by_step[(by_step["min"] == by_step["max"]) & (by_step["max"] > 1) & ~by_step.index.isin(has_pairs)]
    if not len(chosen):
        return list(ranks), ()
    runs, steps = chosen["max"], chosen.index.to_numpy(dtype=np.int64)
    microbatches = ops.groupby("step")["microbatch"].max() + 1

    def numbered(table: pd.DataFrame, key: list[str]) -> pd.DataFrame:
        rows = table[_is_counted(table) & table["step"].isin(steps)].sort_values("start_ns", kind="stable")
        same = rows.groupby(key, observed=True)["step"]
        each = same.transform("size") // rows["step"].map(runs)  # a microbatch may send several tensors
        shift = same.cumcount() // np.maximum(each, 1) * rows["step"].map(microbatches)
        result = table.copy()
        result.loc[rows.index, "microbatch"] = (rows["microbatch"] + shift).astype(np.int64)
        return result

    line = (
        f"step {as_ranges(set(steps.tolist()))} has {counted(int(runs.max()), 'run')} of the same microbatches: those of each "
        "are numbered behind those of the one before"
    )
    return [
        replace(recognised, ops=numbered(recognised.ops, _OP), comms=numbered(recognised.comms, _MESSAGE))
        for recognised in ranks
    ], (line,)


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


def _is_counted(table: pd.DataFrame) -> Bool:
    known: Bool = ((table["step"] >= 0) & (table["microbatch"] >= 0)).to_numpy()
    is_op = rows_among(table["kind"], COMPUTE_KINDS) if "pair" in table else np.ones(len(table), dtype=np.bool_)
    return known & is_op
