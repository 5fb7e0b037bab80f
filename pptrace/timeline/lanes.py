"""Time of each rank by what it did: compute, transfer, waiting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.clock import Clock
from pptrace.intervals import EMPTY, Int64, NestedIntervals, intersect, lengths_within, merge, subtract, union
from pptrace.marks import Collective
from pptrace.model.device import DeviceWork, IdleTime, RangedPauses, with_host_waits
from pptrace.model.tables import COMPUTE_KINDS, MESSAGES
from pptrace.recognise.messages.match import without_group_or_peer
from pptrace.slices import Slice

INNER_AXES = ("tp", "cp", "ep")
"""Axes along which ops communicate."""
_IDLE_PARTS = ("launch_starved", "blocking", "dependency", "unknown", "between_operators")


class Lane(Struct, frozen=True):
    """The time of one rank as sets of intervals (see :mod:`pptrace.intervals`), ns.

    ``compute`` is the union of its compute kernels or, without device events, of its F/B/I/W ops, or without these of its
    host's operators, minus the communication nested in them: a host range waits for what it calls, whereas what a table puts
    on the device is overlapped with its device ops.
    ``transfer`` is communication with all sides present; ``exposed`` is the part of it that no compute overlaps
    during which the rank posted that transfer or waited for it: one that was posted ahead and has come before its reader
    asks for it is not exposed, and what else the rank waits for meanwhile is not its doing.
    ``unknown`` is communication that no compute overlaps and whose other side is not in the traces: waiting or
    transfer, which is unknown.
    Communication of which not even the group was recorded counts as transfer if it is a collective and as waiting if it is a
    message, or a barrier, which moves no data.
    ``not_overlapped`` is all communication without compute at the same time that the rank posted or waited for: an upper bound of
    ``exposed``.
    ``on_device``: ``compute`` are kernels, so that all else in its ops is no compute; ``of_operators``: it is what the operators
    of its host took. ``idle`` is when its device did nothing, and why; None where that is not known. ``recompute`` is the part of
    ``compute`` in which a backward ran a forward again, as far as that is known. ``pauses`` are those of the host in ranges, by
    their names. ``knows_compute``: where there is no compute, the rank did not; a recorder may leave out operators.
    """

    compute: Int64
    transfer: Int64
    exposed: Int64
    unknown: Int64
    not_overlapped: Int64
    on_device: bool = False
    idle: IdleTime | None = None
    of_operators: bool = False
    recompute: Int64 = field(default_factory=lambda: EMPTY)
    pauses: Mapping[str, Int64] = field(default_factory=dict)
    knows_compute: bool = True


def lane_of(
    rank: int,
    ops: Slice,
    comms: Slice,
    work: DeviceWork | None,
    clock: Clock,
    lacks_peers: bool = False,
    host: Int64 | None = None,
    lacks_members: bool = False,
) -> Lane:
    """The lane of a rank, from its aligned ops and comms and from its device and host work, which are still on its own clock.

    ``host`` is None of a table, which has all ops. ``lacks_peers``: ranks of its pipeline have no trace, so that messages
    without a peer may be to them and are of no known kind. ``lacks_members``: ranks of the run have none, for which
    collectives without a group may have waited.
    """
    is_unknown, is_message = without_group_or_peer(comms), comms.among("kind", MESSAGES)
    waits = is_message | (comms["kind"] == Collective.BARRIER)
    is_known = (comms["match"] >= 0) | (comms["group_size"] == 1) | (is_unknown & ~waits & (not lacks_members))
    known_comms = comms if is_known.all() else comms.where(is_known)
    transfer = union(known_comms["transfer_start_ns"], known_comms["transfer_end_ns"])
    unclear = ~is_known & (~is_unknown | (is_message & lacks_peers) | (~waits & lacks_members))
    unmatched = union(comms["start_ns"][unclear], comms["end_ns"][unclear])
    blocking = _blocking(comms, "start_ns", "end_ns")
    of_operators = host is not None and len(host) > 0 and not ops.among("kind", COMPUTE_KINDS).any()
    if work is not None and len(work.compute):
        compute = clock.to_common_clock(rank, work.compute)
    elif of_operators and host is not None:
        compute = subtract(clock.to_common_clock(rank, host), blocking)
    else:
        compute_ops = ops.where(ops.among("kind", COMPUTE_KINDS))
        nested = is_nested(comms, compute_ops, is_table=work is None or not len(work))
        inside = blocking if nested.all() else _blocking(comms.where(nested), "start_ns", "end_ns")
        compute = subtract(union(compute_ops["start_ns"], compute_ops["end_ns"]), inside)
    exposed = subtract(_blocking(known_comms, "transfer_start_ns", "transfer_end_ns"), compute)
    not_overlapped = subtract(blocking, compute)
    unclear_part = subtract(subtract(unmatched, compute), exposed)
    again = EMPTY
    if work is not None and len(work.backward.recompute):
        again = intersect(clock.to_common_clock(rank, work.backward.recompute), compute)
    paused = RangedPauses() if work is None else work.idle.in_ranges
    times = clock.to_common_clock(rank, np.stack((paused.start_ns, paused.end_ns), axis=1))
    pauses = {name: times[paused.name == number] for number, name in enumerate(paused.names)}
    known: dict[str, Any] = {"of_operators": of_operators, "recompute": again, "pauses": pauses}
    lane = Lane(compute, transfer, exposed, unclear_part, not_overlapped, **known)
    if work is None or not len(work):
        return replace(lane, knows_compute=host is None or len(host) > 0 or len(compute) > 0)
    return replace(lane, on_device=len(work.compute) > 0, of_operators=False, idle=_idle_of(rank, work, comms, clock))


def _idle_of(rank: int, work: DeviceWork, comms: Slice, clock: Clock) -> IdleTime | None:
    """The idle time of a rank's device on the common clock, without its synchronisations."""
    if work.idle.reason:
        return None
    parts = ((name, getattr(work.idle, name)) for name in _IDLE_PARTS)
    moved: dict[str, Any] = {name: clock.to_common_clock(rank, part) for name, part in parts if part is not None}
    return with_host_waits(IdleTime(**moved), host_waits(comms))


def host_parts(operators: Int64, comms: Slice) -> tuple[Int64, Int64]:
    """(compute, communication) of a host without a device: its operators without the communication that they wait for, and the
    communication that it posted or waited for meanwhile. All are on one clock.
    """
    blocking = _blocking(comms, "start_ns", "end_ns")
    return subtract(operators, blocking), blocking


def host_waits(comms: Slice) -> Int64:
    """Times at which a rank's host waited for communication that it carried out itself (gloo, MPI), on the clock of ``comms``."""
    start, posted, end = comms["start_ns"], comms["posted_ns"], comms["end_ns"]
    waits = comms.where((comms["clock"] == "host") & ~((posted == end) & (start < end)))
    return union(np.maximum(waits["start_ns"], waits["asked_ns"]), waits["end_ns"])


def communication_inside_ops(ops: Slice, comms: Slice, lane: Lane) -> Int64:
    """Time in which each op of a rank posted collectives and exchanges (tp, cp, …) or waited for them without compute, ns."""
    blocked = subtract(_blocking(comms.where(is_inner(comms)), "start_ns", "end_ns"), lane.compute)
    return lengths_within(blocked, ops["start_ns"], ops["end_ns"])


def exposed_inside_ops(ops: Slice, comms: Slice, lane: Lane, axis: str) -> Int64:
    """Time in which collectives along an axis were moved inside each op of a rank, which waited for them without compute, ns."""
    of_axis = comms.where(is_inner(comms) & (comms["axis"] == axis) & (comms["match"] >= 0))
    moved = subtract(_blocking(of_axis, "transfer_start_ns", "transfer_end_ns"), lane.compute)
    return lengths_within(moved, ops["start_ns"], ops["end_ns"])


def is_message(comms: Slice) -> npt.NDArray[np.bool_]:
    """Mark the pipeline's messages among some communication."""
    messages: npt.NDArray[np.bool_] = (comms["axis"] == "pp") & comms.among("kind", MESSAGES)
    return messages


def is_inner(comms: Slice) -> npt.NDArray[np.bool_]:
    """Mark the communication that is a part of an op: collectives and exchanges, not the pipeline's messages."""
    inner: npt.NDArray[np.bool_] = (comms["microbatch"] < 0) & ~is_message(comms)
    return inner


def _blocking(comms: Slice, start: str, end: str) -> Int64:
    """The part of communication, from the column ``start`` to ``end``, that its side was posting or waiting for."""
    starts, ends = comms[start], comms[end]
    posting = union(starts, np.minimum(ends, comms["posted_ns"]))
    waiting = union(np.maximum(starts, comms["asked_ns"]), ends)
    return merge(posting, waiting)


def is_nested(comms: Slice, ops: Slice, is_table: bool) -> npt.NDArray[np.bool_]:
    """Mark the communication of a rank that lies wholly inside one of its ops, which posted or waited for it. What began before
    overlaps with it; and so does what a table puts on the device with its ops, whose intervals are then those of their kernels.
    """
    if not len(ops) or not len(comms):
        return np.zeros(len(comms), dtype=np.bool_)
    ordered = ops.sorted_by(("start_ns",))
    inside = NestedIntervals(ordered["start_ns"], ordered["end_ns"]).cover(comms["start_ns"], comms["end_ns"])
    if is_table and (ops["clock"] == "device").all():
        inside &= comms["clock"] != "device"
    return inside
