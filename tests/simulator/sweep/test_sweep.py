"""A sweep against closed forms, and against simulations of its points one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.errors import ShapeError, UnknownScheduleError, UsageError
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.simulator import peak_inflight, simulate, uniform
from pptrace.simulator.sweep.run import CostsOf, Grid, Sweep, SweepCosts, SweptPoint, run_sweep
from pptrace.simulator.sweep.values import Microbatches

IDEAL = SweepCosts(1000, 2000, 1000)
COSTS = (IDEAL, SweepCosts(800, 1500, 700), SweepCosts(1000, 2200, 800), SweepCosts(900, 2000, 1100, 130))


def grid(
    schedules: tuple[str, ...] = ("1f1b",),
    pp: tuple[int, ...] = (4,),
    microbatches: tuple[Microbatches, ...] = (Microbatches(0, 8),),
    chunks: tuple[int | None, ...] = (None,),
    costs: tuple[SweepCosts, ...] = (IDEAL,),
    costs_of: CostsOf = CostsOf.RANK,
) -> Grid:
    return Grid(schedules, pp, microbatches, chunks, (None,), costs, costs_of)


def of(swept: SweptPoint) -> tuple[str, int, int, int]:
    return swept.point.schedule, swept.point.pp, swept.point.num_microbatches, swept.num_chunks


def fixed(*numbers: int) -> tuple[Microbatches, ...]:
    return tuple(Microbatches(0, number) for number in numbers)


def test_throughput_per_rank_of_1f1b_is_m_over_m_plus_p_minus_1() -> None:
    pp = (1, 2, 4, 8, 16, 32)
    sweep = run_sweep(grid(("1f1b", "gpipe"), pp, (Microbatches(1, -1), *fixed(32), Microbatches(8, 0))))
    assert len(sweep.simulated) == 2 * 3 * len(pp) - 2  # one rank has no p − 1 microbatches
    for swept in sweep.simulated:
        p, m = swept.point.pp, swept.point.num_microbatches
        assert swept.step.throughput_per_rank == pytest.approx(m / (m + p - 1), rel=1e-12)
        assert swept.step.throughput == pytest.approx(p * m / (m + p - 1), rel=1e-12)
        assert swept.step.bubble_share == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)
        assert swept.step.microbatches_per_s == pytest.approx(1e9 * m / ((m + p - 1) * 3000), rel=1e-12)


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 5),
    st.integers(1, 12),
    st.sampled_from([None, 2, 3]),
    st.lists(st.tuples(*(st.integers(0, 50) for _ in range(4))), min_size=1, max_size=3),
)
def test_each_point_is_the_simulation_of_it_alone(
    name: str, p: int, m: int, chunks: int | None, drawn: list[tuple[int, ...]]
) -> None:
    costs = tuple(SweepCosts(f + 1, i + w, w, p2p) for f, i, w, p2p in drawn)
    sweep = run_sweep(grid((name,), (p,), fixed(m), (chunks,), costs, CostsOf.ACTION))
    if SCHEDULES[name].searches:
        return
    if any(swept.step is None for swept in sweep.points):
        with pytest.raises(ShapeError) as caught:
            build(name, p, m, chunks)
        assert [(swept.step, swept.refused) for swept in sweep.points] == [(None, str(caught.value))] * len(costs)
        return
    plan = build(name, p, m, chunks)
    for swept, of_point in zip(sweep.points, costs, strict=True):
        alone = simulate(plan, uniform(of_point.forward_ns, of_point.backward_ns, of_point.wgrad_ns, of_point.p2p_ns))
        assert swept.step.makespan_ns == alone.makespan_ns
        assert swept.step.bubble_ratio == pytest.approx(alone.bubble_ratio)
        assert swept.step.peak_inflight == max(peak_inflight(plan))
        assert swept.step.inner_bubble_ratio == pytest.approx(
            max(rank.inner_bubble_ns / rank.compute_ns for rank in alone.ranks)
        )


def test_costs_of_a_rank_or_of_the_model_are_shared_out_so_that_sizes_compare() -> None:
    """Without bubbles, a rank's layers take m(f + b), the model's m(f + b)/p, however they are cut."""
    for costs_of, ideal_ns in ((CostsOf.RANK, {4: 24_000, 6: 24_000}), (CostsOf.MODEL, {4: 6_000, 6: 4_000})):
        names = ("1f1b", "interleaved-1f1b", "zbv", "dualpipe")
        sweep = run_sweep(grid(names, (4, 6), fixed(24), (None, 3), costs_of=costs_of))
        assert len({(swept.point.schedule, swept.num_chunks) for swept in sweep.simulated}) == 5
        for swept in sweep.simulated:
            compute_ns = swept.step.throughput_per_rank * swept.step.makespan_ns
            assert compute_ns == pytest.approx(3 * ideal_ns[swept.point.pp], rel=1e-12), of(swept)


def test_a_message_costs_the_same_in_every_cut() -> None:
    slow = SweepCosts(1000, 2000, 1000, 600)
    two = run_sweep(grid(("1f1b",), (2,), fixed(1), costs=(IDEAL, slow))).simulated
    assert [swept.step.makespan_ns for swept in two if swept.step] == [6000, 7200]
    cut = run_sweep(grid(("interleaved-1f1b",), (2,), fixed(2), (2,), (IDEAL, slow))).simulated
    alone = simulate(build("interleaved-1f1b", 2, 2, 2), uniform(500, 1000, 500, 600))
    assert [swept.step.makespan_ns for swept in cut if swept.step][1] == alone.makespan_ns


def test_memory_is_counted_in_one_unit() -> None:
    """Of p = 4 ranks 1F1B keeps 4 microbatches, ZBV as much in 8 halves, DualPipe p + 1 stages of 1/p of the model."""
    sweep = run_sweep(grid(("1f1b", "zbv", "dualpipe", "v-half"), (4,), fixed(16)))
    assert [swept.step.peak_activations for swept in sweep.simulated if swept.step] == [4, 4, 5, 3]


def test_a_searched_schedule_is_searched_for_each_cost() -> None:
    cheap, dear = SweepCosts(1000, 2000, 1000), SweepCosts(1000, 2600, 300, 400)
    found = run_sweep(grid(("zb-auto",), (4,), fixed(8), costs=(cheap, dear))).simulated
    alone = [run_sweep(grid(("zb-auto",), (4,), fixed(8), costs=(costs,))).simulated[0] for costs in (cheap, dear)]
    assert [swept.step for swept in found] == [swept.step for swept in alone]


def test_no_combination_is_dropped() -> None:
    calls: list[int] = []
    sweep = run_sweep(grid(("1f1b", "dualpipe"), (3, 4), fixed(4, 8), (1, 2), COSTS), calls.append)
    assert isinstance(sweep, Sweep)
    assert len(sweep.points) == 2 * 2 * 2 * 2 * 4 == len(sweep.simulated) + len(sweep.refused)
    assert calls[-1] == len(sweep.points)
    assert {swept.refused for swept in sweep.refused if swept.point.schedule == "1f1b"} == {
        "1f1b: 2 chunks per rank; this schedule has 1 (try interleaved-1f1b)"
    }
    assert all(swept.refused for swept in sweep.refused)


def test_a_sweep_of_millions_and_an_unknown_schedule_are_refused() -> None:
    with pytest.raises(UsageError, match="1,000,000 combinations; expected at most 100,000"):
        grid(("1f1b",), tuple(range(1, 1001)), fixed(*range(1, 1001)))
    with pytest.raises(UnknownScheduleError):
        run_sweep(grid(("nope",)))
