"""Microbatches that a plan leaves outstanding, and those of them that recompute fully."""

from __future__ import annotations

from itertools import pairwise

import pytest

from instrument.models.gpt_config import Recompute
from pptrace.errors import UsageError
from pptrace.schedule.actions import Cell, Kind, iter_halves, parse_action
from pptrace.schedule.builders import interleaved
from pptrace.schedule.lower import lower
from pptrace.schedule.outstanding import Outstanding, in_flight_by_stage, outstanding, recomputed_cells
from pptrace.schedule.plan import make_plan
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.schedule.shape import Shape
from pptrace.simulator import peak_inflight
from tests.instrument.pipeline.cases.plans import overlapped
from tests.instrument.pipeline.cases.training import Case
from tests.instrument.pipeline.test_exact import check
from tests.support.pool import Pool


def test_what_is_outstanding_is_counted_from_forward_to_backward_and_to_weights() -> None:
    assert [outstanding(build("1f1b", 4, 8), rank).in_flight for rank in range(4)] == [4, 3, 2, 1]
    assert outstanding(build("gpipe", 4, 8), 0) == Outstanding(in_flight=8, deferred_weight_grads=0, held=8)
    assert outstanding(build("zb-h1", 4, 8), 3) == Outstanding(in_flight=1, deferred_weight_grads=4, held=4)
    cells = ("0F0", "0F1", "0I0", "0F2", "0W0", "0I1", "0I2", "0W1", "0W2")
    plan = make_plan("test", [[parse_action(cell) for cell in cells]])
    assert outstanding(plan, 0) == Outstanding(in_flight=2, deferred_weight_grads=2, held=3)


def test_the_forward_of_an_overlapped_pair_comes_before_its_backward() -> None:
    plan = Case("overlapped", 2, 4, rows=overlapped(2, 4)).plan
    assert [outstanding(plan, rank).in_flight for rank in range(2)] == [3, 2]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_runtime_and_the_simulator_count_the_same_activations(name: str) -> None:
    plan = build(name, 4, 8)
    assert tuple(outstanding(plan, rank).held for rank in range(4)) == peak_inflight(plan)


@pytest.mark.parametrize("keep", range(6))
@pytest.mark.parametrize("microbatches", [1, 3, 4, 9])
def test_1f1b_recomputes_as_megatron_does(microbatches: int, keep: int) -> None:
    plan = build("1f1b", 4, microbatches)
    for rank in range(4):
        window = min(4 - rank - 1, microbatches) + 1  # Megatron-LM's warmup and one
        expected = {Cell(rank, index) for index in range(microbatches) if index % window >= keep}
        assert recomputed_cells(plan, rank, keep) == expected


@pytest.mark.parametrize("keep", range(6))
@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_interleaved_1f1b_recomputes_as_megatron_does(microbatches: int, keep: int) -> None:
    shape = Shape(2, microbatches, 2)
    plan = interleaved.build_1f1b(shape)
    for rank in range(2):
        window = interleaved.num_warmup_forwards(shape, rank) + 1
        table = interleaved.schedule_table(microbatches, 2, 2)
        expected = {Cell(2 * chunk + rank, mb) for k, (mb, chunk) in enumerate(table) if k % window >= keep}
        assert recomputed_cells(plan, rank, keep) == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_keeping_none_recomputes_all_and_keeping_the_window_none(schedule: str) -> None:
    plan = build(schedule, 4, 8)
    for rank in range(4):
        forwards = {Cell(a.stage, a.microbatch or 0) for a in iter_halves(plan.ranks[rank]) if a.kind is Kind.F}
        window = outstanding(plan, rank).in_flight
        assert recomputed_cells(plan, rank, 0) == forwards
        assert recomputed_cells(plan, rank, window) == frozenset()
        by_keep = [recomputed_cells(plan, rank, keep) for keep in range(window + 1)]
        assert all(more > fewer for more, fewer in pairwise(by_keep))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "zb-h1"])
def test_no_more_than_are_kept_are_outstanding_where_backwards_come_in_order(schedule: str) -> None:
    plan = build(schedule, 4, 11)
    for rank in range(4):
        again = recomputed_cells(plan, rank, 2)
        kept: set[int] = set()
        for half in iter_halves(plan.ranks[rank]):
            assert half.microbatch is not None
            if half.kind is Kind.F and Cell(half.stage, half.microbatch) not in again:
                kept.add(half.microbatch)
            elif half.kind in (Kind.B, Kind.I):
                kept.discard(half.microbatch)
            assert len(kept) <= 2


def test_a_negative_number_is_one_line() -> None:
    with pytest.raises(UsageError, match="-1 outstanding microbatches without full recompute; expected 0 or more"):
        recomputed_cells(build("1f1b", 2, 2), 0, -1)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv", "dualpipe-v", "dualpipe"])
def test_gradients_are_exact_whichever_microbatches_recompute(pool: Pool, schedule: str) -> None:
    chunks = SCHEDULES[schedule].default_chunks
    ways = ((0, Recompute.NONE), (1, Recompute.SELECTIVE), (3, Recompute.NONE))
    check(pool, [Case(schedule, 4, 8, chunks=chunks, keep=keep, recompute=recompute) for keep, recompute in ways])


def test_the_most_forwards_in_flight_are_counted_stage_by_stage() -> None:
    plan = lower(build("interleaved-1f1b", 2, 4, 2))
    assert [in_flight_by_stage(plan, rank) for rank in range(2)] == [{0: 4, 2: 2}, {1: 3, 3: 1}]
    assert in_flight_by_stage(build("1f1b", 4, 8), 1) == {1: 3}
    assert in_flight_by_stage(build("zb-h1", 2, 4), 0) == {0: 2}
