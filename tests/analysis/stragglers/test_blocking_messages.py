"""Messages that block both sides: a transfer begins when both are ready, and keeps the sender as long as the receiver."""

from __future__ import annotations

import pytest

from pptrace.analysis.report import Report
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from tests.support.analysed import analyse
from tests.support.extent import by_turns
from tests.support.synthetic import Message, record

USUAL, STEPS = 20, 6


def report_of(name: str, slow: int, dp: int = 1) -> Report:
    """The report of a run whose messages between pipeline ranks 1 and 2 take ``slow``, all others ``USUAL`` ns."""
    plan = build(name, 4, 8)

    def latency(message: Message) -> int:
        direction, stage, _ = message
        ends = {plan.placement[stage], plan.placement[stage + (1 if direction == "F" else -1)]}
        return slow if ends == {1, 2} else USUAL

    recording = record(plan, lambda action: 1000 if action.kind is Kind.F else 2000, latency, dp=dp, steps=STEPS)
    return analyse(recording.traces()).report


@pytest.mark.parametrize(("name", "slow"), by_turns(("interleaved-1f1b", "zb-h1", "zbv"), (300, 1300)))
def test_the_gain_of_a_slow_link_is_what_a_run_with_a_fast_one_gains(name: str, slow: int) -> None:
    report, clean = report_of(name, slow), report_of(name, USUAL)
    (link,) = (finding for finding in report.findings if finding.evidence.get("reason") == "slow link")
    assert link.evidence["where"] == {"link": "1-2"}
    real = (report.steps[0].span_ns or 0) - (clean.steps[0].span_ns or 0)
    assert link.gain_ns == pytest.approx(real, rel=0.03)
