"""The comparison of one run with one other."""

from __future__ import annotations

from pptrace.analysis.compare.compare import compare_sides
from pptrace.analysis.compare.result import Comparison
from pptrace.analysis.compare.side import ComparedRun


def compare_runs(a: ComparedRun, b: ComparedRun) -> Comparison:
    """The change from one run to another; both have a whole step."""
    return compare_sides([a], [b])
