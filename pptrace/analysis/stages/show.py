"""The tables of what the stages compute: by kind of work, by part of the model, and why one takes longer than another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pptrace.analysis.op_costs import OpCost
from pptrace.analysis.stages.answer import words_of
from pptrace.analysis.stages.types import StageCompute, StageOps, StageWork
from pptrace.model import units
from pptrace.model.report_table import MAX_ROWS, Amount, Columns, ReportTable, more, rows_of

if TYPE_CHECKING:
    from pptrace.analysis.questions import Rows
    from pptrace.analysis.report import Report

_MOST_CLASSES = 4
_NOT_NAMED = "of no part"


def tables(report: Report, amount: Amount) -> list[ReportTable]:
    """The tables of the whole amount: by kind of work and, where the program named parts of its model, by part."""
    return [] if report.stages is None or amount is Amount.BRIEF else stage_tables(report.stages, amount)


def _rows(report: Report) -> Iterator[dict[str, Any]]:
    for ops in () if report.stages is None else report.stages.ops:
        for what, parts in (("class", ops.classes), ("part", ops.parts)):
            known = {"stage": ops.stage, "kind": ops.kind, "count": ops.count, "what": what}
            yield from (known | {"name": part.name, "ns": part.ns, "flops": part.flops} for part in parts)


FILES: Mapping[str, Rows] = {
    "stage-work": (_rows, "what the ops of each stage do, by kind of work and part of the model")
}


def stage_tables(compute: StageCompute, amount: Amount) -> list[ReportTable]:
    """The tables of a report: by kind of work and, where the program named parts of its model, by part."""
    parts = [ops for ops in compute.ops if ops.parts]
    return [_by_class(compute, amount), *([_by_part(parts, amount)] if parts else [])]


def _by_class(compute: StageCompute, amount: Amount) -> ReportTable:
    with_flops = any(ops.flops is not None for ops in compute.ops)
    rows = [
        (
            str(ops.stage),
            ops.kind,
            f"{ops.count:,}",
            units.milliseconds(ops.compute_ns // ops.count),
            *([_rate(ops.flops, ops.compute_ns)] if with_flops else []),
            _shares(ops),
        )
        for ops in compute.ops
    ]
    whole = amount is Amount.WHOLE
    shown = rows if whole else rows[:MAX_ROWS]
    longest = sorted(compute.differences, key=lambda one: -one.more_ns)
    of_stages = [f"stage {one.stage}: {words_of(one)}" for one in (longest if whole else longest[:_MOST_CLASSES])]
    notes = (
        *more(len(rows) - len(shown)),
        *of_stages,
        "mean compute of an op by kind of work, over all microbatches, steps and replicas",
        *([_COUNTED] if with_flops else []),
        *dict.fromkeys(f"FLOPs are not known: {ops.no_flops}" for ops in compute.ops if ops.no_flops and whole),
    )
    columns = ("stage", "kind", "ops", "ms", *(["FLOP/s"] if with_flops else []), "")
    return ReportTable("stage-work", "What stages compute", columns, tuple(shown), notes, 2)


_COUNTED = "FLOP/s: matrix products, convolutions and the full square of attention, over all of an op's compute"


def _rate(flops: int | None, ns: int) -> str:
    return "–" if not flops or not ns else units.flops(flops / ns * 1e9)


def _shares(ops: StageOps) -> str:
    """The largest kinds of work with their shares."""
    shown = ops.classes[:_MOST_CLASSES]
    rest = ops.compute_ns - sum(part.ns for part in shown)
    parts = [*shown, *([StageWork("all else", rest)] if rest else [])]
    return ", ".join(
        f"{part.name} {part.ns / max(ops.compute_ns, 1):.0%}{f' ({_rate(part.flops, part.ns)})' if part.flops else ''}"
        for part in parts
    )


def _by_part(with_parts: Sequence[StageOps], amount: Amount) -> ReportTable:
    with_flops = any(part.flops for ops in with_parts for part in ops.parts)
    rows = [
        (
            str(ops.stage),
            ops.kind,
            part.name or _NOT_NAMED,
            units.milliseconds(part.ns // ops.count),
            units.percent(part.ns / max(ops.compute_ns, 1)),
            *([_rate(part.flops, part.ns)] if with_flops else []),
        )
        for ops in with_parts
        for part in ops.parts
    ]
    shown = rows if amount is Amount.WHOLE else rows[:MAX_ROWS]
    notes = (
        *more(len(rows) - len(shown)),
        "parts: modules (with_modules, with_stack), ranges of the program, or what kernels repeat",
    )
    columns = ("stage", "kind", "part", "ms", "of the op", *(["FLOP/s"] if with_flops else []))
    return ReportTable("stage-parts", "Parts of the model", columns, tuple(shown), notes, num_labels=3)


_COST_COLUMNS: Columns[OpCost] = {
    "stage": lambda cost: str(cost.stage),
    "kind": lambda cost: cost.kind,
    "ops": lambda cost: str(cost.count),
    "p10 ms": lambda cost: units.milliseconds(cost.p10_ns),
    "median": lambda cost: units.milliseconds(cost.median_ns),
    "p90": lambda cost: units.milliseconds(cost.p90_ns),
    "longest": lambda cost: units.milliseconds(cost.max_ns),
    "spread": lambda cost: units.percent((cost.p90_ns - cost.p10_ns) / cost.median_ns if cost.median_ns else None),
    "ranks": lambda cost: str(cost.num_ranks),
    "slowest, its median": lambda cost: f"rank {cost.slowest_rank}: {units.milliseconds(cost.slowest_ns)}",
}


def stages_table(costs: Sequence[OpCost]) -> ReportTable:
    """A row for each stage and kind: percentiles of the compute in an op, and the rank with the largest median."""
    notes = (
        "compute in an op, without what it communicates or waits for; all microbatches, steps and replicas",
        "spread: from the tenth to the ninetieth percentile, of the median",
    )
    rows = rows_of(costs, _COST_COLUMNS)
    return ReportTable("stages", "Cost by stage and kind", tuple(_COST_COLUMNS), rows, notes, num_labels=2)
