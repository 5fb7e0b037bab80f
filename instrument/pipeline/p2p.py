"""Point-to-point communication between the stages of a pipeline.

:meth:`Communicator.exchange` posts the transfers of one call together, such as those of Megatron-LM's
``send_forward_recv_backward``, and returns when all are complete; :meth:`Communicator.post` only posts. Source: Megatron-LM
``core/pipeline_parallel/p2p_communication.py``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from instrument.mesh import Mesh
from instrument.pipeline.microbatch_buffers import Tensors
from instrument.pipeline.order import Posting
from instrument.pipeline.transport import Parcel, Pending, Transport
from instrument.recorder import Recorder
from pptrace.errors import PptraceError, UsageError
from pptrace.marks import Axis, Transfer
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.messages import Direction, message_of, peer_of
from pptrace.schedule.plan import Plan

_HEADER_DIMS = 3  # Megatron's three int64: the dims of an activation


Shape = tuple[int, ...]
_MOST_TENSORS = 2
"""Tensors of a message: a decoder's activations, and what its encoder has made."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shapes, dtype and device of the tensors of every message: (microbatch size, sequence, hidden).

    ``shapes`` has those of a stage's output, which the gradients that come back have too. ``negotiated`` means that sequences
    vary: each tensor is preceded by its shape.
    """

    shapes: Callable[[int], Sequence[Shape]]
    dtype: torch.dtype
    device: torch.device
    negotiated: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One message of a call; ``tensors`` are what a send carries, none for a receive."""

    action: Action
    tensors: Tensors = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Routed:
    """A tensor of a message with its peer, and for a receive its buffer, or None as long as the shape is not known.

    ``index`` is that of one of several tensors, None of the only one.
    """

    action: Action
    pp_rank: int
    peer: int
    tag: int
    tensor: Tensor | None
    index: int | None = None

    @property
    def is_recv(self) -> bool:
        return self.action.kind.is_recv

    def transfer(self) -> Transfer:
        return Transfer(self.action, self.peer, 0 if self.tensor is None else self.tensor.nbytes, self.index)

    def parcel(self, tensor: Tensor, header: bool) -> Parcel:
        tag = self.tag * _MOST_TENSORS + (self.index or 0)
        return Parcel(tensor, self.pp_rank, self.action.kind.is_send, 2 * tag + header)


@dataclass(frozen=True, slots=True, eq=False)
class _Announced:
    """A sent tensor and the header before it, which must stay alive as long."""

    header: Pending
    tensor: Pending

    def wait(self) -> Tensor:
        self.header.wait()
        return self.tensor.wait()


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A receive that has been posted and not been awaited."""

    _posted: Sequence[tuple[_Routed, Pending]]
    _recorder: Recorder

    def wait(self, step: int) -> Tensors:
        """Wait for the tensors, each in a range of its wait, and return them."""
        received = []
        for item, pending in self._posted:
            with self._recorder.wait(item, step):
                received.append(pending.wait())
        return tuple(received)


class Communicator:
    """Sends and receives activations and their gradients along one pipeline.

    Operations return None for what does not exist: the first stage receives no forward and sends no backward, the last
    receives no backward and sends no forward.
    """

    def __init__(
        self,
        mesh: Mesh,
        plan: Plan,
        spec: TensorSpec,
        transport: Transport,
        recorder: Recorder,
        posting: Posting = Posting(),  # noqa: B008
    ) -> None:
        if posting.prefetch_depth and spec.negotiated:
            raise UsageError("messages of negotiated shape cannot be posted ahead; use a prefetch depth of 0")
        self._mesh = mesh
        self._plan = plan
        self._spec = spec
        self._transport = transport
        self._recorder = recorder
        self._posting = posting
        self._sending: dict[Kind | None, deque[list[tuple[_Routed, Pending]]]] = defaultdict(deque)
        self._num_unawaited = 1 if posting.calls.overlaps else posting.prefetch_depth

    def exchange(self, messages: Sequence[Message], step: int) -> list[Tensors | None]:
        """Post all transfers together and wait for all.

        Returns:
            The received tensors for each receive, None for each send, in the order of ``messages``.

        With negotiated shapes, the sizes of receives stand as 0 in the call's range, which opens before they are known;
        the ranges of the waits inside it have them.
        """
        routed = [self._route(message) for message in messages]
        received: dict[Action, list[Tensor]] = {message.action: [] for message in messages}
        if self._posting.blocking:
            for items in sorted(routed, key=self._turn):
                for item in items:
                    self._call([item], step, received)
        elif messages:
            self._call([item for items in routed for item in items], step, received)
        return [None if message.action.kind.is_send else tuple(received[message.action]) for message in messages]

    def _call(self, routed: Sequence[_Routed], step: int, received: Mapping[Action, list[Tensor]]) -> None:
        """Post tensors together and wait for all; those that come are added to the received ones of their action."""
        with self._recorder.p2p(routed, Axis.PP, step):
            posted = [self._negotiate(item) for item in routed] if self._spec.negotiated else self._post(routed)
            # Receives first: they end last, because the peer must compute for them, and by then the sends are complete
            # as a rule. So the host is woken once, and a receive is seen complete when it is.
            for item, pending in sorted(posted, key=_is_send):
                with self._recorder.wait(item, step):
                    tensor = pending.wait()
                if item.is_recv:
                    received[item.action].append(tensor)
            if self._posting.synchronised and self._spec.device.type == "cuda":
                torch.cuda.synchronize(self._spec.device)

    def post(self, messages: Sequence[Message], step: int) -> list[tuple[Action, Arrival]]:
        """Post all transfers together and wait for none of them; the call's range ends with the posting.

        Sends are awaited later, in separate ranges: when as many more groups with sends have been posted as the prefetch
        depth says (with Megatron-LM's calls: one more with a send of that kind), or by :meth:`complete_sends`.

        Returns:
            The receives, to be awaited by the actions that read them.
        """
        routed = [item for message in messages for item in self._route(message)]
        with self._recorder.p2p(routed, Axis.PP, step):
            posted = self._post(routed)
        sends = [entry for entry in posted if _is_send(entry)]
        if sends:
            waiting = self._sending[sends[0][0].action.kind if self._posting.calls.overlaps else None]
            waiting.append(sends)
            if len(waiting) > self._num_unawaited:
                self._complete_oldest(waiting, step)
        arriving: dict[Action, list[tuple[_Routed, Pending]]] = {}
        for item, pending in posted:
            if item.is_recv:
                arriving.setdefault(item.action, []).append((item, pending))
        return [(action, Arrival(items, self._recorder)) for action, items in arriving.items()]

    def complete_sends(self, step: int) -> None:
        """Wait for every send that has been posted."""
        for waiting in self._sending.values():
            while waiting:
                self._complete_oldest(waiting, step)

    def _complete_oldest(self, waiting: deque[list[tuple[_Routed, Pending]]], step: int) -> None:
        for item, pending in waiting.popleft():
            with self._recorder.wait(item, step):
                pending.wait()

    def _turn(self, items: Sequence[_Routed]) -> tuple[bool, bool]:
        """The turn of a message where a call of several is split into one for each, so that neighbours' calls meet.

        Even stages send first and odd ones receive first, activations before gradients, so nobody waits in a ring.
        """
        kind = items[0].action.kind
        return (kind is Kind.SEND_B or kind is Kind.RECV_B, kind.is_send == bool(self._mesh.pp_rank % 2))

    def _route(self, message: Message) -> list[_Routed]:
        action, plan = message.action, self._plan
        planned, pp_rank = message_of(plan, action), peer_of(plan, action)
        forward = planned.direction is Direction.FORWARD
        # Of the activations between two stages, whichever way the message goes.
        shapes = self._spec.shapes(planned.source_stage if forward else planned.target_stage)
        # Unique per message and equal at both ends: numbered by direction, sending stage and microbatch.
        tag = ((planned.microbatch or 0) * plan.num_stages + planned.source_stage) * 2 + forward
        tensors: list[Tensor | None]
        if not action.kind.is_send:
            tensors = [None if self._spec.negotiated else self._buffer(shape) for shape in shapes]
        elif len(message.tensors) == len(shapes):
            tensors = [tensor.detach().contiguous() for tensor in message.tensors]
        else:
            raise PptraceError(
                f"{action} on pipeline rank {self._mesh.pp_rank} has {len(message.tensors)} tensors to send; expected "
                f"{len(shapes)}"
            )
        ends = (action, pp_rank, self._mesh.global_rank(pp_rank), tag)
        if len(tensors) == 1:
            return [_Routed(*ends, tensors[0])]
        return [_Routed(*ends, tensor, index) for index, tensor in enumerate(tensors)]

    def _buffer(self, shape: Shape) -> Tensor:
        return torch.empty(shape, dtype=self._spec.dtype, device=self._spec.device)

    def _post(self, routed: Sequence[_Routed]) -> list[tuple[_Routed, Pending]]:
        parcels = [item.parcel(item.tensor, False) for item in routed if item.tensor is not None]
        return list(zip(routed, self._transport.post(parcels), strict=True))

    def _negotiate(self, item: _Routed) -> tuple[_Routed, Pending]:
        """Send the shape and then the tensor, or wait for the shape and then post the receive.

        One message at a time, in the plan's order: two ranks whose groups differ would wait for each other's shapes if
        each waited for those of its whole group first. Reading a shape waits on the host, on NCCL for all work before it on
        the stream too.
        """
        header = item.parcel(self._header(item), True)
        if item.tensor is not None:
            announced, sent = self._transport.post([header, item.parcel(item.tensor, False)])
            return item, _Announced(announced, sent)
        shape = self._transport.post([header])[0].wait().tolist()
        buffer = self._buffer(tuple(shape))
        routed = replace(item, tensor=buffer)
        return self._post([routed])[0]

    def _header(self, item: _Routed) -> Tensor:
        if item.tensor is None:
            return torch.empty(_HEADER_DIMS, dtype=torch.int64, device=self._spec.device)
        if item.tensor.dim() != _HEADER_DIMS:
            raise PptraceError(
                f"{item.action} has shape {tuple(item.tensor.shape)}; a message of negotiated shape has "
                f"{_HEADER_DIMS} dimensions: microbatch size, sequence, hidden"
            )
        return torch.tensor(item.tensor.shape, dtype=torch.int64).to(self._spec.device, non_blocking=True)


def _is_send(posted: tuple[_Routed, Pending]) -> bool:
    return posted[0].action.kind.is_send
