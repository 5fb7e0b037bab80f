"""Live tensors: what each is, what only autograd holds, and of which stage; and which errors say that memory ran out."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from instrument.launch.recording.out_of_memory import find_out_of_memory
from instrument.launch.recording.tensor_census import LiveTensor, What, count_live_tensors
from instrument.optim.adamw import AdamW
from instrument.pipeline.microbatch_buffers import MicrobatchBuffers
from pptrace.schedule.actions import Cell

ROWS, WIDTH = 37, 53
"""No other tensor of the process has these sizes."""


def of_shape(*shape: int) -> list[LiveTensor]:
    return [tensor for tensor in count_live_tensors() if tensor.shape == shape]


@pytest.mark.parametrize("make", [lambda p: torch.optim.Adam(p), lambda p: AdamW(p, 1e-3)])
def test_parameters_gradients_and_moments_are_told_apart(make: Callable[..., torch.optim.Optimizer]) -> None:
    weight = nn.Parameter(torch.ones(ROWS, WIDTH))
    optimizer = make([weight])
    weight.sum().backward()
    optimizer.step()
    held = of_shape(ROWS, WIDTH)
    num_bytes = ROWS * WIDTH * 4
    assert sorted((tensor.what, tensor.bytes) for tensor in held) == [
        (What.GRADIENT, num_bytes),
        (What.OPTIMIZER_STATE, num_bytes),
        (What.OPTIMIZER_STATE, num_bytes),
        (What.PARAMETER, num_bytes),
    ]
    del weight, optimizer
    gc.collect()
    assert of_shape(ROWS, WIDTH) == []


def test_what_only_autograd_holds_is_found_once_with_the_operator_that_saved_it() -> None:
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    loss = (x * 2).softmax(0).exp().sum()
    activations = [tensor for tensor in of_shape(ROWS, WIDTH) if tensor.what is What.ACTIVATION]
    assert sorted(str(tensor.op) for tensor in activations) == ["ExpBackward0", "SoftmaxBackward0"]
    loss.backward()
    assert [tensor.what for tensor in of_shape(ROWS, WIDTH)].count(What.ACTIVATION) == 0


def test_activations_that_a_runtime_holds_have_their_stage_and_microbatch() -> None:
    buffers = MicrobatchBuffers()
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    buffers.put_forward(Cell(3, 5), (x,), (x.exp(),))
    (held,) = [tensor for tensor in of_shape(ROWS, WIDTH) if tensor.what is What.ACTIVATION]
    assert (held.op, held.stage, held.microbatch) == ("ExpBackward0", 3, 5)
    buffers.take_forward(Cell(3, 5))


def test_counting_recomputes_nothing() -> None:
    calls: list[int] = []

    def layer(x: Tensor) -> Tensor:
        calls.append(1)
        return x.exp().exp()

    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=False)
    count_live_tensors()
    assert len(calls) == 1
    y.sum().backward()
    assert len(calls) == 2


def test_tensors_without_storage_are_passed_over() -> None:
    kept = torch.ones(ROWS, WIDTH, device="meta"), torch.eye(ROWS).to_sparse(), torch.ones(0, WIDTH)
    shapes = {tensor.shape for tensor in count_live_tensors()}
    assert not shapes & {(ROWS, WIDTH), (0, WIDTH)}
    assert len(kept) == 3


def caught(*errors: BaseException) -> BaseException:
    """The last of these errors, each raised while the one before was handled."""
    last: BaseException | None = None
    for error in errors:
        error.__context__ = last
        last = error
    return last


def test_errors_that_say_that_memory_ran_out_are_known_also_behind_others() -> None:
    cpu = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    for error in (
        cpu,
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: out of memory"),
    ):
        assert find_out_of_memory(error) is error
        assert find_out_of_memory(caught(error, ValueError("x"), RuntimeError("stage 3 failed"))) is error
    assert find_out_of_memory(caught(ValueError("out of memory"), KeyError("y"))) is None
    looped = ValueError()
    looped.__context__ = KeyError()
    looped.__context__.__context__ = looped
    assert find_out_of_memory(looped) is None
