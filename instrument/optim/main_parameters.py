"""Main parameters, which the optimizer updates instead of the model's: copies with more bits, or a replica's shard of them.

Mixed precision keeps parameters of 16 bits in the model, and their values, gradients and moments in 32: updates are often
smaller than half of a bfloat16's last bit. ZeRO-1 gives each replica the updates of one part of every bucket, so that
moments and main parameters are sharded over the replicas; gradients are reduce-scattered and updated parameters
all-gathered, together as many bytes as one all-reduce.

Sources: mixed precision, arXiv 1710.03740; ZeRO, arXiv 1910.02054; Megatron-LM ``DistributedOptimizer``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from instrument.backward_split.gradients_of import gradient_dtype, local
from instrument.collectives import AxisGroup, Pending
from instrument.optim.adamw import AdamW
from instrument.optim.buckets import Bucket

if TYPE_CHECKING:
    from instrument.optim.fully_sharded import FullySharded


class Zero(IntEnum):
    """ZeRO's stages: the tensors that are sharded over the replicas."""

    NONE = 0
    OPTIMIZER = 1  # moments and main parameters
    GRADIENTS = 2  # these and gradients
    PARAMETERS = 3  # these and parameters


class MainParameters(Protocol):
    """Tensors that represent a model's parameters in the optimizer."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The tensors, whose ``.grad`` the optimizer reads."""
        ...

    def take_gradients(self) -> None:
        """Set the ``.grad`` of each tensor."""
        ...

    def drop_gradients(self) -> None:
        """Free the model's gradients."""
        ...

    def publish(self) -> None:
        """Copy the tensors' values into the model's parameters."""
        ...


class Copies:
    """A copy of every parameter in the dtype of its gradient."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._model = tuple(parameters)
        self.parameters = tuple(nn.Parameter(p.detach().to(gradient_dtype(p))) for p in self._model)

    def take_gradients(self) -> None:
        for main, parameter in zip(self.parameters, self._model, strict=True):
            main.grad = None if parameter.grad is None else local(parameter.grad)

    def drop_gradients(self) -> None:
        for parameter in self._model:
            parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        torch._foreach_copy_(self._model, self.parameters)


class Locals(Copies):
    """This replica's shards of parameters under ``fully_shard``: the same memory, as plain tensors."""

    def __init__(self, parameters: Iterable[nn.Parameter], sharding: FullySharded) -> None:
        self._model = tuple(parameters)
        self._sharding = sharding
        self.parameters = tuple(nn.Parameter(local(parameter).detach()) for parameter in self._model)

    def publish(self) -> None:
        self._sharding.forget_gathered()


class Shards:
    """This replica's part of every bucket, in the dtype of the gradients: equal parts, in the order of the ranks.

    It is a :class:`instrument.optim.buckets.Mean` as well: gradients are averaged straight into the parts.

    Args:
        buckets: whose lengths the number of replicas divides.
        group: the replicas.
        divisor: of the sums of their gradients.
    """

    def __init__(self, buckets: Sequence[Bucket], group: AxisGroup, divisor: int) -> None:
        self._group = group
        self._divisor = divisor
        self._parts = {id(bucket): self._part_of(bucket) for bucket in buckets}
        self._buckets = tuple(buckets)
        self._gathers: dict[int, Pending[Tensor]] = {}
        self._buckets_of = {id(p): bucket for bucket in buckets for p in bucket.parameters}
        self.parameters = tuple(self._parts.values())
        self.overlaps_gathers = False

    def start(self, bucket: Bucket, gradients: Tensor) -> Pending[Tensor]:  # noqa: ARG002
        return self._group.start_reduce_scatter(gradients)

    def finish(self, bucket: Bucket, summed: Tensor) -> None:
        self._parts[id(bucket)].grad = summed.div_(self._divisor)
        bucket.drop_gradients()

    def take_gradients(self) -> None:
        """Do nothing: averaging put them into the parts."""

    def drop_gradients(self) -> None:
        """Do nothing: averaging freed them."""

    def publish(self) -> None:
        self.complete()
        for bucket in (
            reversed(self._buckets) if self.overlaps_gathers else self._buckets
        ):  # forwards read first layers first
            part = self._parts[id(bucket)].detach().to(bucket.parameters[0].dtype)
            if self.overlaps_gathers:
                self._gathers[id(bucket)] = self._group.start_all_gather(part)
            else:
                bucket.take_values(self._group.all_gather(part))

    def complete(self, module: nn.Module | None = None) -> None:
        """Wait for the gathers under way of the buckets with a module's parameters, or of all."""
        if not self._gathers:
            return
        parameters = () if module is None else module.parameters()
        buckets = (
            self._buckets
            if module is None
            else [self._buckets_of[id(p)] for p in parameters if id(p) in self._buckets_of]
        )
        for bucket in buckets:
            if gather := self._gathers.pop(id(bucket), None):
                bucket.take_values(gather.wait())

    def counted(self, rows: Mapping[int, int | None]) -> list[Tensor]:
        """The gradients in this rank's parts, of the first ``rows[id(parameter)]`` rows of each parameter, or of all where
        that is None; of a parameter without an entry nothing.
        """
        counted = []
        for bucket in self._buckets:
            part = self._parts[id(bucket)]
            assert part.grad is not None  # averaged before
            begin = self._group.rank * part.numel()
            for parameter, offset in bucket.offsets():
                if id(parameter) not in rows:
                    continue
                num_rows = rows[id(parameter)]
                size = parameter.numel() if num_rows is None else num_rows * (parameter.numel() // parameter.shape[0])
                first, last = max(offset, begin), min(offset + size, begin + part.numel())
                if first < last:
                    counted.append(part.grad[first - begin : last - begin])
        return counted

    def _part_of(self, bucket: Bucket) -> nn.Parameter:
        length = bucket.length // self._group.size
        part = bucket.values()[self._group.rank * length :][:length]
        return nn.Parameter(part.to(gradient_dtype(bucket.parameters[0]), copy=True))


class Joined:
    """Several kinds of main parameters, such as shards over different replicas, as one."""

    def __init__(self, parts: Sequence[MainParameters]) -> None:
        self._parts = tuple(parts)

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return [parameter for part in self._parts for parameter in part.parameters]

    def take_gradients(self) -> None:
        for part in self._parts:
            part.take_gradients()

    def drop_gradients(self) -> None:
        for part in self._parts:
            part.drop_gradients()

    def publish(self) -> None:
        for part in self._parts:
            part.publish()


class MainAdamW(AdamW):
    """AdamW on main parameters; the model's are updated after every step and every rollback.

    Args:
        main: whose tensors are updated.
        lr: may be changed between steps.
    """

    def __init__(self, main: MainParameters, lr: float) -> None:
        super().__init__(main.parameters, lr)
        self._main = main

    def step(self) -> None:
        self._main.take_gradients()
        super().step()
        self._main.publish()

    def roll_back(self) -> None:
        super().roll_back()
        self._main.publish()

    def scale_gradients(self, factor: float) -> None:
        self._main.take_gradients()
        super().scale_gradients(factor)

    def zero_grad(self) -> None:
        super().zero_grad()
        self._main.drop_gradients()


def main_parameters(parameters: Iterable[nn.Parameter], sharding: FullySharded | None) -> MainParameters | None:
    """Main parameters of a model under ``fully_shard``, or with gradients of more bits than parameters; else None."""
    model_parameters = tuple(parameters)
    if sharding is not None:
        return Locals(model_parameters, sharding)
    return (
        Copies(model_parameters)
        if any(gradient_dtype(parameter) != parameter.dtype for parameter in model_parameters)
        else None
    )


def make_adamw(parameters: Iterable[nn.Parameter], main: MainParameters | None, lr: float) -> AdamW:
    """Make AdamW of a rank's parameters, or of their main parameters."""
    return AdamW(parameters, lr) if main is None else MainAdamW(main, lr)


def accumulate_in(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Let ``.grad`` of floating-point parameters have at least the bits of ``dtype``."""
    for parameter in parameters:
        parameter.grad_dtype = torch.promote_types(parameter.dtype, dtype)
