"""Kernels that go on to receive what has been sent: a finding of their own, and no fault of the hosts."""

from __future__ import annotations

from functools import cache

import pytest

from pptrace.analysis.findings.verdict import with_verdict
from pptrace.analysis.report import Report
from pptrace.analysis.stragglers.communication import LATE_RECEIVES
from pptrace.analysis.stragglers.hosts import LATE_START
from pptrace.analysis.whatif.study import study_run
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from pptrace.workflow.analyse import Analysis
from tests.support.analysed import analyse
from tests.support.synthetic import record

AFTER_NS = 4_000
"""Time from the end of a kernel that sends to that of the one that receives."""


def report_of(after_ns: int, *, on_device: bool = True, one_host: bool = True, late_ns: int = 0) -> Report:
    return with_verdict(analysis_of(after_ns, on_device, one_host, late_ns).report)


@cache
def analysis_of(after_ns: int, on_device: bool = True, one_host: bool = True, late_ns: int = 0) -> Analysis:
    """Four steps of a run whose sends wait for nobody; rank 2 begins ``late_ns`` after the others."""
    cost = {Kind.F: 1_000, Kind.B: 2_000}
    how = {"is_buffered": True, "late_by": {2: late_ns}}
    recording = record(build("1f1b", 4, 8), lambda op: cost[op.kind], after_ns, steps=4, device=on_device, **how)
    return analyse(recording.traces(one_host=one_host))


def test_what_steps_get_back_is_the_time_after_the_kernels_that_send() -> None:
    report, prompt = report_of(AFTER_NS), report_of(0)
    (finding,) = (finding for finding in report.findings if finding.evidence.get("reason") == LATE_RECEIVES)
    assert finding.evidence["cause"] == "unexplained"
    assert finding.evidence["typical_ns"] == AFTER_NS - 1, "the kernel that sends lasts 1 ns"
    span, shorter = report.steps[0].span_ns, prompt.steps[0].span_ns
    # Of messages that were sent before their receive was posted, the rest is transfer.
    assert 0.85 * (span - shorter) <= (finding.gain_ns or 0) <= span - shorter
    assert "receive kernels that run on after the send" in report.verdict
    assert "unexplained" not in report.verdict


def test_a_rank_that_is_late_itself_is_named_all_the_same() -> None:
    report = report_of(0, late_ns=12_000)
    assert [
        finding.evidence["where"] for finding in report.findings if finding.evidence.get("reason") == LATE_START
    ] == [{"rank": 2}]


def test_clocks_that_may_be_off_by_more_tell_nothing_of_late_receives_nor_of_late_starts() -> None:
    report = report_of(AFTER_NS, one_host=False)
    assert (report.clock.uncertainty_ns or 0) > AFTER_NS / 2
    assert not [finding for finding in report.findings if finding.evidence.get("reason")]


@pytest.mark.parametrize(("after_ns", "is_noted"), [(AFTER_NS, True), (0, False)])
def test_predictions_say_that_they_take_late_receives_for_delays(after_ns: int, is_noted: bool) -> None:
    analysis = analysis_of(after_ns)
    study = study_run(analysis.report, analysis.costs, analysis.schedule, None)
    assert any("predicted to start as late" in line for line in study.warnings) == is_noted
