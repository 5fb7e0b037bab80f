"""Products of all experts' rows with a matrix of each: one kernel for all experts where torch has one.

torch's grouped product (``torch.nn.functional.grouped_mm``) has a kernel for bfloat16 on NVIDIA GPUs of compute capability 9.x
and 10.x, where rows and matrices begin at multiples of 16 bytes. Of other numbers it refuses some; of the rest it copies the
ends of the groups to the host and multiplies one group after another. There the same is done here, by the numbers that the
host has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes at whose multiples a row must begin."""
MOST_GROUPS = 1023
KERNEL_CAPABILITIES = (9, 10)
"""Major compute capabilities for which torch has the kernel."""


@dataclass(frozen=True, slots=True, eq=False)
class RowGroups:
    """The rows of each expert, one expert's behind the other's.

    Args:
        rows_of_expert: how many of each; on the host.
        ends: (experts,) where those of each end, int32, on the device; None where there is no kernel.
    """

    rows_of_expert: Sequence[int]
    ends: Tensor | None

    @classmethod
    def of(cls, rows_of_expert: Sequence[int], *operands: Tensor) -> RowGroups:
        """The groups for products of these operands. On a GPU the host does not wait for the copy of the ends."""
        if not 0 < len(rows_of_expert) <= MOST_GROUPS or not sum(rows_of_expert) or not has_kernel(operands):
            return cls(rows_of_expert, None)
        device = operands[0].device
        ends = torch.tensor(list(accumulate(rows_of_expert)), dtype=torch.int32, pin_memory=device.type == "cuda")
        return cls(rows_of_expert, ends.to(device, non_blocking=True))

    def multiply(self, rows: Tensor, matrices: Tensor, biases: Tensor | None = None) -> Tensor:
        """Each expert's rows (rows, in) times its matrix, of (experts, in, out), plus its bias, of (experts, out)."""
        if self.ends is not None:
            output: Tensor = torch.ops.aten._grouped_mm(rows, matrices, self.ends)
            return output if biases is None else output.add_(biases.index_select(0, self._expert_of_row(self.ends)))
        output = rows.new_empty(len(rows), matrices.shape[2])
        for expert, (part, result) in enumerate(zip(self._split(rows), self._split(output), strict=True)):
            if biases is None:
                torch.mm(part, matrices[expert], out=result)
            else:
                torch.addmm(biases[expert], part, matrices[expert], out=result)
        return output

    def outer(self, gradient: Tensor, rows: Tensor) -> Tensor:
        """(rows, out), (rows, in) → (experts, out, in): gradientᵀ · rows of each expert, zeros of one without rows."""
        if self.ends is not None:
            total: Tensor = torch.ops.aten._grouped_mm(gradient.t(), rows, self.ends)
            return total
        total = rows.new_empty(len(self.rows_of_expert), gradient.shape[1], rows.shape[1])
        for expert, (left, right) in enumerate(zip(self._split(gradient), self._split(rows), strict=True)):
            torch.mm(left.t(), right, out=total[expert])
        return total

    def sum(self, gradient: Tensor) -> Tensor:
        """(rows, out) → (experts, out): the sum of each expert's rows, by the kernel a product with columns of ones."""
        if self.ends is not None:
            ones = gradient.new_ones(len(gradient), ALIGNMENT // gradient.element_size())
            return self.outer(gradient, ones)[..., 0].contiguous()
        return torch.stack([part.sum(0) for part in self._split(gradient)])

    def _split(self, rows: Tensor) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = torch.split(rows, list(self.rows_of_expert))
        return parts

    def _expert_of_row(self, ends: Tensor) -> Tensor:
        rows = torch.arange(sum(self.rows_of_expert), dtype=torch.int32, device=ends.device)
        return torch.bucketize(rows, ends, right=True, out_int32=True)


def has_kernel(operands: Sequence[Tensor]) -> bool:
    """Return whether torch multiplies these by one kernel."""
    device = operands[0].device
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    if torch.cuda.get_device_capability(device)[0] not in KERNEL_CAPABILITIES:
        return False
    return all(each.dtype is torch.bfloat16 and _is_aligned(each) for each in operands)


def _is_aligned(operand: Tensor) -> bool:
    row_bytes = operand.shape[-1] * operand.element_size()
    return operand.is_contiguous() and row_bytes % ALIGNMENT == 0 and operand.data_ptr() % ALIGNMENT == 0
