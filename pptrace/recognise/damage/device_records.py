"""Damage of a rank's device records: what does not agree with the calls that launched it, or with the order of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pptrace.model.damage import Damage, RankDamage
from pptrace.model.device import DeviceWork, Rows
from pptrace.model.tables import Int64
from pptrace.model.traces import Category, Events
from pptrace.recognise.device.graphs import inside
from pptrace.recognise.device.lost_work import kernel_launches
from pptrace.recognise.device.work import device_rows, launch_calls
from pptrace.recognise.repeats.captures import capture_times

_CLOCKS_NS = 100_000
"""Errors between the clocks of device and host."""
_SHARE_EMPTY, _FEWEST_EMPTY = 1e-3, 10
"""Kernels of no length from which on they are the recorder's: a resolution of a microsecond makes a few."""
_GRAPH_LAUNCHES = ("cudaGraphLaunch", "hipGraphLaunch", "cuGraphLaunch")
_GRAPH_NAME = "CUDA graph"
"""Name of the one event that Nsight Systems writes for a graph whose nodes it does not record."""


def device_damage(events: Events, work: DeviceWork) -> Iterator[RankDamage]:
    """Find the damage of device records; ``work`` is what was recognised of them."""
    if work.missing_device_events:
        yield RankDamage.counted(Damage.NO_DEVICE_EVENTS, 1)
    yield RankDamage.of(Damage.LOST_KERNELS, work.lost.start_ns)
    rows = device_rows(events)
    if not len(rows):
        return
    calls = launch_calls(events, rows)
    is_kernel = events.category[rows] == Category.KERNEL
    yield from _without_launch(events, rows, calls)
    early = (calls >= 0) & (events.start_ns[rows] < events.start_ns[calls] - _CLOCKS_NS)
    yield RankDamage.of(Damage.KERNELS_BEFORE_LAUNCH, events.start_ns[rows[early]])
    yield RankDamage.of(Damage.REPEATED_CORRELATION, events.start_ns[_repeated(events, rows[is_kernel])])
    doubled = _doubled(events, rows)
    yield RankDamage.of(Damage.REPEATED_KERNELS, events.start_ns[doubled])
    empty = rows[is_kernel & (events.dur_ns[rows] == 0)]
    if len(empty) >= max(_FEWEST_EMPTY, _SHARE_EMPTY * np.count_nonzero(is_kernel)):
        yield RankDamage.of(Damage.EMPTY_KERNELS, events.start_ns[empty])
    yield RankDamage.of(Damage.GRAPHS_AS_ONE_EVENT, events.start_ns[_named(events, rows, (_GRAPH_NAME,))])
    yield RankDamage.of(Damage.GRAPHS_WITHOUT_KERNELS, events.start_ns[_graphs_without_work(events, rows)])


def out_of_order(events: Events) -> Rows:
    """The device work that begins before work that was launched before it on its stream, or behind what was launched after it.

    A stream runs its work in the order of the launches. Of two pieces that are in the wrong order, the ones to blame are those
    without which most are right: the fewer of those that are later than a successor and those that are earlier than a
    predecessor.
    """
    rows = device_rows(events)
    calls = launch_calls(events, rows)
    known = np.flatnonzero(calls >= 0)
    if not len(known):
        return rows[:0]
    rows, launched = rows[known], events.start_ns[calls[known]]
    stream = _streams(events, rows)
    order = np.lexsort((events.start_ns[rows], launched, stream))
    rows = rows[order]
    bounds = [0, *(np.flatnonzero(np.diff(stream[order]) != 0) + 1).tolist(), len(rows)]
    wrong = [rows[first:last][_misplaced(events.start_ns[rows[first:last]])] for first, last in pairwise(bounds)]
    return np.sort(np.concatenate(wrong))


def _streams(events: Events, rows: Rows) -> npt.NDArray[np.intp]:
    """The stream of each row as a number from 0 on, of all devices."""
    names, stream = np.unique(events.stream[rows], return_inverse=True)
    _, device = np.unique(events.device[rows], return_inverse=True)
    codes: npt.NDArray[np.intp] = device * len(names) + stream
    return codes


def _misplaced(start: Int64) -> npt.NDArray[np.bool_]:
    """Mark the starts, in the order of the launches, that are not in their place."""
    earliest_behind = np.append(np.minimum.accumulate(start[::-1])[::-1][1:], np.iinfo(np.int64).max)
    latest_before = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(start)[:-1])
    late, early = start - _CLOCKS_NS > earliest_behind, start < latest_before - _CLOCKS_NS
    chosen: npt.NDArray[np.bool_] = late if late.sum() <= early.sum() else early
    return chosen


def _without_launch(events: Events, rows: Rows, calls: Rows) -> Iterator[RankDamage]:
    """Device work whose launch is not there: all of it, where nothing correlates; else launched before the recording, or lost.

    A stream runs its work in the order of the launches: what comes before its first work with a launch was launched before.
    """
    missing = calls < 0
    if not (events.category == Category.RUNTIME).any() or not missing.any():
        return
    if missing.all():
        yield RankDamage.of(Damage.NO_CORRELATION, events.start_ns[rows])
        return
    stream = _streams(events, rows)
    first = np.full(stream.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, stream[~missing], events.start_ns[rows[~missing]])
    first[first == np.iinfo(np.int64).max] = events.start_ns[calls[~missing]].min()  # streams of earlier work alone
    is_before = events.start_ns[rows] < first[stream]
    yield RankDamage.of(Damage.WORK_BEFORE_RECORDING, events.start_ns[rows[missing & is_before]])
    yield RankDamage.of(Damage.KERNELS_WITHOUT_LAUNCH, events.start_ns[rows[missing & ~is_before]])


def _repeated(events: Events, kernels: Rows) -> Rows:
    """The kernels that a call for one kernel launched besides its first."""
    launches, _ = kernel_launches(events, kernels)
    of_calls = kernels[np.isin(events.correlation[kernels], events.correlation[launches])]
    _, first = np.unique(events.correlation[of_calls], return_index=True)
    return np.delete(of_calls, first)


def _doubled(events: Events, rows: Rows) -> Rows:
    """The pieces that are another one again: the same name, stream, times and length."""
    rows = rows[events.dur_ns[rows] > 0]
    names = ("device", "stream", "start_ns", "dur_ns", "name_id")
    columns = np.stack([getattr(events, name)[rows].astype(np.int64) for name in names])
    order = np.lexsort(columns)
    again = (np.diff(columns[:, order]) == 0).all(axis=0)
    return np.sort(rows[order[1:][again]])


def _named(events: Events, rows: Rows, names: tuple[str, ...]) -> Rows:
    codes = [code for code, name in enumerate(events.names) if name.startswith(names)]
    return rows[np.isin(events.name_id[rows], codes)]


def _graphs_without_work(events: Events, rows: Rows) -> Rows:
    """The launches of graphs of which nothing ran, outside of captures; none where no graph's nodes are known."""
    launches = _named(events, np.flatnonzero(events.category == Category.RUNTIME), _GRAPH_LAUNCHES)
    has_work = np.isin(events.correlation[launches], events.correlation[rows])
    empty = launches[~has_work]
    return empty[~inside(capture_times(events), events.start_ns[empty], events.start_ns[empty])]
