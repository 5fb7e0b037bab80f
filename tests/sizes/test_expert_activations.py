"""Bytes that a layer's experts keep for their backward, in closed form, against storages that are alive after a real forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from instrument.mesh import MeshShape
from instrument.models.gpt import Block
from instrument.models.gpt_config import GptConfig, Recompute
from instrument.pipeline.memory import StorageWatch
from pptrace.sizes.activations import ActivationSizes
from pptrace.sizes.expert_options import Dispatcher, ExpertOptions, Scoring, Shared
from pptrace.sizes.expert_step import ExpertVolume, LayerRoutes
from pptrace.sizes.memory import MemoryPrediction
from pptrace.sizes.step import StepVolume
from tests.instrument.models.cases.mixes import Mix, facts_of
from tests.sizes.held_layers import hold_layers
from tests.support.gpt_runs import facts
from tests.support.pool import Pool

SEQUENCES, LENGTH, HIDDEN, HEADS = 3, 16, 32, 8
EVERYTHING: dict[str, Any] = {"shared_width": 12, "shared": Shared.RESIDUAL, "aux_loss": 0.1, "z_loss": 0.1}
CASES: list[dict[str, Any]] = [
    *({}, {"aux_loss": 0.1, "scale": 2.0}, {"z_loss": 0.1, "scoring": Scoring.SOFTMAX_BEFORE, "top_k": 1}),
    {"scoring": Scoring.RENORMALISED, "shared_width": 12},
    {"scoring": Scoring.SIGMOID, "aux_loss": 0.1, "overlap": True},
    {"scoring": Scoring.SIGMOID, "top_k": 1, "shared_width": 12, "shared": Shared.GATED},
    *({"capacity_factor": 0.5}, {"grouped": True}, {"dispatcher": Dispatcher.PADDED}),
    *({"dispatcher": Dispatcher.ALL_GATHER}, EVERYTHING),
]


def alive_after_forward(options: ExpertOptions, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes that a layer holds after its forward, its output too; rows that its experts computed)."""
    torch.manual_seed(0)
    block = Block(GptConfig(2, HIDDEN, HEADS, LENGTH, dtype=dtype, experts=options))
    block.experts.draw_experts(1, 0.02)
    computed: list[int] = []
    inner = block.experts._compute
    block.experts._compute = lambda rows, of: (computed.append(len(rows)), inner(rows, of))[1]
    x = torch.randn(SEQUENCES, LENGTH, HIDDEN, dtype=dtype).requires_grad_()
    watch = StorageWatch(block.parameters())
    with watch:
        output = block(x * 1)
        alive = watch.live_bytes() - output.untyped_storage().nbytes()
    return alive, computed[0] if computed else 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bytes_of_a_layer_are_those_alive_after_its_forward(case: dict[str, Any], dtype: torch.dtype) -> None:
    options = ExpertOptions(8, **{"top_k": 2, "width": 20, **case})
    alive, rows = alive_after_forward(options, dtype)
    run = facts(
        hidden=HIDDEN,
        heads=HEADS,
        kv_heads=HEADS,
        sequence=LENGTH,
        microbatch_size=SEQUENCES,
        dtype=str(dtype).removeprefix("torch."),
        experts=options,
    )
    if options.overlap:  # which computes experts in a function of its own, and drops nothing
        rows = SEQUENCES * LENGTH * options.top_k
    counted = LayerRoutes([0], [rows], [rows])
    of_experts = ExpertVolume(run, MeshShape(1), {(0, 0, 0): counted}).kept_bytes(0, 0, "none")
    assert ActivationSizes(run, 1, 1, on_device=False).layer("none", of_experts) == alive


def test_a_padded_buffer_with_a_capacity_needs_no_counts_and_others_do() -> None:
    for dispatcher, factor, is_known in (("padded", 1.0, True), ("padded", None, False), ("all-to-all", 1.0, False)):
        options = ExpertOptions(8, dispatcher=Dispatcher(dispatcher), capacity_factor=factor)
        volume = ExpertVolume(facts(experts=options), MeshShape(1))
        assert (volume.kept_bytes(0, 0, "none") is not None) is is_known


OVERLAPPED = ExpertOptions(4, 2, width=20, overlap=True)
ON_RANKS = [
    Mix(dp=2, ep=2, experts=OVERLAPPED),
    Mix(dp=2, ep=2, experts=replace(OVERLAPPED, grouped=True)),
    Mix(dp=2, ep=2, experts=replace(OVERLAPPED, num=2, shared_width=8, shared=Shared.GATED), bfloat16=True),
    Mix(dp=2, ep=2, experts=replace(OVERLAPPED, dispatcher=Dispatcher.PADDED, shared_width=8)),
    Mix(dp=2, ep=2, experts=replace(OVERLAPPED, dispatcher=Dispatcher.ALL_GATHER)),
    Mix(tp=2, etp=2, experts=OVERLAPPED),
]
PAIRS = [
    Mix(pp=2, dp=2, ep=2, schedule="dualpipe-v", experts=options)
    for options in (
        *(OVERLAPPED, replace(OVERLAPPED, shared_width=8, capacity_factor=0.5)),
        replace(OVERLAPPED, num=2, shared_width=8, shared=Shared.RESIDUAL),
        replace(OVERLAPPED, num=2, dispatcher=Dispatcher.PADDED, capacity_factor=1.0),
        replace(OVERLAPPED, dispatcher=Dispatcher.PADDED, aux_loss=0.1, scale=2.0),
        replace(OVERLAPPED, dispatcher=Dispatcher.ALL_GATHER, shared_width=8),
        replace(OVERLAPPED, overlap=False),
    )
]
NARROW = [
    replace(PAIRS[0], bfloat16=True, experts=replace(OVERLAPPED, scoring=scoring, scale=scale, shared_width=8))
    for scoring, scale in (
        (Scoring.SOFTMAX_AFTER, 1.0),
        (Scoring.SOFTMAX_AFTER, 2.0),
        (Scoring.SOFTMAX_BEFORE, 1.0),
        (Scoring.SIGMOID, 1.0),
    )
] + [replace(PAIRS[0], bfloat16=True)]
SHARING = [
    Mix(pp=2, tp=2, schedule="dualpipe-v", ep=2, experts=OVERLAPPED),
    Mix(pp=2, tp=2, schedule="dualpipe-v", ep=2, experts=replace(OVERLAPPED, shared_width=8)),
    Mix(pp=2, tp=2, schedule="dualpipe-v", ep=2, sequence=True, dropout=0.1, experts=OVERLAPPED),
    Mix(pp=2, cp=2, schedule="dualpipe-v", ep=2, recompute=Recompute.SELECTIVE, experts=OVERLAPPED),
    Mix(pp=2, cp=2, schedule="dualpipe-v", ep=2, recompute=Recompute.FULL, experts=OVERLAPPED),
    Mix(pp=2, tp=2, schedule="dualpipe-v", etp=2, experts=OVERLAPPED),
]
SHARED_BY_TWO = [
    Mix(pp=2, tp=2, dp=2, schedule="dualpipe-v", ep=2, etp=2, experts=options)
    for options in (OVERLAPPED, replace(OVERLAPPED, num=2), replace(OVERLAPPED, num=2, dispatcher=Dispatcher.PADDED))
]


@pytest.mark.parametrize(
    ("mixes", "sequences"),
    [(ON_RANKS, 1), (PAIRS, 1), (NARROW, 1), (SHARING, 1), (SHARING, 2), (SHARED_BY_TWO, 1)],
    ids=["alone", "pairs", "narrow", "meshes", "meshes, several sequences", "etp"],
)
def test_what_ranks_keep_while_rows_travel_is_predicted_to_the_byte(
    mixes: list[Mix], sequences: int, pool: Pool
) -> None:
    """Of layers that compute while rows travel, by themselves and in pieces; all layers have the same routes."""
    held = pool.run(hold_layers, mixes, sequences, world=mixes[0].world, timeout_s=120)
    for index, mix in enumerate(mixes):
        of_ranks = [of_rank[index] for of_rank in held]
        routes = {(rank, 0, layer): each.routes for rank, each in enumerate(of_ranks) for layer in range(mix.layers)}
        run, plan = replace(facts_of(mix, 1), microbatch_size=sequences), mix.plan
        memory = MemoryPrediction(StepVolume(run, mix.shape, plan, routes), on_device=False)
        sizes = ActivationSizes(run, mix.tp, mix.cp, on_device=False)
        for rank, each in enumerate(of_ranks):
            stage = plan.stages_of(rank // (mix.world // mix.pp))[0]
            ends = sizes.ends(stage == 0, stage == plan.chain_length - 1)
            predicted = memory.of_rank(rank)
            num_layers = run.layers_per_stage[stage]
            assert predicted.activations_of_stage[stage] == num_layers * each.num_bytes + ends, (mix, rank)


def test_a_rank_that_shares_experts_predicts_itself_by_what_it_counted() -> None:
    """Of rows that came to it and of those that its experts computed, in the mean over all steps; of a layer without none."""
    mix = SHARED_BY_TWO[0]
    routes = {(0, step, 0): LayerRoutes([10], [arrived], [20]) for step, arrived in ((0, 4), (1, 6))}
    volume = ExpertVolume(facts_of(mix, 2), mix.shape, routes)
    apart = ExpertVolume(facts_of(mix, 2), mix.shape, {(0, 0, 0): LayerRoutes([10], [5], [20])})
    assert volume.kept_bytes(0, 0, "none", in_pieces=True) == apart.kept_bytes(0, 0, "none", in_pieces=True)
    assert volume.kept_bytes(1, 0, "none", in_pieces=True) is None
