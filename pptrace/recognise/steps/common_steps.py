"""Steps that all ranks of a run have in common: their numbers, where the traces of some number them and those of others do not,
and which they are, where ranks recorded different ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import pandas as pd

from pptrace.model.tables import COMPUTE_KINDS
from pptrace.recognise.recognised_rank import RecognisedRank


def with_common_steps(ranks: Sequence[RecognisedRank]) -> tuple[list[RecognisedRank], tuple[str, ...]]:
    """The ranks, those whose steps were counted from 0 with the numbers of the others' step ranges, and a line that says so.

    A rank without step ranges (recorded without pptrace's launcher, say) is taken in order where it has as many steps as every
    rank that has ranges; where it has more or fewer, nothing tells which they are, and its numbers stay.
    """
    numbers = {found.number: _steps_with_ops(found) for found in ranks}
    numbered = [found for found in ranks if numbers[found.number] and _has_ranges(found)]
    given = {tuple(numbers[found.number]) for found in numbered}
    if len(given) != 1:
        return list(ranks), ()
    (steps,) = given
    counted = {
        found.number
        for found in ranks
        if not _has_ranges(found) and numbers[found.number] == list(range(len(steps))) != list(steps)
    }
    if not counted:
        return list(ranks), ()
    shown = ", ".join(map(str, sorted(counted)))
    line = f"nothing numbers the steps of rank {shown}: they are taken in order for steps {steps[0]} to {steps[-1]} of the others"
    names = dict(enumerate(steps))
    return [_renumbered(found, names) if found.number in counted else found for found in ranks], (line,)


def with_recorded_steps(ranks: Sequence[RecognisedRank]) -> tuple[list[RecognisedRank], tuple[str, ...]]:
    """The ranks with the steps alone that all of them recorded, and a line where that leaves any out.

    Ranks of one run recorded different ones where a profiler of the script ran on some of them. Of a step that some did not
    record nothing can be said that compares ranks. Where no step is of all, every rank keeps its own.
    """
    recorded = {found.number: steps for found in ranks if (steps := _recorded(found)) is not None}
    if len(recorded) < len(ranks) or len(set(recorded.values())) < 2:
        return list(ranks), ()
    steps = range(max(own.start for own in recorded.values()), min(own.stop for own in recorded.values()))
    own_steps = "; ".join(
        f"{_ranks_text([rank for rank, _ in alike])}: {_steps_text(own)}"
        for own, alike in groupby(
            sorted(recorded.items(), key=lambda item: (item[1].start, item[1].stop, item[0])), lambda item: item[1]
        )
    )
    line = f"ranks recorded different steps ({own_steps})"
    if not steps:
        return list(ranks), (
            f"{line}, and none that all have: what compares ranks is null; record steps in which {_AGREE}",
        )
    return [_with_steps(found, steps) for found in ranks], (
        f"{line}: the report is of {_steps_text(steps)}, which all have",
    )


_AGREE = "the script's own profiler runs on no rank (--steps A:B)"
_LAUNCHED = "pptrace.trace/1"


def _recorded(found: RecognisedRank) -> range | None:
    """The steps that pptrace's launcher recorded; None where something else did, or none is complete."""
    steps = found.info.metadata.get("steps")
    if found.info.metadata.get("schema") != _LAUNCHED or not isinstance(steps, list) or len(steps) != 2:
        return None
    own = range(*steps) if all(isinstance(step, int) for step in steps) else range(0)
    return own or None


def _with_steps(found: RecognisedRank, steps: range) -> RecognisedRank:
    def kept(table: pd.DataFrame) -> pd.DataFrame:
        return table[(table["step"] < 0) | table["step"].isin(steps)].reset_index(drop=True)

    return replace(found, ops=kept(found.ops), comms=kept(found.comms))


def _steps_text(steps: range) -> str:
    return f"step {steps.start}" if len(steps) == 1 else f"steps {steps.start}–{steps.stop - 1}"


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _has_ranges(found: RecognisedRank) -> bool:
    return bool((found.ops["kind"] == "STEP").any())


def _steps_with_ops(found: RecognisedRank) -> list[int]:
    compute = found.ops[found.ops["kind"].isin(COMPUTE_KINDS) & (found.ops["step"] >= 0)]
    return sorted(compute["step"].unique().tolist())


def _renumbered(found: RecognisedRank, names: dict[int, int]) -> RecognisedRank:
    def renamed(table: pd.DataFrame) -> pd.DataFrame:
        return table.assign(step=table["step"].map(lambda step: names.get(step, -1)).astype("int64"))

    return replace(found, ops=renamed(found.ops), comms=renamed(found.comms))
