"""Steps that no range counts: captures of graphs are none, and what repeats is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from pptrace.model.join_tables import concat_tables
from pptrace.model.tables import COMPUTE_KINDS, MESSAGES
from pptrace.model.wording import counted, numbered
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.recognise.repeats.cuda_graphs import without_steps
from pptrace.slices import rows_among


def without_capturing_steps(ranks: Sequence[RecognisedRank]) -> tuple[list[RecognisedRank], tuple[str, ...]]:
    """Drop the steps in which any rank captured a graph, on all ranks; with a line where there are any."""
    steps = tuple(sorted({step for recognised in ranks for step in recognised.capturing}))
    if not steps:
        return list(ranks), ()
    without = [
        replace(recognised, ops=without_steps(recognised.ops, steps), comms=without_steps(recognised.comms, steps))
        for recognised in ranks
    ]
    what = "hold captures of CUDA graphs, which are no steps" if len(steps) > 1 else "holds the capture of a CUDA graph"
    line = f"{'steps' if len(steps) > 1 else 'step'} {numbered(steps)} {what}: left out"
    return without, (line if len(steps) > 1 else f"{line}, since that is no step",)


def with_repeated_steps(ops: pd.DataFrame, ranks: Sequence[RecognisedRank]) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Add the steps that repetition tells, where the ops of all ranks tell none; with a line.

    Ranks of one run take the same number of steps: where they differ, which belong together is unknown, and there are none.
    Neither are there, without graphs, where ranks exchange messages: these may be a pipeline that was not recognised, whose steps
    would pass for those of a plain loop.

    Args:
        ops: of all ranks.
    """
    if rows_among(ops["kind"], (*COMPUTE_KINDS, "STEP")).any():
        return ops, ()
    has_graphs = any(recognised.repeats.has_graphs or recognised.capturing for recognised in ranks)
    if not has_graphs and any(
        rows_among(table["kind"], MESSAGES).any() for rank in ranks for table in (rank.calls, rank.comms)
    ):
        return ops, ()
    counts = {len(recognised.repeats) for recognised in ranks}
    if counts == {0} or not counts:
        # Why there are none where something would have shown them: optimizers, graphs or a capture.
        reason = next((recognised.repeats.reason for recognised in ranks if recognised.repeats.reason), "")
        return ops, (f"nothing marks the steps, and {reason}: the report is of the whole trace",) if reason else ()
    if len(counts) > 1:
        line = "nothing marks the steps, and what repeats does so differently often by rank: the report is of the whole trace"
        return ops, (line,)
    (count,) = counts
    first = ranks[0].repeats
    clock = "device" if all(recognised.repeats.on_device for recognised in ranks) else "host"
    begins = "the first work of one to the first work of the next" if clock == "device" else "one begin to the next"
    line = (
        f"nothing marks the steps: {counted(count, 'step')} from what repeats, each from {first.boundary or begins} "
        f"({first.what}{' on rank ' + str(ranks[0].number) if len(ranks) > 1 else ''})"
    )
    return concat_tables([ops, *map(_rows, ranks)]), (line,)


def _rows(recognised: RecognisedRank) -> pd.DataFrame:
    """The steps of a rank, and the other ranges in them."""
    return concat_tables([recognised.repeats.ranges, recognised.repeats.spans]).assign(rank=recognised.number)
