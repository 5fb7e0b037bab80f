"""Assign training steps to the ops of a table whose step column is incomplete or missing.

column with gaps                the step of the neighbouring ops on its rank, if this op is missing there
no column, but microbatches     an op that repeats on its rank begins the next step
neither                         a step ends where the whole pipeline has drained
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pandas as pd

from pptrace.model.tables import BACKWARD_KINDS, COMPUTE_KINDS, FORWARD_KINDS
from pptrace.slices import rows_where

StepsAndNotes = tuple[pd.DataFrame, tuple[str, ...]]
"""(ops with steps, notes on steps that were inferred from the order of ops)."""


def assign_steps(ops: pd.DataFrame, is_gap: pd.Series[bool], has_microbatches: bool) -> StepsAndNotes:
    """Assign a step to every op of a file where possible (0 if they may all be of one step); drop compute ops without a step.

    ``is_gap`` marks the rows with an empty cell; a row with -1 belongs to no step.
    """
    if "step" in ops and (ops["step"] >= 0).any():
        filled, notes = _fill_gaps(ops, is_gap)
        return rows_where(filled, (filled["step"] >= 0) | ~filled["kind"].isin(COMPUTE_KINDS)), notes
    return (number_by_repetition(ops, has_steps=False), ()) if has_microbatches else _split_where_drained(ops)


def number_by_repetition(ops: pd.DataFrame, has_steps: bool) -> pd.DataFrame:
    """Number steps by repetition, unless they have numbers: an op that repeats on its rank begins the next step."""
    if has_steps:
        return ops
    key = _key(ops)
    return ops.assign(step=ops.sort_values("start_ns", kind="stable").groupby(key).cumcount())


def _key(ops: pd.DataFrame) -> list[str]:
    """Columns that identify an op within its step."""
    return [name for name in ("rank", "kind", "stage", "chunk", "microbatch") if name in ops]


def _fill_gaps(ops: pd.DataFrame, is_gap: pd.Series[bool]) -> StepsAndNotes:
    if not (is_gap[ops.index] & ops["kind"].isin(COMPUTE_KINDS)).any():
        return ops, ()
    ordered = ops.sort_values("start_ns", kind="stable")
    known_steps = ordered["step"].where(ordered["step"] >= 0).groupby(ordered["rank"])
    around = pd.DataFrame({"before": known_steps.ffill(), "after": known_steps.bfill()}).fillna(-1).astype("int64")
    compute = ordered[ordered["kind"].isin(COMPUTE_KINDS)]
    unnumbered = compute.index[is_gap[compute.index]]
    keys = pd.Series(list(compute[_key(ops)].itertuples(index=False, name=None)), index=compute.index)
    used_ops: set[tuple[Hashable, int]] = set()
    if "microbatch" in ops:  # without it many ops of a step have the same key
        used_ops = set(zip(keys.tolist(), compute["step"].tolist(), strict=True))
    step_by_row: dict[int, int] = {}
    for row in unnumbered.tolist():
        candidates = {step for step in around.loc[row].tolist() if step >= 0 and (keys[row], step) not in used_ops}
        if len(candidates) == 1:
            step_by_row[row] = candidates.pop()
            used_ops |= {(keys[row], step_by_row[row])} if "microbatch" in ops else set()
    assigned = pd.Series(step_by_row, dtype="int64").reindex(ops.index)
    steps = assigned.fillna(ops["step"]).astype("int64")
    note = f"{len(unnumbered)} of {len(compute)} ops have no step: {len(step_by_row)} got that of the ops before and after them"
    if len(step_by_row) < len(unnumbered):
        note += "; the others are left out, so that their steps lack ops"
    return ops.assign(step=steps), (note,)


def _split_where_drained(ops: pd.DataFrame) -> StepsAndNotes:
    """Split steps where every rank has run as many backwards as forwards, and all ranks the same number.

    Within a step only the last stage is ever in that state: the others have microbatches in flight.
    """
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)].sort_values("start_ns", kind="stable")
    rows_of_rank = dict(iter(compute.groupby("rank")))
    one_step = ops.assign(step=0)
    unknown_note = (
        "no columns step and microbatch, and the order of ops shows no end of a step: all ops are read as one step; "
        "add a column step"
    )
    stage_sets = {frozenset(rows["stage"].tolist()) if "stage" in rows else rank for rank, rows in rows_of_rank.items()}
    if len(stage_sets) < 2:
        return one_step, (unknown_note,) if len(compute) else ()
    starts = {rank: _drained_starts(rows) for rank, rows in rows_of_rank.items()}
    common = sorted(set.intersection(*(set(starts_of_rank) for starts_of_rank in starts.values())))
    if not common:
        totals = {(_count(rows, FORWARD_KINDS), _count(rows, BACKWARD_KINDS)) for rows in rows_of_rank.values()}
        is_one_step = len(totals) == 1 and len(set(*totals)) == 1
        return one_step, () if is_one_step else (unknown_note,)
    steps = pd.Series(0, index=ops.index, dtype="int64")
    for rank, starts_of_rank in starts.items():
        is_of_rank = ops["rank"] == rank
        cuts = [starts_of_rank[count] for count in common]
        steps[is_of_rank] = np.searchsorted(cuts, ops.loc[is_of_rank, "start_ns"].to_numpy(), side="right")
    note = f"no columns step and microbatch: split into {len(common) + 1} steps where the pipeline has drained"
    return ops.assign(step=steps), (note,)


def _count(rows: pd.DataFrame, kinds: tuple[str, ...]) -> int:
    return int(rows["kind"].isin(kinds).sum())


def _drained_starts(rows: pd.DataFrame) -> dict[int, int]:
    """Starts, ns, of forwards with no microbatch in flight, by the number of microbatches done. Rows in order of start."""
    forwards, backwards = rows["kind"].isin(FORWARD_KINDS).cumsum(), rows["kind"].isin(BACKWARD_KINDS).cumsum()
    starts = (rows["kind"] == "F") & (forwards - 1 == backwards) & (backwards > 0)
    return dict(zip(backwards[starts].tolist(), rows.loc[starts, "start_ns"].tolist(), strict=True))
