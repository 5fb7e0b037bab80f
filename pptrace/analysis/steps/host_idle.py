"""Device-idle time of a rank in windows by what its next work waited for, and the host's synchronisations in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pptrace.intervals import Int64, lengths_within
from pptrace.model.device import DeviceWork, HostIdle, IdleTime, Synchronisations, SyncSummary
from pptrace.slices import Slice

MOST_SYNCHRONISATIONS = 10
"""Calls and operators that a summary lists, those first that cost the device most."""


def host_idle_of_windows(
    work: DeviceWork, idle: IdleTime, starts_ns: Sequence[int], ends_ns: Sequence[int]
) -> list[HostIdle | None]:
    """The partition of the idle time in each window; None without a device, or where a launch that it needs was not recorded.

    Args:
        work: of the rank; its own ``idle`` is not looked at.
        idle: of :func:`pptrace.model.device.with_host_waits`.
        starts_ns, ends_ns: the windows, on the rank's own clock.
    """
    if not len(work) or idle.reason:
        return [None] * len(starts_ns)
    sets = (idle.launch_starved, idle.blocking, idle.dependency, idle.unknown)
    lengths = [lengths_within(part, starts_ns, ends_ns).tolist() for part in sets]
    return [
        None if unknown else HostIdle(starved, blocking, dependency)
        for starved, blocking, dependency, unknown in zip(*lengths, strict=True)
    ]


def synchronisations_of_windows(
    syncs: Synchronisations,
    starts_ns: Sequence[int],
    ends_ns: Sequence[int],
    longest_op: Callable[[int], str | None] = lambda _: None,
    on_clock: Callable[[int], int] = lambda time_ns: time_ns,
) -> list[tuple[SyncSummary, ...]]:
    """The synchronisations that ended in each window, by call and operator, the costliest first.

    Args:
        syncs: of the rank, on its own clock, as the windows are.
        longest_op: the op that was held up by a synchronisation that ended at a time.
        on_clock: converts a time of the rank to the clock of the report.
    """
    order = np.argsort(syncs.end_ns, kind="stable")
    ends = syncs.end_ns[order]
    first, last = np.searchsorted(ends, starts_ns), np.searchsorted(ends, ends_ns)
    return [
        _summaries(syncs, order[begin:stop], start, end, longest_op, on_clock)
        for begin, stop, start, end in zip(first.tolist(), last.tolist(), starts_ns, ends_ns, strict=True)
    ]


def _summaries(
    syncs: Synchronisations,
    rows: Int64,
    start_ns: int,
    end_ns: int,
    longest_op: Callable[[int], str | None],
    on_clock: Callable[[int], int],
) -> tuple[SyncSummary, ...]:
    duration = syncs.end_ns[rows] - syncs.start_ns[rows]
    drained = np.minimum(syncs.drained_end_ns[rows], end_ns) - np.maximum(syncs.drained_start_ns[rows], start_ns)
    summaries = []
    for number in np.unique(syncs.name[rows]).tolist():
        same = syncs.name[rows] == number
        call, operator = syncs.names[number]
        longest = rows[same][duration[same].argmax()]
        summaries.append(
            SyncSummary(
                call=call,
                operator=operator,
                count=int(same.sum()),
                total_ns=int(duration[same].sum()),
                drained_ns=int(np.maximum(drained[same], 0).sum()),
                longest_ns=int(duration[same].max()),
                longest_start_ns=on_clock(int(syncs.start_ns[longest])),
                longest_op=longest_op(on_clock(int(syncs.end_ns[longest]))),
            )
        )
    summaries.sort(key=lambda entry: (-entry.drained_ns, -entry.total_ns, entry.call, entry.operator))
    return tuple(summaries[:MOST_SYNCHRONISATIONS])


def held_up_op(ops: Slice) -> Callable[[int], str | None]:
    """For a time the op of a rank that ran then, or ran next, such as ``0F3``; None after its last op or without a stage.

    ``ops`` are of one rank, and stand in order of start.
    """
    latest = np.maximum.accumulate(ops["end_ns"])
    kind, kinds = ops.codes("kind")

    def name(time_ns: int) -> str | None:
        index = int(np.searchsorted(latest, time_ns, side="right"))
        if index >= len(latest) or ops["stage"][index] < 0 or ops["microbatch"][index] < 0:
            return None
        return f"{ops['stage'][index]}{kinds[kind[index]]}{ops['microbatch'][index]}"

    return name
