"""Which training step each op of a table belongs to, where its column says so for some ops or is not there.

column with gaps                the step of the ops around it on its rank, if that lacks this op
no column, but microbatches     an op that comes again on its rank begins the next step
neither                         a step ends where the whole pipeline has drained
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pandas as pd

COMPUTE = ("F", "B", "I", "W", "OVERLAP_F_B")
_FORWARD = ("F", "OVERLAP_F_B")
_BACKWARD = ("B", "I", "OVERLAP_F_B")

Told = tuple[pd.DataFrame, tuple[str, ...]]
"""Ops with steps, and lines about what order had to tell."""


def told_steps(ops: pd.DataFrame, is_gap: pd.Series[bool], has_microbatches: bool) -> Told:
    """The ops of one file with all the steps that can be told, 0 where all may be of one; without those of no step.

    ``is_gap`` are the rows whose cell is empty; one that says -1 belongs to no step.
    """
    if "step" in ops and (ops["step"] >= 0).any():
        filled, lines = _without_gaps(ops, is_gap)
        return filled[(filled["step"] >= 0) | ~filled["kind"].isin(COMPUTE)], lines
    return (with_steps(ops, has_steps=False), ()) if has_microbatches else _by_drains(ops)


def with_steps(ops: pd.DataFrame, has_steps: bool) -> pd.DataFrame:
    """Ops with steps: where nothing numbers them, an op that comes again on its rank begins the next one."""
    if has_steps:
        return ops
    key = _key(ops)
    return ops.assign(step=ops.sort_values("start_ns", kind="stable").groupby(key).cumcount())


def _key(ops: pd.DataFrame) -> list[str]:
    """The columns that name an op within its step."""
    return [name for name in ("rank", "kind", "stage", "chunk", "microbatch") if name in ops]


def _without_gaps(ops: pd.DataFrame, is_gap: pd.Series[bool]) -> Told:
    ordered = ops.sort_values("start_ns", kind="stable")
    known = ordered["step"].where(ordered["step"] >= 0).groupby(ordered["rank"])
    around = pd.DataFrame({"before": known.ffill(), "after": known.bfill()}).fillna(-1).astype("int64")
    compute = ordered[ordered["kind"].isin(COMPUTE)]
    lacking = compute.index[is_gap[compute.index]]
    if not len(lacking):
        return ops, ()
    keys = pd.Series(list(compute[_key(ops)].itertuples(index=False, name=None)), index=compute.index)
    taken: set[tuple[Hashable, int]] = set()
    if "microbatch" in ops:  # without it many ops of a step have the same name
        taken = set(zip(keys.tolist(), compute["step"].tolist(), strict=True))
    found: dict[int, int] = {}
    for row in lacking.tolist():
        fitting = {step for step in around.loc[row].tolist() if step >= 0 and (keys[row], step) not in taken}
        if len(fitting) == 1:
            found[row] = fitting.pop()
            taken |= {(keys[row], found[row])} if "microbatch" in ops else set()
    told = pd.Series(found, dtype="int64").reindex(ops.index)
    steps = told.fillna(ops["step"]).astype("int64")
    line = f"{len(lacking)} of {len(compute)} ops have no step: {len(found)} are told by the ops around them"
    return ops.assign(step=steps), (line + (", the others are left out" if len(found) < len(lacking) else ""),)


def _by_drains(ops: pd.DataFrame) -> Told:
    """Steps end where each rank has as many backwards as forwards behind it, and all ranks the same number of them.

    Before the end of a step that is so at no time but on the last stage: the others hold microbatches in flight.
    """
    compute = ops[ops["kind"].isin(COMPUTE)].sort_values("start_ns", kind="stable")
    own = dict(iter(compute.groupby("rank")))
    one_step = ops.assign(step=0)
    untold = "no columns step and microbatch: where steps begin could not be told, and all ops are taken for one step"
    held = {frozenset(rows["stage"].tolist()) if "stage" in rows else rank for rank, rows in own.items()}
    if len(held) < 2:
        return one_step, (untold,) if len(compute) else ()
    begins = {rank: _drained(rows) for rank, rows in own.items()}
    common = sorted(set.intersection(*(set(begin) for begin in begins.values())))
    if not common:
        totals = {(_count(rows, _FORWARD), _count(rows, _BACKWARD)) for rows in own.values()}
        is_one = len(totals) == 1 and len(set(*totals)) == 1
        return one_step, () if is_one else (untold,)
    steps = pd.Series(0, index=ops.index, dtype="int64")
    for rank, begin in begins.items():
        mine = ops["rank"] == rank
        cuts = [begin[count] for count in common]
        steps[mine] = np.searchsorted(cuts, ops.loc[mine, "start_ns"].to_numpy(), side="right")
    line = f"no columns step and microbatch: {len(common) + 1} steps are told by where the pipeline has drained"
    return ops.assign(step=steps), (line,)


def _count(rows: pd.DataFrame, kinds: tuple[str, ...]) -> int:
    return int(rows["kind"].isin(kinds).sum())


def _drained(rows: pd.DataFrame) -> dict[int, int]:
    """Where a rank begins a forward with none in flight: how many it has behind it → the start, ns. Rows by start."""
    forwards, backwards = rows["kind"].isin(_FORWARD).cumsum(), rows["kind"].isin(_BACKWARD).cumsum()
    begins = (rows["kind"] == "F") & (forwards - 1 == backwards) & (backwards > 0)
    return dict(zip(backwards[begins].tolist(), rows.loc[begins, "start_ns"].tolist(), strict=True))
