"""Steps that no optimizer and no range counts: captures of graphs are none, and what repeats is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from pptrace.model.join_tables import concat_tables
from pptrace.model.tables import COMPUTE_KINDS, OPS, make_table
from pptrace.model.wording import counted, numbered
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.recognise.repeats.captures import without_steps
from pptrace.slices import rows_among


def without_capturing_steps(ranks: Sequence[RecognisedRank]) -> tuple[list[RecognisedRank], tuple[str, ...]]:
    """Drop the steps in which any rank captured a graph, on all ranks; with a line where there are any."""
    steps = tuple(sorted({step for recognised in ranks for step in recognised.capturing}))
    if not steps:
        return list(ranks), ()
    kept = [
        replace(recognised, ops=without_steps(recognised.ops, steps), comms=without_steps(recognised.comms, steps))
        for recognised in ranks
    ]
    what = "hold captures of CUDA graphs, which are no steps" if len(steps) > 1 else "holds the capture of a CUDA graph"
    line = f"{'steps' if len(steps) > 1 else 'step'} {numbered(steps)} {what}: left out"
    return kept, (line if len(steps) > 1 else f"{line}, since that is no step",)


def with_repeated_steps(ops: pd.DataFrame, ranks: Sequence[RecognisedRank]) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Add the steps that repetition tells, where the ops of all ranks tell none; with a line.

    Ranks of one run take the same number of steps: where they differ, which belong together is unknown, and there are none.

    Args:
        ops: of all ranks.
    """
    if rows_among(ops["kind"], (*COMPUTE_KINDS, "STEP")).any():
        return ops, ()
    counts = {len(recognised.repeats) for recognised in ranks}
    if counts == {0} or not counts:
        return ops, _reasons(ranks)
    if len(counts) > 1:
        line = "nothing marks the steps, and what repeats does so differently often by rank: the report is of the whole trace"
        return ops, (line,)
    (count,) = counts
    first = ranks[0].repeats
    clock = "device" if all(recognised.repeats.on_device for recognised in ranks) else "host"
    begins = "the first work of one to the first work of the next" if clock == "device" else "one begin to the next"
    line = (
        f"nothing marks the steps: {counted(count, 'step')} from what repeats, each from {begins} ({first.what}"
        f"{' on rank ' + str(ranks[0].number) if len(ranks) > 1 else ''})"
    )
    return concat_tables([ops, *map(_rows, ranks)]), (line,)


def _reasons(ranks: Sequence[RecognisedRank]) -> tuple[str, ...]:
    """Reasons for which there are no steps, of runs whose work is that of graphs or that captured one."""
    for recognised in ranks:
        repeats = recognised.repeats
        if repeats.reason and (repeats.has_graphs or recognised.capturing):
            return (f"nothing marks the steps, and {repeats.reason}: the report is of the whole trace",)
    return ()


def _rows(recognised: RecognisedRank) -> pd.DataFrame:
    repeats = recognised.repeats
    size = len(repeats)
    columns = {name: np.full(size, -1, dtype=np.int64) for name in ("stage", "chunk", "microbatch")}
    texts = {"kind": "STEP", "phase": "", "clock": "device" if repeats.on_device else "host", "source": "inferred"}
    return make_table(
        OPS,
        {
            **columns,
            **{name: [text] * size for name, text in {**texts, "pair": ""}.items()},
            "rank": np.full(size, recognised.number, dtype=np.int64),
            "step": np.arange(size, dtype=np.int64),
            "start_ns": repeats.start_ns,
            "end_ns": repeats.end_ns,
        },
    )
