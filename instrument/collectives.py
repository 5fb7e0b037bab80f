"""Marked collectives and ring exchanges among the ranks of one mesh axis.

Every operation lies inside exactly one range. A blocking one ends inside it; one that is only started has a handle, and the
wait for it has a separate range (:mod:`pptrace.marks`). ``bytes`` is counted as nccl-tests does: the whole tensor, gathered
or before it is scattered. On an axis of one rank nothing is communicated and nothing marked.

Dimensions other than the first are gathered and scattered through a copy that puts the ranks' parts side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from instrument.mesh import Mesh
from instrument.recorder import Range, Recorder
from instrument.route import Route, copy_to_device, copy_to_host, host_buffer
from pptrace.errors import PptraceError
from pptrace.marks import Axis, Collective, Link

T = TypeVar("T")

# Torch before 2.13 has them by the other names, which later ones deprecate. Looked up at each call: hooks replace them.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class Reduction(StrEnum):
    SUM = "sum"
    MAX = "max"

    @property
    def op(self) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.SUM if self is Reduction.SUM else dist.ReduceOp.MAX


@dataclass(frozen=True, slots=True, eq=False)
class _Posted(Generic[T]):
    """A posted operation; ``finish`` returns its result once the works are done. ``sent`` is kept alive until then."""

    works: Sequence[dist.Work | None]
    finish: Callable[[], T]
    sent: Tensor | Sequence[Tensor] = ()

    def wait(self) -> T:
        for work in self.works:
            if work is not None:
                work.wait()
        return self.finish()


class Pending(Generic[T]):
    """An operation that has been started. Wait for it once, on every rank."""

    __slots__ = ("_posted", "_range")

    def __init__(self, posted: _Posted[T], waiting: Callable[[], Range] | None) -> None:
        self._posted: _Posted[T] | None = posted
        self._range = waiting

    def wait(self) -> T:
        """Return the result. On NCCL it may be read by work put on the current stream after this, and the host continues at once.

        Raises:
            PptraceError: it has been waited for already.
        """
        posted, self._posted = self._posted, None  # releases the tensors
        if posted is None:
            raise PptraceError("an operation was waited for twice; keep what the first wait returned")
        if self._range is None:
            return posted.wait()
        with self._range():
            return posted.wait()


def completed(answer: T) -> Pending[T]:
    """A pending operation that is complete already."""
    return Pending(_Posted((), lambda: answer), None)


class AxisGroup:
    """The ranks along one axis, of which this process is one.

    Args:
        group: process group, whose backend is gloo where the route is host-staged; None: this rank alone, for which no
            process group need exist.
        axis: what the ranges call it.
        recorder: writes the ranges, and knows the step.
        route: DIRECT, or HOST_STAGED where several ranks share a GPU: tensors travel through pinned host memory. A
            staged operation waits on the host for one event of the current stream, never for the device.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, axis: Axis, recorder: Recorder, route: Route = Route.DIRECT
    ) -> None:
        self._group = group
        self.axis = axis
        self.recorder = recorder
        self.ranks = (0,) if group is None else tuple(dist.get_process_group_ranks(group))
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = len(self.ranks)
        self._staged = route is Route.HOST_STAGED
        self._coalesces = group is not None and dist.get_backend(group) == "nccl"

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return self._group

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> Tensor:
        """Reduce in place over all ranks; returns ``tensor``."""
        return self._run(
            Collective.ALL_REDUCE, tensor.nbytes, tensor, lambda: self._all_reduce(tensor, reduction, False)
        )

    def start_all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> Pending[Tensor]:
        """:meth:`all_reduce`, started; ``tensor`` must not be touched until the wait."""
        return self._start(
            Collective.ALL_REDUCE, tensor.nbytes, tensor, lambda: self._all_reduce(tensor, reduction, True)
        )

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Concatenate the tensors of all ranks along ``dim``."""
        num_bytes = tensor.nbytes * self.size
        return self._run(Collective.ALL_GATHER, num_bytes, tensor, lambda: self._all_gather(tensor, dim, False))

    def start_all_gather(self, tensor: Tensor, dim: int = 0) -> Pending[Tensor]:
        """:meth:`all_gather`, started."""
        num_bytes = tensor.nbytes * self.size
        return self._start(Collective.ALL_GATHER, num_bytes, tensor, lambda: self._all_gather(tensor, dim, True))

    def all_gather_into(self, gathered: Tensor, tensor: Tensor) -> None:
        """Gather the flat parts (n,) of all ranks into ``gathered`` (n · ranks,)."""
        self._run(Collective.ALL_GATHER, gathered.nbytes, tensor, lambda: self._all_gather_into(gathered, tensor))

    def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Sum over all ranks; each keeps its part along ``dim``, whose size the number of ranks divides."""
        self._require_divisible(tensor, dim)
        return self._run(
            Collective.REDUCE_SCATTER, tensor.nbytes, tensor, lambda: self._reduce_scatter(tensor, dim, False)
        )

    def reduce_scatter_into(self, part: Tensor, tensor: Tensor) -> None:
        """Sum a flat ``tensor`` (n · ranks,) over all ranks and put this rank's part (n,) into ``part``."""
        self._run(Collective.REDUCE_SCATTER, tensor.nbytes, tensor, lambda: self._reduce_scatter_into(part, tensor))

    def start_reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Pending[Tensor]:
        """:meth:`reduce_scatter`, started."""
        self._require_divisible(tensor, dim)
        return self._start(
            Collective.REDUCE_SCATTER, tensor.nbytes, tensor, lambda: self._reduce_scatter(tensor, dim, True)
        )

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Send part i along the first dimension to rank i; part i of the result came from rank i."""
        self._require_divisible(tensor, 0)
        return self._run(Collective.ALL_TO_ALL, tensor.nbytes, tensor, lambda: self._all_to_all(tensor, False))

    def start_all_to_all(self, tensor: Tensor) -> Pending[Tensor]:
        """:meth:`all_to_all`, started."""
        self._require_divisible(tensor, 0)
        return self._start(Collective.ALL_TO_ALL, tensor.nbytes, tensor, lambda: self._all_to_all(tensor, True))

    def all_to_all_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the next ``sent[i]`` rows to each rank i; the result has ``received[i]`` rows of each, in the order of ranks.

        Any of them may be 0. What one rank sends to another is what that one receives from it.
        """
        if self.size == 1:
            return rows
        row_bytes = rows.shape[1:].numel() * rows.itemsize
        with self.recorder.uneven_all_to_all(self.axis, sent, received, row_bytes, self.recorder.step):
            return self._all_to_all_rows(rows, sent, received, False).wait()

    def start_all_to_all_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending[Tensor]:
        """:meth:`all_to_all_rows`, started."""
        if self.size == 1:
            return completed(rows)
        row_bytes = rows.shape[1:].numel() * rows.itemsize
        handle, step = self.recorder.new_handle(), self.recorder.step
        with self.recorder.uneven_all_to_all(self.axis, sent, received, row_bytes, step, handle):
            posted = self._all_to_all_rows(rows, sent, received, True)
        return Pending(posted, lambda: self.recorder.awaiting(self.axis, step, handle))

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Broadcast from rank ``source`` of the axis, in place; returns ``tensor``."""
        return self._run(Collective.BROADCAST, tensor.nbytes, tensor, lambda: self._broadcast(tensor, source, False))

    def start_rotation(self, tensor: Tensor, offset: int = 1) -> Pending[Tensor]:
        """Start a ring exchange: send to the rank ``offset`` after this one, receive from the rank ``offset`` before it.

        All ranks call it with the same shape, dtype and ``offset``; ``tensor`` must not be written to until the wait.

        Returns:
            The received tensor, contiguous.
        """
        target, source = (self.rank + offset) % self.size, (self.rank - offset) % self.size
        if target == self.rank:
            return completed(tensor)
        handle, step = self.recorder.new_handle(), self.recorder.step
        with self.recorder.exchange(self._links(target, source, tensor.nbytes), self.axis, step, handle):
            posted = self._rotate(tensor, target, source)
        return Pending(posted, lambda: self.recorder.awaiting(self.axis, step, handle))

    def _run(self, kind: Collective, num_bytes: int, tensor: Tensor, post: Callable[[], _Posted[Tensor]]) -> Tensor:
        if self.size == 1:
            return tensor
        with self.recorder.collective(kind, self.axis, self.size, num_bytes, self.recorder.step):
            return post().wait()

    def _start(
        self, kind: Collective, num_bytes: int, tensor: Tensor, post: Callable[[], _Posted[Tensor]]
    ) -> Pending[Tensor]:
        if self.size == 1:
            return completed(tensor)
        handle, step = self.recorder.new_handle(), self.recorder.step
        with self.recorder.collective(kind, self.axis, self.size, num_bytes, step, handle):
            posted = post()
        return Pending(posted, lambda: self.recorder.awaiting(self.axis, step, handle))

    def _all_reduce(self, tensor: Tensor, reduction: Reduction, async_op: bool) -> _Posted[Tensor]:
        buffer = self._to_backend(tensor)
        work = dist.all_reduce(buffer, reduction.op, self._group, async_op=async_op)
        return _Posted((work,), lambda: self._copy_back(tensor, buffer))

    def _broadcast(self, tensor: Tensor, source: int, async_op: bool) -> _Posted[Tensor]:
        buffer = self._to_backend(tensor)
        work = dist.broadcast(buffer, group=self._group, group_src=source, async_op=async_op)
        return _Posted((work,), lambda: self._copy_back(tensor, buffer))

    def _all_gather(self, tensor: Tensor, dim: int, async_op: bool) -> _Posted[Tensor]:
        buffer = self._to_backend(tensor.contiguous())
        parts = self._receive_buffer((self.size, *tensor.shape), tensor)
        work = getattr(dist, _ALL_GATHER)(
            parts.view(self.size * tensor.numel()), buffer.view(-1), self._group, async_op
        )
        return _Posted((work,), lambda: _side_by_side(self._from_backend(parts, tensor.device), dim), buffer)

    def _all_gather_into(self, gathered: Tensor, tensor: Tensor) -> _Posted[Tensor]:
        buffer = self._to_backend(tensor)
        parts = self._receive_buffer(gathered.shape, tensor) if self._staged else gathered
        work = getattr(dist, _ALL_GATHER)(parts, buffer, self._group)
        return _Posted((work,), lambda: self._copy_back(gathered, parts))

    def _reduce_scatter_into(self, part: Tensor, tensor: Tensor) -> _Posted[Tensor]:
        buffer = self._to_backend(tensor)
        received = self._receive_buffer(part.shape, tensor) if self._staged else part
        work = getattr(dist, _REDUCE_SCATTER)(received, buffer, group=self._group)
        return _Posted((work,), lambda: self._copy_back(part, received))

    def _reduce_scatter(self, tensor: Tensor, dim: int, async_op: bool) -> _Posted[Tensor]:
        buffer = self._to_backend(_stacked(tensor, dim, self.size))
        received = self._receive_buffer(buffer.shape[1:], tensor)
        work = getattr(dist, _REDUCE_SCATTER)(received.view(-1), buffer.view(-1), group=self._group, async_op=async_op)
        return _Posted((work,), lambda: self._from_backend(received, tensor.device), buffer)

    def _all_to_all(self, tensor: Tensor, async_op: bool) -> _Posted[Tensor]:
        buffer = self._to_backend(tensor.contiguous())
        received = self._receive_buffer(buffer.shape, tensor)
        work = dist.all_to_all_single(received, buffer, group=self._group, async_op=async_op)
        return _Posted((work,), lambda: self._from_backend(received, tensor.device), buffer)

    def _all_to_all_rows(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], async_op: bool
    ) -> _Posted[Tensor]:
        buffer = self._to_backend(rows.contiguous())
        incoming = self._receive_buffer((sum(received), *rows.shape[1:]), rows)
        work = dist.all_to_all_single(incoming, buffer, list(received), list(sent), self._group, async_op)
        return _Posted((work,), lambda: self._from_backend(incoming, rows.device), buffer)

    def _rotate(self, tensor: Tensor, target: int, source: int) -> _Posted[Tensor]:
        buffer = self._to_backend(tensor.contiguous())
        incoming = self._receive_buffer(buffer.shape, tensor)
        return _Posted(
            self._post(buffer, target, incoming, source), lambda: self._from_backend(incoming, tensor.device), buffer
        )

    def _post(self, outgoing: Tensor, target: int, incoming: Tensor, source: int) -> Sequence[dist.Work | None]:
        assert self._group is not None, "a rank that is alone has nobody to exchange with"
        if self._coalesces:
            send = dist.P2POp(dist.isend, outgoing, group=self._group, group_peer=target)
            receive = dist.P2POp(dist.irecv, incoming, group=self._group, group_peer=source)
            return dist.batch_isend_irecv([send, receive])
        # gloo posts sends and receives in the caller's thread, while a loop thread spins on the same locks; an
        # all-to-all, of which all parts but one are empty, uses separate threads.
        sent, received = [0] * self.size, [0] * self.size
        sent[target], received[source] = outgoing.numel(), incoming.numel()
        options = dist.AllToAllOptions()
        return (self._group.alltoall_base(incoming.view(-1), outgoing.view(-1), received, sent, options),)

    def _links(self, target: int, source: int, num_bytes: int) -> Sequence[Link]:
        if not self.recorder.listening:
            return ()
        return Link(True, self.ranks[target], num_bytes), Link(False, self.ranks[source], num_bytes)

    def _to_backend(self, tensor: Tensor) -> Tensor:
        """The memory that is handed to the backend: the tensor's, or a copy of it on the host."""
        return copy_to_host([tensor])[0] if self._staged else tensor

    def _receive_buffer(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """An empty tensor for what is received: on the device, or on the host."""
        return host_buffer(shape, like) if self._staged else like.new_empty(shape)

    def _from_backend(self, tensor: Tensor, device: torch.device) -> Tensor:
        return copy_to_device(tensor, device) if self._staged else tensor

    def _copy_back(self, tensor: Tensor, buffer: Tensor) -> Tensor:
        return tensor.copy_(buffer, non_blocking=True) if self._staged else tensor

    def _require_divisible(self, tensor: Tensor, dim: int) -> None:
        if tensor.shape[dim] % self.size:
            raise PptraceError(
                f"dimension {dim} of a tensor of shape {tuple(tensor.shape)} does not divide into {self.size} parts, "
                f"one for each rank of {self.axis}"
            )


def axis_group(mesh: Mesh, axis: Axis, recorder: Recorder, route: Route = Route.DIRECT) -> AxisGroup:
    """The group of this rank along an axis of the mesh."""
    return AxisGroup(mesh.groups[axis], axis, recorder, route)


def _side_by_side(parts: Tensor, dim: int) -> Tensor:
    """(ranks, …) → the same without the first dimension, and ``dim`` as many times as long."""
    shape = list(parts.shape[1:])
    dim %= len(shape)
    shape[dim] *= parts.shape[0]
    return parts.movedim(0, dim).reshape(shape)


def _stacked(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The inverse of :func:`_side_by_side`, contiguous."""
    dim %= tensor.dim()
    shape = tensor.shape
    parted = tensor.reshape(*shape[:dim], size, shape[dim] // size, *shape[dim + 1 :])
    return parted.movedim(dim, 0).contiguous()
