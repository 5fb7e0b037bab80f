"""Device events of one rank, and their sums over its trace; its idle time by what its next work waited for, and the host's
synchronisations with it; the pieces of its compute, by kind of work and part of the model; and parts of its backwards: forwards
that run again, and gradients of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.intervals import EMPTY, intersect, merge, subtract, union
from pptrace.model.tables import Int8, Int32, Int64

_NONE: Int64 = np.empty(0, dtype=np.int64)


class Synchronisations(Struct, frozen=True, eq=False):
    """Host calls that returned when device work was over, or that took far longer than usual while the device had nothing to do,
    sorted by start, ns.

    ``name`` indexes ``names``: (the call, the outermost operator around it or ""). ``drained_start_ns`` to ``drained_end_ns``
    is the idle time that began during the call and in which the host had not launched the next work: the device ran dry
    because the host was waiting for it. Both are equal where there is none.
    """

    start_ns: Int64 = field(default_factory=lambda: _NONE)
    end_ns: Int64 = field(default_factory=lambda: _NONE)
    name: Int64 = field(default_factory=lambda: _NONE)
    drained_start_ns: Int64 = field(default_factory=lambda: _NONE)
    drained_end_ns: Int64 = field(default_factory=lambda: _NONE)
    names: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.start_ns)


class RangedPauses(Struct, frozen=True, eq=False):
    """Pauses of a host between operators, ns, each with the range that it lies in: ``name`` indexes ``names``."""

    start_ns: Int64 = field(default_factory=lambda: _NONE)
    end_ns: Int64 = field(default_factory=lambda: _NONE)
    name: Int64 = field(default_factory=lambda: _NONE)
    names: tuple[str, ...] = ()


class IdleTime(Struct, frozen=True, eq=False):
    """The time of a rank in which its device did nothing, as sets of intervals (:mod:`pptrace.intervals`), on its own clock.

    Disjoint, and together all time without device work: ``launch_starved`` (the host had not launched the next work),
    ``blocking`` (nor could it, because it was waiting for communication), ``dependency`` (the next work had been launched and
    waited for others), ``unknown`` (its launch was not recorded). ``reason`` is why none of them is known, "" where they are.
    ``between_operators`` is when no thread of the host ran an operator or called the runtime for a millisecond or more, whatever
    the device did; None where no operators were recorded. ``in_ranges`` are the parts of such times in ranges of threads that
    train, each in the innermost one, by its name.
    """

    launch_starved: Int64 = field(default_factory=lambda: EMPTY)
    blocking: Int64 = field(default_factory=lambda: EMPTY)
    dependency: Int64 = field(default_factory=lambda: EMPTY)
    unknown: Int64 = field(default_factory=lambda: EMPTY)
    synchronisations: Synchronisations = field(default_factory=Synchronisations)
    reason: str = ""
    between_operators: Int64 | None = None
    in_ranges: RangedPauses = field(default_factory=RangedPauses)


class HostIdle(Struct, frozen=True):
    """Device-idle time by what the work that ends it waited for; the three sum to the device's ``idle_ns`` exactly."""

    launch_starved_ns: int  #: time in which the host had not launched that work
    #: time in which it could not: it was waiting for communication, in a call that synchronises or of a library that runs on the
    #: host (gloo, MPI)
    blocking_ns: int
    dependency_ns: int  #: time in which the work was launched and waited for another rank, stream or kernel


IDLE_REASONS = {"launch_starved": "not launched", "blocking": "blocked", "dependency": "dependency"}
"""Words for the reasons."""


class SyncSummary(Struct, frozen=True):
    """Calls of the host, inside one operator, that waited for its device, or that took tens of times as long as usual while the
    device ran dry: at first use of a kernel modules are loaded, memory is allocated.
    """

    call: str  #: call, such as ``cudaStreamSynchronize``, a copy without ``Async`` or of pageable memory, or a long launch
    operator: str  #: outermost operator around it, such as ``aten::item``; empty outside of any
    count: int  #: calls
    total_ns: int  #: time of the host in them
    #: idle time that began during them, or of long ones with them, and lasted until the host had launched again: the device ran
    #: dry because the host was in them
    drained_ns: int
    longest_ns: int  #: length of the longest
    longest_start_ns: int  #: start of the longest
    #: op that the longest held up, such as ``0F3`` (stage, kind, microbatch); null outside of a pipeline, after its last op, or
    #: where the stage is not known
    longest_op: str | None = None


def with_host_waits(idle: IdleTime, waits: Int64) -> IdleTime:
    """The idle time, of which *blocking* is what was launch-starved while the host waited for communication; on one clock."""
    blocked = intersect(idle.launch_starved, waits)
    if not len(blocked):
        return idle
    starved = subtract(idle.launch_starved, blocked)
    return replace(idle, launch_starved=starved, blocking=merge(idle.blocking, blocked))


class WorkClass(StrEnum):
    """Kinds of work that kernels and operators do, as ``stages[].classes[].name`` of the report names them."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    NORM = "norm"
    LOSS = "softmax and loss"
    EMBEDDING = "embedding"
    OPTIMIZER = "optimizer"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    COPY = "copy"
    RANDOM = "random numbers"
    OTHER = "other work"
    PYTHON = "outside operators"


CLASSES = tuple(WorkClass)


class Pieces(Struct, frozen=True, eq=False):
    """Disjoint pieces of time in order, ns on the rank's own clock, in which it computed: of kernels each until another one runs
    that began before it had ended, without a device of the innermost operators.

    ``work`` is the index of each one's class in :data:`CLASSES`, ``part`` that of its part of the model in ``names``: a module or
    a range that the program set; the first name is "", of what nothing names. ``name`` is a number for the name of each kernel or
    operator. ``flops`` are the floating-point operations of the operators whose longest piece it is: 0 where another one is,
    or it multiplies nothing, -1 where it may multiply, but is in no operator whose FLOPs are known.
    """

    start_ns: Int64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    end_ns: Int64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    work: Int8 = field(default_factory=lambda: np.zeros(0, dtype=np.int8))
    part: Int32 = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    name: Int32 = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    names: tuple[str, ...] = ("",)
    flops: Int64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.start_ns)


NO_NODES = "its trace has no operators of autograd"
NO_RANGES = f"{NO_NODES}, and no ranges of recompute"


class BackwardParts(Struct, frozen=True, eq=False):
    """Sets of time (:mod:`pptrace.intervals`), ns on the rank's own clock: of its kernels, without a device of its host.

    ``recompute`` is when a backward ran a forward again, ``weights`` when a full backward computed gradients of weights. Each is
    known where its reason is "".
    """

    recompute: Int64 = field(default_factory=lambda: EMPTY)
    weights: Int64 = field(default_factory=lambda: EMPTY)
    no_recompute: str = NO_RANGES
    no_weights: str = NO_NODES


Rows: TypeAlias = npt.NDArray[np.intp]


class LostKernels(Struct, frozen=True, eq=False):
    """Kernels that were launched and not recorded: when each began at the earliest and had ended at the latest, ns, in order,
    and how many were launched in all. ``num_unrelated`` of them were recorded, but not so that what launched them is known, or
    when they communicated: they count as lost.
    """

    start_ns: Int64
    end_ns: Int64
    num_launches: int
    num_unrelated: int = 0

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def num_missing(self) -> int:
        """Number of those that were not recorded at all."""
        return len(self) - self.num_unrelated

    def with_unrelated(self, start_ns: Int64, end_ns: Int64) -> LostKernels:
        """The same with kernels that were recorded, but whose launch is not known."""
        starts, ends = np.concatenate((self.start_ns, start_ns)), np.concatenate((self.end_ns, end_ns))
        return LostKernels(np.sort(starts), np.sort(ends), self.num_launches, self.num_unrelated + len(start_ns))


UNKNOWN_CLOCK = "what was recorded is left out, since the clock of the device is not that of the host"
"""A placeholder of device events whose times are not known (:attr:`DeviceWork.missing_device_events`)."""
NOTHING_LOST = LostKernels(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 0)


class DeviceWork(Struct, frozen=True, dict=True):
    """The device events of one rank, sorted by start: kernels, copies and fills, in ns.

    ``launch_ns`` is the start of the host call with the same correlation; -1 where it was not recorded.
    ``missing_device_events`` names what shows that the rank uses a device although no event of it was recorded, "" otherwise:
    its host ranges then last as long as launching does. ``idle`` is the time without any of these events, and why.
    ``lost`` are kernels that were launched and not recorded. ``pieces`` are what the rank computed when, by kind of work: of a
    rank without a device its operators. ``backward`` is what its backwards are made of. ``algorithm`` is that of each kernel
    (a code of :data:`pptrace.recognise.device.work.ALGORITHMS`). ``from_pageable`` are copies from pageable memory of the host to
    the device; None where names of copies do not tell which memory they are from.
    """

    start_ns: Int64
    end_ns: Int64
    stream: Int64
    launch_ns: Int64
    is_compute: npt.NDArray[np.bool_]
    is_communication: npt.NDArray[np.bool_]
    missing_device_events: str = ""
    idle: IdleTime = field(default_factory=IdleTime)
    lost: LostKernels = field(default_factory=lambda: NOTHING_LOST)
    pieces: Pieces = field(default_factory=Pieces)
    backward: BackwardParts = field(default_factory=BackwardParts)
    algorithm: npt.NDArray[np.int8] = field(default_factory=lambda: np.zeros(0, dtype=np.int8))
    from_pageable: npt.NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.start_ns)

    def intervals(self, selected: npt.NDArray[np.bool_]) -> Int64:
        return union(self.start_ns[selected], self.end_ns[selected])

    @property
    def launch_order(self) -> Rows:
        """The rows whose launch was recorded, in the order of the launches."""
        known = np.flatnonzero(self.launch_ns >= 0)
        return known[np.argsort(self.launch_ns[known], kind="stable")]

    @property
    def _before_recording(self) -> Rows:
        """The rows that were launched before the recording: without a launch, and before all work of their stream that has one.
        None where launches of later work are missing as well; no copies where none has a launch, as MTIA's have not.
        """
        is_launched, moves = self.launch_ns >= 0, ~(self.is_compute | self.is_communication)
        if is_launched.all() or len(self.lost):
            return np.empty(0, dtype=np.intp)
        streams, number = np.unique(self.stream, return_inverse=True)
        first = np.full(len(streams), np.iinfo(np.int64).min)
        of_launched, at = np.unique(number.reshape(-1)[is_launched], return_index=True)
        first[of_launched] = self.start_ns[is_launched][at]
        is_before = ~is_launched & (self.start_ns < first[number.reshape(-1)])
        return np.flatnonzero(is_before if is_launched[moves].any() else is_before & ~moves)

    def done_ns(self, times: Int64, clock: Callable[[Int64], Int64] = lambda own: own) -> Int64:
        """Times, or when all work was over that was launched before them, if that is later; ``clock`` gives a time on theirs."""
        order, before = self.launch_order, self._before_recording
        launched, end = clock(self.launch_ns[order]), clock(self.end_ns[order])
        first = clock(self.end_ns[before]).max(initial=np.iinfo(np.int64).min)
        done: Int64 = np.maximum.accumulate(np.append(first, end))
        return np.maximum(times, done[np.searchsorted(launched, times)])

    @cached_property
    def compute(self) -> Int64:
        return self.intervals(self.is_compute)

    @cached_property
    def communication(self) -> Int64:
        return self.intervals(self.is_communication)

    @cached_property
    def memory(self) -> Int64:
        return self.intervals(~self.is_compute & ~self.is_communication)


class DeviceBreakdown(Struct, frozen=True):
    """Device time by category: each nanosecond belongs to one, in the order compute, communication, memory."""

    #: start of the window on the rank's own clock; null, as all of these, without device events, or where the trace lacks much of
    #: them there
    first_ns: int | None
    last_ns: int | None  #: end of the window; null as ``first_ns``
    busy_ns: int | None  #: union of kernels, copies and fills; null as ``first_ns``
    compute_ns: int | None  #: union of compute kernels; null as ``first_ns``
    communication_ns: int | None  #: communication kernels that no compute overlapped; null as ``first_ns``
    memory_ns: int | None  #: copies and fills that neither overlapped; null as ``first_ns``
    idle_ns: int | None  #: the rest; null as ``first_ns``
    #: (communication ∩ compute) / communication; null as ``first_ns``, and without communication
    overlap_ratio: float | None
    #: the part of ``memory_ns`` in copies from pageable memory of the host; null as ``first_ns``, and where names of copies to
    #: the device do not tell which memory they are from
    pageable_ns: int | None = None
