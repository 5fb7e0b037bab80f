"""The table of causal probes: what a faster target would gain, as measured, beside its share of the critical path."""

from __future__ import annotations

from collections.abc import Sequence

from pptrace.analysis.whole_run import ProbedTarget
from pptrace.report import units
from pptrace.report.tables.table import ReportTable


def probes_table(probes: Sequence[ProbedTarget]) -> ReportTable:
    """A row for each target."""
    rows = tuple(
        (
            probe.target,
            f"{probe.epsilon:.0%}",
            str(len(probe.steps)),
            units.percent(probe.slope),
            _interval(probe),
            units.percent(probe.critical_path_share),
            units.percent(probe.replayed_slope),
        )
        for probe in probes
    )
    reasons = (f"{probe.target}: {probe.reason}" for probe in probes if probe.reason is not None)
    notes = (
        "slope: how much of what the target gets shorter the step gets shorter; measured by delaying all other ops",
        "the probed steps are in no other table",
        *reasons,
    )
    columns = ("target", "others delayed", "steps", "slope", "95 % interval", "critical path", "replayed")
    return ReportTable("probes", "What a faster target would gain", columns, rows, notes)


def _interval(probe: ProbedTarget) -> str:
    low, high = probe.slope_low, probe.slope_high
    return "–" if low is None or high is None else f"{units.percent(low)} to {units.percent(high)}"
