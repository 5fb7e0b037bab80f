"""The table of recompute: by stage and kind, its time in an op and its share of it; of the whole amount by rank too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pptrace.analysis.recompute.types import BackwardOps, RecomputeReport
from pptrace.model import units
from pptrace.model.known import sum_of
from pptrace.model.report_table import MAX_ROWS, Amount, ReportTable, more, share

if TYPE_CHECKING:
    from pptrace.analysis.questions import Rows
    from pptrace.analysis.report import Report

_COLUMNS = ("stage", "kind", "ranks", "ops", "ms", "recompute ms", "of the op", "weights ms", "of the op")
_OF_RECOMPUTE = 7
"""Columns without those of gradients of weights."""


def tables(report: Report, amount: Amount) -> list[ReportTable]:
    """The table of a run that recomputes, or of which its reason is known why that is not known; whole, also of other runs."""
    recompute = report.recompute
    if (
        recompute is None
        or not recompute.ops
        or (amount is Amount.BRIEF and not any(one.recompute_ns for one in recompute.ops))
    ):
        return []
    groups: dict[tuple[int, ...] | tuple[int, str], list[BackwardOps]] = {}
    for one in recompute.ops:
        groups.setdefault((one.stage, one.kind, *([one.rank] if amount is Amount.WHOLE else [])), []).append(one)  # type: ignore[arg-type]
    width = len(_COLUMNS) if any(one.weights_ns is not None for one in recompute.ops) else _OF_RECOMPUTE
    rows = [_row(of_group)[:width] for of_group in groups.values()]
    shown = rows if amount is Amount.WHOLE else rows[:MAX_ROWS]
    notes = (*more(len(rows) - len(shown)), *_notes(recompute))
    return [ReportTable("recompute", "Recompute in backwards", _COLUMNS[:width], tuple(shown), notes, 3, (3,))]


FILES: Mapping[str, Rows] = {
    "recompute": (
        lambda report: () if report.recompute is None else report.recompute.ops,
        "what backwards are made of: recompute and gradients of weights, by rank, stage and kind",
    )
}


def _row(ops: Sequence[BackwardOps]) -> tuple[str, ...]:
    """The mean op of some ranks."""
    count, compute = sum(one.count for one in ops), sum(one.compute_ns for one in ops)
    again, weights = sum_of(one.recompute_ns for one in ops), sum_of(one.weights_ns for one in ops)
    ranks = f"{ops[0].rank}" if len(ops) == 1 else f"{len(ops)} ranks"
    parts = [cell for ns in (again, weights) for cell in (_mean(ns, count), units.percent(share(ns, compute)))]
    return (str(ops[0].stage), ops[0].kind, ranks, f"{count:,}", _mean(compute, count), *parts)


def _mean(ns: int | None, count: int) -> str:
    return units.milliseconds(None if ns is None else ns // count)


def _notes(recompute: RecomputeReport) -> list[str]:
    notes = ["compute of the mean op; recompute: the forward that runs again in it"]
    if recompute.steps:
        typical = sorted(recompute.steps, key=lambda one: one.recompute_ns)[(len(recompute.steps) - 1) // 2]
        every, each = map(units.milliseconds, (typical.recompute_ns, recompute.mean_of_ranks(typical.step)))
        notes.insert(0, f"in the median step {every} ms of recompute on all ranks together, {each} ms on each")
    reasons = {"recompute": recompute.recompute_reason}
    if any(one.weights_ns is not None for one in recompute.ops):
        reasons["weights"] = recompute.weights_reason
        notes[-1] += "; weights: gradients of weights in a full B"
    return notes + [f"{name} not known where {reason}" for name, reason in reasons.items() if reason]
