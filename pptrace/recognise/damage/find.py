"""All damage of a rank's trace, and the trace without the device records that cannot be where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from pptrace.model.damage import KINDS, Damage, RankDamage
from pptrace.model.device import DeviceWork, Rows
from pptrace.model.traces import Category, Events, InputFormat, Trace
from pptrace.model.wording import counted
from pptrace.recognise.damage.device_records import device_damage, out_of_order
from pptrace.recognise.damage.host_records import host_damage
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


def without_misplaced_work(trace: Trace) -> Trace:
    """The trace without device work that is far from its host's events, or not in its place among the work of its stream.

    When it really was is not known: it is missing, as what a recorder has lost.
    """
    events = trace.events
    if not len(events):
        return trace
    rows = device_rows(events)
    far = rows[_is_far(events, rows)]
    misplaced = np.setdiff1d(out_of_order(events), far)
    if not len(far) and not len(misplaced):
        return trace
    damage = (
        RankDamage.counted(Damage.FAR_TIMES, len(far)),
        RankDamage.of(Damage.KERNELS_OUT_OF_ORDER, events.start_ns[misplaced]),
    )
    number = len(far) + len(misplaced)
    line = (
        f"left out {counted(number, 'piece')} of device work that cannot have been where the trace has "
        f"{'it' if number == 1 else 'them'}: {_reason(len(far), len(misplaced))}"
    )
    return replace(
        trace,
        events=_without(events, np.concatenate((far, misplaced))),
        warnings=(*trace.warnings, line),
        damage=RankDamage.joined((trace.damage, *damage)),
    )


def _reason(num_far: int, num_misplaced: int) -> str:
    far = f"{num_far:,} ten minutes and more from the events of the host" if num_far else ""
    misplaced = f"{num_misplaced:,} on a stream before work that was launched earlier, or behind later work"
    return " and ".join(part for part in (far, misplaced if num_misplaced else "") if part)


def _is_far(events: Events, rows: Rows) -> np.ndarray[Any, np.dtype[np.bool_]]:
    on_host = np.flatnonzero(events.category < Category.HOST_LIMIT)
    if not len(on_host):
        return np.zeros(len(rows), dtype=np.bool_)
    first, last = int(events.start_ns[on_host[0]]), int(events.ends_of(on_host).max())
    start = events.start_ns[rows]
    return (start > last + _FAR_NS) | (start < first - _FAR_NS)


def _without(events: Events, rows: Rows) -> Events:
    """The events without some rows."""
    kept = np.setdiff1d(np.arange(len(events)), rows)
    names = ("category", "name_id", "start_ns", "dur_ns", "device", "stream", "thread", "correlation")
    columns: Mapping[str, Any] = {name: getattr(events, name)[kept] for name in names}
    return replace(events, **columns, comm_args=_renumbered(events.comm_args, kept))


def _renumbered(table: pd.DataFrame, kept: Rows) -> pd.DataFrame:
    """The arguments of the events that are kept, by their new rows."""
    of_kept = table[table["event"].isin(kept)]
    return of_kept.assign(event=np.searchsorted(kept, of_kept["event"].to_numpy())).reset_index(drop=True)
