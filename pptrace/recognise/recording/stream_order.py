"""Order of a device's work on different streams: where one waits for another, and where a graph runs on several.

A trace has the calls that make a stream wait for an event, but neither the streams nor the event. Work that was launched behind
such a call is taken to wait for all that was launched before it, and had ended when it began, as it does where the event is of
the last work so far. A graph runs behind what was launched before it, and in front of what is launched after it, on whichever
streams its nodes are.
"""

from __future__ import annotations

import numpy as np

from pptrace.intervals import Int64
from pptrace.model.traces import Category, Events
from pptrace.recognise.device.idle import WAITS_ON_STREAM
from pptrace.recognise.recording.boundaries import Rows


def waits_between_streams(
    events: Events, start: Int64, end: Int64, stream: Int64, launched_ns: Int64
) -> tuple[Rows, Rows]:
    """(work, work of another stream that begins after its end).

    What follows from the order of the streams themselves is not among them.

    Args:
        start, end, stream, launched_ns: of the device's work; ``launched_ns`` is −1 where that is not known.
    """
    known = np.flatnonzero(launched_ns >= 0)
    order = known[np.lexsort((start[known], launched_ns[known]))]
    moments = np.union1d(
        events.start_ns[events.rows_named(WAITS_ON_STREAM, Category.RUNTIME)],
        _launches_on_several(launched_ns[order], stream[order]),
    )
    of_streams = [order[stream[order] == number] for number in np.unique(stream[order])] if len(moments) else []
    sources, targets = [order[:0]], [order[:0]]
    for later in of_streams:
        begun = launched_ns[later]
        # The launch before it on its stream, maybe of the same graph.
        since = np.append(np.iinfo(np.int64).min, begun)[:-1]
        waiting = later[np.searchsorted(moments, begun, side="right") > np.searchsorted(moments, since)]
        for earlier in of_streams:
            if earlier is later:
                continue
            launched = np.searchsorted(launched_ns[earlier], launched_ns[waiting], side="right")
            ended = np.searchsorted(np.maximum.accumulate(end[earlier]), start[waiting], side="right")
            number = np.minimum(launched, ended)
            is_more = number > np.append(0, np.maximum.accumulate(number))[:-1]
            sources.append(earlier[number[is_more] - 1])
            targets.append(waiting[is_more])
    return np.concatenate(sources), np.concatenate(targets)


def _launches_on_several(launched_ns: Int64, stream: Int64) -> Int64:
    """The times at which one call launched work of several streams, ns; both by launch."""
    is_same = launched_ns[1:] == launched_ns[:-1]
    several: Int64 = np.unique(launched_ns[1:][is_same & (stream[1:] != stream[:-1])])
    return several
