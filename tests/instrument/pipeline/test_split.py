"""Layers whose weight gradients wait: the same gradients, and no more memory than they need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from instrument.backward_split.split import Linear, WeightQueue, WeightWork, attach
from instrument.models.gpt import GptStage, cross_entropy
from instrument.models.gpt_config import GptConfig
from pptrace.errors import PptraceError

CONFIG = GptConfig(layers=2, hidden=8, heads=2, sequence=6, dtype=torch.float64)
TOKENS = torch.arange(12).view(2, 6)
TARGETS = TOKENS + 1


def gradients(stage: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in stage.named_parameters() if weight.grad is not None}


def loss_of(stage: nn.Module) -> Tensor:
    return cross_entropy(stage(TOKENS), TARGETS)


def check(stage: nn.Module, times: int = 1) -> None:
    """All gradients of the stage are so many times those of a backward of plain layers."""
    plain = GptStage(CONFIG, range(2))
    loss_of(plain).backward()
    result, expected = gradients(stage), gradients(plain)
    assert result.keys() == expected.keys()
    for name, gradient in result.items():
        torch.testing.assert_close(gradient, times * expected[name], rtol=0, atol=1e-12)


def finish(work: list[WeightWork]) -> None:
    while work:
        work.pop(0).run()


def test_input_gradients_leave_linear_and_embedding_weights_to_their_work() -> None:
    stage = GptStage(CONFIG, range(2))
    queue = attach(stage)
    with queue.collecting() as work:
        loss_of(stage).backward()
    early = gradients(stage)
    assert early.keys() == {name for name, _ in stage.named_parameters() if "norm" in name}
    assert len(work) == 2 * 4 + 1 + 2  # linear layers, head, two embeddings
    finish(work)
    check(stage)


def test_a_whole_backward_of_a_stage_with_a_queue_is_the_same() -> None:
    stage = GptStage(CONFIG, range(2))
    attach(stage)
    loss_of(stage).backward()
    check(stage)


def test_weight_gradients_add_up_in_any_order() -> None:
    stage = GptStage(CONFIG, range(2))
    queue = attach(stage)
    collected = []
    for _ in range(2):
        with queue.collecting() as work:
            loss_of(stage).backward()
        collected.append(work)
    loss_of(stage).backward()
    for work in reversed(collected):
        finish(work)
    check(stage, 3)


@dataclass
class Watch:
    """The storages of what layers read and return, weakly."""

    inputs: list[StorageWeakRef] = field(default_factory=list)
    outputs: list[StorageWeakRef] = field(default_factory=list)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.inputs.append(StorageWeakRef(args[0].untyped_storage()))
        self.outputs.append(StorageWeakRef(output.untyped_storage()))


def alive(watched: list[StorageWeakRef]) -> int:
    return sum(not storage.expired() for storage in watched)


def test_an_input_gradient_keeps_only_what_its_weight_gradients_need_and_they_free_it() -> None:
    stage = GptStage(CONFIG, range(2))
    queue = attach(stage)
    watches, works = [], []
    for _ in range(2):  # two microbatches: the W of one frees nothing of the other
        watch = Watch()
        hooks = [part.register_forward_hook(watch) for part in stage.modules() if isinstance(part, Linear)]
        loss = loss_of(stage)
        for hook in hooks:
            hook.remove()
        assert alive(watch.inputs) == 9
        assert alive(watch.outputs) > 0
        with queue.collecting() as work:
            loss.backward()
        del loss
        watches.append(watch)
        works.append(work)
    for watch in watches:
        assert alive(watch.inputs) == 9
        assert alive(watch.outputs) == 0
    first = works[0]
    for left in range(len(first) - 1, -1, -1):
        is_linear = not isinstance(getattr(first[0], "indices", None), Tensor)
        before = alive(watches[0].inputs)
        first.pop(0).run()
        assert alive(watches[0].inputs) == before - is_linear, left
    assert [alive(watch.inputs) for watch in watches] == [0, 9]
    finish(works[1])
    assert alive(watches[1].inputs) == 0


def test_a_queue_that_does_not_collect_takes_nothing() -> None:
    with pytest.raises(PptraceError, match="outside of an input-gradient backward"):
        WeightQueue().put(None)
