"""Numbers of steps that all ranks of a run have in common, where the traces of some number them and those of others do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from pptrace.recognise.rank import RankFound
from pptrace.recognise.schedule import COMPUTE_KINDS


def with_common_steps(ranks: Sequence[RankFound]) -> tuple[list[RankFound], tuple[str, ...]]:
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


def _has_ranges(found: RankFound) -> bool:
    return bool((found.ops["kind"] == "STEP").any())


def _steps_with_ops(found: RankFound) -> list[int]:
    compute = found.ops[found.ops["kind"].isin(COMPUTE_KINDS) & (found.ops["step"] >= 0)]
    return sorted(compute["step"].unique().tolist())


def _renumbered(found: RankFound, names: dict[int, int]) -> RankFound:
    def renamed(table: pd.DataFrame) -> pd.DataFrame:
        return table.assign(step=table["step"].map(lambda step: names.get(step, -1)).astype("int64"))

    return replace(found, ops=renamed(found.ops), comms=renamed(found.comms))
