"""Steps of runs whose labels count ops and end no step: a step is over where all forwards of every rank had their backwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from pptrace.recognise.rank import RankFound
from pptrace.tables import Int64

_FORWARDS, _BACKWARDS = ("F",), ("B", "I")


def with_balanced_steps(ranks: Sequence[RankFound]) -> tuple[list[RankFound], tuple[str, ...]]:
    """The ranks with their one long step cut where each of them has as many backwards as forwards, and a line that says so.

    One rank alone cannot tell: the last stage runs each backward right after its forward. Nothing is cut where no rank is ever
    two forwards ahead, as where each microbatch runs alone, since any of them could end a step.
    """
    working = [found for found in ranks if len(found.ops) and found.ops["kind"].isin(_FORWARDS).any()]
    if len(working) < 2 or not all(map(_is_one_counted_step, working)):
        return list(ranks), ()
    balances = [_balance(found.ops) for found in working]
    if max(int(ahead.max(initial=0)) for ahead, _ in balances) < 2:
        return list(ranks), ()
    ends = set.intersection(*({int(n) for n in count[ahead == 0]} for ahead, count in balances))
    cuts = np.array(sorted(ends - {max(int(count[-1]) for _, count in balances)}), dtype=np.int64)
    if not len(cuts):
        return list(ranks), ()
    line = f"no label ends a step: {len(cuts) + 1} steps are told by where all ranks have run the backwards of all their forwards"
    chosen = {id(found) for found in working}
    return [_cut(found, cuts) if id(found) in chosen else found for found in ranks], (line,)


def _is_one_counted_step(found: RankFound) -> bool:
    """Whether the rank's ops were counted from the beginning of the trace to its end, for want of anything that ends a step."""
    compute = found.ops[found.ops["kind"].isin((*_FORWARDS, *_BACKWARDS))]
    counted = (compute["step"] == 0).all() and (compute["stage"] == -1).all() and (compute["microbatch"] >= 0).all()
    return bool(counted) and len(compute) == len(found.ops)


def _balance(ops: pd.DataFrame) -> tuple[Int64, Int64]:
    """After each op in time order: how many forwards wait for their backwards, and how many there have been."""
    kinds = ops.sort_values("start_ns", kind="stable")["kind"]
    forwards = np.cumsum(kinds.isin(_FORWARDS).to_numpy(), dtype=np.int64)
    backwards = np.cumsum(kinds.isin(_BACKWARDS).to_numpy(), dtype=np.int64)
    return forwards - backwards, forwards


def _cut(found: RankFound, cuts: Int64) -> RankFound:
    """Ops by their number; messages, which may be fewer, by the ops beside them: a send's before it, a receive's after it."""
    ops = found.ops.copy()
    step = np.searchsorted(cuts, ops["microbatch"].to_numpy(), side="right")
    ops["step"] = step
    ops["microbatch"] = ops["microbatch"] - np.concatenate(([0], cuts))[step]
    comms = found.comms.copy()
    own = ((comms["axis"] == "pp") & (comms["stage"] == -1) & (comms["microbatch"] >= 0)).to_numpy()
    if own.any():
        comms.loc[own, "step"] = _steps_beside(comms[own], ops)
        order = comms[own].sort_values("start_ns", kind="stable")
        count = order.groupby(["step", "kind", "direction"]).cumcount()
        comms.loc[count.index, "microbatch"] = count
    return replace(found, ops=ops.astype(found.ops.dtypes), comms=comms.astype(found.comms.dtypes))


def _steps_beside(comms: pd.DataFrame, ops: pd.DataFrame) -> Int64:
    ordered = ops.sort_values("start_ns", kind="stable")
    starts, steps = ordered["start_ns"].to_numpy(), ordered["step"].to_numpy()
    after = np.minimum(np.searchsorted(starts, comms["start_ns"].to_numpy(), side="left"), len(starts) - 1)
    before = np.maximum(np.searchsorted(starts, comms["start_ns"].to_numpy(), side="right") - 1, 0)
    chosen: Int64 = np.where(comms["kind"] == "send", steps[before], steps[after])
    return chosen
