"""Cut steps where no range or label marks their end: a step ends where every rank has run as many backwards as forwards.

Forwards and backwards are then counted from the beginning of the trace to its end, as of one step, which is cut here. One rank
alone need not tell: the last one of a pipeline runs each backward right after its forward, the first one has forwards waiting for
their backwards from the beginning of a step to its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import pandas as pd
from msgspec.structs import replace

from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import Int64
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.slices import rows_among

_FORWARDS, _BACKWARDS = ("F",), ("B", "I")

_OPEN = (
    "no span marks the end of a step, and the order of ops on the traced ranks does not show it: "
    "forwards and backwards are left out; record the spans of steps"
)
_BALANCED = "no label ends a step: each is assumed to end where all ranks have run as many backwards as forwards"
_CUT = "no span marks the end of a step: a step is assumed to end where each rank has run as many backwards as forwards"


def _balance(kinds: Iterable[str]) -> tuple[Int64, Int64, set[int]]:
    """(forwards waiting for their backwards after each op of a rank, forwards so far, numbers of forwards after which none is
    waiting).
    """
    row = list(kinds)
    forwards = np.cumsum([kind in _FORWARDS for kind in row], dtype=np.int64)
    waiting = forwards - np.cumsum([kind in _BACKWARDS for kind in row], dtype=np.int64)
    return waiting, forwards, set(forwards[waiting == 0].tolist())


def with_balanced_steps(ranks: Sequence[RecognisedRank]) -> tuple[list[RecognisedRank], tuple[str, ...]]:
    """Cut the single counted step of each rank into steps; with a warning, which has no number: messages may show more of them.

    Nothing is cut where no rank is ever two forwards ahead, as where each microbatch runs alone, since any of them could end a
    step.
    """
    computing = [recognised for recognised in ranks if rows_among(recognised.ops["kind"], _FORWARDS).any()]
    if len(computing) < 2 or not all(map(_is_one_counted_step, computing)):
        return list(ranks), ()
    balances = [_balance(recognised.ops.sort_values("start_ns", kind="stable")["kind"]) for recognised in computing]
    if max(int(waiting.max(initial=0)) for waiting, *_ in balances) < 2:
        return list(ranks), ()
    last = max(int(forwards[-1]) for _, forwards, _ in balances)
    cuts = np.array(sorted(set.intersection(*(ends for *_, ends in balances)) - {last}), dtype=np.int64)
    if not len(cuts):
        return list(ranks), ()
    chosen = {id(recognised) for recognised in computing}
    return [_cut(recognised, cuts) if id(recognised) in chosen else recognised for recognised in ranks], (_BALANCED,)


def with_balanced_spans(
    ops: pd.DataFrame, mesh: MeshInfo, ranks: Collection[int]
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Cut the single step of ``ranks``' spans in each pipeline; with a warning.

    Here only a first rank that no other contradicts tells; where none does, the ops are left out.

    Args:
        ops: schema OPS; forwards and backwards without stages, counted from 0 on each rank.
        ranks: those whose traces may lack every range that ends a step.
    """
    selected_ops = ops[ops["rank"].isin(ranks)]
    selected = selected_ops[rows_among(selected_ops["kind"], (*_FORWARDS, "B"))]
    compute = selected.sort_values("start_ns", kind="stable")
    if (
        compute.empty
        or (selected_ops["step"] != 0).any()
        or rows_among(selected_ops["kind"], ("STEP", "OPTIMIZER")).any()
    ):
        return ops, ()
    rows = {int(str(rank)): part for rank, part in compute.groupby("rank")}
    filled = ops.copy()
    is_cut = False
    dropped: list[int] = []
    for pipeline in mesh.pipelines:
        traced = [rank for rank in pipeline if rank in rows]
        cuts = _cuts_of_first([rows[rank]["kind"].tolist() if rank in rows else [] for rank in pipeline])
        for rank in traced:
            of_rank = rows[rank]
            if not len(cuts):
                dropped += of_rank.index.tolist()
                continue
            is_cut = True
            step, filled.loc[of_rank.index, "microbatch"] = _numbers(of_rank["microbatch"].to_numpy(), cuts)
            filled.loc[of_rank.index, "step"] = step
            others = filled[
                (filled["rank"] == rank) & ~filled.index.isin(of_rank.index)
            ]  # of the step of the op before
            before = np.searchsorted(of_rank["start_ns"].to_numpy(), others["start_ns"].to_numpy(), side="right") - 1
            filled.loc[others.index, "step"] = step[np.maximum(before, 0)]
    if dropped:
        return filled.drop(index=dropped).reset_index(drop=True), (_OPEN,)
    return filled, (_CUT,) if is_cut else ()


def _cuts_of_first(kinds: Sequence[Sequence[str]]) -> Int64:
    """Number of forwards after which each step ends; none where the first rank does not tell or another one contradicts it.

    What follows the last end is a step that is cut off. A trace that begins inside a step has backwards without forwards.
    """
    balances = list(map(_balance, kinds))
    none = np.zeros(0, dtype=np.int64)
    if len(kinds) < 2 or any((waiting < 0).any() for waiting, *_ in balances):
        return none
    first, *others = (ends for *_, ends in balances)
    agrees = all(first <= ends for row, ends in zip(kinds[1:], others, strict=True) if row)
    return np.array(sorted(first), dtype=np.int64) if agrees else none


def _is_one_counted_step(recognised: RecognisedRank) -> bool:
    """Return whether the ops are counted through the whole trace as one step, because nothing marks the end of a step."""
    compute = recognised.ops[rows_among(recognised.ops["kind"], (*_FORWARDS, *_BACKWARDS))]
    counted = (compute["step"] == 0).all() and _names_nothing(compute).all() and (compute["microbatch"] >= 0).all()
    return bool(counted) and len(compute) == len(recognised.ops)


def _names_nothing(table: pd.DataFrame) -> pd.Series[bool]:
    """Mark the rows that name neither a stage nor a chunk other than the first."""
    return (table["stage"] < 0) & (table["chunk"] <= 0)


def _numbers(counted: Int64, cuts: Int64) -> tuple[Int64, Int64]:
    """The steps of ops that were counted from 0, and their microbatches within them."""
    step = np.searchsorted(cuts, counted, side="right").astype(np.int64)
    return step, counted - np.concatenate(([0], cuts))[step]


def _cut(recognised: RecognisedRank, cuts: Int64) -> RecognisedRank:
    """Ops by their number; messages, which may be fewer, by the ops next to them: a send's before it, a receive's after it."""
    ops = recognised.ops.copy()
    ops["step"], ops["microbatch"] = _numbers(ops["microbatch"].to_numpy(), cuts)
    comms = recognised.comms.copy()
    is_message = ((comms["axis"] == "pp") & _names_nothing(comms) & (comms["microbatch"] >= 0)).to_numpy()
    if is_message.any():
        messages, by_time = comms[is_message], ops.sort_values("start_ns", kind="stable")
        starts, steps = by_time["start_ns"].to_numpy(), by_time["step"].to_numpy()
        times = messages["start_ns"].to_numpy()
        after = np.minimum(np.searchsorted(starts, times, side="left"), len(starts) - 1)
        before = np.maximum(np.searchsorted(starts, times, side="right") - 1, 0)
        comms.loc[is_message, "step"] = np.where(messages["kind"] == "send", steps[before], steps[after])
        ordered = comms[is_message].sort_values("start_ns", kind="stable")
        count = ordered.groupby(["step", "kind", "direction"], observed=True).cumcount()
        comms.loc[count.index, "microbatch"] = count
    return replace(recognised, ops=ops.astype(recognised.ops.dtypes), comms=comms.astype(recognised.comms.dtypes))
