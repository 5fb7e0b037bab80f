"""ZeRO-2 and ZeRO-3 through torch's ``fully_shard``: gradients, or parameters as well, are sharded over the replicas.

Each layer is one unit, the rest of a stage (embedding, head) another. ZeRO-3 frees a unit's gathered parameters
after its forward and gathers them again for its backward, for every microbatch; ZeRO-2 keeps them from a stage's first
forward of a step to its last backward. Gradients are reduce-scattered in a stage's last backward only.

Source: ZeRO, arXiv 1910.02054; PyTorch FSDP, arXiv 2304.11277.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from instrument.collectives import AxisGroup
from pptrace.errors import PptraceError


class FullySharded:
    """The stages of a rank, sharded over its replicas. Every rank of the world makes one at the same time.

    Args:
        stages: stage → module, whose ``blocks`` are one unit each; their parameters become DTensors.
        group: the replicas, at least two.
        keeps_parameters: from the first forward of a step to the last backward (ZeRO-2), or not (ZeRO-3).

    Raises:
        PptraceError: there are no replicas to share with.
    """

    def __init__(self, stages: Mapping[int, nn.Module], group: AxisGroup, keeps_parameters: bool) -> None:
        if group.process_group is None or group.size < 2:
            raise PptraceError("parameters are sharded over replicas, and there is only one; use dp or cp above 1")
        self._keeps = keeps_parameters
        first = next(parameter for stage in stages.values() for parameter in stage.parameters())
        mesh = DeviceMesh.from_group(group.process_group, first.device.type, mesh_dim_names=("replicas",))
        self._units = {stage: _shard(module, mesh, group, keeps_parameters) for stage, module in stages.items()}
        for stage in stages:
            self._end_with_backward(stage, False)

    @contextmanager
    def finishing(self, stages: Sequence[int]) -> Iterator[None]:
        """Context of the last backward of these stages in a step, which averages their gradients."""
        for stage in stages:
            self._end_with_backward(stage, True)
        yield
        for stage in stages:
            self._end_with_backward(stage, False)

    def forget_gathered(self) -> None:
        """Free gathered parameters, whose shards have changed."""
        for units in self._units.values():
            for unit in units:
                unit.reshard()

    def _end_with_backward(self, stage: int, is_last: bool) -> None:
        module = self._units[stage][-1]
        module.set_requires_gradient_sync(is_last)
        module.set_is_last_backward(is_last)
        module.set_reshard_after_backward(is_last or not self._keeps)


class _Marked:
    """Base of fully_shard's two collectives: the group, and allocation of buffers."""

    def __init__(self, group: AxisGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Marked, AllGather):
    """fully_shard's all-gather through a marked group."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,  # noqa: ARG002 — the marked one's
        async_op: bool = False,  # noqa: ARG002 — torch waits for a work only if it is given one
    ) -> None:
        self._group.all_gather_into(output_tensor, input_tensor)


class _Scatter(_Marked, ReduceScatter):
    """fully_shard's reduce-scatter through a marked group."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,  # noqa: ARG002 — the marked one's
        op: object,  # noqa: ARG002 — a sum, as set below
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        self._group.reduce_scatter_into(output_tensor, input_tensor)


def _shard(stage: nn.Module, mesh: DeviceMesh, group: AxisGroup, keeps_parameters: bool) -> list[FSDPModule]:
    """The units of a stage, itself last."""
    dtype = next(stage.parameters()).dtype
    is_mixed = dtype.itemsize < torch.float32.itemsize
    policy = MixedPrecisionPolicy(dtype, torch.float32) if is_mixed else MixedPrecisionPolicy()
    if is_mixed:
        stage.float()  # what the optimizer updates
    units: list[FSDPModule] = []
    for unit in [*getattr(stage, "blocks", nn.ModuleDict()).values(), stage]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=not keeps_parameters, mp_policy=policy)
        assert isinstance(unit, FSDPModule)
        unit.set_custom_all_gather(_Gather(group))
        unit.set_custom_reduce_scatter(_Scatter(group))
        unit.set_force_sum_reduction_for_comms(True)
        units.append(unit)
    return units
