"""Steps common to all ranks: numbers for ranks whose steps have none, and the steps that all ranks recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from pptrace.model.tables import COMPUTE_KINDS
from pptrace.model.wording import listed
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.slices import rows_among


def with_common_steps(ranks: Sequence[RecognisedRank]) -> tuple[list[RecognisedRank], tuple[str, ...]]:
    """Number the steps of ranks without step ranges like those of the others; with a warning.

    A rank without step ranges (recorded without pptrace's launcher, say) is taken in order where it has as many steps as every
    rank that has ranges; where it has more or fewer, which they are is unknown, and its numbers stay.
    """
    numbers = {recognised.number: _steps_with_ops(recognised) for recognised in ranks}
    with_ranges = [recognised for recognised in ranks if numbers[recognised.number] and _has_ranges(recognised)]
    step_lists = {tuple(numbers[recognised.number]) for recognised in with_ranges}
    if len(step_lists) != 1:
        return list(ranks), ()
    (steps,) = step_lists
    counted = {
        recognised.number
        for recognised in ranks
        if not _has_ranges(recognised) and numbers[recognised.number] == list(range(len(steps))) != list(steps)
    }
    if not counted:
        return list(ranks), ()
    line = (
        f"the steps of rank {listed(sorted(counted))} have no numbers: assumed to be steps {steps[0]} to {steps[-1]} of the "
        "other ranks, in order"
    )

    def renamed(table: pd.DataFrame) -> pd.DataFrame:
        return table.assign(step=table["step"].map(lambda step: names.get(step, -1)).astype("int64"))

    names = dict(enumerate(steps))
    return [
        replace(recognised, ops=renamed(recognised.ops), comms=renamed(recognised.comms))
        if recognised.number in counted
        else recognised
        for recognised in ranks
    ], (line,)


def with_recorded_steps(ranks: Sequence[RecognisedRank]) -> tuple[list[RecognisedRank], tuple[str, ...]]:
    """Keep only the steps that all ranks recorded; with a warning where that drops any.

    Ranks of one run recorded different ones where a profiler of the script ran on some of them. In a step that some did not
    record, ranks cannot be compared. Where no step was recorded by all, every rank keeps its own.
    """
    recorded = {recognised.number: steps for recognised in ranks if (steps := _recorded(recognised)) is not None}
    if len(recorded) < len(ranks) or len(set(recorded.values())) < 2:
        return list(ranks), ()
    steps = range(
        max(rank_steps.start for rank_steps in recorded.values()),
        min(rank_steps.stop for rank_steps in recorded.values()),
    )
    by_steps: dict[tuple[int, int], list[int]] = {}
    for rank, rank_steps in sorted(recorded.items()):
        by_steps.setdefault((rank_steps.start, rank_steps.stop), []).append(rank)
    parts = (
        f"{'rank' if len(same) == 1 else 'ranks'} {listed(same)}: {_steps_text(range(*edges))}"
        for edges, same in sorted(by_steps.items())
    )
    line = f"ranks recorded different steps ({'; '.join(parts)})"
    if not steps:
        return list(ranks), (
            f"{line}, and no step is common to all: figures that compare ranks are null; record steps in which the script's own "
            "profiler runs on no rank (--steps A:B)",
        )

    def common(table: pd.DataFrame) -> pd.DataFrame:
        return table[(table["step"] < 0) | table["step"].isin(steps)].reset_index(drop=True)

    return [replace(recognised, ops=common(recognised.ops), comms=common(recognised.comms)) for recognised in ranks], (
        f"{line}: the report is of {_steps_text(steps)}, which all ranks recorded",
    )


_LAUNCHED = "pptrace.trace/1"


def _recorded(recognised: RecognisedRank) -> range | None:
    """The steps that pptrace's launcher recorded; None for other recorders or where none is complete."""
    steps = recognised.info.metadata.get("steps")
    if recognised.info.metadata.get("schema") != _LAUNCHED or not isinstance(steps, list) or len(steps) != 2:
        return None
    rank_steps = range(*steps) if all(isinstance(step, int) for step in steps) else range(0)
    return rank_steps or None


def _steps_text(steps: range) -> str:
    return f"step {steps.start}" if len(steps) == 1 else f"steps {steps.start}–{steps.stop - 1}"


def _has_ranges(recognised: RecognisedRank) -> bool:
    return bool(rows_among(recognised.ops["kind"], ("STEP",)).any())


def _steps_with_ops(recognised: RecognisedRank) -> list[int]:
    step = recognised.ops["step"].to_numpy()
    steps: list[int] = np.unique(step[rows_among(recognised.ops["kind"], COMPUTE_KINDS) & (step >= 0)]).tolist()
    return steps
