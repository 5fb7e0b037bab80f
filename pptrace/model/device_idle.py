"""Device-idle time of one rank by what its next work waited for, and the host's synchronisations with the device."""

from __future__ import annotations

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.intervals import EMPTY, Int64, intersect, merge, subtract

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
