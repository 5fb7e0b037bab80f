"""The run without its recording: the graphs of all ranks, joined by their messages and collectives, played again.

Every node comes as soon as all its edges let it (:mod:`pptrace.recognise.recording.graph`). A message or collective is a node of
its own, which comes when the last of its members has; a member that had waited for it goes on as much later as it did in the
recording. Nodes are taken in the order of the recorded times, in which every cause comes before its effect.

The events of a trace then move as the nodes of its graph around them did.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.clock import Clock
from pptrace.intervals import Int64
from pptrace.model.traces import Bool, Category, Trace
from pptrace.recognise.device.work import device_rows
from pptrace.recognise.recording.boundaries import Boundaries, Float
from pptrace.recognise.recording.graph import RankGraph, edges_of
from pptrace.slices import Slice, first_like, reduce_groups

_CHUNK = 100_000
"""Nodes of which Python has numbers at one time."""
_LEAST_LAG = 0.1
"""Part of the lag between threads that remains at least."""
_MOST_TIES = 64


class RunGraph(Struct, frozen=True, eq=False):
    """The joined graph: nodes in the order in which they are taken, edges by target.

    ``time_ns`` are the recorded times on the common clock, ``position`` the place of each rank's nodes in that order. The edges
    into node ``i`` are ``edge_of[i]`` to ``edge_of[i + 1]``, of which recording took ``cost_ns``. ``chain`` are those from
    boundary to boundary of one thread, thread by thread in order of time: the index of the ``edge``, what recording took of it
    (``cost_ns``, ``overhead_ns``, ``room_ns``), whether it is the ``first`` of its thread, and whether its target ``waited``.
    """

    time_ns: Int64
    position: Mapping[int, Int64]
    edge_of: Int64
    source: Int64
    lag_ns: Int64
    cost_ns: Float
    chain: Slice

    def replay(self, scale: float) -> Int64:
        """The time at which each node comes without the recording, if that cost ``scale`` times as much as it is taken to; on the
        common clock.
        """
        if scale <= 0:
            return self.time_ns.copy()
        most = np.where(self.lag_ns > 0, self.lag_ns * (1 - _LEAST_LAG), 0.0)
        lags = self.lag_ns - np.rint(np.minimum(self.cost_ns * scale, most)).astype(np.int64)
        lags[self.chain["edge"]] -= self._removed(scale)
        return _play(self.time_ns, self.edge_of, self.source, lags)

    def _removed(self, scale: float) -> Int64:
        """Time that recording took of each edge of a chain, ns. What one has no room for is taken from those after it, until the
        thread waits.
        """
        chain, waited = self.chain, self.chain["waited"]
        room = np.where(waited, 0, chain["room_ns"])
        due = np.where(waited, 0, np.rint(chain["cost_ns"] * scale).astype(np.int64) + chain["overhead_ns"])
        begins = chain["first"] | waited
        begins[1:] |= waited[:-1]
        balance = np.concatenate(([0], np.cumsum(due - room)))
        stretch = np.cumsum(begins)
        # Each stretch lies below all of those before it, so that the least value until now is one of its own.
        level = -(int(np.ptp(balance)) + 1) * stretch
        since = balance[1:] - balance[np.flatnonzero(begins)][stretch - 1] + level
        owed = since - np.minimum.accumulate(np.minimum(since, level))
        carried = np.where(begins, 0, np.concatenate(([0], owed[:-1])))
        removed: Int64 = due + carried - owed
        return removed


def join_graphs(
    graphs: Mapping[int, RankGraph], costs_ns: Mapping[int, float], comms: pd.DataFrame, clock: Clock
) -> RunGraph:
    """Join the graphs of ranks.

    Args:
        graphs: by rank, each on its own clock.
        costs_ns: of recording one event of each rank.
        comms: matched communication of all ranks (schema COMMS) on the common clock.
        clock: converts the ranks' times.
    """
    times = {rank: clock.to_common_clock(rank, graphs[rank].time_ns) for rank in sorted(graphs)}
    *begins, num_nodes = np.cumsum([0, *map(len, times.values())]).tolist()
    first = dict(zip(times, begins, strict=True))
    chain_edges, chains, of_ranks = [], [], []
    for rank, number in first.items():
        host, edges, cost_ns = graphs[rank].host, graphs[rank].edges, costs_ns[rank]
        follows = np.flatnonzero(host["thread"][1:] == host["thread"][:-1]) + 1
        rows = host.where(follows)
        chain_edges.append(edges_of(number + follows - 1, number + follows, rows["lag_ns"]))
        is_first, columns = np.diff(follows, prepend=-1) > 1, ("overhead_ns", "room_ns", "waited")
        chain = {"cost_ns": rows["units"] * cost_ns, "first": is_first, **{name: rows[name] for name in columns}}
        chains.append(Slice(chain))
        moved = {name: edges[name] + number for name in ("source", "target")}
        of_ranks.append(edges.with_columns({**moved, "units": edges["units"] * cost_ns}))
    members = _members(graphs, times, first, comms)
    # Each message or collective is a node, which comes when its last member has begun.
    matches, index = np.unique(members["match"].to_numpy(), return_inverse=True)
    start, end, wait_ns, start_node, end_node = (
        members[name].to_numpy() for name in ("start_ns", "end_ns", "asked_ns", "start_node", "end_node")
    )
    ready = reduce_groups(np.maximum, start, index, len(matches))
    waited, depends = wait_ns <= ready[index], end >= ready[index]
    lag = np.where(waited, end - ready[index], 0)
    meetings = num_nodes + index
    of_meetings = [edges_of(start_node, meetings, 0), edges_of(meetings[depends], end_node[depends], lag[depends])]
    time = np.concatenate([*times.values(), ready])
    # Nothing but the meeting let a member that had waited for it come later than this lag after any other cause.
    longest = np.full(len(time), np.iinfo(np.int64).max)
    longest[end_node[depends & waited]] = lag[depends & waited]
    edges = Slice.joined([edges_of([], [], []), *chain_edges, *of_ranks, *of_meetings])
    parts = {rank: (number, len(times[rank])) for rank, number in first.items()}
    return _ordered(time, edges, Slice.joined(chains), longest, parts)


def _members(
    graphs: Mapping[int, RankGraph], times: Mapping[int, Int64], first: Mapping[int, int], comms: pd.DataFrame
) -> pd.DataFrame:
    """The rows of matched communication with the nodes at which each begins and ends, where all rows of a match have both."""
    matched = comms[(comms["match"] >= 0) & (comms["clock"] != "none") & comms["rank"].isin(list(graphs))]
    rows = matched[["rank", "start_ns", "asked_ns", "end_ns", "match", "clock"]].reset_index(drop=True)
    start, end = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()
    on_device = (rows["clock"] == "device").to_numpy()
    start_node, end_node = np.full(len(rows), -1), np.full(len(rows), -1)
    for rank, graph in graphs.items():
        of_rank = (rows["rank"] == rank).to_numpy()
        host, device = of_rank & ~on_device, of_rank & on_device
        on_host, starts, ends = graph.split(times[rank])
        for node, at in ((start_node, start), (end_node, end)):
            found = first_like([at[host]], [on_host])
            node[host] = np.where(found >= 0, first[rank] + found, -1)
        first_work = first[rank] + len(graph.host)
        one = first_like([start[device], end[device]], [starts, ends])
        # Of several kernels, as a send and a receive that one range waits for, a row has the first begin and the last end.
        for node, at, edges, number in (
            (start_node, start, starts, first_work),
            (end_node, end, ends, first_work + len(starts)),
        ):
            work = np.where(one >= 0, one, first_like([at[device]], [edges]))
            node[device] = np.where(work >= 0, number + work, -1)
    has_nodes = (start_node >= 0) & (end_node >= 0)
    _, match = np.unique(rows["match"].to_numpy(), return_inverse=True)
    size = np.bincount(match)
    is_complete = (size > 1) & (size == np.bincount(match, has_nodes))
    members: pd.DataFrame = rows.assign(start_node=start_node, end_node=end_node)[is_complete[match]]
    return members


def _ordered(time: Int64, edges: Slice, chain: Slice, longest: Int64, parts: Mapping[int, tuple[int, int]]) -> RunGraph:
    """Put nodes and edges in order. The first edges are those of the chain, the last those of meetings.

    Args:
        longest: the longest lag that edges into a node may have that are not from a meeting.
        parts: the first node of each rank and their number.
    """
    from_meeting = edges["source"] >= sum(size for _, size in parts.values())
    lag = np.where(from_meeting, edges["lag_ns"], np.minimum(edges["lag_ns"], longest[edges["target"]]))
    waited = chain["waited"] | (longest[edges["target"][: len(chain)]] < np.iinfo(np.int64).max)
    ahead = time[edges["source"]] <= time[edges["target"]]  # clocks that are off may show an effect before its cause
    order = np.lexsort((_level_among_equals(time, edges["source"][ahead], edges["target"][ahead]), time))
    position = np.empty(len(time), dtype=np.int64)
    position[order] = np.arange(len(time))
    lag = _tight(time, edges["source"], edges["target"], lag, ahead)
    used = np.flatnonzero(ahead)
    used = used[np.argsort(position[edges["target"][used]], kind="stable")]
    index = np.full(len(edges), -1)
    index[used] = np.arange(len(used))
    return RunGraph(
        time[order],
        {rank: position[first : first + size] for rank, (first, size) in parts.items()},
        np.searchsorted(position[edges["target"][used]], np.arange(len(time) + 1)),
        position[edges["source"][used]],
        lag[used],
        edges["units"][used],
        chain.with_columns({"edge": index[: len(chain)], "waited": waited}),
    )


def _level_among_equals(time: Int64, source: Int64, target: Int64) -> Int64:
    """For nodes with the same time how many of them come before each."""
    level = np.zeros(len(time), dtype=np.int64)
    equal = time[source] == time[target]
    source, target = source[equal], target[equal]
    for _ in range(_MOST_TIES):
        before = level[target]
        np.maximum.at(level, target, level[source] + 1)
        if (level[target] == before).all():
            break
    return level


def _tight(time: Int64, source: Int64, target: Int64, lag: Int64, used: Bool) -> Int64:
    """Lags with which every node comes when it came: none lets it come later, and the longest one not earlier."""
    room = time[target] - time[source]
    lag = np.minimum(lag, room)
    slack = np.where(used, room - lag, np.iinfo(np.int64).max)
    least = reduce_groups(np.minimum, slack, target, len(time))
    lengthened: Int64 = np.where(used & (slack == least[target]), room, lag)
    return lengthened


def _play(time: Int64, edge_of: Int64, source: Int64, lag: Int64) -> Int64:
    """The time at which each node comes: the latest of its edges, the recorded time without any."""
    comes = array("q", time.tobytes())
    for low in range(0, len(time), _CHUNK):
        first = edge_of[low : low + _CHUNK + 1]
        sources, lags = (values[first[0] : first[-1]].tolist() for values in (source, lag))
        edge = 0
        for node, last in enumerate((first[1:] - first[0]).tolist(), low):
            if edge == last:
                continue
            latest = comes[sources[edge]] + lags[edge]
            edge += 1
            while edge < last:
                other = comes[sources[edge]] + lags[edge]
                if other > latest:
                    latest = other
                edge += 1
            comes[node] = latest
    return np.frombuffer(comes, dtype=np.int64).copy()


class Correction(Struct, frozen=True, eq=False):
    """Times of the nodes of a rank's graph without the recording, on the rank's own clock.

    ``cost_ns`` was taken out for each event. Host nodes are a ``thread``, the recorded ``time_ns`` and ``comes_ns``, by thread
    and time; ``start_ns`` and ``end_ns`` are of the device's work, in its order.
    """

    cost_ns: float
    thread: Int64
    time_ns: Int64
    comes_ns: Int64
    start_ns: Int64
    end_ns: Int64

    @classmethod
    def of(cls, graph: RankGraph, comes_ns: Int64, cost_ns: float) -> Correction:
        host, start, end = graph.split(comes_ns)
        return cls(cost_ns, graph.host["thread"], graph.host["time_ns"], host, start, end)


class Corrections(Struct, frozen=True):
    """Corrections by the file and the rank that it names; traces of others stay as they are."""

    by_trace: Mapping[tuple[str, int | None], Correction]

    @property
    def digest(self) -> str:
        """A text that only these corrections have."""
        digest = hashlib.sha256()
        for (_, rank), correction in sorted(self.by_trace.items(), key=lambda item: str(item[0])):
            digest.update(f"{rank} {correction.cost_ns}".encode())
            for name in correction.__struct_fields__[1:]:
                digest.update(np.ascontiguousarray(getattr(correction, name)).tobytes())
        return digest.hexdigest()

    def corrected(self, trace: Trace) -> Trace:
        """The trace as it would have been without its recording."""
        correction = self.by_trace.get((trace.path, trace.rank))
        return trace if correction is None else corrected(trace, correction)


def corrected(trace: Trace, correction: Correction) -> Trace:
    """The trace with all times as they would have been without the recording."""
    events = trace.events
    boundaries = Boundaries.of(events)
    comes = _boundaries_come(boundaries, correction)
    start, end, work = events.start_ns.copy(), events.end_ns, device_rows(events)
    for times, chosen in ((start, ~boundaries.is_end), (end, boundaries.is_end)):
        times[boundaries.event[chosen]] = comes[chosen]
    start[work], end[work] = correction.start_ns, correction.end_ns
    # What is neither an event of a thread's boundaries nor work of a device moves along its thread or stream.
    is_other = np.ones(len(events), dtype=np.bool_)
    is_other[boundaries.event] = is_other[work] = False
    others = np.flatnonzero(is_other)
    on_device = events.category[others] >= Category.HOST_LIMIT
    bounds = zip(boundaries.first[:-1], boundaries.first[1:], strict=True)
    clocks = [(boundaries.time_ns[low:high], comes[low:high]) for low, high in bounds]
    of_thread, main = dict(zip(boundaries.threads.tolist(), clocks, strict=True)), max(clocks, key=lambda c: len(c[0]))
    moves = [(rows, of_thread.get(thread, main)) for thread, rows in events.rows_by_thread(others[~on_device]).items()]
    streams = events.stream[others[on_device]]
    for stream in np.unique(streams).tolist():
        of_stream = work[events.stream[work] == stream]
        recorded = np.append(events.start_ns[of_stream], events.ends_of(of_stream))
        order = np.argsort(recorded, kind="stable")
        clock = (recorded[order], np.append(start[of_stream], end[of_stream])[order])
        moves.append((others[on_device][streams == stream], clock if len(of_stream) else main))
    for rows, clock in moves:
        start[rows], end[rows] = _moved(events.start_ns[rows], *clock), _moved(events.ends_of(rows), *clock)
    duration = np.maximum(end - start, 0)
    order = np.lexsort((-duration, start))  # longer ones first among equals
    memory = trace.memory.assign(t_ns=_moved(trace.memory["t_ns"].to_numpy(), *main))
    moved = replace(events, start_ns=start, dur_ns=duration).take(order)
    return replace(trace, events=moved, memory=memory)


def _boundaries_come(boundaries: Boundaries, correction: Correction) -> Int64:
    """The time of each boundary: between two nodes, recording is taken from where it lies, the rest from all gaps alike."""
    node, num_nodes = np.empty(len(boundaries), dtype=np.intp), len(correction.time_ns)
    for thread, low, high in zip(boundaries.threads, boundaries.first[:-1], boundaries.first[1:], strict=True):
        first, last = np.searchsorted(correction.thread, (thread, thread + 1))
        before = np.searchsorted(correction.time_ns[first:last], boundaries.time_ns[low:high], side="right")
        node[low:high] = first + before - 1  # the last node of its thread that each boundary does not come before
    is_node = boundaries.time_ns == correction.time_ns[node]
    stretch = np.concatenate((node[:1], node[:-1]))  # the node before each gap; the first gap of a thread is empty
    removed = np.append(np.diff(correction.time_ns - correction.comes_ns), 0).astype(np.float64)
    removed = np.maximum(removed, 0.0)
    gaps = boundaries.gaps_ns
    recording = np.minimum(boundaries.units * correction.cost_ns + boundaries.overhead_ns, boundaries.room_ns)
    parts: tuple[Float, Float] = (recording.astype(np.float64), (gaps - recording).astype(np.float64))
    of_stretch = [np.bincount(stretch, part, num_nodes).astype(np.float64) for part in parts]
    from_recording = np.minimum(removed, of_stretch[0])
    shares = [_ratio(from_recording, of_stretch[0]), _ratio(removed - from_recording, of_stretch[1])]
    total = np.cumsum(gaps - parts[0] * shares[0][stretch] - parts[1] * shares[1][stretch])
    last_node = np.maximum.accumulate(np.where(is_node, np.arange(len(boundaries)), 0))
    comes: Int64 = correction.comes_ns[node] + np.rint(total - total[last_node]).astype(np.int64)
    return comes


def _ratio(part: Float, total: Float) -> Float:
    ratio: Float = np.divide(part, total, out=np.zeros_like(part), where=total > 0)
    return ratio


def _moved(times: Int64, recorded: Int64, comes: Int64) -> Int64:
    """Move times as the recorded times around them moved, which are in order; those beyond their ends as the last ones."""
    if not len(recorded):
        return times
    moves = np.interp(
        (times - recorded[0]).astype(np.float64), (recorded - recorded[0]).astype(np.float64), comes - recorded
    )
    moved: Int64 = times + np.rint(moves).astype(np.int64)
    return moved
