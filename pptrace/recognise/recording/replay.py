"""The run without its recording: the graphs of all ranks, joined by their messages and collectives, played again.

Every node comes as soon as all its edges let it (:mod:`pptrace.recognise.recording.graph`). A message or collective is a node of
its own, which comes when the last of its members has; a member that had waited for it goes on as much later as it did in the
recording. Nodes are taken in the order of the recorded times, in which every cause comes before its effect.

The events of a trace then move as the nodes of its graph around them did.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.clock import Clock
from pptrace.intervals import Int64
from pptrace.model.traces import Bool, Category, Trace
from pptrace.recognise.device.work import device_rows
from pptrace.recognise.recording.boundaries import Boundaries, Compact, Float, Rows
from pptrace.recognise.recording.graph import Edges, RankGraph
from pptrace.slices import Slice, compact, first_like, reduce_groups

_CHUNK = 100_000
"""Nodes of which Python has numbers at one time."""
_LEAST_LAG = 0.1
"""Part of the lag between threads that remains at least."""
_MOST_TIES = 64
_NO_LIMIT = np.iinfo(np.int64).max
_NO_ROWS = np.empty(0, dtype=np.int64)


class Chain(Struct, frozen=True, eq=False):
    """Edges from boundary to boundary of the threads of a rank, thread by thread in order of time: their index in the graph, what
    recording took of each, whether it is the ``first`` of its thread, and whether its target ``waited``.
    """

    edge: Int64
    cost_ns: Float
    overhead_ns: Int64
    room_ns: Int64
    first: Bool
    waited: Bool

    def removed_ns(self, scale: float) -> Int64:
        """Time that recording took of each edge, ns, if it cost ``scale`` times as much as it is taken to. What one has no room
        for is taken from those after it, until the thread waits.
        """
        waited = self.waited
        room = np.where(waited, 0, self.room_ns)
        due = np.where(waited, 0, np.rint(self.cost_ns * scale).astype(np.int64) + self.overhead_ns)
        begins = self.first | waited
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


class RunGraph(Struct, frozen=True, eq=False):
    """The joined graph: nodes in the order in which they are taken, edges by target.

    ``time_ns`` are the recorded times on the common clock, ``position`` the place of each rank's nodes in that order. The edges
    into node ``i`` are ``edge_of[i]`` to ``edge_of[i + 1]``. Of those which ``recorded`` numbers recording took ``cost_ns``, and
    of the ``chains`` of each rank what they say.
    """

    time_ns: Int64
    position: Mapping[int, Compact]
    edge_of: Compact
    source: Compact
    lag_ns: Int64
    recorded: Int64
    cost_ns: Float
    chains: Sequence[Chain]

    def replay(self, scale: float) -> Int64:
        """The time at which each node comes without the recording, if that cost ``scale`` times as much as it is taken to; on the
        common clock.
        """
        if scale <= 0:
            return self.time_ns.copy()
        lags = self.lag_ns.copy()
        most = np.where(lags[self.recorded] > 0, lags[self.recorded] * (1 - _LEAST_LAG), 0.0)
        lags[self.recorded] -= np.rint(np.minimum(self.cost_ns * scale, most)).astype(np.int64)
        for chain in self.chains:
            lags[chain.edge] -= chain.removed_ns(scale)
        return _play(self.time_ns, self.edge_of, self.source, lags)


def join_graphs(
    graphs: Mapping[int, RankGraph], costs_ns: Mapping[int, float], comms: pd.DataFrame, clock: Clock
) -> RunGraph:
    """Join the graphs of ranks. What takes more memory than the joined graph is made for one rank at a time.

    Args:
        graphs: by rank, each on its own clock.
        costs_ns: of recording one event of each rank.
        comms: matched communication of all ranks (schema COMMS) on the common clock.
        clock: converts the ranks' times.
    """
    times = {rank: clock.to_common_clock(rank, graphs[rank].time_ns) for rank in sorted(graphs)}
    *begins, num_nodes = np.cumsum([0, *map(len, times.values())]).tolist()
    first = dict(zip(times, begins, strict=True))
    meetings = _Meetings.of(_members(graphs, times, first, comms), num_nodes)
    time = np.concatenate([*times.values(), meetings.ready_ns])
    del times

    def parts() -> Iterator[tuple[int | None, _Part]]:
        for rank, number in first.items():
            yield rank, _Part.of_rank(graphs[rank], number, meetings)
        yield None, _Part(num_nodes, len(meetings.ready_ns), meetings.into)

    num_into, equal = np.zeros(len(time), dtype=np.int64), []
    for _, part in parts():
        num_into[part.first : part.first + part.num_nodes] = part.num_into(time)
        is_equal = time[part.edges.source] == time[part.edges.target]
        equal.append((part.edges.source[is_equal], part.edges.target[is_equal]))
    order = compact(np.lexsort((_level_among_equals(len(time), *map(np.concatenate, zip(*equal, strict=True))), time)))
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    edge_of = compact(np.concatenate(([0], np.cumsum(num_into[order]))))
    source, lag = np.empty(edge_of[-1], dtype=order.dtype), np.empty(edge_of[-1], dtype=np.int64)
    recorded, costs, chains = [], [], []
    for rank, part in parts():
        used, places = part.placed(time, position, edge_of)
        source[places], lag[places] = position[part.edges.source[used]], part.lags_ns(time)[used]
        if rank is None:
            continue
        place_of = np.full(len(part.edges), -1)
        place_of[used] = places
        of_part = place_of[part.edges.recorded]
        recorded.append(of_part[of_part >= 0])
        costs.append(part.edges.units[of_part >= 0] * costs_ns[rank])
        chains.append(part.chain(graphs[rank].host, place_of, costs_ns[rank]))
    positions = {rank: position[number : number + len(graphs[rank])] for rank, number in first.items()}
    recorded_edges = np.concatenate([_NO_ROWS, *recorded])
    return RunGraph(
        time[order], positions, edge_of, source, lag, recorded_edges, np.concatenate([np.empty(0), *costs]), chains
    )


class _Meetings(Struct, frozen=True, eq=False):
    """The nodes of messages and collectives, each of which comes when the last of its members has begun (``ready_ns``).

    ``into`` and ``out`` are the edges from and to nodes of ranks, the latter by target. Nothing but its meeting let each of the
    nodes that ``waited``, which ascend, come later than ``longest_ns`` after any other cause.
    """

    ready_ns: Int64
    into: Edges
    out: Edges
    waited: Int64
    longest_ns: Int64

    @classmethod
    def of(cls, members: pd.DataFrame, first: int) -> _Meetings:
        """The meetings of their members, as nodes from ``first`` on."""
        matches, index = np.unique(members["match"].to_numpy(), return_inverse=True)
        start, end, asked, start_node, end_node = (
            members[name].to_numpy() for name in ("start_ns", "end_ns", "asked_ns", "start_node", "end_node")
        )
        ready = reduce_groups(np.maximum, start, index, len(matches))
        waited = asked <= ready[index]
        lag = np.where(waited, end - ready[index], 0)
        depends = np.flatnonzero(end >= ready[index])
        depends = depends[np.argsort(end_node[depends], kind="stable")]
        longest = depends[waited[depends]]
        out = Edges.of(first + index[depends], end_node[depends], lag[depends])
        return cls(ready, Edges.of(start_node, first + index, 0), out, end_node[longest], lag[longest])

    def of_nodes(self, nodes: range) -> tuple[Edges, Int64]:
        """(the edges to some nodes, the longest lag of other edges into each of them)."""
        low, high = np.searchsorted(self.out.target, (nodes.start, nodes.stop))
        edges = Edges(self.out.source[low:high], self.out.target[low:high], self.out.lag_ns[low:high])
        low, high = np.searchsorted(self.waited, (nodes.start, nodes.stop))
        longest = np.full(len(nodes), _NO_LIMIT)
        longest[self.waited[low:high] - nodes.start] = self.longest_ns[low:high]
        return edges, longest


class _Part(Struct, frozen=True, eq=False):
    """All edges into the nodes of a rank, or into those of all messages and collectives: ``num_nodes`` from ``first`` on, before
    they are put in order.

    Edges of a rank are from one boundary of a thread to the next one (``follows``), then its other ones (until ``num_own``), then
    those from meetings. ``longest_ns`` is by node the longest lag that edges may have which are not from a meeting.
    """

    first: int
    num_nodes: int
    edges: Edges
    follows: Int64 = field(default_factory=lambda: _NO_ROWS)
    num_own: int = 0
    longest_ns: Int64 = field(default_factory=lambda: _NO_ROWS)

    @classmethod
    def of_rank(cls, graph: RankGraph, first: int, meetings: _Meetings) -> _Part:
        follows = np.flatnonzero(graph.host["thread"][1:] == graph.host["thread"][:-1]) + 1
        chain = Edges.of(follows - 1, follows, graph.host["lag_ns"][follows])
        from_meetings, longest = meetings.of_nodes(range(first, first + len(graph)))
        parts = [chain.numbered_from(first), graph.edges.numbered_from(first), from_meetings]
        return cls(first, len(graph), Edges.joined(parts), follows, len(chain) + len(graph.edges), longest)

    def ahead(self, time: Int64) -> Bool:
        """Mark the edges that do not lead back: clocks that are off may show an effect before its cause."""
        return time[self.edges.source] <= time[self.edges.target]

    def num_into(self, time: Int64) -> Int64:
        """The number of edges into each node."""
        return np.bincount(self.edges.target[self.ahead(time)] - self.first, minlength=self.num_nodes)

    def placed(self, time: Int64, position: Compact, edge_of: Compact) -> tuple[Int64, Int64]:
        """(the edges that do not lead back, their places among all edges)."""
        used = np.flatnonzero(self.ahead(time))
        node = position[self.edges.target[used]]
        order = np.argsort(node, kind="stable")
        node = node[order]
        return used[order], edge_of[node] + (np.arange(len(node)) - np.searchsorted(node, node))

    def lags_ns(self, time: Int64) -> Int64:
        """Lags with which every node comes when it came: none lets it come later, and the longest one not earlier."""
        source, target = self.edges.source, self.edges.target
        lag, node, room = self.edges.lag_ns.copy(), target - self.first, time[target] - time[source]
        lag[: self.num_own] = np.minimum(lag[: self.num_own], self.longest_ns[node[: self.num_own]])
        lag = np.minimum(lag, room)
        slack = np.where(room >= 0, room - lag, np.iinfo(np.int64).max)
        least = reduce_groups(np.minimum, slack, node, self.num_nodes)
        lengthened: Int64 = np.where((room >= 0) & (slack == least[node]), room, lag)
        return lengthened

    def chain(self, host: Slice, place_of: Int64, cost_ns: float) -> Chain:
        """The chain of the rank's threads, whose edges have these places."""
        follows = self.follows
        return Chain(
            compact(place_of[: len(follows)]),
            host["units"][follows] * cost_ns,
            host["overhead_ns"][follows],
            host["room_ns"][follows],
            np.diff(follows, prepend=-1) > 1,
            host["waited"][follows] | (self.longest_ns[follows] < _NO_LIMIT),
        )


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


def _level_among_equals(num_nodes: int, source: Int64, target: Int64) -> Int64:
    """For nodes with the same time how many of them come before each; the edges are those between such nodes."""
    level = np.zeros(num_nodes, dtype=np.int64)
    for _ in range(_MOST_TIES):
        before = level[target]
        np.maximum.at(level, target, level[source] + 1)
        if (level[target] == before).all():
            break
    return level


def _play(time: Int64, edge_of: Compact, source: Compact, lag: Int64) -> Int64:
    """The time at which each node comes: the latest of its edges, the recorded time without any."""
    comes = array("q")
    comes.frombytes(time.view(np.uint8).data)
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
    return np.frombuffer(comes, dtype=np.int64)


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
    num_nodes = len(correction.time_ns)
    removed = np.maximum(np.append(np.diff(correction.time_ns - correction.comes_ns), 0), 0)
    of_stretch = np.zeros((2, num_nodes))  # recording, and the rest, between each node and the next one
    for block in boundaries.blocks():
        _, stretch, parts = _parts_of_gaps(boundaries, correction, block)
        low, beyond = int(stretch.min()), int(stretch.max()) + 1
        for sums, part in zip(of_stretch, parts, strict=True):
            sums[low:beyond] += np.bincount(stretch - low, part)
    from_recording = np.minimum(removed, of_stretch[0])
    shares = [_ratio(from_recording, of_stretch[0]), _ratio(removed - from_recording, of_stretch[1])]
    comes, since_node = np.empty(len(boundaries), dtype=np.int64), 0.0
    for block in boundaries.blocks():
        node, stretch, parts = _parts_of_gaps(boundaries, correction, block)
        kept = [part * (1 - share[stretch]) for share, part in zip(shares, parts, strict=True)]
        total = since_node + np.cumsum(kept[0] + kept[1])
        is_node = boundaries.time_ns[block] == correction.time_ns[node]
        last_node = np.maximum.accumulate(np.where(is_node, np.arange(len(node)), -1))
        since = total - np.where(last_node >= 0, total[last_node], 0.0)
        comes[block], since_node = correction.comes_ns[node] + np.rint(since).astype(np.int64), float(since[-1])
    return comes


def _parts_of_gaps(
    boundaries: Boundaries, correction: Correction, block: slice
) -> tuple[Rows, Rows, tuple[Float, Float]]:
    """For each boundary of a block: (the last node of its thread that it does not come before, the node before its gap, the time
    of the gap that is recording, and the time that is not).
    """
    rows = np.arange(max(block.start - 1, 0), block.stop)
    thread, node = boundaries.threads_of(rows), np.empty(len(rows), dtype=np.intp)
    for index in np.unique(thread).tolist():
        of_thread = slice(*np.searchsorted(thread, (index, index + 1)).tolist())
        first, last = np.searchsorted(correction.thread, boundaries.threads[index] + np.arange(2))
        times = boundaries.time_ns[rows[of_thread]]
        node[of_thread] = first - 1 + np.searchsorted(correction.time_ns[first:last], times, side="right")
    node, stretch = (node[1:], node[:-1]) if block.start else (node, np.concatenate((node[:1], node[:-1])))
    gaps = boundaries.gaps_ns(block)
    recording: Float = np.minimum(
        boundaries.units(block) * correction.cost_ns + boundaries.overhead_ns(block), boundaries.room_ns(block)
    )
    return node, stretch, (recording, (gaps - recording).astype(np.float64))


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
