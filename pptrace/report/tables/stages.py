"""The table of what ops cost in each stage."""

from __future__ import annotations

from collections.abc import Sequence

from pptrace.analysis.op_costs import OpCost
from pptrace.model import units
from pptrace.model.report_table import ReportTable


def stages_table(costs: Sequence[OpCost]) -> ReportTable:
    """A row for each stage and kind: percentiles of the compute in an op, and the rank with the largest median."""
    rows = [
        (
            str(cost.stage),
            cost.kind,
            str(cost.count),
            *map(units.milliseconds, (cost.p10_ns, cost.median_ns, cost.p90_ns, cost.max_ns)),
            units.percent((cost.p90_ns - cost.p10_ns) / cost.median_ns if cost.median_ns else None),
            str(cost.num_ranks),
            f"rank {cost.slowest_rank}: {units.milliseconds(cost.slowest_ns)}",
        )
        for cost in costs
    ]
    columns = ("stage", "kind", "ops", "p10 ms", "median", "p90", "longest", "spread", "ranks", "slowest, its median")
    notes = (
        "compute in an op, without what it communicates or waits for; all microbatches, steps and replicas",
        "spread: from the tenth to the ninetieth percentile, of the median",
    )
    return ReportTable("stages", "Cost by stage and kind", columns, tuple(rows), notes, num_labels=2)
