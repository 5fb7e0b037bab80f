"""Bytes that a layer's experts keep for their backward, in closed form, against storages that are alive after a real forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from instrument.expert.options import Dispatcher, ExpertOptions, Scoring, Shared
from instrument.models.gpt import Block, GptConfig
from instrument.pipeline.memory import StorageWatch
from pptrace.analysis.volume.activations import ActivationSizes
from pptrace.analysis.volume.expert_step import ExpertVolume, LayerRoutes
from tests.instrument.models.cases.mixes import expert_facts
from tests.support.gpt_runs import facts, mesh

SEQUENCES, LENGTH, HIDDEN, HEADS = 3, 16, 32, 8
EVERYTHING: dict[str, Any] = {"shared_width": 12, "shared": Shared.RESIDUAL, "aux_loss": 0.1, "z_loss": 0.1}
CASES: list[dict[str, Any]] = [
    {},
    {"aux_loss": 0.1, "scale": 2.0},
    {"z_loss": 0.1, "scoring": Scoring.SOFTMAX_BEFORE, "top_k": 1},
    {"scoring": Scoring.RENORMALISED, "shared_width": 12},
    {"scoring": Scoring.SIGMOID, "aux_loss": 0.1, "overlap": True},
    {"scoring": Scoring.SIGMOID, "top_k": 1, "shared_width": 12, "shared": Shared.GATED},
    {"capacity_factor": 0.5},
    {"dispatcher": Dispatcher.PADDED},
    {"dispatcher": Dispatcher.ALL_GATHER},
    EVERYTHING,
]


def alive_after_forward(options: ExpertOptions, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes that a layer holds after its forward, its output too; rows that its experts computed)."""
    torch.manual_seed(0)
    block = Block(GptConfig(2, HIDDEN, HEADS, LENGTH, dtype=dtype, experts=options))
    assert block.experts is not None
    block.experts.draw_experts(1, 0.02)
    computed: list[int] = []
    inner = block.experts._compute
    block.experts._compute = lambda rows, of: (computed.append(len(rows)), inner(rows, of))[1]  # type: ignore
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
        experts=expert_facts(options),
    )
    if options.overlap:  # which computes experts in a function of its own, and drops nothing
        rows = SEQUENCES * LENGTH * options.top_k
    counted = LayerRoutes(torch.zeros(1, 8).numpy(), torch.tensor([rows]).numpy())
    of_experts = ExpertVolume(run, mesh(), {(0, 0, 0): counted}).kept_bytes(0, 0, "none")
    assert ActivationSizes(run, 1, 1, has_dropout=False, on_device=False).layer("none", of_experts) == alive


def test_a_padded_buffer_with_a_capacity_needs_no_counts_and_others_do() -> None:
    for dispatcher, factor, is_known in (("padded", 1.0, True), ("padded", None, False), ("all-to-all", 1.0, False)):
        options = ExpertOptions(8, dispatcher=Dispatcher(dispatcher), capacity_factor=factor)
        volume = ExpertVolume(facts(experts=expert_facts(options)), mesh())
        assert (volume.kept_bytes(0, 0, "none") is not None) is is_known
