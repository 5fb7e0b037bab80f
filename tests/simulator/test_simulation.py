"""The simulator against closed forms and against timelines worked out by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.errors import ScheduleError
from pptrace.model.tables import OPS
from pptrace.schedule.actions import Kind
from pptrace.schedule.lower import lower
from pptrace.schedule.needs import needs_of
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.schedule.text import from_rows
from pptrace.simulator import IDEAL, Costs, Simulation, peak_inflight, simulate, uniform
from tests.schedule.shapes import interleaved_shapes, one_chunk_shapes, plans

COSTS = [(1, 2), (3, 1), (5, 5), (7, 0)]


def spans(simulation: Simulation) -> dict[str, tuple[int, int]]:
    return {str(timed.action): (timed.start, timed.end) for rank in simulation.ranks for timed in rank.timeline}


def test_gpipe_and_1f1b_take_m_plus_p_minus_1_pairs() -> None:
    for number, (p, m) in enumerate(one_chunk_shapes()):
        f, b = COSTS[number % len(COSTS)]
        for name in ("gpipe", "1f1b"):
            simulation = simulate(build(name, p, m), uniform(f, b))
            assert simulation.makespan_ns == (m + p - 1) * (f + b), (name, p, m)
            for rank in simulation.ranks:
                assert rank.compute_ns == m * (f + b)
                assert rank.bubble_ns == (p - 1) * (f + b)


def test_interleaved_has_a_bubble_of_p_minus_1_pairs_of_chunks() -> None:
    """Whatever the group size, as long as m is a whole number of groups."""
    checked = 0
    for p, m, v, n in interleaved_shapes():
        if m % n == 0 and (n == p or m <= 2 * n) and p * m * v < 150:
            f, b = COSTS[checked % 2]
            simulation = simulate(build("interleaved-1f1b", p, m, v, n), uniform(f, b))
            assert {rank.bubble_ns for rank in simulation.ranks} == {(p - 1) * (f + b)}, (p, m, v, n)
            assert simulation.makespan_ns == (m * v + p - 1) * (f + b)
            checked += 1
    assert checked > 50


def test_an_overlapped_pair_that_is_cheaper_than_its_halves_shortens_the_step() -> None:
    kinds = {Kind.F: 2, Kind.B: 4, Kind.I: 2, Kind.W: 2}
    for name in ("dualpipe", "dualpipe-v"):
        plan = build(name, 4, 12)
        apart, together = simulate(plan, Costs(kinds)), simulate(plan, Costs({**kinds, Kind.OVERLAP_F_B: 5}))
        assert together.makespan_ns < apart.makespan_ns


def test_the_ratio_is_over_compute_and_the_share_over_the_window_with_unequal_stages_too() -> None:
    simulation = simulate(
        build("1f1b", 2, 3), Costs(stages={(Kind.F, 0): 1, (Kind.F, 1): 3, (Kind.B, 0): 2, (Kind.B, 1): 4})
    )
    compute = 3 * (1 + 2) + 3 * (3 + 4)
    bubble = 2 * simulation.makespan_ns - compute
    assert simulation.bubble_ratio == pytest.approx(float(Fraction(bubble, compute)))
    assert simulation.bubble_share == pytest.approx(float(Fraction(bubble, 2 * simulation.makespan_ns)))


def test_a_split_backward_holds_its_activation_until_the_weight_gradient() -> None:
    plan = from_rows([["0F0", "0I0", "0F1", "0I1", "0W0", "0F2", "0B2", "0W1"]], "split")
    assert peak_inflight(plan) == (2,)
    full = from_rows([["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]], "full")
    assert peak_inflight(full) == (1,)
    both = from_rows([["0F0", "0B0", "0F1", "0W0", "0B1"]], "both")  # as a trace may have it
    assert peak_inflight(both) == (2,)


def test_1f1b_with_latency_by_hand() -> None:
    """p=2, m=2, f=10, b=20, message 3.

    rank 0  F0 0-10  F1 10-20  (B0 of rank 1 ends at 43, arrives 46)  B0 46-66  (B1 ends 73, arrives 76)  B1 76-96
    rank 1  F0 13-23  B0 23-43  F1 43-53  B1 53-73
    """
    simulation = simulate(build("1f1b", 2, 2), uniform(10, 20, p2p_ns=3))
    assert spans(simulation) == {
        **{"0F0": (0, 10), "0F1": (10, 20), "0B0": (46, 66), "0B1": (76, 96)},
        **{"1F0": (13, 23), "1B0": (23, 43), "1F1": (43, 53), "1B1": (53, 73)},
    }
    assert simulation.makespan_ns == 96
    assert [rank.bubble_ns for rank in simulation.ranks] == [36, 36]


def test_each_message_has_the_time_measured_for_it() -> None:
    simulation = simulate(build("gpipe", 2, 2), Costs(kinds={Kind.F: 10, Kind.B: 10}, transfers={(Kind.F, 0, 0): 25}))
    assert spans(simulation)["1F0"] == (35, 45)
    assert spans(simulation)["1F1"] == (45, 55)


def test_the_first_backward_of_1f1b_comes_later_the_more_stages_follow() -> None:
    """In slot 2(p − s − 1) + 2 of stage s, counted from 1 at its first forward, where both take a slot."""
    for p, m in ((1, 1), (2, 5), (4, 4), (4, 9), (7, 8)):
        found = spans(simulate(build("1f1b", p, m), uniform(1, 1)))
        slots = [found[f"{stage}B0"][0] - found[f"{stage}F0"][0] + 1 for stage in range(p)]
        assert slots == [2 * (p - stage - 1) + 2 for stage in range(p)]


op_costs = st.dictionaries(
    st.tuples(st.sampled_from([Kind.F, Kind.B, Kind.I, Kind.W]), st.integers(0, 9), st.integers(0, 9)),
    st.integers(0, 50),
)


@given(plans(), op_costs, st.integers(0, 9))
def test_every_action_starts_as_soon_as_its_rank_and_its_inputs_are_ready(
    plan: Plan, ops: dict[tuple[Kind, int, int], int], latency: int
) -> None:
    """Not earlier, and not later: the definition, checked action by action against the finished timeline."""
    costs = Costs(kinds={Kind.F: 3, Kind.B: 7, Kind.I: 4, Kind.W: 3}, ops=dict(ops), p2p_latency_ns=latency)
    simulation = simulate(plan, costs)
    placed = {half.key: (rank.rank, t) for rank in simulation.ranks for t in rank.timeline for half in t.action.halves}
    assert [[t.action for t in rank.timeline] for rank in simulation.ranks] == list(map(list, plan.ranks))
    for rank in simulation.ranks:
        free = 0
        for timed in rank.timeline:
            ready = [free]
            for keys in needs_of(plan, timed.action):
                ((source, producer),) = (placed[key] for key in keys if key in placed)
                ready.append(producer.end + (0 if source == rank.rank else latency))
            assert timed.start == max(ready)
            assert timed.end - timed.start == costs.duration(timed.action)
            free = timed.end
    assert simulation.makespan_ns == max(timed.end for _, timed in placed.values())


@given(plans())
def test_sends_and_receives_in_a_plan_change_nothing(plan: Plan) -> None:
    costs = uniform(3, 5, p2p_ns=2)
    assert simulate(lower(plan), costs).ops().equals(simulate(plan, costs).ops())


def test_the_ops_table_is_that_of_a_measured_run() -> None:
    plan = build("interleaved-1f1b", 2, 2)
    ops = simulate(plan, uniform(1, 2)).ops()
    assert list(ops.columns) == list(OPS)
    assert all(str(ops[name].dtype) == "int64" for name, dtype in OPS.items() if dtype == "int64")
    assert len(ops) == 16
    first = ops.iloc[0]
    assert (first["rank"], first["kind"], first["stage"], first["phase"], first["source"]) == (
        *(0, "F", 0, "warmup", "simulated"),
    )
    assert set(ops["chunk"]) == {0, 1}


def test_a_plan_that_cannot_end_is_refused() -> None:
    with pytest.raises(ScheduleError, match="handwritten: rank 0 never gets past its action number 1"):
        simulate(from_rows([["0B0", "0F0"]], "handwritten"), IDEAL)
    with pytest.raises(ScheduleError, match="never gets past"):
        simulate(from_rows([["0F0", "0B0"], ["1F0"]], "handwritten"), IDEAL)
