"""Damage of a rank's trace, and the trace without what cannot have been."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pptrace.model.damage import KINDS, Damage, RankDamage
from pptrace.model.device import DeviceWork, Rows
from pptrace.model.traces import Category, InputFormat, Trace
from pptrace.model.wording import counted
from pptrace.recognise.damage.device_records import device_damage, out_of_order
from pptrace.recognise.damage.host_records import empty_ranges, host_damage
from pptrace.recognise.device.work import device_rows

_FAR_NS = 600 * 10**9
"""Device work this long after the last event of its host, or before the first, is not where it was: no queue is that long."""


def damage_of(trace: Trace, work: DeviceWork) -> RankDamage:
    """The damage of a trace; ``work`` is what was recognised of its device."""
    if not len(trace.events):
        return trace.damage
    of_device = device_damage(trace.events, work, has_all_calls=trace.format.has_all_calls)
    if (trace.damage.kind == KINDS.index(Damage.FAR_TIMES)).any() and not len(work):
        of_device = iter(())  # all of it was far off, and is left out
    if trace.format is InputFormat.XPLANE and not (trace.events.category == Category.RUNTIME).any():
        unlaunched = KINDS.index(Damage.NO_CORRELATION)  # a TPU runs whole programs: no call launches an operation
        of_device = (damage for damage in of_device if not (damage.kind == unlaunched).any())
    return RankDamage.joined((trace.damage, *of_device, *host_damage(trace.events)))


def without_damaged_events(trace: Trace) -> Trace:
    """The trace without device work that is far from its host's events, or not in its place among the work of its stream, and
    without ranges whose length was not recorded.

    When they really were is not known: they are missing, as what a recorder has lost.
    """
    events = trace.events
    if not len(events):
        return trace
    rows = device_rows(events)
    on_host = np.flatnonzero(events.category < Category.HOST_LIMIT)
    far = rows[:0]
    if len(on_host):
        first, last = int(events.start_ns[on_host[0]]), int(events.ends_of(on_host).max())
        far = rows[(events.start_ns[rows] > last + _FAR_NS) | (events.start_ns[rows] < first - _FAR_NS)]
    misplaced = np.setdiff1d(out_of_order(events), far)
    empty = empty_ranges(events)
    if not len(far) and not len(misplaced) and not len(empty):
        return trace
    damage = (
        RankDamage.counted(Damage.FAR_TIMES, len(far)),
        RankDamage.of(Damage.KERNELS_OUT_OF_ORDER, events.start_ns[misplaced]),
        RankDamage.of(Damage.EMPTY_RANGES, events.start_ns[empty]),
    )
    remaining = np.setdiff1d(np.arange(len(events)), np.concatenate((far, misplaced, empty)))
    return replace(
        trace,
        events=events.take(remaining),
        warnings=(*trace.warnings, *_lines(far, misplaced, empty)),
        damage=RankDamage.joined((trace.damage, *damage)),
    )


def _lines(far: Rows, misplaced: Rows, empty: Rows) -> Iterator[str]:
    """Warnings of what was left out."""
    number = len(far) + len(misplaced)
    if number:
        reasons = [
            (far, "ten minutes and more from the events of the host"),
            (misplaced, "on a stream before work that was launched earlier, or behind later work"),
        ]
        yield (
            f"left out {counted(number, 'piece')} of device work that cannot have been where the trace has "
            f"{'it' if number == 1 else 'them'}: {' and '.join(f'{len(rows):,} {why}' for rows, why in reasons if len(rows))}"
        )
    if len(empty):
        yield f"left out {counted(len(empty), 'range')} of no length, where others of the same name have one"
