"""Training with experts on meshes equals training in one process: loss and parameters after AdamW steps, float64, 1e-9.

Every run clips, so that a sum of gradients that is scaled wrongly changes the parameters, which AdamW alone would hide; and every
call to a process group lies in one mark of its axis and size.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, product
from pathlib import Path

import numpy as np
import pytest

from instrument.models.gpt_config import Recompute
from instrument.optim.clipping import OptimizerSync
from pptrace.axes import Axis
from pptrace.sizes.expert_options import Dispatcher, DropOrder, ExpertOptions, Forced, Scoring, SecondChoice, Shared
from pptrace.sizes.memory import MemoryPrediction
from pptrace.sizes.predicted import routes_of
from pptrace.sizes.step import StepVolume
from tests.instrument.models.cases.mixes import Mix, Outcome, facts_of, reference, train_mixes
from tests.support.extent import ALL, pairwise
from tests.support.pool import Pool

TOLERANCE = 1e-9
OPTIONS = ExpertOptions(4, 2, aux_loss=0.05, z_loss=0.01)
STEPS = 3 if ALL else 2
MIX = Mix(experts=OPTIONS, steps=STEPS, clip=0.3)
MOST_TOGETHER = 6


def check(pool: Pool, mixes: list[Mix]) -> list[list[Outcome]]:
    outcomes = pool.run(train_mixes, mixes, world=mixes[0].world, timeout_s=300)
    for index, mix in enumerate(mixes):
        for rank, outcome in enumerate(row[index] for row in outcomes):
            assert outcome.parameter_error < TOLERANCE, (mix, rank, outcome)
            assert outcome.loss_error < TOLERANCE, (mix, rank, outcome)
            assert outcome.unmarked == (), (mix, rank, outcome.unmarked[:3])
        assert any(len(row[index].losses) == mix.steps for row in outcomes)
        check_predictions(mix, [row[index] for row in outcomes])
    return outcomes


def check_predictions(mix: Mix, outcomes: list[Outcome]) -> None:
    """Ranks hold the parameters that are predicted, and the marks of every step count what is, to the byte; but for steps in
    which forwards may be abandoned and run again.
    """
    has_abandoned = mix.sync is OptimizerSync.POST_VALIDATION
    of_ranks = (routes_of(rank, outcome.experts) for rank, outcome in enumerate(outcomes))
    routes = {key: each for of_rank in of_ranks for key, each in of_rank.items()}
    predicted = StepVolume(facts_of(mix, mix.steps), mix.shape, mix.plan, routes)
    memory = MemoryPrediction(predicted, on_device=False)
    for rank, outcome in enumerate(outcomes):
        held = memory.of_rank(rank)
        assert outcome.weights == held.weights, (mix, rank)
        for step in range(1 if has_abandoned else mix.steps):
            assert outcome.volumes[step] == predicted.of_rank(rank, step), (mix, rank, step)


@pytest.mark.parametrize("ep", [1, 2])
def test_replicas_share_experts_or_hold_all_of_them(pool: Pool, ep: int) -> None:
    mix = replace(MIX, dp=2, ep=ep)
    outcomes = check(pool, [mix, replace(mix, zero=1, bucket_bytes=1000), replace(mix, recompute=Recompute.FULL)])
    for whole, sharded, recomputed in outcomes:
        along_ep = [key for key in whole.volumes[0] if key[0] == "ep"]
        assert along_ep == ([("ep", "all_to_all")] if ep > 1 else [])
        assert (("edp", "all_reduce") in whole.volumes[0]) is (ep == 1)
        assert (("edp", "reduce_scatter") in sharded.volumes[0]) is (ep == 1)
        if ep > 1:  # counts, rows there, rows back, in two layers of two microbatches; backward has rows alone
            assert whole.volumes[0]["ep", "all_to_all"].count == 2 * 2 * (3 + 2)
            assert recomputed.volumes[0]["ep", "all_to_all"].count == 2 * 2 * (3 + 2 + 2)


REPLICAS = replace(MIX, pp=2, dp=2, ep=2)
SPLIT = [
    [replace(REPLICAS, schedule=name) for name in ("interleaved-1f1b", "zbv")],
    [replace(REPLICAS, schedule="zb-h1", zero=1, ahead=2), replace(REPLICAS, sync=OptimizerSync.POST_VALIDATION)],
    [replace(REPLICAS, schedule="dualpipe")],
]


def test_schedules_run_experts_with_whole_and_split_backwards(pool: Pool) -> None:
    for mixes in SPLIT:
        check(pool, mixes)
    if ALL:
        check(pool, [replace(REPLICAS, schedule=name) for name in ("1f1b", "gpipe", "zb-h1")])


IN_PIECES = replace(OPTIONS, overlap=True, shared_width=8)
PAIRS = replace(REPLICAS, schedule="dualpipe", experts=IN_PIECES)
SHARING_TOKENS = replace(PAIRS, schedule="dualpipe-v", dp=1, tp=2, sequence=True)


def test_overlapped_pairs_alternate_in_pieces(pool: Pool) -> None:
    """With whole backwards and split ones, of which only some pairs are overlapped; nothing else travels than without."""
    padded = replace(IN_PIECES, dispatcher=Dispatcher.PADDED, shared=Shared.RESIDUAL, every=2)
    plain = replace(PAIRS, experts=replace(IN_PIECES, overlap=False))
    mixes = [plain, PAIRS, replace(PAIRS, experts=padded, recompute=Recompute.SELECTIVE)]
    for in_turn, in_pieces, of_few_layers in check(pool, mixes):
        assert in_turn.volumes == in_pieces.volumes
        assert in_turn.turns == 0
        assert in_pieces.turns > of_few_layers.turns > 0
    check(pool, [SHARING_TOKENS])
    assert all(outcome.turns > 0 for (outcome,) in check(pool, [replace(PAIRS, schedule="combined-1f1b")]))


FOLDED = replace(MIX, tp=2, dp=2, host_staged=True, experts=replace(OPTIONS, overlap=True, shared_width=12))


@pytest.mark.parametrize("ep", [1, 2, 4] if ALL else [4])
def test_experts_are_folded_over_tensor_parallel_ranks(pool: Pool, ep: int) -> None:
    mix = replace(FOLDED, ep=ep)
    check(pool, [replace(mix, sequence=True), replace(mix, recompute=Recompute.FULL)])


SIZES_OF_EP = (1, 2, 4) if ALL else (1, 2)
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "dualpipe-v") if ALL else ("1f1b", "zb-h1", "dualpipe-v")


def grid() -> list[Mix]:
    """Every mesh within eight ranks, and on it every schedule and dispatcher, with and without overlap; in turns all experts at
    once.
    """
    mixes = []
    for pp, dp, cp, tp, ep, etp in product((1, 2), (1, 2), (1, 2), (1, 2), SIZES_OF_EP, (1, 2)):
        if pp * dp * cp * tp > 8 or (dp * cp * tp) % (ep * etp):
            continue
        schedules = SCHEDULES if pp > 1 else ("1f1b",)
        for schedule, dispatcher, overlap in product(schedules, Dispatcher, (False, True)):
            grouped = len(mixes) // 2 % 2 == 1
            options = replace(OPTIONS, dispatcher=dispatcher, overlap=overlap, shared_width=8, grouped=grouped)
            zero = int(dp * cp > 1 and overlap)
            mixes.append(
                Mix(
                    pp,
                    tp,
                    cp,
                    dp,
                    tp > 1 and overlap,
                    schedule=schedule,
                    ep=ep,
                    etp=etp,
                    experts=options,
                    steps=STEPS,
                    clip=0.3,
                    zero=zero,
                )
            )
    return mixes


def settings_of(mix: Mix) -> dict[str, object]:
    settings = {name: getattr(mix, name) for name in ("pp", "tp", "cp", "dp", "ep", "etp", "schedule")}
    return settings | {name: getattr(mix.experts, name) for name in ("dispatcher", "overlap", "grouped")}


ALL_AXES = replace(MIX, pp=2, tp=2, cp=2, ep=2, etp=2, sequence=True, order="cp-dp-pp-tp", clip=0.1, schedule="zb-h1")
TIGHT = replace(OPTIONS, capacity_factor=0.6)
DROPPING = replace(MIX, tp=2, cp=2, ep=2, recompute=Recompute.FULL, experts=TIGHT)
GATHERING = replace(MIX, dp=2, ep=2, experts=replace(OPTIONS, dispatcher=Dispatcher.ALL_GATHER))
AT_ONCE = replace(MIX, dp=2, ep=2, experts=replace(OPTIONS, num=8, grouped=True))
PADDED = replace(OPTIONS, dispatcher=Dispatcher.PADDED)
PARTS = replace(MIX, tp=2, cp=2, ep=4, etp=1, experts=PADDED)
ELSEWHERE = [
    *(replace(MIX, dp=2), *(mix for mixes in SPLIT for mix in mixes), PAIRS, SHARING_TOKENS, replace(FOLDED, ep=4)),
    *(ALL_AXES, DROPPING, GATHERING, AT_ONCE, PARTS, replace(MIX, dp=2, ep=2, experts=replace(PADDED, overlap=True))),
]
"""Mixes that other tests here train: the grid leaves out what they have."""


def test_every_two_settings_together_train_as_one_process_does(pool: Pool) -> None:
    """Each dispatcher on every mesh, with every schedule, and what shares the same ranks."""
    chosen = grid() if ALL else pairwise(grid(), settings_of, lambda mix: mix.world**1.5, ELSEWHERE)
    for _, of_shape in groupby(sorted(chosen, key=lambda mix: str(mix.shape)), key=lambda mix: mix.shape):
        mixes = list(of_shape)
        for first in range(0, len(mixes), MOST_TOGETHER):  # each call has a time limit
            check(pool, mixes[first : first + MOST_TOGETHER])


def test_all_experts_at_once_train_the_same(pool: Pool) -> None:
    """Recomputed, in pieces, with weights' gradients later, experts without tokens, and buckets that fire nevertheless."""
    options = AT_ONCE.experts
    hot = replace(AT_ONCE, zero=1, bucket_bytes=1000, experts=replace(options, forced=Forced.HOT, top_k=2))
    check(pool, [replace(AT_ONCE, recompute=Recompute.FULL), hot])
    in_pieces = replace(options, overlap=True, shared_width=8)
    check(pool, [replace(AT_ONCE, pp=2, schedule="dualpipe", experts=in_pieces)])


def test_an_order_that_names_ep_trains_the_same(pool: Pool) -> None:
    """Experts are shared by ranks that are far from each other: replicas of them vary faster."""
    mix = replace(MIX, tp=2, dp=2, ep=2, order="dp-ep-tp-cp-pp")
    assert (
        mix.shape.groups_of(Axis.EP)
        == [(0, 2), (1, 3)]
        != replace(mix, order="tp-cp-ep-dp-pp").shape.groups_of(Axis.EP)
    )
    check(pool, [mix, replace(mix, order="tp-cp-ep-dp-pp", zero=1)])


def test_all_axes_together(pool: Pool) -> None:
    check(pool, [replace(ALL_AXES, recompute=Recompute.FULL)])
    if ALL:
        check(pool, [replace(ALL_AXES, schedule="dualpipe", ep=1, etp=4)])


def test_other_routers_and_layers_without_experts_train_the_same(pool: Pool) -> None:
    mix = replace(MIX, dp=2, ep=2)
    routers = [
        replace(OPTIONS, top_k=1, scoring=Scoring.SOFTMAX_BEFORE, every=2),
        replace(OPTIONS, num=8, top_k=8, width=12),
        replace(OPTIONS, num=6, top_k=3, scoring=Scoring.SIGMOID, scale=2.5, shared_width=8),
        replace(OPTIONS, scoring=Scoring.RENORMALISED, aux_loss=0.0),
    ]
    routers += [
        replace(OPTIONS, num=8, num_groups=4, groups_per_token=2, shared_width=8, shared=Shared.RESIDUAL),
        replace(OPTIONS, num=6, pyramid=(4, 6), shared_width=8, shared=Shared.GATED, overlap=True),
    ]
    check(pool, [replace(mix, experts=options) for options in routers])
    check(pool, [replace(mix, pp=2, experts=replace(OPTIONS, every=4))])  # the last stage has no experts


def test_dropped_routes_and_gathered_tokens_train_the_same(pool: Pool) -> None:
    """Capacities are those of whole sequences, which cp cuts in two chunks for each rank and tp again. Recomputed layers end
    where backward needs nothing more: they bring no output back.
    """
    by_weight = replace(TIGHT, drop_order=DropOrder.WEIGHTS, dispatcher=Dispatcher.ALL_GATHER, aux_loss=0.0)
    check(pool, [DROPPING, replace(DROPPING, experts=by_weight)])
    gathering = replace(GATHERING, pp=2, schedule="zb-h1") if ALL else GATHERING
    check(pool, [gathering, replace(gathering, experts=replace(OPTIONS, forced=Forced.HOT, capacity_factor=1.0))])


def test_a_bias_balances_by_the_counts_of_the_global_batch(pool: Pool) -> None:
    """With a bias that changes choices from step to step, also where forwards are abandoned and run again, or recomputed."""
    options = replace(OPTIONS, scoring=Scoring.SIGMOID, bias_rate=0.01, aux_loss=0.0)
    unbiased = replace(options, bias_rate=0.0)
    losses = [reference(Mix(dp=2, clip=0.3, experts=router))[1] for router in (options, unbiased)]
    assert losses[0] != losses[1]
    mix = replace(MIX, pp=2, dp=2, ep=2, experts=options)
    check(pool, [replace(mix, sync=OptimizerSync.POST_VALIDATION, recompute=Recompute.FULL)])
    if ALL:
        check(pool, [replace(mix, schedule=name) for name in ("1f1b", "zb-h1")])
        check(pool, [replace(mix, schedule="dualpipe")])
        check(pool, [replace(mix, pp=1, tp=2)])


def test_noise_and_forced_routes_belong_to_tokens(pool: Pool, tmp_path: Path) -> None:
    """Whatever rank, microbatch or part of a sequence has them, and again where a layer or a whole forward runs once more."""
    np.save(tmp_path / "routes.npy", np.random.default_rng(1).random((2, 4, 3, 16, 4)).argsort()[..., :2])
    padded = replace(PADDED, capacity_factor=0.8)
    options = [
        replace(padded, jitter=0.2, second=SecondChoice.SAMPLED),
        replace(padded, second=SecondChoice.RANDOM, shared_width=8, shared=Shared.RESIDUAL),
        replace(PADDED, forced=Forced.BIASED, overlap=True),
        replace(OPTIONS, forced=Forced.RANDOM, jitter=0.1),
        replace(OPTIONS, forced=Forced.REPLAYED, routes=str(tmp_path / "routes.npy")),
    ]
    mix = replace(MIX, dp=2, ep=2, recompute=Recompute.FULL)
    check(pool, [replace(mix, experts=each) for each in options])
    check(pool, [replace(PARTS, experts=each, sequence=index == 0) for index, each in enumerate(options[:2])])
    whole = replace(MIX, pp=2, dp=2, ep=2, experts=options[0], sync=OptimizerSync.POST_VALIDATION)
    check(pool, [whole, *([replace(whole, schedule="zb-h1"), replace(whole, experts=options[4])] if ALL else [])])
