"""One axis of the mesh as one rank sees it: its neighbours there, and marked operations among them.

Every operation lies inside exactly one range. A blocking one ends inside it; one that is only started has a handle, and the
wait for it has a range of its own (:mod:`pptrace.marks`). ``bytes`` is counted as nccl-tests does: the whole tensor, gathered
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
from instrument.route import Route, host_copy, wait_for_copies
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
    """An operation on its way; ``finish`` gives its answer once the works are done.

    ``sent`` is held on to until then.
    """

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
        """The answer. On NCCL it may be read by work put on the current stream after this, and the host goes on at once.

        Raises:
            PptraceError: somebody has waited already.
        """
        posted, self._posted = self._posted, None  # lets go of the tensors
        if posted is None:
            raise PptraceError("an operation was waited for twice; keep what the first wait returned")
        if self._range is None:
            return posted.wait()
        with self._range():
            return posted.wait()


def arrived(answer: T) -> Pending[T]:
    """What there is nothing to wait for."""
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

    @property
    def next(self) -> int:
        """The rank after this one in the ring."""
        return (self.rank + 1) % self.size

    @property
    def previous(self) -> int:
        """The rank before this one in the ring."""
        return (self.rank - 1) % self.size

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> Tensor:
        """Reduce in place over all ranks; gives ``tensor`` back."""
        return self._run(
            Collective.ALL_REDUCE, tensor.nbytes, tensor, lambda: self._all_reduce(tensor, reduction, False)
        )

    def start_all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> Pending[Tensor]:
        """:meth:`all_reduce`, started; ``tensor`` must not be touched until the wait."""
        return self._start(
            Collective.ALL_REDUCE, tensor.nbytes, tensor, lambda: self._all_reduce(tensor, reduction, True)
        )

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The parts of all ranks side by side along ``dim``."""
        num_bytes = tensor.nbytes * self.size
        return self._run(Collective.ALL_GATHER, num_bytes, tensor, lambda: self._all_gather(tensor, dim, False))

    def start_all_gather(self, tensor: Tensor, dim: int = 0) -> Pending[Tensor]:
        """:meth:`all_gather`, started."""
        num_bytes = tensor.nbytes * self.size
        return self._start(Collective.ALL_GATHER, num_bytes, tensor, lambda: self._all_gather(tensor, dim, True))

    def all_gather_into(self, gathered: Tensor, tensor: Tensor) -> None:
        """The flat parts (n,) of all ranks in ``gathered`` (n · ranks,)."""
        self._run(Collective.ALL_GATHER, gathered.nbytes, tensor, lambda: self._all_gather_into(gathered, tensor))

    def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The sum over all ranks, of which each keeps its part along ``dim``, whose size the ranks divide."""
        self._require_divisible(tensor, dim)
        return self._run(
            Collective.REDUCE_SCATTER, tensor.nbytes, tensor, lambda: self._reduce_scatter(tensor, dim, False)
        )

    def reduce_scatter_into(self, part: Tensor, tensor: Tensor) -> None:
        """This rank's part (n,) of the sum of a flat ``tensor`` (n · ranks,) over all ranks."""
        self._run(Collective.REDUCE_SCATTER, tensor.nbytes, tensor, lambda: self._reduce_scatter_into(part, tensor))

    def start_reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Pending[Tensor]:
        """:meth:`reduce_scatter`, started."""
        self._require_divisible(tensor, dim)
        return self._start(
            Collective.REDUCE_SCATTER, tensor.nbytes, tensor, lambda: self._reduce_scatter(tensor, dim, True)
        )

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Part i along the first dimension goes to rank i; part i of the answer came from rank i."""
        self._require_divisible(tensor, 0)
        return self._run(Collective.ALL_TO_ALL, tensor.nbytes, tensor, lambda: self._all_to_all(tensor, False))

    def start_all_to_all(self, tensor: Tensor) -> Pending[Tensor]:
        """:meth:`all_to_all`, started."""
        self._require_divisible(tensor, 0)
        return self._start(Collective.ALL_TO_ALL, tensor.nbytes, tensor, lambda: self._all_to_all(tensor, True))

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """What rank ``source`` of the axis has, in place; gives ``tensor`` back."""
        return self._run(Collective.BROADCAST, tensor.nbytes, tensor, lambda: self._broadcast(tensor, source, False))

    def start_rotation(self, tensor: Tensor, places: int = 1) -> Pending[Tensor]:
        """Every rank sends to the rank ``places`` after it in the ring, and receives from the one as many before it.

        All ranks call it with the same shape, dtype and ``places``; ``tensor`` must not be written to until the wait.

        Returns:
            What comes: the tensor of the rank before, contiguous.
        """
        to, source = (self.rank + places) % self.size, (self.rank - places) % self.size
        if to == self.rank:
            return arrived(tensor)
        handle, step = self.recorder.new_handle(), self.recorder.step
        with self.recorder.exchange(self._links(to, source, tensor.nbytes), self.axis, step, handle):
            posted = self._rotate(tensor, to, source)
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
            return arrived(tensor)
        handle, step = self.recorder.new_handle(), self.recorder.step
        with self.recorder.collective(kind, self.axis, self.size, num_bytes, step, handle):
            posted = post()
        return Pending(posted, lambda: self.recorder.awaiting(self.axis, step, handle))

    def _all_reduce(self, tensor: Tensor, reduction: Reduction, later: bool) -> _Posted[Tensor]:
        there = self._depart(tensor)
        work = dist.all_reduce(there, reduction.op, self._group, async_op=later)
        return _Posted((work,), lambda: self._arrive_in(tensor, there))

    def _broadcast(self, tensor: Tensor, source: int, later: bool) -> _Posted[Tensor]:
        there = self._depart(tensor)
        work = dist.broadcast(there, group=self._group, group_src=source, async_op=later)
        return _Posted((work,), lambda: self._arrive_in(tensor, there))

    def _all_gather(self, tensor: Tensor, dim: int, later: bool) -> _Posted[Tensor]:
        there = self._depart(tensor.contiguous())
        parts = self._room((self.size, *tensor.shape), there)
        work = getattr(dist, _ALL_GATHER)(parts.view(self.size * tensor.numel()), there.view(-1), self._group, later)
        return _Posted((work,), lambda: _side_by_side(self._arrive(parts, tensor.device), dim), there)

    def _all_gather_into(self, gathered: Tensor, tensor: Tensor) -> _Posted[Tensor]:
        there = self._depart(tensor)
        parts = self._room(gathered.shape, there) if self._staged else gathered
        work = getattr(dist, _ALL_GATHER)(parts, there, self._group)
        return _Posted((work,), lambda: self._arrive_in(gathered, parts))

    def _reduce_scatter_into(self, part: Tensor, tensor: Tensor) -> _Posted[Tensor]:
        there = self._depart(tensor)
        mine = self._room(part.shape, there) if self._staged else part
        work = getattr(dist, _REDUCE_SCATTER)(mine, there, group=self._group)
        return _Posted((work,), lambda: self._arrive_in(part, mine))

    def _reduce_scatter(self, tensor: Tensor, dim: int, later: bool) -> _Posted[Tensor]:
        there = self._depart(_stacked(tensor, dim, self.size))
        mine = self._room(there.shape[1:], there)
        work = getattr(dist, _REDUCE_SCATTER)(mine.view(-1), there.view(-1), group=self._group, async_op=later)
        return _Posted((work,), lambda: self._arrive(mine, tensor.device), there)

    def _all_to_all(self, tensor: Tensor, later: bool) -> _Posted[Tensor]:
        there = self._depart(tensor.contiguous())
        received = self._room(there.shape, there)
        work = dist.all_to_all_single(received, there, group=self._group, async_op=later)
        return _Posted((work,), lambda: self._arrive(received, tensor.device), there)

    def _rotate(self, tensor: Tensor, to: int, source: int) -> _Posted[Tensor]:
        there = self._depart(tensor.contiguous())
        coming = self._room(there.shape, there)
        return _Posted(self._post(there, to, coming, source), lambda: self._arrive(coming, tensor.device), there)

    def _post(self, leaving: Tensor, to: int, coming: Tensor, source: int) -> Sequence[dist.Work | None]:
        assert self._group is not None, "a rank that is alone has nobody to exchange with"
        if self._coalesces:
            send = dist.P2POp(dist.isend, leaving, group=self._group, group_peer=to)
            receive = dist.P2POp(dist.irecv, coming, group=self._group, group_peer=source)
            return dist.batch_isend_irecv([send, receive])
        # gloo posts sends and receives in the caller's thread, beside a loop thread that spins on the same locks; an
        # all-to-all, of which all parts but one are empty, leaves that to threads of its own.
        sent, received = [0] * self.size, [0] * self.size
        sent[to], received[source] = leaving.numel(), coming.numel()
        options = dist.AllToAllOptions()
        return (self._group.alltoall_base(coming.view(-1), leaving.view(-1), received, sent, options),)

    def _links(self, to: int, source: int, num_bytes: int) -> Sequence[Link]:
        if not self.recorder.listening:
            return ()
        return Link(True, self.ranks[to], num_bytes), Link(False, self.ranks[source], num_bytes)

    def _depart(self, tensor: Tensor) -> Tensor:
        """The memory that is handed to the backend: the tensor's own, or a copy of it on the host."""
        if not self._staged:
            return tensor
        host = host_copy(tensor)
        wait_for_copies(tensor.device)
        return host

    def _room(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Where the backend puts what comes: on the device, or on the host, pinned as what leaves is."""
        if not self._staged:
            return like.new_empty(shape)
        return torch.empty(tuple(shape), dtype=like.dtype, pin_memory=like.is_pinned())

    def _arrive(self, tensor: Tensor, device: torch.device) -> Tensor:
        # The allocator of pinned memory does not reuse the buffer before this copy's stream has passed it.
        return tensor.to(device, non_blocking=True) if self._staged else tensor

    def _arrive_in(self, tensor: Tensor, there: Tensor) -> Tensor:
        return tensor.copy_(there, non_blocking=True) if self._staged else tensor

    def _require_divisible(self, tensor: Tensor, dim: int) -> None:
        if tensor.shape[dim] % self.size:
            raise PptraceError(
                f"dimension {dim} of a tensor of shape {tuple(tensor.shape)} does not divide into {self.size} parts, "
                f"one for each rank of {self.axis}"
            )


def axis_group(mesh: Mesh, axis: Axis, recorder: Recorder, route: Route = Route.DIRECT) -> AxisGroup:
    """An axis of the mesh at this rank's place."""
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
