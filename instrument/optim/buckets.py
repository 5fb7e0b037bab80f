"""Gradient buckets: averaged over the replicas during the backward of the last microbatch.

Parameters are put into buckets in the order in which backward finishes them, last layer first, as DDP and Megatron-LM's
``distributed_data_parallel`` do. A bucket is sent when the last of its parameters has its complete gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from instrument.backward_split.gradients_of import gradient_dtype, gradient_of
from instrument.collectives import AxisGroup, Pending

BUCKET_BYTES = 25 * 2**20  # as DDP


class Bucket:
    """Parameters of one dtype whose gradients travel together.

    Args:
        parameters: in the order of their gradients in the message.
        multiple: the message is padded with zeros to a multiple of this length.
    """

    __slots__ = ("length", "parameters")

    def __init__(self, parameters: Sequence[nn.Parameter], multiple: int = 1) -> None:
        self.parameters = tuple(parameters)
        numel = sum(parameter.numel() for parameter in self.parameters)
        self.length = -(-numel // multiple) * multiple

    def offsets(self) -> Iterator[tuple[nn.Parameter, int]]:
        """Each parameter and its offset in the message, in elements."""
        offset = 0
        for parameter in self.parameters:
            yield parameter, offset
            offset += parameter.numel()

    def gradients(self) -> Tensor:
        """The gradients in one tensor (length,), a copy."""
        return self._flat([gradient_of(parameter) for parameter in self.parameters])

    def values(self) -> Tensor:
        """The parameters in one tensor (length,), a copy."""
        return self._flat([parameter.detach() for parameter in self.parameters])

    def take_gradients(self, flat: Tensor) -> None:
        """Replace the gradients by (length,)."""
        for parameter, offset in self.offsets():
            gradient_of(parameter).copy_(flat[offset : offset + parameter.numel()].view_as(parameter))

    @torch.no_grad()
    def take_values(self, flat: Tensor) -> None:
        """Replace the parameters by (length,)."""
        for parameter, offset in self.offsets():
            parameter.copy_(flat[offset : offset + parameter.numel()].view_as(parameter))

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = [tensor.flatten() for tensor in tensors]
        missing = self.length - sum(tensor.numel() for tensor in flat)
        return torch.cat([*flat, flat[0].new_zeros(missing)] if missing else flat)


class Mean(Protocol):
    """A way to average the gradients of a bucket over the replicas."""

    def start(self, bucket: Bucket, gradients: Tensor) -> Pending[Tensor]:
        """Send ``gradients`` (length,), which must not be touched until the wait."""
        ...

    def finish(self, bucket: Bucket, summed: Tensor) -> None:
        """Store the result of the reduction."""
        ...


class WholeMean:
    """Average every gradient on every replica, in ``.grad``.

    Args:
        group: the replicas, over which gradients are summed.
        divisor: of the sums.
    """

    def __init__(self, group: AxisGroup, divisor: int) -> None:
        self._group = group
        self._divisor = divisor

    def start(self, bucket: Bucket, gradients: Tensor) -> Pending[Tensor]:  # noqa: ARG002
        return self._group.start_all_reduce(gradients)

    def finish(self, bucket: Bucket, summed: Tensor) -> None:
        bucket.take_gradients(summed.div_(self._divisor))


class OverlappedMean:
    """Averages buckets one by one, as their parameters become ready.

    Every replica reports the same parameters ready in the same order, so that their buckets match.
    """

    def __init__(self, buckets: Sequence[Bucket], mean: Mean) -> None:
        self._mean = mean
        self._buckets = tuple(buckets)
        self._bucket_of = {id(parameter): bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._missing: dict[int, int] = {}
        self._pending: dict[int, Pending[Tensor]] = {}
        self._clear()

    def parameters(self) -> Iterator[int]:
        """Ids of the parameters."""
        return iter(self._bucket_of)

    def ready(self, parameter: nn.Parameter) -> None:
        """Report that a parameter has the gradients of all microbatches; once per parameter and step."""
        bucket = self._bucket_of[id(parameter)]
        self._missing[id(bucket)] -= 1
        if self._missing[id(bucket)] == 0:
            self._post(bucket)

    def finish(self) -> None:
        """Send the buckets that are not sent yet, and store all means."""
        for bucket in self._buckets:
            if id(bucket) not in self._pending:
                self._post(bucket)
        for bucket in self._buckets:
            self._mean.finish(bucket, self._pending[id(bucket)].wait())
        self._clear()

    def _post(self, bucket: Bucket) -> None:
        self._pending[id(bucket)] = self._mean.start(bucket, bucket.gradients())

    def _clear(self) -> None:
        self._pending = {}
        self._missing = {id(bucket): len(bucket.parameters) for bucket in self._buckets}


def make_buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int, multiple: int = 1) -> Iterator[Bucket]:
    """Group parameters in order; a bucket ends where its gradients fill it or the dtype changes."""
    members: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        num_bytes = parameter.numel() * gradient_dtype(parameter).itemsize
        if members and (size + num_bytes > bucket_bytes or parameter.dtype != members[0].dtype):
            yield Bucket(members, multiple)
            members, size = [], 0
        members.append(parameter)
        size += num_bytes
    if members:
        yield Bucket(members, multiple)
