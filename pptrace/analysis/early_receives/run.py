"""Receives that held up other calls and ops of a run, from what each rank posted, and what a repaired order would get back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pptrace.analysis.early_receives.of_rank import RankOrder
from pptrace.analysis.early_receives.repair import RepairedOrder, repaired_order
from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.detectors import Study
from pptrace.analysis.stragglers.reason import Reason, where_most
from pptrace.analysis.whole_run import EARLY_RECEIVES
from pptrace.model.tables import Int64
from pptrace.slices import Slice, reduce_groups

_CAUSES = ("unexplained", "communication", "structural", "host")


@dataclass(frozen=True, slots=True, eq=False)
class EarlyOfRun:
    """``holds``: those of all ranks, one for each receive that held up something, with ``rank``, ``name`` (index in ``names``)
    and ``ns``. ``order`` is the better order with what it gains, or why there is none; None where nothing was held up.
    """

    where: str | None
    num_steps: int
    holds: Slice
    names: tuple[str, ...]
    order: RepairedOrder | str | None = None
    reason: str | None = None

    @classmethod
    def of(cls, ranks: Mapping[int, RankOrder], plans: Sequence[StepMatrix]) -> EarlyOfRun:
        """Early receives of all ranks together; ``plans`` are the costs of the whole steps."""
        reason = next((order.reason for order in ranks.values() if order.reason is not None), None)
        steps = max(order.num_steps for order in ranks.values())
        where = {order.where for order in ranks.values() if order.reason is None}
        if reason is None and len(where) > 1:
            reason = "some ranks are timed on the host and some on the device"
        holds, names = _held(ranks)
        run = cls(None if reason else where.pop(), 0 if reason else steps, holds, names, reason=reason)
        return run if reason or not len(holds) else replace(run, order=repaired_order(plans, ranks))


def _held(ranks: Mapping[int, RankOrder]) -> tuple[Slice, tuple[str, ...]]:
    """The holds whose other ranks were ready too, of each receive the longest."""
    matches, since = (np.concatenate([order.waiting[name] for order in ranks.values()]) for name in ("match", "since"))
    by_match = np.argsort(matches, kind="stable")
    matches, since = matches[by_match], since[by_match]
    names = tuple(dict.fromkeys(name for order in ranks.values() for name in order.names))
    parts = []
    for rank, order in ranks.items():
        holds = order.holds
        ready = np.maximum(holds["begin"], _others_ready(holds, matches, since))
        ns = holds["until"] - ready
        known = ns > 0
        name = np.array([names.index(text) for text in order.names], dtype=np.int64)[holds["what"]]
        columns = {**holds.columns, "ns": ns, "name": name, "rank": np.full(len(holds), rank)}
        chosen = Slice({key: np.asarray(column)[known] for key, column in columns.items()})
        order_of = np.lexsort((-chosen["ns"], chosen["receive"]))
        _, first = np.unique(chosen["receive"][order_of], return_index=True)
        parts.append(chosen.where(order_of[first]))
    return Slice.joined(parts), names


def _others_ready(holds: Slice, matches: Int64, since: Int64) -> Int64:
    """Times when the other ranks of each held call were ready, ns; never where they were not for long; for ops any time."""
    first, last = (np.searchsorted(matches, holds["match"], side=side) for side in ("left", "right"))
    ready = np.full(len(holds), np.iinfo(np.int64).max)
    ready[holds["match"] < 0] = np.iinfo(np.int64).min
    for row in np.flatnonzero((holds["match"] >= 0) & (last - first == holds["size"] - 1) & (last > first)).tolist():
        ready[row] = since[first[row] : last[row]].max()
    return ready


def with_reason(study: Study, early: EarlyOfRun | None) -> Study:
    """The study with the reason that receives are posted early, where a better order is known."""
    if early is None or not isinstance(early.order, RepairedOrder):
        return study
    rows = early.holds
    ranks, number = np.unique(rows["rank"], return_inverse=True)
    sums = reduce_groups(np.add, rows["ns"], number, len(ranks))
    detail = (
        f"{len(rows):,} receives were posted before their sender could send, and what their rank posted behind them waited, "
        f"typically {np.median(rows['ns']) / 1e6:,.2f} ms: post them later, in the order that `pptrace whatif --repair-order "
        "--csv FILE` writes"
    )
    reason = Reason(
        EARLY_RECEIVES,
        _CAUSES,
        where_most(dict(zip(ranks.tolist(), sums.tolist(), strict=True))),
        "Early receives: {share} is lost behind receives that are posted before their sender can send",
        detail,
        early.order.gains,
        {"num_receives": len(rows), "typical_ns": round(float(np.median(rows["ns"])))},
    )
    return replace(study, reasons=(*study.reasons, reason))
