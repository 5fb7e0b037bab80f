"""Bytes that stages keep from I to W, in closed form, against storages that are alive after the I of real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from instrument.models.gpt_config import Recompute
from pptrace.sizes.activations import ActivationSizes
from pptrace.sizes.expert_options import Dispatcher, ExpertOptions, Scoring, Shared
from pptrace.sizes.expert_step import ExpertVolume, LayerRoutes
from tests.instrument.models.cases.mixes import Mix, facts_of
from tests.sizes.held_weight_work import HeldWork, hold_weight_work
from tests.support.extent import ALL, by_turns
from tests.support.pool import Pool

EXPERTS = ExpertOptions(4, 2, width=20)
SHARED = replace(EXPERTS, shared_width=8, aux_loss=0.1, z_loss=0.1)
ONE = Mix(pp=2, schedule="zb-h1")
DENSE = [
    *(ONE, replace(ONE, dropout=0.1, tied=False), replace(ONE, bfloat16=True, kv_heads=2)),
    *(replace(ONE, recompute=Recompute.FULL), replace(ONE, recompute=Recompute.SELECTIVE)),
    replace(ONE, schedule="dualpipe"),
]
ON_ONE_RANK = [
    *(replace(ONE, experts=replace(EXPERTS, dispatcher=dispatcher)) for dispatcher in Dispatcher),
    replace(ONE, experts=replace(EXPERTS, scoring=Scoring.SIGMOID), bfloat16=True, dropout=0.1),
    *(replace(ONE, experts=replace(SHARED, shared=how)) for how in Shared),
    *(replace(ONE, experts=replace(SHARED, shared=how), bfloat16=True, dropout=0.1) for how in Shared),
    replace(ONE, experts=replace(EXPERTS, every=2), recompute=Recompute.FULL),
]
TWO = replace(ONE, tp=2)
TENSOR_PARALLEL = [
    TWO,
    replace(TWO, overlap=True, bfloat16=True),
    replace(TWO, sequence=True, dropout=0.1, kv_heads=1),
    replace(TWO, sequence=True, overlap=True),
]
SHARING_TOKENS = [
    replace(TWO, ep=2, sequence=sequence, bfloat16=bfloat16, experts=experts)
    for number, (bfloat16, experts) in enumerate(
        (
            *((False, EXPERTS), (True, EXPERTS), (False, SHARED)),
            *((False, replace(SHARED, shared=Shared.RESIDUAL)), (True, replace(SHARED, shared=Shared.GATED))),
        )
    )
    for sequence in ((False, True) if ALL or number == 0 else (number % 2 == 0,))
] + [replace(TWO, etp=2, experts=replace(EXPERTS, dispatcher=dispatcher)) for dispatcher in Dispatcher]
CONTEXT_PARALLEL = [
    replace(ONE, cp=2),
    replace(ONE, cp=2, ulysses=2, kv_heads=1),
    replace(ONE, cp=2, ep=2, experts=EXPERTS),
]
OVERLAPPED = [
    Mix(pp=2, dp=2, ep=2, schedule=schedule, experts=replace(EXPERTS, overlap=True, dispatcher=dispatcher, num=num))
    for number, dispatcher in enumerate(Dispatcher)
    for schedule, num in product(("zb-h1", "dualpipe-v"), (2, 4))
    if ALL or ((schedule == "zb-h1") == (num == 2)) == (number % 2 == 0)  # every two of them together
] + [Mix(pp=2, dp=2, ep=2, schedule="dualpipe-v", experts=replace(SHARED, overlap=True, shared=how)) for how in Shared]


MIXES = {
    "dense": DENSE,
    "experts": ON_ONE_RANK,
    "tp": TENSOR_PARALLEL,
    "tp and experts": SHARING_TOKENS,
    "cp": CONTEXT_PARALLEL,
    "overlapped": OVERLAPPED,
}


@pytest.mark.parametrize(("name", "sequences"), by_turns([*MIXES], [1, 2]))
def test_what_ranks_keep_from_i_to_w_is_predicted_to_the_byte(name: str, sequences: int, pool: Pool) -> None:
    mixes = MIXES[name]
    held = pool.run(hold_weight_work, mixes, sequences, world=mixes[0].world)
    for mix, *of_ranks in zip(mixes, *held, strict=True):
        run = replace(facts_of(mix, 1), microbatch_size=sequences)
        volume = None if mix.experts is None else ExpertVolume(run, mix.shape, routes_of(mix, of_ranks))
        sizes = ActivationSizes(run, mix.tp, mix.cp, on_device=False)
        for rank, stages in enumerate(of_ranks):
            for each in stages:
                index, last = mix.plan.model_stage(each.stage), mix.plan.chain_length - 1
                of_experts = [
                    None if volume is None or not run.experts_of(layer) else volume.weight_work(rank, layer)
                    for layer in run.layers_of(index)
                ]
                assert sizes.weight_work(of_experts, index == 0, index == last) == each.num_bytes, (mix, rank, each)


def routes_of(mix: Mix, of_ranks: Sequence[Sequence[HeldWork]]) -> dict[tuple[int, int, int], LayerRoutes]:
    """The routes of all layers with experts, by rank, step and layer."""
    run, found = facts_of(mix, 1), {}
    for rank, stages in enumerate(of_ranks):
        for each in stages:
            layers = [layer for layer in run.layers_of(mix.plan.model_stage(each.stage)) if run.experts_of(layer)]
            for layer, routes in zip(layers, each.routes, strict=True):
                found[rank, 0, layer] = routes
    return found
