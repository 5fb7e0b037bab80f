"""Lengths of the phases of a simulated step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from pptrace.schedule.actions import Phase
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.simulator import IDEAL, phase_lengths, simulate, uniform
from pptrace.slices import slices
from pptrace.timeline.windows import phase_spans_of_steps
from tests.schedule.shapes import plans


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 2), (4, 8), (8, 8), (5, 20)])
def test_those_of_1f1b_are_closed_forms(p: int, m: int) -> None:
    f, b = 3, 7
    simulation = simulate(build("1f1b", p, m), uniform(f, b))
    for r, lengths in enumerate(phase_lengths(simulation)):
        warmup, cooldown = (p - 1) * f, r * b + (p - r - 1) * (f + b)
        assert lengths == {
            Phase.WARMUP: warmup,
            Phase.STEADY: (m + p - 1) * (f + b) - warmup - cooldown,
            Phase.COOLDOWN: cooldown,
        }


def test_gpipe_has_no_steady_phase() -> None:
    for r, lengths in enumerate(phase_lengths(simulate(build("gpipe", 4, 6), uniform(1, 2)))):
        assert list(lengths.values()) == [r + 6, 0, 9 * 3 - r - 6]


@given(plans())
def test_a_measured_step_is_cut_in_the_same_way(plan: Plan) -> None:
    simulation = simulate(plan, IDEAL)
    of_rank = slices(simulation.ops(), ("rank", "step"))
    for rank, lengths in enumerate(phase_lengths(simulation)):
        ops = of_rank[rank, 0]
        (measured,) = phase_spans_of_steps(ops, np.zeros(len(ops), dtype=np.int64), [0], [simulation.makespan_ns])
        assert {span.phase: span.end_ns - span.start_ns for span in measured} == lengths
