"""Activations on the host: what a forward saves is copied there and freed, and gradients are the same to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from instrument.backward_split.split import attach
from instrument.models.gpt import GptStage, cross_entropy
from instrument.models.gpt_config import GptConfig, Recompute
from instrument.offload import FROM_HOST, TO_HOST, OffloadingStage
from instrument.recorder import Recorder

TOKENS = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))


def gradients(stage: GptStage, module: nn.Module, *, splits: bool = False) -> list[Tensor]:
    stage.zero_grad()
    queue = attach(module) if splits else None
    loss = cross_entropy(module(TOKENS), TOKENS)
    if queue is None:
        loss.backward()
    else:
        with queue.collecting() as work:
            loss.backward()
        for weights in work:
            weights.run()
    return [parameter.grad.clone() for parameter in stage.parameters()]


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("recompute", Recompute)
def test_gradients_are_those_of_the_stage_to_the_last_bit(recompute: Recompute, splits: bool) -> None:
    stage = GptStage(GptConfig(2, 16, 4, 16, dtype=torch.float64, recompute=recompute), range(2))
    plain = gradients(stage, stage, splits=splits)
    offloaded = gradients(stage, OffloadingStage(stage, Recorder()), splits=splits)
    assert all(map(torch.equal, plain, offloaded))


def test_what_a_forward_saves_is_freed_and_its_copies_have_ranges() -> None:
    stage = GptStage(GptConfig(1, 16, 4, 16, dtype=torch.float64), range(1))
    weights, made = {parameter.data_ptr() for parameter in stage.parameters()}, list[StorageWeakRef]()
    mlp = next(module for name, module in stage.named_modules() if name.endswith("mlp_in"))
    mlp.register_forward_hook(lambda _module, _inputs, output: made.append(StorageWeakRef(output.untyped_storage())))
    plain = stage(TOKENS)
    with torch.profiler.profile() as profiler:
        output = OffloadingStage(stage, Recorder())(TOKENS)
        output.sum().backward()
    assert [storage.expired() for storage in made] == [False, True], "GELU needs it: by itself, or as a copy"
    assert plain.requires_grad
    names = [event.name for event in profiler.events()]
    copies = (names.count(f"part: {TO_HOST}"), names.count(f"part: {FROM_HOST}"))
    assert copies[0] == copies[1] > 8
    assert {parameter.data_ptr() for parameter in stage.parameters()} == weights
