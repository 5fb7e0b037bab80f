"""Steps of traces in which no range ends one: where all ranks have run as many backwards as forwards.

The first rank of a pipeline has forwards outstanding from the beginning of a step to its end, so that it tells; the last one,
which runs each backward after its forward, does not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pandas as pd

from pptrace.recognise.mesh import MeshInfo
from pptrace.tables import Int64

_OPEN = (
    "no span tells where a step ends, and the order of ops on the traced ranks does not either: "
    "forwards and backwards are left out"
)
_CUT = "no span tells where a step ends: steps end where each rank has run as many backwards as forwards"


def with_balanced_spans(
    ops: pd.DataFrame, mesh: MeshInfo, ranks: Collection[int]
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """``ops`` of ``ranks`` cut into steps where they are numbered as one by order alone, and a line that says so.

    Args:
        ops: schema OPS; forwards and backwards without stages, counted from 0 on each rank.
        ranks: those whose traces may lack every range that ends a step.
    """
    own = ops[ops["rank"].isin(ranks)]
    compute = own[own["kind"].isin(("F", "B"))].sort_values("start_ns", kind="stable")
    if compute.empty or (own["step"] != 0).any() or own["kind"].isin(("STEP", "OPTIMIZER")).any():
        return ops, ()
    rows = {int(str(rank)): part for rank, part in compute.groupby("rank")}
    filled = ops.copy()
    is_cut = False
    lost: list[int] = []
    for pipeline in mesh.pipelines:
        kinds = {rank: rows[rank]["kind"].tolist() for rank in pipeline if rank in rows}
        ends = _ends([kinds.get(rank, []) for rank in pipeline])
        if not ends:
            lost += [index for rank in kinds for index in rows[rank].index]
        for rank in kinds if ends else ():
            _cut(filled, rows[rank], ends)
            is_cut = True
    if lost:
        return filled.drop(index=lost).reset_index(drop=True), (_OPEN,)
    return filled, (_CUT,) if is_cut else ()


def _ends(kinds: Sequence[Sequence[str]]) -> list[int]:
    """After how many forwards each step ends; [] where the first rank does not tell or another one contradicts it.

    What follows the last end is a step that is cut off. A trace that begins inside a step has backwards without forwards.
    """
    outstanding = [_outstanding(row) for row in kinds]
    if len(kinds) < 2 or any((counts < 0).any() for counts in outstanding):
        return []
    first, *others = (_balanced(row, counts) for row, counts in zip(kinds, outstanding, strict=True))
    agrees = all(set(first) <= set(ends) for row, ends in zip(kinds[1:], others, strict=True) if row)
    return first if agrees else []


def _outstanding(kinds: Sequence[str]) -> Int64:
    """After each op, how many forwards have had no backward yet."""
    return np.cumsum([1 if kind == "F" else -1 for kind in kinds], dtype=np.int64)


def _balanced(kinds: Sequence[str], outstanding: Int64) -> list[int]:
    """After how many forwards none is outstanding."""
    forwards = np.cumsum([kind == "F" for kind in kinds], dtype=np.int64)
    return [int(count) for count in forwards[outstanding == 0]]


def _cut(filled: pd.DataFrame, rows: pd.DataFrame, ends: Sequence[int]) -> None:
    """Give the rows of a rank their steps, and its ops their microbatches counted in each."""
    counted = rows["microbatch"].to_numpy()
    step = np.searchsorted(np.asarray(ends), counted, side="right")
    begins = np.asarray([0, *ends])[step]
    filled.loc[rows.index, "step"] = step
    filled.loc[rows.index, "microbatch"] = counted - begins
    others = filled[(filled["rank"] == rows["rank"].iloc[0]) & ~filled.index.isin(rows.index)]
    place = np.searchsorted(rows["start_ns"].to_numpy(), others["start_ns"].to_numpy(), side="right") - 1
    filled.loc[others.index, "step"] = step[np.maximum(place, 0)]
