"""The part of the report on receives that held up other calls and ops, from what each rank posted, and what a repaired order
would get back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.early_receives.of_rank import RankOrder
from pptrace.analysis.early_receives.of_rank import of_rank as of_rank
from pptrace.analysis.early_receives.repair import RepairedOrder, repaired_order
from pptrace.analysis.early_receives.types import EarlyReceives, HeldCall, HeldRank
from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.detectors import Study
from pptrace.analysis.stragglers.reason import Reason, where_most
from pptrace.analysis.whole_run import EARLY_RECEIVES
from pptrace.model.tables import Int64
from pptrace.schedule.actions import KINDS, Action
from pptrace.slices import Slice, distinct_of, reduce_groups

if TYPE_CHECKING:
    from pptrace.analysis.questions import QuestionInputs


_CAUSES = ("unexplained", "communication", "structural", "host")


class EarlyOfRun(Struct, frozen=True, eq=False):
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


_MOST_PAIRS = 1_000


def answer(inputs: QuestionInputs) -> Mapping[str, Any]:
    """The receives of a run that held up something, those with most time first."""
    early = inputs.early
    return {} if early is None else {"early_receives": early_receives(early)}


def early_receives(early: EarlyOfRun) -> EarlyReceives:
    """The report's part from what is known of a run."""
    if early.reason is not None:
        return EarlyReceives(reason=early.reason)
    order, steps = early.order, max(early.num_steps, 1)
    ranks = [
        HeldRank(rank, count, total // steps, longest) for (rank,), count, total, longest in _by(early.holds, ("rank",))
    ]
    pairs = []
    for (rank, kind, stage, microbatch, peer, name, at, of), count, total, longest in _by(early.holds, _PAIR):
        receive, what = str(Action(KINDS[kind], stage, microbatch)), early.names[name]
        held = what if " " in what else f"{at}{what}{of}"
        pairs.append(HeldCall(rank, receive, stage, microbatch, peer, held, count, total // steps, longest))
    return EarlyReceives(
        early.where,
        early.num_steps,
        int(early.holds["ns"].sum()) // steps,
        order.gain if isinstance(order, RepairedOrder) else None if order else 0,
        order if isinstance(order, str) else None,
        tuple(sorted(ranks, key=lambda one: (-one.held_ns, one.rank))),
        tuple(sorted(pairs, key=lambda one: (-one.held_ns, one.rank, one.receive))[:_MOST_PAIRS]),
        len(pairs),
    )


_PAIR = ("rank", "kind", "stage", "microbatch", "peer", "name", "at", "of")


def _by(holds: Slice, names: tuple[str, ...]) -> Iterator[tuple[list[int], int, int, int]]:
    """(values of the columns, count, sum and longest of ``ns``) of each group of holds."""
    if not len(holds):
        return
    group, first = distinct_of([holds[name] for name in names])
    total, longest = (reduce_groups(of_all, holds["ns"], group, len(first)) for of_all in (np.add, np.maximum))
    counts = np.bincount(group, minlength=len(first))
    for row, count, ns, most in zip(first.tolist(), counts.tolist(), total.tolist(), longest.tolist(), strict=True):
        yield [int(holds[name][row]) for name in names], count, ns, most
