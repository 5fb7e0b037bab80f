"""Time between the ops of ranks without a device: the cause ``host``, in place of what nothing explains."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from pptrace.analysis.explain.binding import Bindings, bindings_of
from pptrace.analysis.explain.causes import _lateness
from pptrace.analysis.explain.inner_waits import no_inner_waits
from pptrace.analysis.explain.measured import along_graph, costs_of_windows
from pptrace.analysis.explain.rank_messages import CALLS
from pptrace.analysis.explain.step_times import StepTimes
from pptrace.analysis.matrix.step_matrix import OUTSIDE, StepMatrix
from pptrace.analysis.result import StepReport
from pptrace.analysis.whole_run import Cause
from pptrace.schedule.actions import Kind
from pptrace.schedule.message_graph import Messaging, make_graph
from pptrace.schedule.registry import build
from pptrace.simulator import makespans
from pptrace.slices import Slice, group_sums
from pptrace.workflow.analyse import analyse
from tests.analysis.explain.op_by_op import random_times
from tests.support.extent import by_turns
from tests.support.known import known
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
    causes = by_name(late.causes)
    assert sum(causes.values()) == late.span_ns - (late.ideal_ns or 0)
    assert abs(causes["unexplained"]) <= 0.005 * late.span_ns
    assert causes["host"] == pytest.approx(late.span_ns - known(clean.span_ns), rel=0.15)
    assert {tuple(cause.where.items()) for cause in late.causes or () if cause.cause == "host"} == {
        (("rank", LATE_RANK),)
    }
    assert by_name(clean.causes)["host"] == 0


def test_delays_are_those_of_windows_of_which_they_are_known_and_waits_for_a_late_start_are_the_late_rank_s() -> None:
    rng = random.Random(7)
    for _ in range(60):
        times = random_times(rng)
        bindings, is_known = bindings_of(times), np.array([rng.random() < 0.6 for _ in times.windows])
        costs = costs_of(times, bindings)
        before_ops, posted, of_late = _lateness(costs, is_known)
        assert posted is None
        for window, is_told in enumerate(is_known.tolist()):
            of_ranks = [0] * times.table.pp
            for row in range(len(times.table)):
                delay = int(times.start[window, row] - bindings.ready[window, row] - bindings.moving[window, row])
                assert before_ops[window, row] == (delay if is_told else 0)
                held = min(int(bindings.held[window, row]), delay) if is_told else 0
                of_ranks[times.table.rank[row]] += delay - held if is_told else 0
                of_ranks[times.table.rank[bindings.held_by[window, row]]] += held
            assert of_late[window].tolist() == of_ranks


def test_calls_take_over_what_is_before_ops_because_of_them() -> None:
    rng = random.Random(3)
    plan = build("1f1b", 3, 3)
    graph = make_graph(plan, Messaging.RENDEZVOUS)
    while (times := random_times(rng)).table.pp != 3:
        pass
    times = replace(times, table=plan.table)
    bindings, is_known = bindings_of(times), np.ones(len(times.windows), dtype=np.bool_)
    costs = costs_of(times, bindings)
    alone, _, ranks_alone = _lateness(costs, is_known)
    before, late = alone // 2, np.full((len(is_known), len(graph.call_row)), 5)
    before_ops, posted, of_ranks = _lateness(replace(costs, graph=graph, posted=late, before_posting=before), is_known)
    assert posted is not None
    assert (posted == 5).all()
    assert (before_ops == alone - before).all()
    calls = np.bincount(times.table.rank[graph.call_row], minlength=3)
    assert (of_ranks - ranks_alone == 5 * calls - group_sums(before, times.table.rank, 3)).all()
    unknown = _lateness(replace(costs, graph=graph, posted=late, before_posting=before), ~is_known)
    assert not any(part is not None and part.any() for part in unknown)


def test_calls_take_no_more_of_what_is_before_an_op_than_it_was_late() -> None:
    """Transfers that kept a rank from its op are not its calls': of the time since its inputs were there they are left out."""
    rng, plan = random.Random(5), build("1f1b", 3, 3)
    graph, num_beyond = make_graph(plan, Messaging.RENDEZVOUS), 0
    ends = np.flatnonzero(graph.call_of_end >= 0)
    rows = graph.call_row[graph.call_of_end[ends]]
    for _ in range(40):
        while (times := random_times(rng)).table.pp != 3:
            pass
        times = replace(times, table=plan.table)
        bindings = bindings_of(times)
        window = np.repeat(np.arange(len(times.windows)), len(ends))
        at = window, np.tile(rows, len(times.windows))
        columns = (
            window,
            np.tile(ends, len(times.windows)),
            bindings.ready[at],
            times.start[at],
            np.zeros_like(window),
        )
        calls, is_whole = Slice(dict(zip(CALLS, columns, strict=True))), np.ones(len(times.windows), dtype=np.bool_)
        nothing = np.zeros_like(times.start)
        costs = along_graph(costs_of(times, bindings), graph, times, bindings, [calls], is_whole, nothing)
        assert (known(costs.before_posting) <= costs.delays).all()
        num_beyond += int((times.start[at] - bindings.ready[at] > costs.delays[at]).sum())
    assert num_beyond > 100


def costs_of(times: StepTimes, bindings: Bindings) -> StepMatrix:
    nothing = np.zeros_like(times.start)
    return costs_of_windows(times, bindings, no_inner_waits(), Slice.empty(*OUTSIDE, texts=("name",)), nothing)


def test_a_replay_with_delays_is_the_measured_step_where_nothing_waits_for_receivers() -> None:
    """Buffered sends: op for op the measured times, so that nothing of the step is left over."""
    step = step_of("1f1b", 4, LATE_NS, sends="buffered")
    table = build("1f1b", 4, 8).table
    assert makespans(table, np.where(table.kind == Kind.B.code, 2000, 1000)[np.newaxis], TRANSFER_NS)[0] < (
        step.span_ns or 0
    )
    assert by_name(step.causes)["unexplained"] == 0
