"""Blame: every nanosecond of bubble once, and what one op adds to the bubble is charged to it."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.analysis.explain.blame import charge_bubbles, typical_of
from pptrace.analysis.explain.critical_path import bindings_of
from pptrace.analysis.explain.inner_waits import no_inner_waits
from pptrace.analysis.explain.step_times import StepTimes
from pptrace.analysis.report import Report
from pptrace.model.tables import Int64
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.registry import SCHEDULES, build
from tests.support.analysed import analyse
from tests.support.extent import ALL
from tests.support.replayed_times import replayed_times
from tests.support.synthetic import record

NAMES = sorted(set(SCHEDULES) - {"zb-auto", "dualpipe"}) if ALL else ["interleaved-1f1b", "zbv", "dualpipe-v"]
SLOWER_NS = 5_000


def charges_of(times: StepTimes) -> dict[str, Int64]:
    bindings = bindings_of(times)
    waits = no_inner_waits()
    return charge_bubbles(times, bindings, typical_of(times, bindings, waits), waits)


@given(st.sampled_from(sorted(set(SCHEDULES) - {"zb-auto"})), st.integers(0, 2**32), st.sampled_from([0, 13]))
def test_all_bubble_is_charged_once_and_nothing_is_charged_twice(name: str, seed: int, latency: int) -> None:
    rng = random.Random(seed)
    table = build(name, 4, 8).table
    durations = [[rng.randint(0, 100) for _ in range(len(table))] for _ in range(3)]
    times = replayed_times(table, durations, latency)
    charges = charges_of(times)
    in_steps = times.gap_bubble.sum(axis=1) + times.tail_bubble.sum(axis=1)
    assert sum(charge.sum(axis=1) for charge in charges.values()).tolist() == in_steps.tolist()
    assert min(charge.min() for charge in charges.values()) >= 0


@cache
def reported(name: str, slow: tuple[int, int] | None) -> Report:
    def cost(action: Action) -> int:
        usual = {Kind.F: 1000, Kind.B: 2000, Kind.OVERLAP_F_B: 2800}.get(action.kind, 1000)
        is_slow = action.kind is Kind.F and (action.stage, action.microbatch) == slow
        return usual + (SLOWER_NS if is_slow else 0)

    return analyse(record(build(name, 4, 8), cost, latency=30, steps=2).traces()).report


@pytest.mark.parametrize("name", NAMES)
def test_what_one_slow_op_adds_to_the_bubble_of_all_ranks_is_charged_to_it(name: str) -> None:
    before, after = (reported(name, slow).steps[0] for slow in (None, (2, 3)))
    added = after.blame.total_ns - before.blame.total_ns
    assert added == sum(rank.bubble_ns or 0 for rank in after.ranks) - sum(rank.bubble_ns or 0 for rank in before.ranks)
    most = after.blame.ops[0]
    assert (most.kind, most.stage, most.microbatch) == ("F", 2, 3)
    charged_before = sum(op.ns for op in before.blame.ops if (op.kind, op.stage, op.microbatch) == ("F", 2, 3))
    assert added > SLOWER_NS
    assert 0.95 * added <= most.ns - charged_before <= 1.05 * added
