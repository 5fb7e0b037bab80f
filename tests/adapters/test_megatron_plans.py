"""Ops and messages of a pass of Megatron-LM, against the plans of the catalogue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.adapters.megatron_plans import PassShape, plan_of
from pptrace.schedule import registry
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan import Plan


@st.composite
def shapes(draw: st.DrawFn) -> PassShape:
    """Any shape that Megatron-LM allows: a last group of microbatches is empty or at least as large as the pipeline."""
    pp = draw(st.integers(2, 5))
    chunks = draw(st.integers(2, 4))
    group = draw(st.integers(pp, pp + 3))
    rest = draw(st.sampled_from([0, *range(pp, group)]))
    return PassShape(pp, group * draw(st.integers(1, 3)) + rest, chunks, group)


def arriving(plan: Plan, rank: int, kind: Kind) -> list[tuple[int, int | None]]:
    """(chunk, microbatch) of the messages that reach ``rank``, in the order in which the neighbour's ops make them."""
    forward = kind is Kind.RECV_F
    sender = (rank + (-1 if forward else 1)) % plan.pp
    stages = [
        (action.stage + (1 if forward else -1), action.microbatch)
        for action in plan.compute_actions(sender)
        if action.kind is (Kind.F if forward else Kind.B)
    ]
    return [(stage // plan.pp, microbatch) for stage, microbatch in stages if 0 <= stage < plan.num_stages]


@given(shapes())
def test_messages_arrive_in_the_order_in_which_the_neighbour_computes_them(shape: PassShape) -> None:
    plan = registry.build("interleaved-1f1b", shape.pp, shape.num_microbatches, shape.num_chunks, shape.group_size)
    for rank in range(shape.pp):
        for kind in (Kind.RECV_F, Kind.RECV_B):
            assert shape.received(kind, rank) == arriving(plan, rank, kind)


@given(shapes())
def test_the_plan_of_a_pass_is_that_of_the_catalogue(shape: PassShape) -> None:
    assert plan_of(shape) == registry.build(
        "interleaved-1f1b", shape.pp, shape.num_microbatches, shape.num_chunks, shape.group_size
    )


def test_a_pass_without_a_pipeline_takes_its_microbatches_one_by_one() -> None:
    plan = plan_of(PassShape(1, 3))
    assert list(map(str, plan.compute_actions(0))) == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]


def test_a_shape_that_megatron_refuses_has_no_plan() -> None:
    assert plan_of(PassShape(4, 6, 2, 4)) is None


def test_overlapped_passes_warm_up_with_one_forward_more_and_then_run_in_pairs() -> None:
    """``get_pp_rank_microbatches`` of megatron-core 0.16: 2·(pp − rank − 1) + (chunks − 1)·group + 1 forwards."""
    plan = plan_of(PassShape(2, 4, 2, 2, overlaps=True))
    assert [str(action) for action in plan.compute_actions(1)] == [
        "1F0",
        "1F1",
        "3F0",
        "(3F1;3B0)OVERLAP_F_B",
        "(1F2;3B1)OVERLAP_F_B",
        "(1F3;1B0)OVERLAP_F_B",
        "(3F2;1B1)OVERLAP_F_B",
        "(3F3;3B2)OVERLAP_F_B",
        "3B3",
        "1B2",
        "1B3",
    ]


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (2, 2), (4, 3)])
def test_overlapped_passes_run_every_op_once(pp: int, chunks: int) -> None:
    shape = PassShape(pp, 2 * pp + 1 if pp == 1 else 2 * pp, chunks, pp if chunks > 1 else None, overlaps=True)
    plan = plan_of(shape)
    for rank in range(pp):
        halves = [half.key for action in plan.compute_actions(rank) for half in action.halves]
        assert len(set(halves)) == len(halves) == 2 * chunks * shape.num_microbatches
