"""Time between the ops of ranks without a device: the cause ``host``, in place of what nothing explains."""

from __future__ import annotations

import pytest

from pptrace.analysis.result import StepReport
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from tests.support.analysed import analyse
from tests.support.extent import by_turns
from tests.support.parts import by_cause
from tests.support.synthetic import record

LATE_RANK, LATE_NS, TRANSFER_NS = 1, 400, 50


def step_of(name: str, pp: int, late_ns: int, *, sends: str) -> StepReport:
    """The first step of a run of which one rank is late for all its calls, all else alike."""
    recording = record(
        build(name, pp, 8),
        lambda action: 2000 if action.kind is Kind.B else 1000,
        TRANSFER_NS,
        steps=2,
        one_by_one=sends == "one by one",
        is_buffered=sends == "buffered",
        before_calls=lambda rank, _action: late_ns if rank == LATE_RANK else 0,
    )
    return analyse(recording.traces()).report.steps[0]


@pytest.mark.parametrize(
    ("plan", "sends"),
    by_turns((("1f1b", 4), ("interleaved-1f1b", 2), ("zb-h1", 3)), ("together", "one by one", "buffered")),
)
def test_what_a_rank_is_late_by_is_its_host_s_and_not_unexplained(plan: tuple[str, int], sends: str) -> None:
    name, pp = plan
    late, clean = (step_of(name, pp, ns, sends=sends) for ns in (LATE_NS, 0))
    causes = by_cause(late.causes)
    assert sum(causes.values()) == late.span_ns - (late.ideal_ns or 0)
    assert abs(causes["unexplained"]) <= 0.005 * late.span_ns
    assert causes["host"] == pytest.approx(late.span_ns - clean.span_ns, rel=0.15)
    assert {tuple(cause.where.items()) for cause in late.causes or () if cause.cause == "host"} == {
        (("rank", LATE_RANK),)
    }
    assert by_cause(clean.causes)["host"] == 0
