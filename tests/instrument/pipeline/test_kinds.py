"""Split backwards, V-shaped placements and overlapped pairs are as exact as everything else."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _add_unshard_reshard

from instrument.models.gpt_config import Recompute, RecomputeMethod, RecomputeModule
from instrument.pipeline.transport import Mode
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.schedule.text import from_rows
from pptrace.schedule.validate import validate
from tests.instrument.pipeline.cases.plans import Rows, mixed_1f1b, overlapped, split_1f1b, split_rows, v_shaped
from tests.instrument.pipeline.cases.training import Case, compare_with_one_process
from tests.instrument.pipeline.test_exact import check
from tests.support.extent import ALL
from tests.support.pool import Pool

SIZES = (2, 4)


def case(rows: Rows, pp: int, microbatches: int, **more: object) -> Case:
    validate(from_rows((row.split() for row in rows), "by hand"))
    return Case("by hand", pp, microbatches, rows=rows, **more)


@pytest.mark.parametrize("pp", [1, *SIZES])
def test_input_and_weight_gradients_apart_are_exact(pool: Pool, pp: int) -> None:
    few = ((1, 0, False), (3, 1, True), (6, 6, True))
    sizes = product((1, 3, 6), (0, 1, 6), (False, True)) if ALL else few
    check(pool, [case(split_1f1b(pp, m, delay), pp, m, tied=tied) for m, delay, tied in sizes])


@pytest.mark.parametrize("pp", SIZES)
def test_split_and_whole_backwards_in_one_plan_are_exact(pool: Pool, pp: int) -> None:
    check(pool, [case(mixed_1f1b(pp, 5), pp, 5, tied=tied) for tied in (False, True)])


def test_split_backwards_of_two_replicas_are_exact(pool: Pool) -> None:
    check(pool, [case(split_1f1b(2, 4, 2), 2, 4, dp=2, tied=tied) for tied in (False, True)])


def test_split_backwards_of_chunks_are_exact(pool: Pool) -> None:
    for pp in SIZES if ALL else SIZES[1:]:
        rows = split_rows(build("interleaved-1f1b", pp, 4, 2), 3)
        check(pool, [case(rows, pp, 4), case(rows, pp, 4, tied=True)])


WHOLE, SPLIT = ("B",), ("I", "W")
ON_A_V = list(product((1, *SIZES), (WHOLE, SPLIT), Mode))
FEW_ON_A_V = [
    *((1, SPLIT, Mode.BATCHED), (2, WHOLE, Mode.BATCHED), (4, SPLIT, Mode.BATCHED)),
    *((2, WHOLE, Mode.EVEN_ODD), (4, SPLIT, Mode.EVEN_ODD), (2, SPLIT, Mode.BLOCKING), (4, WHOLE, Mode.BLOCKING)),
]
"""Every two settings together; one rank has no messages."""


@pytest.mark.parametrize(("pp", "backward", "mode"), ON_A_V if ALL else FEW_ON_A_V)
def test_chunks_on_a_v_are_exact(pool: Pool, pp: int, backward: tuple[str, ...], mode: Mode) -> None:
    rows = v_shaped(pp, 3, backward)
    check(
        pool, [case(rows, pp, 3, tied=tied, mode=mode) for tied in ((False, True) if mode is Mode.BATCHED else (True,))]
    )


@pytest.mark.parametrize(("pp", "backward"), product(SIZES, ("B", "I")) if ALL else [(SIZES[0], "I"), (SIZES[1], "B")])
def test_overlapped_pairs_are_exact(pool: Pool, pp: int, backward: str) -> None:
    rows = overlapped(pp, 6, backward)
    assert "OVERLAP_F_B" in rows[0]
    check(pool, [case(rows, pp, 6, tied=tied) for tied in (False, True)])


@pytest.mark.parametrize("recompute", [Recompute.SELECTIVE, Recompute.FULL])
def test_recomputed_activations_are_exact(pool: Pool, recompute: Recompute) -> None:
    for pp in SIZES if ALL else SIZES[1:]:
        whole = Case("1f1b", pp, 4, tied=True, recompute=recompute)
        split = case(split_1f1b(pp, 4, 2), pp, 4, tied=True, recompute=recompute)
        check(pool, [whole, split, case(overlapped(pp, 4, "I"), pp, 4, recompute=recompute)])


UNIFORM, BLOCK = RecomputeMethod
MLP = (RecomputeModule.MLP,)


def test_layers_and_modules_that_recompute_are_exact(pool: Pool) -> None:
    """Of three layers of a stage: one, two as one and one more, all as one; the MLP, and both modules."""
    one = Case("1f1b", 2, 4, layers=6, recompute=Recompute.FULL)
    by_layers = [
        replace(one, method=method, num_layers=number) for method, number in ((BLOCK, 1), (UNIFORM, 2), (UNIFORM, 3))
    ]
    modules = [replace(one, recompute=Recompute.SELECTIVE, modules=names) for names in (MLP, tuple(RecomputeModule))]
    split = case(split_1f1b(2, 4, 2), 2, 4, recompute=Recompute.FULL)
    check(pool, [*by_layers, *modules, replace(split, layers=6, method=UNIFORM, num_layers=2)])


def test_weight_gradients_put_aside_are_counted(pool: Pool) -> None:
    cases = [case(split_1f1b(2, 6, delay), 2, 6) for delay in (0, 2, 6)]
    outcomes = pool.run(compare_with_one_process, cases, world=2)
    assert [[outcome.peak_deferred_weight_grads for outcome in row] for row in outcomes] == [[1, 3, 6], [1, 3, 6]]
    assert [outcome.peak_in_flight for outcome in outcomes[0]] == [2, 2, 2]


WAYS = [*({"mode": mode} for mode in Mode), {"ahead": 2}]


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_schedule_of_the_catalogue_is_exact(pool: Pool, schedule: str) -> None:
    """Each on four ranks, and tied on two, in another mode or posted ahead: by default they take turns."""
    turn, chunks = sorted(SCHEDULES).index(schedule), SCHEDULES[schedule].default_chunks
    two, four = (Case(schedule, pp, 2 * pp, chunks=chunks, tied=pp == 2) for pp in SIZES)
    check(pool, [replace(two, **way) for way in (WAYS if ALL else [WAYS[1 + turn % 3]])])
    check(pool, [replace(four, ahead=ahead) for ahead in ((0, 2) if ALL else (0,))])


@pytest.mark.parametrize("tied", [False, True])
def test_stages_with_a_copy_on_two_ranks_are_exact(pool: Pool, tied: bool) -> None:
    """In every mode, by default of two ranks, and of four where embeddings are tied."""
    for pp in SIZES if ALL else (4 if tied else 2,):
        check(pool, [Case("dualpipe", pp, 2 * pp + 2, chunks=2, layers=pp + 3, tied=tied, mode=mode) for mode in Mode])
    check(pool, [Case("dualpipe", 2, 6, dp=2, chunks=2, tied=tied)])


def test_a_last_group_smaller_than_p_is_exact(pool: Pool) -> None:
    for pp, m, chunks in ((3, 5, 3), (4, 6, 2), (4, 5, 2)) if ALL else ((3, 5, 3), (4, 6, 2)):
        check(
            pool, [Case("interleaved-1f1b", pp, m, chunks=chunks, layers=pp * chunks, ahead=ahead) for ahead in (0, 2)]
        )


def lowered_by_torch(plan: Plan) -> Rows:
    """A plan's cells after torch's own passes: parameter gathering and sends and receives."""
    compute = {
        rank: [_Action.from_str(str(action)) for action in row] for rank, row in enumerate(plan.compute_only().ranks)
    }
    gathered = {rank: _add_unshard_reshard(row) for rank, row in compute.items()}
    lowered = _add_send_recv(gathered, lambda stage: plan.placement[stage], plan.num_stages)
    return tuple(" ".join(str(action) for action in row if action is not None) for _, row in sorted(lowered.items()))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv"])
def test_plans_that_torch_lowered_are_exact(pool: Pool, schedule: str) -> None:
    for pp in SIZES if ALL else SIZES[1:]:
        plan = build(schedule, pp, 2 * pp)
        rows = lowered_by_torch(plan)
        assert "UNSHARD" in rows[0]
        assert "SEND_F" in rows[0]
        check(pool, [case(rows, pp, 2 * pp, ahead=ahead) for ahead in (0, 2)])
