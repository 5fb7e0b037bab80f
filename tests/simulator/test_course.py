"""A course takes as long as the simulation of its plan."""

from __future__ import annotations

import random

import pytest

from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from pptrace.schedule.text import from_rows
from pptrace.simulator import Costs, simulate
from pptrace.simulator.course import compile_plan


@pytest.mark.parametrize(
    ("name", "pp", "num_microbatches", "num_chunks"),
    [("1f1b", 4, 8, 1), ("gpipe", 3, 5, 1), ("interleaved-1f1b", 4, 8, 2), ("zbv", 4, 8, 2), ("dualpipe", 4, 12, 2)],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_course_takes_as_long_as_the_simulation(
    name: str, pp: int, num_microbatches: int, num_chunks: int, seed: int
) -> None:
    plan = build(name, pp, num_microbatches, num_chunks)
    chance = random.Random(seed)
    course = compile_plan(plan)
    durations = {stop.key: chance.randrange(50) for stop in course.nodes}
    makers = [key for key in plan.by_key if key[0] in (Kind.F, Kind.B, Kind.I)]
    transfers = {key: chance.randrange(30) for key in makers if chance.random() < 0.8}
    simulated = simulate(plan, Costs(ops=durations, transfers=transfers))
    assert course.makespan(durations, transfers) == simulated.makespan_ns


def test_an_action_that_a_measured_order_has_twice_counts_from_its_first_run_on() -> None:
    plan = from_rows([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "1F1", "1B0", "1B1"]], "custom")
    course = compile_plan(plan)
    durations = {stop.key: 10 for stop in course.nodes}
    assert course.makespan(durations, {}) == simulate(plan, Costs(ops=durations)).makespan_ns
