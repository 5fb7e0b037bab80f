"""The tables of what a step's length hangs on: its critical path, and who is to blame for its bubble."""

from __future__ import annotations

from collections.abc import Mapping

from pptrace.analysis.result import StepReport
from pptrace.analysis.step_parts import CriticalPath
from pptrace.model import units
from pptrace.model.report_table import FEW_RANKS, Amount, Bar, ReportTable, more

_BRIEF_ROWS = 3
_LEAST_SHARE = 0.01
"""Smaller parts are not listed in a note."""


def blame_table(step: StepReport, amount: Amount) -> ReportTable:
    """A row for each rank, of many ranks each stage, whose ops, messages and pauses cause bubble anywhere, the most first."""
    blame = step.blame
    assert blame is not None
    by_stage = amount is Amount.BRIEF and len(blame.by_rank) > FEW_RANKS
    charged = blame.by_stage if by_stage else blame.by_rank
    ordered = sorted(charged.items(), key=lambda item: (-item[1], item[0]))
    shown = ordered[:_BRIEF_ROWS] if amount is Amount.BRIEF else ordered
    rows = [
        (
            str(name),
            units.milliseconds(ns),
            units.percent(ns / blame.total_ns),
            Bar((("bubble", ns / blame.total_ns),)),
        )
        for name, ns in shown
    ]
    notes = [*more(len(ordered) - len(shown)), f"by kind: {_shares(blame.by_kind, blame.total_ns)}"]
    most = []
    if by_stage:
        worst, ns = max(blame.by_rank.items(), key=lambda item: (item[1], -item[0]))
        most.append(f"of one rank {units.milliseconds(ns)} ms (rank {worst})")
    for op in blame.ops[:1]:
        where = f"{op.kind} of microbatch {op.microbatch} on rank {op.rank}, stage {op.stage}"
        most.append(f"of one op {units.milliseconds(op.ns)} ms ({where})")
    notes += [f"most {', '.join(most)}"] if most else []
    columns = ("stage" if by_stage else "rank", "ms", "of all bubble", "")
    return ReportTable("blame", "Who causes the bubble of all ranks", columns, tuple(rows), tuple(notes))


def critical_path_line(path: CriticalPath) -> str:
    """One line: what the chain of ops that the step's length hangs on is made of, and where it mostly is."""
    stage, ns = max(path.by_stage.items(), key=lambda item: (item[1], -item[0]))
    return f"critical path: {_shares(path.parts, path.span_ns)}; {ns / path.span_ns:.0%} of it in stage {stage}"


def _shares(parts: Mapping[str, int], whole: int) -> str:
    listed = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {ns / whole:.0%}" for name, ns in listed if ns >= _LEAST_SHARE * whole)
