"""Transport of tensors between two pipeline ranks: posting modes, direct or through host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from instrument.mesh import Mesh
from instrument.route import Route, copy_to_device, copy_to_host, host_buffer
from pptrace.marks import Axis
from pptrace.schedule.messages import peer_of
from pptrace.schedule.plan import Plan


class Mode(StrEnum):
    """The way in which the transfers of one call are posted."""

    BATCHED = "batched"  # one batch_isend_irecv
    EVEN_ODD = "even-odd"  # one isend or irecv each; even ranks serve the next rank first, odd ranks the previous
    BLOCKING = "blocking"  # one isend or irecv at a time, each awaited before the next


@dataclass(frozen=True, slots=True)
class Parcel:
    """One tensor to or from a pipeline rank. ``tag`` pairs both ends where the backend has tags (gloo)."""

    tensor: Tensor
    pp_rank: int
    sending: bool
    tag: int


class Pending(Protocol):
    """A posted parcel."""

    def wait(self) -> Tensor:
        """Return the tensor once it has arrived, or once a sent one may be changed.

        On NCCL that holds for work put on the current stream after this call, and the host continues at once.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Posted:
    """Keeps the tensor alive until the transfer is complete."""

    work: dist.Work
    tensor: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """A received tensor that has yet to be copied to its device."""

    posted: _Posted
    device: torch.device

    def wait(self) -> Tensor:
        return copy_to_device(self.posted.wait(), self.device)


class Wire:
    """Posts parcels, from and to the memory that they are in, in the order in which they are given
    (:mod:`instrument.pipeline.order`), on the pipeline's groups.

    Both ends of a pair of ranks see their parcels in one common order (plans are lowered so), and every mode keeps it.
    """

    def __init__(self, mesh: Mesh, mode: Mode) -> None:
        self._group = mesh.groups[Axis.PP]
        self._reverse = mesh.pp_reverse
        self._rank = mesh.pp_rank
        self._mode = mode
        self._tagged = dist.get_backend(self._group) == "gloo"
        self._coalesces = dist.get_backend(self._group) == "nccl"

    def connect(self, peers: Iterable[int], device: torch.device) -> None:
        """Exchange a number with every peer, where NCCL coalesces calls; all ranks of the pipeline call this before they post.

        NCCL opens connections in the first group of calls that needs them, and the host waits there for the other end. Two ranks
        whose first groups differ, one that sends and receives and one that only receives, fail ("Message truncated") or wait
        for each other: the first before it sends, the second until it has received. Here both directions of a pair are opened
        in equal groups, pair after pair in one order, so that no rank waits in a ring.
        """
        if not (self._coalesces and self._mode is Mode.BATCHED):
            return
        for peer in sorted(peers, key=lambda peer: sorted((self._rank, peer))):
            number = torch.zeros(1, device=device)
            parcels = [Parcel(number, peer, True, 0), Parcel(torch.empty_like(number), peer, False, 0)]
            for posted in self._post_coalesced(parcels):
                posted.wait()

    def post(self, parcels: Sequence[Parcel]) -> list[_Posted]:
        """Start all transfers; returns them in the order of the parcels."""
        if self._mode is Mode.BATCHED and self._coalesces:
            return self._post_coalesced(parcels)
        reverse = self._reverse if self._mode is Mode.EVEN_ODD else None
        senders = (self._rank if parcel.sending else parcel.pp_rank for parcel in parcels)
        return [
            self._post_one(item, reverse if sender == 1 else None)
            for item, sender in zip(parcels, senders, strict=True)
        ]

    def _post_coalesced(self, parcels: Sequence[Parcel]) -> list[_Posted]:
        operations = [
            dist.P2POp(
                dist.isend if parcel.sending else dist.irecv,
                parcel.tensor,
                group=self._group,
                group_peer=parcel.pp_rank,
            )
            for parcel in parcels
        ]
        works = dist.batch_isend_irecv(operations)
        if len(works) == 1:  # one work for the whole batch
            works = works * len(parcels)
        return [_Posted(work, parcel.tensor) for work, parcel in zip(works, parcels, strict=True)]

    def _post_one(self, parcel: Parcel, group: dist.ProcessGroup | None = None) -> _Posted:
        """One isend or irecv, by the group's methods.

        On a backend that does not coalesce, batch_isend_irecv is no more than a loop of these, and its checks cost half
        as much again as the calls.
        """
        group = group or self._group
        post = group.send if parcel.sending else group.recv
        return _Posted(post([parcel.tensor], parcel.pp_rank, parcel.tag if self._tagged else 0), parcel.tensor)


class HostStagedTransport:
    """Parcels on a GPU travel through pinned host memory.

    A send waits on the host until its copy has been made: for one event of the current stream, never for the device.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def post(self, parcels: Sequence[Parcel]) -> Sequence[Pending]:
        copies = iter(copy_to_host([parcel.tensor for parcel in parcels if parcel.sending]))
        staged = [
            replace(parcel, tensor=next(copies) if parcel.sending else host_buffer(parcel.tensor.shape, parcel.tensor))
            for parcel in parcels
        ]
        return [
            posted if parcel.sending else _Staged(posted, parcel.tensor.device)
            for parcel, posted in zip(parcels, self._wire.post(staged), strict=True)
        ]


class Transport(Protocol):
    def post(self, parcels: Sequence[Parcel]) -> Sequence[Pending]:
        """Start all transfers together; the answers stand in the order of the parcels."""
        ...


def make_transport(mesh: Mesh, mode: Mode, route: Route, plan: Plan, device: torch.device) -> Transport:
    """The transport of this rank's pipeline, connected with the ranks that the (lowered) plan exchanges messages with."""
    wire = Wire(mesh, mode)
    messages = (action for action in plan.ranks[mesh.pp_rank] if action.kind.is_p2p)
    wire.connect({peer_of(plan, action) for action in messages}, device)
    return HostStagedTransport(wire) if route is Route.HOST_STAGED else wire
