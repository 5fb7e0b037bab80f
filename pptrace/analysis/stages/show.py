"""The tables of what the stages compute: by kind of work, by part of the model, and why one takes longer than another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pptrace.analysis.op_costs import OpCost
from pptrace.analysis.stages.answer import words_of
from pptrace.analysis.stages.types import StageCompute, StageOps, StageWork
from pptrace.model import units
from pptrace.model.report_table import MAX_ROWS, Amount, Columns, ReportTable, more, table_of

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
    with_flops, is_whole = any(ops.flops is not None for ops in compute.ops), amount is Amount.WHOLE
    shown = compute.ops if is_whole else compute.ops[:MAX_ROWS]
    longest = sorted(compute.differences, key=lambda one: -one.more_ns)
    notes = (
        *more(len(compute.ops) - len(shown)),
        *(f"stage {one.stage}: {words_of(one)}" for one in (longest if is_whole else longest[:_MOST_CLASSES])),
        "mean compute of an op by kind of work, over all microbatches, steps and replicas",
        *([_COUNTED] if with_flops else []),
        *dict.fromkeys(f"FLOPs are not known: {ops.no_flops}" for ops in compute.ops if ops.no_flops and is_whole),
    )
    columns: Columns[StageOps] = {
        "stage": lambda ops: str(ops.stage),
        "kind": lambda ops: ops.kind,
        "ops": lambda ops: f"{ops.count:,}",
        "ms": lambda ops: units.milliseconds(ops.compute_ns // ops.count),
        **({"FLOP/s": lambda ops: _rate(ops.flops, ops.compute_ns)} if with_flops else {}),
        "": _shares,
    }
    return table_of("stage-work", "What stages compute", shown, columns, notes, 2)


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
    rows = [(ops, part) for ops in with_parts for part in ops.parts]
    shown = rows if amount is Amount.WHOLE else rows[:MAX_ROWS]
    notes = (
        *more(len(rows) - len(shown)),
        "parts: modules (with_modules, with_stack), ranges of the program, or what kernels repeat",
    )
    with_flops = any(part.flops for _, part in rows)
    columns: Columns[tuple[StageOps, StageWork]] = {
        "stage": lambda row: str(row[0].stage),
        "kind": lambda row: row[0].kind,
        "part": lambda row: row[1].name or _NOT_NAMED,
        "ms": lambda row: units.milliseconds(row[1].ns // row[0].count),
        "of the op": lambda row: units.percent(row[1].ns / max(row[0].compute_ns, 1)),
        **({"FLOP/s": lambda row: _rate(row[1].flops, row[1].ns)} if with_flops else {}),
    }
    return table_of("stage-parts", "Parts of the model", shown, columns, notes, 3)


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
    return table_of("stages", "Cost by stage and kind", costs, _COST_COLUMNS, notes, 2)
