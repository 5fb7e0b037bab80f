"""Kinds of findings that a run is too short for, or has nothing to compare with; intervals of a few steps."""

from __future__ import annotations

from functools import cache
from io import StringIO

import pytest
from rich.console import Console

from pptrace.analysis.report import Report
from pptrace.report.text import print_report
from pptrace.schedule.actions import Action
from pptrace.schedule.registry import build
from tests.support.analysed import analyse
from tests.support.synthetic import record, without


@cache
def report_of(steps: int, dp: int = 1, pp: int = 4, heavy: int | None = None) -> Report:
    def cost(action: Action) -> int:
        return 1000 * (1 + (action.stage == heavy))

    return analyse(record(build("1f1b", pp, 8), cost, latency=20, dp=dp, steps=steps).traces()).report


def kinds_of(report: Report) -> set[str]:
    return {kind for kinds in report.missing_evidence for kind in kinds.findings}


def test_a_single_step_has_no_interval() -> None:
    report = report_of(1, heavy=2)
    (imbalance,) = (finding for finding in report.findings if finding.evidence["cause"] == "imbalance")
    assert imbalance.gain_ns is not None
    assert (imbalance.gain_low_ns, imbalance.gain_high_ns) == (None, None)


@pytest.mark.parametrize(
    ("steps", "lacking"),
    [
        (1, {"interval of the gain", "pauses", "outliers", "change of level"}),
        (2, {"pauses", "outliers", "change of level"}),
        (4, {"outliers", "change of level"}),
        (9, {"change of level"}),
        (10, set()),
    ],
)
def test_short_runs_lack_evidence_of_what_happens_now_and_then(steps: int, lacking: set[str]) -> None:
    report = report_of(steps, dp=2)
    assert kinds_of(report) == lacking
    assert ("what recurs cannot be told from" in report.verdict) == (steps < 3)


@pytest.mark.parametrize(("pp", "lacking"), [(3, {"straggler", "slow link"}), (4, {"straggler"})])
def test_one_pipeline_cannot_tell_a_slow_worker_from_a_heavy_stage(pp: int, lacking: set[str]) -> None:
    report = report_of(10, pp=pp, heavy=1)
    assert kinds_of(report) == lacking
    imbalance = next(finding for finding in report.findings if finding.evidence["cause"] == "imbalance")
    assert imbalance.detail.endswith("a slow rank would look the same: there is one pipeline")
    of_two = next(
        finding for finding in report_of(10, 2, pp, heavy=1).findings if finding.evidence["cause"] == "imbalance"
    )
    assert "look the same" not in of_two.detail


def test_steps_that_lack_a_rank_tell_of_no_cause() -> None:
    report = analyse(without(record(build("1f1b", 4, 8), steps=12).traces(), 1), num_ranks=4).report
    assert {"imbalance", "straggler", "jitter", "communication", "host"} <= kinds_of(report)


def test_the_text_says_it_in_one_line_of_the_findings() -> None:
    console = Console(file=StringIO(), width=200)
    print_report(report_of(2), console)
    text = console.file.getvalue()
    (line,) = (line for line in text.splitlines() if line.startswith("not enough evidence"))
    assert line == (
        "not enough evidence: 2 whole steps, too few for pauses (4), outliers (5), change of level (10); "
        "one pipeline: a slow worker cannot be distinguished from a heavy stage"
    )
    assert len(text.splitlines()) <= 70
