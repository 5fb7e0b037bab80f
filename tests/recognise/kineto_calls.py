"""Communication as torch's profiler records it, made to order: every event of a call, on the host and on the device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from pptrace.model.tables import COMM_ARGS
from pptrace.model.traces import Category, Trace
from tests.support.synthetic import AUTOGRAD_THREAD, MAIN_THREAD, NCCL_STREAM, START, Event, make_trace
from tests.support.tables import table_of


@dataclass
class Rank:
    """The events of one rank under construction; times count from :data:`START`."""

    rank: int
    distributed: Mapping[str, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    args: list[tuple[Event, dict[str, Any]]] = field(default_factory=list)
    correlation: int = 0

    def add(self, category: Category, name: str, start: int, end: int, **more: Any) -> Event:
        event = Event(category, name, START + start, START + end, **more)
        self.events.append(event)
        return event

    def kernel(
        self, name: str, launch: int, start: int, end: int, thread: int = MAIN_THREAD, stream: int = NCCL_STREAM
    ) -> Event:
        self.correlation += 1
        self.add(Category.RUNTIME, "cudaLaunchKernel", launch, launch + 1, thread=thread, correlation=self.correlation)
        return self.add(Category.KERNEL, name, start, end, device=0, stream=stream, correlation=self.correlation)

    def group(self, at: int, sends: int, recvs: int, stream: int = NCCL_STREAM) -> None:
        """NCCL's own ranges of a group of messages, and the kernel that carries them; they may begin in the same instant."""
        for index in range(max(sends, recvs)):
            begin = at + 3 * index
            if index < sends:
                self.add(Category.ANNOTATION, "ncclSend", begin, begin + 1, thread=MAIN_THREAD)
            if index < recvs:
                self.add(Category.ANNOTATION, "ncclRecv", begin, begin + 1, thread=MAIN_THREAD)
        self.add(Category.ANNOTATION, "ncclGroupEnd", at + 40, at + 50, thread=MAIN_THREAD)
        self.kernel("ncclDevKernel_SendRecv(x)", at + 45, at + 100, at + 200, stream=stream)

    def record(self, start: int, end: int, thread: int = MAIN_THREAD, **args: Any) -> None:
        """A ``record_param_comms``."""
        event = self.add(Category.CPU_OP, "record_param_comms", start, end, thread=thread)
        ranks = args.pop("ranks", None)
        listed = {} if ranks is None else {"group_ranks": json.dumps(list(ranks)), "group_size": len(ranks)}
        self.args.append((event, listed | args))

    def call(
        self,
        names: tuple[str, str, str, str],
        at: int,
        kernel: tuple[int, int] | None,
        thread: int = MAIN_THREAD,
        **args: Any,
    ) -> None:
        """All events of one NCCL call: operator, record, range, launch and kernel, and the range as projected on its stream.

        ``names`` are the operator's, the record's, the range's and the kernel's.
        """
        operator, collective, work, kernel_name = names
        self.add(Category.CPU_OP, operator, at, at + 10, thread=thread)
        self.record(at + 1, at + 9, thread, collective=collective, **args)
        self.add(Category.ANNOTATION, work, at + 2, at + 8, thread=thread)
        if kernel is not None:
            self.kernel(kernel_name, at + 4, *kernel, thread=thread)
            self.add(Category.DEVICE_ANNOTATION, work, *kernel, device=0, stream=NCCL_STREAM)

    def trace(self) -> Trace:
        made = make_trace(self.events, self.rank)
        order = sorted(self.events, key=lambda event: event.start)
        position = {id(event): index for index, event in enumerate(order)}
        rows = sorted(
            ({**args, "event": position[id(event)]} for event, args in self.args), key=lambda row: row["event"]
        )
        args = table_of(COMM_ARGS, rows, -1)
        return replace(made, events=replace(made.events, comm_args=args), distributed=self.distributed)


ALL_REDUCE = ("c10d::allreduce_", "allreduce", "nccl:all_reduce", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)")
ALL_GATHER = (
    "c10d::_allgather_base_",
    "_allgather_base",
    "nccl:_all_gather_base",
    "ncclDevKernel_AllGather_RING_LL(x)",
)
ALL_TO_ALL = ("c10d::alltoall_base_", "all_to_all", "nccl:all_to_all", "ncclDevKernel_SendRecv(x)")
SEND = ("c10d::send", "send", "nccl:send 0->1", "ncclDevKernel_SendRecv(x)")
RECV = ("c10d::recv_", "recv", "nccl:recv 1<-0", "ncclDevKernel_SendRecv(x)")


__all__ = ["ALL_GATHER", "ALL_REDUCE", "ALL_TO_ALL", "AUTOGRAD_THREAD", "MAIN_THREAD", "RECV", "SEND", "Rank"]
