"""All experts at once against one after the other: torch's grouped product and, where it has no kernel, what is done instead."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from instrument.backward_split.split import attach
from instrument.expert import grouped as grouped_module
from instrument.expert.grouped import RowGroups, has_kernel
from instrument.expert.linear import ExpertLinear, Held
from instrument.expert.mlp import LateWeights, run_experts

HAS_KERNEL = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in grouped_module.KERNEL_CAPABILITIES
ROWS_OF_EXPERT = {
    "some without rows": [0, 5, 0, 0, 9, 3, 1, 0],
    "one with all": [0, 0, 37, 0],
    "none with any": [0, 0, 0],
    "one": [12],
}
CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Experts:
    """Two layers of some experts, and rows of these, by a seed; the outer's bias is another rank's where ``etp`` is 2."""

    def __init__(
        self, rows_of_expert: Sequence[int], dtype: torch.dtype, device: torch.device, bias: bool = True, etp: int = 1
    ) -> None:
        held = Held(range(len(rows_of_expert)), etp - 1, etp)
        torch.manual_seed(4)
        self.inner = ExpertLinear(held, 16, 48, True, bias, dtype).to(device)
        self.outer = ExpertLinear(held, 48, 16, False, bias, dtype).to(device)
        self.layers = torch.nn.ModuleList((self.inner, self.outer))
        with torch.no_grad():
            for parameter in self.layers.parameters():
                parameter.copy_(torch.randn(parameter.shape) / 4)
        self.rows_of_expert = rows_of_expert
        rows, self.gradient = (torch.randn(sum(rows_of_expert), 16).to(device, dtype) for _ in range(2))
        self.rows = rows.requires_grad_()

    def train(self, grouped: bool, how: str = "whole") -> list[Tensor]:
        """The output and all gradients; ``how``: weights' gradients with the rest, ``split`` off, or ``late``."""
        late = LateWeights() if how == "late" else None
        aliases = None if late is None else late.aliases(self.inner, self.outer)
        queue = attach(self.layers) if how == "split" else None
        output = run_experts(self.rows, self.rows_of_expert, self.inner, self.outer, grouped, late, aliases)
        if queue is None:
            output.backward(self.gradient)
        else:
            with queue.collecting() as works:
                output.backward(self.gradient)
            assert all(parameter.grad is None for parameter in self.layers.parameters())
            for work in works:
                work.run()
        tensors = [self.rows, *self.layers.parameters()]
        gradients = [tensor.grad for tensor in tensors]
        for tensor in tensors:
            tensor.grad = None
        return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]


@contextmanager
def without_waits() -> Iterator[None]:
    """A call by which the host waits for the GPU is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)  # that it is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def compare(experts: Experts, how: str, tolerance: float) -> None:
    expected, found = experts.train(False), experts.train(True, how)
    for wanted, result in zip(expected, found, strict=True):
        assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape)
        largest = max([1.0, *wanted.abs().flatten().tolist()])
        torch.testing.assert_close(result, wanted, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("how", ["whole", "split", "late"])
@pytest.mark.parametrize("case", ROWS_OF_EXPERT)
def test_products_without_a_kernel_are_those_of_each_expert(case: str, how: str) -> None:
    for bias, etp in ((True, 1), (False, 1), (True, 2)):
        compare(Experts(ROWS_OF_EXPERT[case], torch.float64, CPU, bias, etp), how, 1e-12)


@pytest.mark.parametrize("how", ["whole", "split", "late"])
@pytest.mark.parametrize("case", ROWS_OF_EXPERT)
def test_operands_of_the_grouped_product_are_right(case: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where torch's product does the same as its kernel."""
    monkeypatch.setattr(grouped_module, "has_kernel", lambda operands: True)
    rows_of_expert = ROWS_OF_EXPERT[case]
    assert (RowGroups.of(rows_of_expert, torch.ones(1)).ends is not None) is (sum(rows_of_expert) > 0)
    for bias, etp in ((True, 1), (False, 1), (True, 2)):
        compare(Experts(rows_of_expert, torch.float32, CPU, bias, etp), how, 1e-5)


def test_cpus_have_no_kernel() -> None:
    assert not has_kernel([torch.ones(8, 8, dtype=torch.bfloat16)])


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_KERNEL, reason="no CUDA device for which torch has the kernel")
@pytest.mark.parametrize("how", ["whole", "split", "late"])
@pytest.mark.parametrize("case", ROWS_OF_EXPERT)
def test_the_kernel_gives_the_same_in_bfloat16_and_the_host_waits_for_nothing(case: str, how: str) -> None:
    for bias, etp in ((True, 1), (False, 1), (True, 2)):
        experts = Experts(ROWS_OF_EXPERT[case], torch.bfloat16, GPU, bias, etp)
        compare(experts, how, 2e-2)
        with without_waits():
            experts.train(True, how)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_KERNEL, reason="no CUDA device for which torch has the kernel")
def test_the_kernel_takes_aligned_bfloat16_alone() -> None:
    rows = torch.ones(4, 24, dtype=torch.bfloat16, device=GPU)
    assert has_kernel([rows])
    assert RowGroups.of([1, 3], rows).ends is not None
    assert not has_kernel([rows, rows.float()])
    assert not has_kernel([rows[:, :12].contiguous()])
    assert not has_kernel([rows.t()])
    assert not has_kernel([rows.flatten()[4:76].view(3, 24)])
