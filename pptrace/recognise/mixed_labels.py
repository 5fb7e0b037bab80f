"""Runs of which some ranks have labelled ops and others have none, as where a profiler lost their ranges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from pptrace.model.tables import COMPUTE_KINDS
from pptrace.recognise.infer.match_ranks import without_inferred
from pptrace.recognise.recognised_rank import RecognisedRank


def without_other_numbers(ranks: Sequence[RecognisedRank]) -> tuple[Sequence[RecognisedRank], tuple[int, ...]]:
    """(the ranks, those without labels of which others have some).

    Ranks of a pipeline run equally many forwards and backwards in a step: inferred ops of which there are others than the
    labelled ranks have are dropped.
    """
    labelled = {_usual_number(rank.ops) for rank in ranks if _is_labelled(rank)}
    if not labelled:
        return ranks, ()
    without = tuple(rank.number for rank in ranks if rank.info.num_events and not _is_labelled(rank))
    wrong = {rank.number for rank in ranks if rank.number in without and _usual_number(rank.ops) not in labelled}
    line = (
        "its trace has no labels of ops, and not as many ops are inferred from it as the labelled ranks have: its ops are "
        "null; record all ranks with the same ranges"
    )
    checked = []
    for rank in ranks:
        dropped = without_inferred(rank) if rank.number in wrong else rank
        has_fewer = len(dropped.ops) < len(rank.ops)
        checked.append(replace(dropped, warnings=(*dropped.warnings, line)) if has_fewer else dropped)
    return checked, without


def _is_labelled(rank: RecognisedRank) -> bool:
    return bool(((rank.ops["source"] == "label") & rank.ops["kind"].isin(COMPUTE_KINDS)).any())


def _usual_number(ops: pd.DataFrame) -> tuple[int, int]:
    """(forwards, other compute) of most steps."""
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)]
    is_forward = (compute["kind"] == "F").to_numpy()
    numbers = Counter(
        (int(forwards), len(compute_of_step) - int(forwards))
        for _, compute_of_step in pd.Series(is_forward).groupby(compute["step"].to_numpy())
        for forwards in (compute_of_step.sum(),)
    )
    return numbers.most_common(1)[0][0] if numbers else (0, 0)
