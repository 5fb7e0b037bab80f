"""Training on mixes of axes that fit eight ranks equals training in one process: loss and parameters, float64, 1e-9.

The grid has every two settings of axes, schedule and sequence parallelism together, and every mesh with PPTRACE_ALL set. In
every run each call to a process group lies in one mark of its axis and size, and the marks count what the formulas predict, to
the byte.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from instrument.context.shard import KeyExchange, Layout
from instrument.models.gpt_config import Recompute, RecomputeModule
from instrument.optim.clipping import OptimizerSync
from instrument.optim.gradient_sync import Reduce
from pptrace.sizes.memory import MemoryPrediction
from pptrace.sizes.step import StepVolume
from tests.instrument.models.cases.mixes import SIZES, STEPS, Mix, Outcome, facts_of, train_mixes
from tests.support.extent import ALL, pairwise
from tests.support.pool import Pool

TOLERANCE = 1e-9


def check(pool: Pool, mixes: list[Mix]) -> list[list[Outcome]]:
    outcomes = pool.run(train_mixes, mixes, world=mixes[0].world, timeout_s=300)
    for index, mix in enumerate(mixes):
        ranks = [row[index] for row in outcomes]
        predicted = StepVolume(facts_of(mix, mix.steps), mix.shape, mix.plan)
        is_known = mix.lengths is None and mix.sync is OptimizerSync.SYNCHRONOUS  # no step is taken back
        settled = mix.steps if is_known else 0
        for rank, outcome in enumerate(ranks):
            assert outcome.volumes[:settled] == tuple(predicted.of_rank(rank, step) for step in range(settled)), mix
            assert outcome.parameter_error < TOLERANCE, (mix, rank, outcome)
            assert outcome.loss_error < TOLERANCE, (mix, rank, outcome)
            assert outcome.num_parameters > 0
            assert outcome.unmarked == (), (mix, rank, outcome.unmarked[:3])
        assert any(len(outcome.losses) == STEPS for outcome in ranks)
    return outcomes


GRID = [
    Mix(*sizes, schedule=schedule, sequence=sequence)
    for sizes in SIZES
    for schedule in (("1f1b", "interleaved-1f1b") if sizes[0] > 1 else ("1f1b",))
    for sequence in ((False, True) if sizes[1] > 1 else (True,))  # one rank has nothing to share a sequence with
]


def settings_of(mix: Mix) -> dict[str, object]:
    return {name: getattr(mix, name) for name in ("pp", "tp", "cp", "dp", "schedule", "sequence")}


def name_of(mix: Mix) -> str:
    return f"pp{mix.pp}-tp{mix.tp}-cp{mix.cp}-dp{mix.dp}-{mix.schedule}{'-sp' if mix.sequence else ''}"


UNEVEN_ENDS = (
    Mix(pp=2, tp=2, schedule="interleaved-1f1b", sequence=True, vocabulary=301, split=(0, 2, 2, 0)),
    Mix(pp=2, tp=2, schedule="zbv", vocabulary=299, tied=False, split=(0, 3, 1, 0), recompute=Recompute.SELECTIVE),
    Mix(pp=2, dp=2, vocabulary=300, zero=1, split=(4, 0), clip=0.3),
    Mix(tp=4, sequence=True, vocabulary=301),
)


@pytest.mark.parametrize("mix", UNEVEN_ENDS, ids=name_of)
def test_any_vocabulary_and_stages_of_the_ends_alone_train_as_one_process_does(pool: Pool, mix: Mix) -> None:
    for rank, (outcome,) in enumerate(check(pool, [mix])):
        volume = StepVolume(facts_of(mix, STEPS), mix.shape, mix.plan)
        assert outcome.weights == MemoryPrediction(volume, on_device=False).of_rank(rank).weights


DEEP = Mix(pp=2, dp=2, schedule="interleaved-1f1b", bucket_bytes=3000)
WHEN = (
    replace(DEEP, reduce=Reduce.ALIGNED),
    replace(DEEP, reduce=Reduce.ALIGNED, zero=1, overlaps_gathers=True, tied=False, recompute=Recompute.FULL),
    replace(DEEP, reduce=Reduce.AFTER, zero=1, overlaps_gathers=True, clip=0.3, sync=OptimizerSync.POST_VALIDATION),
    replace(DEEP, schedule="zb-h1", reduce=Reduce.ALIGNED, zero=1, overlaps_gathers=True),
    replace(DEEP, schedule="dualpipe", reduce=Reduce.AFTER, zero=1, overlaps_gathers=True),
    Mix(
        tp=2,
        cp=2,
        zero=1,
        sequence=True,
        overlaps_gathers=True,
        bucket_bytes=2000,
        num_layers=1,
        recompute=Recompute.FULL,
    ),
)


@pytest.mark.parametrize("mix", WHEN, ids=name_of)
def test_sums_and_gathers_at_other_times_change_nothing(pool: Pool, mix: Mix) -> None:
    """Losses, parameters, and the bytes of every step, all of them in marks (one that waits for its norm is in the next)."""
    check(pool, [mix])


PARTS = Mix(pp=2, tp=2, cp=2, scatters=True)
IN_PARTS = (
    replace(PARTS, schedule="zb-h1", ahead=2, recompute=Recompute.FULL),
    replace(PARTS, cp=1, schedule="interleaved-1f1b", tied=False),
    replace(PARTS, cp=1, schedule="zbv", encoder=(2, 8), tied=False),
)


@pytest.mark.parametrize("mix", IN_PARTS, ids=name_of)
def test_each_rank_of_tp_sends_a_part_of_an_activation_and_trains_the_same(pool: Pool, mix: Mix) -> None:
    """Their gathers are marked and predicted as all else; a chunk on its rank is handed on as it is."""
    check(pool, [mix])
    full, parted = (
        StepVolume(facts_of(one, STEPS), one.shape, one.plan) for one in (replace(mix, scatters=False), mix)
    )
    for rank in range(mix.world):
        before, after = (volume.of_rank(rank, 1)["pp", "send"] for volume in (full, parted))
        assert (after.count, after.bytes) == (before.count, before.bytes // mix.tp)


def test_messages_of_another_dtype_have_its_bytes_and_its_rounding(pool: Pool) -> None:
    mix = Mix(pp=2, tp=2, sent_dtype="float32", scatters=True)
    (outcomes,) = zip(*pool.run(train_mixes, [mix], world=mix.world, timeout_s=300), strict=True)
    predicted = StepVolume(facts_of(mix, STEPS), mix.shape, mix.plan)
    for rank, outcome in enumerate(outcomes):
        assert outcome.volumes == tuple(predicted.of_rank(rank, step) for step in range(STEPS))
        assert (outcome.unmarked, outcome.loss_error < 1e-5) == ((), True)
    assert any(outcome.loss_error > 1e-12 for outcome in outcomes), "messages have 32 bits, the model has 64"


OFFLOADING = Mix(pp=2, tp=2, offloads=True, sequence=True)


@pytest.mark.parametrize(
    "mix", [replace(OFFLOADING, schedule="zb-h1"), replace(OFFLOADING, tp=1, dp=2, zero=1, sequence=False)]
)
def test_activations_on_the_host_change_nothing(pool: Pool, mix: Mix) -> None:
    check(pool, [mix, replace(mix, recompute=Recompute.SELECTIVE)])


IN_ANY_ORDER = (
    Mix(pp=2, tp=2, cp=2, sequence=True, order="pp-tp-cp-dp"),
    Mix(pp=2, cp=2, dp=2, zero=1, order="cp-dp-pp-tp"),
)


@pytest.mark.parametrize("mix", IN_ANY_ORDER, ids=lambda mix: mix.order)
def test_any_order_of_the_axes_trains_the_same(pool: Pool, mix: Mix) -> None:
    check(pool, [mix])


OVERLAPPED = [Mix(tp=4, sequence=sequence, overlap=True) for sequence in (False, True)]


def test_overlapped_communication_changes_nothing(pool: Pool) -> None:
    check(pool, OVERLAPPED)


ELSEWHERE = (*UNEVEN_ENDS, *WHEN, *IN_ANY_ORDER, *OVERLAPPED)
"""Mixes that these tests train as one process does: the grid leaves out what they have."""


@pytest.mark.parametrize(
    "mix", GRID if ALL else pairwise(GRID, settings_of, lambda mix: mix.world, ELSEWHERE), ids=name_of
)
def test_every_mix_trains_as_one_process_does(pool: Pool, mix: Mix) -> None:
    check(pool, [mix])


def test_split_backwards_and_v_shapes_train_on_tensor_and_context_parallel_ranks(pool: Pool) -> None:
    """Of each, or by default of one of them."""
    both = Mix(pp=2, tp=2, cp=2, sequence=True, overlap=True)
    tensor, context = replace(both, cp=1), replace(both, tp=1, sequence=False)
    if ALL:
        check(pool, [replace(both, schedule=name) for name in ("zb-h1", "zbv", "dualpipe-v")])
        check(pool, [replace(both, schedule="dualpipe")])
        check(pool, [Mix(pp=2, tp=2, dp=2, schedule="zbv", ahead=2)])
    else:
        check(pool, [replace(tensor, schedule="zb-h1"), replace(tensor, schedule="zbv", ahead=2)])
        check(pool, [replace(tensor, schedule="dualpipe")])
        check(pool, [replace(context, schedule="dualpipe-v")])


def test_heads_travel_in_place_of_keys_and_beside_them(pool: Pool) -> None:
    check(pool, [Mix(cp=4, ulysses=ulysses) for ulysses in (2, 4)])
    gathered = {"exchange": KeyExchange.ALL_GATHER}
    check(
        pool, [Mix(cp=4, kv_heads=1, layout=Layout.CONTIGUOUS), Mix(cp=4, **gathered), Mix(cp=4, ulysses=2, **gathered)]
    )
    if ALL:
        check(pool, [Mix(pp=2, cp=4, ulysses=2)])
    check(pool, [Mix(tp=2, cp=2, ulysses=2, sequence=True)])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_key_heads_than_ranks_are_copied(pool: Pool, kv_heads: int) -> None:
    check(pool, [Mix(tp=4, kv_heads=kv_heads, sequence=kv_heads == 1)])
    if ALL or kv_heads == 1:
        check(pool, [Mix(pp=2 if ALL else 1, tp=2, cp=2, kv_heads=kv_heads, sequence=True)])


@pytest.mark.parametrize("recompute", [Recompute.SELECTIVE, Recompute.FULL])
def test_recomputed_layers_communicate_again_and_are_exact(pool: Pool, recompute: Recompute) -> None:
    mix = Mix(pp=2 if ALL else 1, tp=2, cp=2, recompute=recompute, sequence=True)
    less = replace(mix, num_layers=1) if recompute is Recompute.FULL else replace(mix, modules=(RecomputeModule.MLP,))
    check(pool, [mix, less])
    if recompute is Recompute.FULL:
        check(pool, [replace(each, pp=2, cp=1) for each in (mix, less)])


def test_every_axis_goes_through_host_memory(pool: Pool) -> None:
    """Of the replicas of cp and dp with ZeRO, below."""
    check(pool, [Mix(pp=2, tp=2, cp=2 if ALL else 1, sequence=True, host_staged=True)])
    if ALL:
        check(pool, [Mix(cp=2, tp=2, dp=2, host_staged=True, tied=False)])


@pytest.mark.parametrize("sync", OptimizerSync)
def test_the_norm_counts_every_parameter_of_the_model_once(pool: Pool, sync: OptimizerSync) -> None:
    """Gradients of both norms are cut down, so that one that is counted twice, or not at all, changes the update."""
    mix = Mix(pp=2, tp=2, clip=0.3, sync=sync)
    check(pool, [mix, replace(mix, sequence=True, schedule="zbv", tied=False)])
    check(pool, [Mix(tp=4, kv_heads=kv_heads, clip=0.3, sync=sync) for kv_heads in (1, 2)])


def test_each_replica_updates_its_part(pool: Pool) -> None:
    """ZeRO-1, with buckets that end within a parameter, and parameters that are shared out over tp, copied and tied."""
    mix = Mix(dp=2, zero=1, clip=0.3, bucket_bytes=1000)
    split = [replace(mix, pp=2, schedule=name) for name in ("interleaved-1f1b", "zb-h1")]
    check(pool, [*split, replace(mix, pp=2, sync=OptimizerSync.POST_VALIDATION)])
    check(pool, [replace(mix, pp=2, schedule="dualpipe", clip=None)])
    if ALL:
        check(pool, [replace(mix, pp=2, tp=2, sequence=True)])
    check(pool, [replace(mix, cp=2 if ALL else 1, tp=2, kv_heads=1, sequence=True)])
    check(pool, [replace(mix, dp=1, cp=4, clip=None, host_staged=True)])


@pytest.mark.parametrize("zero", [2, 3])
def test_replicas_share_out_gradients_and_parameters(pool: Pool, zero: int) -> None:
    mix = Mix(dp=2, zero=zero)
    check(pool, [mix, replace(mix, tied=False, clip=0.3)])
    check(pool, [replace(mix, pp=2, schedule="interleaved-1f1b" if zero == 3 else "1f1b")])
    if zero == 3:
        check(pool, [replace(mix, pp=2 if ALL else 1, tp=2, sequence=True, clip=0.3)])
        check(pool, [replace(mix, cp=2, recompute=Recompute.FULL, host_staged=True)])
    else:  # a step is taken back while its gathered parameters are kept
        check(pool, [replace(mix, pp=2, tied=False, clip=0.3, sync=OptimizerSync.POST_VALIDATION)])
