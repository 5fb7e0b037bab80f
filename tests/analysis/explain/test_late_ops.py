"""Time between the ops of ranks without a device: the cause ``host``, in place of what nothing explains."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from pptrace.analysis.explain.binding import bindings_of
from pptrace.analysis.explain.late_ops import late_ops
from pptrace.analysis.explain.measured import PostedCalls
from pptrace.analysis.explain.step_times import UNKNOWN
from pptrace.analysis.findings.verdict import with_verdict
from pptrace.analysis.result import StepReport
from pptrace.analysis.step_parts import Cause
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from pptrace.simulator import makespans
from pptrace.workflow.analyse import analyse
from tests.analysis.explain.op_by_op import random_times
from tests.support.extent import by_turns
from tests.support.synthetic import Job, Recording, host_events, run_on_paper

LATE_RANK, LATE_NS, TRANSFER_NS = 1, 400, 50


def recording_of(name: str, pp: int, late_ns: int, *, sends: str) -> Recording:
    """A run of which one rank is late for all its calls, all else alike."""
    plan = build(name, pp, 8)
    run = run_on_paper(
        plan,
        lambda action: 2000 if action.kind is Kind.B else 1000,
        TRANSFER_NS,
        one_by_one=sends == "one by one",
        is_buffered=sends == "buffered",
        before_calls=lambda rank, _action: late_ns if rank == LATE_RANK else 0,
    )
    return Recording(Job(plan, 1, 2), run, host_events)


def step_of(name: str, pp: int, late_ns: int, *, sends: str) -> StepReport:
    return analyse(recording_of(name, pp, late_ns, sends=sends).traces()).report.steps[0]


def by_name(causes: tuple[Cause, ...] | None) -> Counter[str]:
    totals = Counter[str]()
    for cause in causes or ():
        totals[cause.cause] += cause.ns
    return totals


@pytest.mark.parametrize(
    ("plan", "sends"),
    by_turns(
        (("gpipe", 2), ("1f1b", 4), ("interleaved-1f1b", 2), ("zb-h1", 3)), ("together", "one by one", "buffered")
    ),
)
def test_what_a_rank_is_late_by_is_its_host_s_and_not_unexplained(plan: tuple[str, int], sends: str) -> None:
    name, pp = plan
    late, clean = (step_of(name, pp, ns, sends=sends) for ns in (LATE_NS, 0))
    assert late.span_ns is not None
    assert clean.span_ns is not None
    causes = by_name(late.causes)
    assert sum(causes.values()) == late.span_ns - (late.ideal_ns or 0)
    assert abs(causes["unexplained"]) <= 0.005 * late.span_ns
    assert causes["host"] == pytest.approx(late.span_ns - clean.span_ns, rel=0.15)
    assert {tuple(cause.where.items()) for cause in late.causes or () if cause.cause == "host"} == {
        (("rank", LATE_RANK),)
    }
    assert by_name(clean.causes)["host"] == 0


def test_the_waterfall_has_what_the_causes_have_of_hosts_without_devices() -> None:
    step = step_of("1f1b", 4, LATE_NS, sends="together")
    assert step.bubble.waterfall_ns is not None
    assert step.bubble.waterfall_ns.host == by_name(step.causes)["host"] > 0
    assert not step.has_devices


def test_the_sentence_and_the_finding_speak_of_ops_that_begin_late() -> None:
    report = with_verdict(analyse(recording_of("1f1b", 4, LATE_NS, sends="together").traces()).report)
    assert "launch" not in report.verdict
    assert "ops of one rank that begin late (rank 1)" in report.verdict


def test_delays_and_calls_are_those_of_windows_without_devices_whose_messages_are_known() -> None:
    rng = random.Random(7)
    seen = Counter[bool]()
    for _ in range(60):
        times = random_times(rng)
        if rng.random() < 0.5:
            times = replace(
                times, arrival=np.where(times.arrival == UNKNOWN, times.begin[:, np.newaxis], times.arrival)
            )
        bindings, chosen = bindings_of(times), np.array([0, 2])
        late = late_ops(times, bindings, chosen)
        assert late.posted is None
        for index, window in enumerate(chosen.tolist()):
            is_known = not times.on_device[window] and UNKNOWN not in times.arrival[window].tolist()
            seen[is_known] += 1
            of_ranks = [0] * times.table.pp
            for row in range(len(times.table)):
                delay = int(times.start[window, row] - bindings.ready[window, row] - bindings.moving[window, row])
                assert late.before_ops[index, row] == (delay if is_known else 0)
                held = min(int(bindings.held[window, row]), delay) if is_known else 0
                of_ranks[times.table.rank[row]] += delay - held if is_known else 0
                of_ranks[times.table.rank[bindings.held_by[window, row]]] += held
            assert late.of_ranks[index].tolist() == of_ranks
    assert min(seen[True], seen[False]) > 10


def test_calls_take_over_what_is_before_ops_because_of_them() -> None:
    rng = random.Random(3)
    times = random_times(rng)
    times = replace(
        times,
        on_device=np.zeros(len(times.windows), dtype=np.bool_),
        arrival=np.where(times.arrival == UNKNOWN, times.begin[:, np.newaxis], times.arrival),
    )
    bindings, chosen = bindings_of(times), np.arange(len(times.windows))
    alone = late_ops(times, bindings, chosen)
    before = alone.before_ops // 2
    posted = PostedCalls(np.full((len(chosen), 4), 5), before, before + 3, np.zeros_like(before))
    late = late_ops(times, bindings, chosen, posted)
    assert late.posted is not None
    assert (late.posted == 5).all()
    assert (late.before_ops == alone.before_ops - before).all()
    rows = np.bincount(times.table.rank, minlength=times.table.pp)
    assert (late.of_ranks - alone.of_ranks == 3 * rows).all()


def test_a_replay_with_delays_is_the_measured_step_where_nothing_waits_for_receivers() -> None:
    """Buffered sends: op for op the measured times, so that nothing of the step is left over."""
    step = step_of("1f1b", 4, LATE_NS, sends="buffered")
    table = build("1f1b", 4, 8).table
    assert makespans(table, np.where(table.kind == Kind.B.code, 2000, 1000)[np.newaxis], TRANSFER_NS)[0] < (
        step.span_ns or 0
    )
    assert by_name(step.causes)["unexplained"] == 0


@pytest.mark.parametrize(("name", "late"), [("1f1b", 1), ("1f1b", 2), ("zb-h1", 2)])
def test_what_others_wait_for_a_rank_that_has_run_nothing_yet_is_its_hosts(name: str, late: int) -> None:
    """Senders wait until it posts its first receive."""
    plan = build(name, 4, 8)
    run = run_on_paper(plan, lambda action: 2000 if action.kind is Kind.B else 1000, 20, late_by={late: 12_000})
    step = analyse(Recording(Job(plan, 1, 2), run, host_events).traces()).report.steps[0]
    host = [cause for cause in step.causes or () if cause.cause == "host"]
    assert all(cause.where == {"rank": late} for cause in host)
    assert sum(cause.ns for cause in host) > 5_000
