"""Clocks from the order of a pipeline's ops, where no messages relate the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from pptrace.clock.bounds import Matrix, is_bounded, offset_ranges
from pptrace.clock.offsets import from_bounds
from pptrace.clock.result import Clock, ClockMethod
from pptrace.slices import rows_among


def from_op_order(
    ranks: Sequence[int], low: Matrix, ops: pd.DataFrame, pipelines: Sequence[Sequence[int]]
) -> Clock | None:
    """Offsets from messages and the order of ops; None where these do not bound all ranks or contradict each other.

    An op that includes its own waiting for a message begins before that message is sent: where starts contradict, ends alone
    count. Clocks that no bound speaks against are left as they are.
    """
    pairs = _op_pairs(ops, pipelines)
    columns = ("start_ns", "end_ns") if (pairs["clock_after"] == "device").all() else ("end_ns",)
    for column in columns:
        both = _with_pairs(low, ranks, pairs, column)
        by_rank = offset_ranges(both)
        if not all(is_bounded(*bounds) for bounds in by_rank):
            return None
        if any(lower > upper for lower, upper in by_rank):
            continue
        if both.max() <= 0:
            widest = max(max(-lower, upper) for lower, upper in by_rank)
            return Clock(ClockMethod.OP_ORDER, dict.fromkeys(ranks, 0), widest)
        clock = from_bounds(ranks, both, {})
        return Clock(ClockMethod.OP_ORDER, clock.offsets_ns, clock.uncertainty_ns)
    return None


def with_op_ends(low: Matrix, ranks: Sequence[int], ops: pd.DataFrame, pipelines: Sequence[Sequence[int]]) -> Matrix:
    """The bounds of messages with those of the ends of ops: of two that follow each other, the second ends later."""
    return _with_pairs(low, ranks, _op_pairs(ops, pipelines), "end_ns")


def _with_pairs(low: Matrix, ranks: Sequence[int], pairs: pd.DataFrame, column: str) -> Matrix:
    both = low.copy()
    source, target = (np.searchsorted(np.asarray(ranks), pairs[name].to_numpy()) for name in ("rank", "rank_after"))
    np.maximum.at(both, (source, target), (pairs["end_ns"] - pairs[f"{column}_after"]).to_numpy(dtype=np.int64))
    np.fill_diagonal(both, 0)
    return both


def _op_pairs(ops: pd.DataFrame, pipelines: Sequence[Sequence[int]]) -> pd.DataFrame:
    """Ops of the recorded stages next to each other, of which the second begins after the first has ended: its columns end in
    ``_after``. Stages between them may have no trace.
    """
    known = ops[rows_among(ops["kind"], ("F", "B", "I")) & (ops["stage"] >= 0) & (ops["microbatch"] >= 0)]
    forward = known["kind"] == "F"
    known = known.assign(forward=forward, place=np.where(forward, known["stage"], -known["stage"]))
    pipeline_of = {rank: number for number, pipeline in enumerate(pipelines) for rank in pipeline}
    known = known.assign(pipeline=known["rank"].map(pipeline_of)).dropna(subset=["pipeline"])
    way = ["pipeline", "step", "forward", "microbatch"]
    known = known[~known.duplicated([*way, "stage"], keep=False)].sort_values([*way, "place"])
    travels = known.groupby(way).ngroup().to_numpy()
    (first,) = np.nonzero(travels[:-1] == travels[1:])
    columns = known[["rank", "start_ns", "end_ns", "clock"]]
    before, after = (columns.iloc[rows].reset_index(drop=True) for rows in (first, first + 1))
    return before.join(after.add_suffix("_after"))
