"""The run without its recording: the graphs of all ranks, joined by their messages and collectives, played again.

Every node comes as soon as all its edges let it (:mod:`pptrace.recognise.recording.graph`). A message or collective is a node of
its own, which comes when the last of its members has; a member that had waited for it goes on as much later as it did in the
recording. Nodes are taken in the order of the recorded times, in which every cause comes before its effect.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from pptrace.clock import Clock
from pptrace.intervals import Int64
from pptrace.recognise.recording.boundaries import Bool, Float
from pptrace.recognise.recording.graph import Edges, RankGraph

_CHUNK = 100_000
"""Nodes of which Python has numbers at one time."""
_LEAST_LAG = 0.1
"""Part of the lag between threads that remains at least."""
_MOST_TIES = 64


@dataclass(frozen=True, slots=True, eq=False)
class RunGraph:
    """The joined graph: nodes in the order in which they are taken, edges by target.

    ``time_ns`` are the recorded times on the common clock, ``position`` the place of each rank's nodes in that order. The edges
    into node ``i`` are ``edge_of[i]`` to ``edge_of[i + 1]``, of which recording took ``cost_ns``; of those from boundary to
    boundary of one thread ``chain`` has the indices, thread by thread in order of time, and what recording took of them.
    """

    time_ns: Int64
    position: Mapping[int, Int64]
    edge_of: Int64
    source: Int64
    lag_ns: Int64
    cost_ns: Float
    chain: Int64
    chain_cost_ns: Float
    chain_overhead_ns: Int64
    chain_room_ns: Int64
    chain_first: Bool
    chain_waited: Bool

    def replay(self, scale: float) -> Int64:
        """The time at which each node comes without the recording, if that cost ``scale`` times as much as it is taken to; on the
        common clock.
        """
        if scale <= 0:
            return self.time_ns.copy()
        return _play(self.time_ns, self.edge_of, self.source, self._lags(scale))

    def _lags(self, scale: float) -> Int64:
        most = np.where(self.lag_ns > 0, self.lag_ns * (1 - _LEAST_LAG), 0.0)
        lags = self.lag_ns - np.rint(np.minimum(self.cost_ns * scale, most)).astype(np.int64)
        lags[self.chain] -= self._removed(scale)
        return lags

    def _removed(self, scale: float) -> Int64:
        """Time that recording took of each edge of a chain, ns. What one has no room for is taken from those after it, until the
        thread waits.
        """
        waited, first = self.chain_waited, self.chain_first
        room = np.where(waited, 0, self.chain_room_ns)
        due = np.where(waited, 0, np.rint(self.chain_cost_ns * scale).astype(np.int64) + self.chain_overhead_ns)
        begins = first | waited
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
    ranks = sorted(graphs)
    times = {rank: clock.to_common_clock(rank, graphs[rank].time_ns) for rank in ranks}
    bounds = np.cumsum([0, *map(len, times.values())]).tolist()
    first = dict(zip(ranks, bounds[:-1], strict=True))
    chain = _Chain.joined([_Chain.of(graphs[rank], first[rank], costs_ns[rank]) for rank in ranks])
    of_ranks = [_shifted(graphs[rank], first[rank], costs_ns[rank]) for rank in ranks]
    meetings = _Meetings.of(graphs, times, first, comms, bounds[-1])
    time = np.concatenate([*times.values(), meetings.time_ns])
    edges = Edges.joined([chain.edges, *of_ranks, *meetings.edges])
    parts = {rank: (first[rank], len(times[rank])) for rank in ranks}
    return _ordered(time, edges, chain, meetings.relaxed, parts)


@dataclass(frozen=True, slots=True, eq=False)
class _Chain:
    """The edges from boundary to boundary of each thread."""

    edges: Edges
    cost_ns: Float
    overhead_ns: Int64
    room_ns: Int64
    first: Bool
    waited: Bool

    @classmethod
    def of(cls, graph: RankGraph, first: int, cost_ns: float) -> _Chain:
        host = graph.host
        follows = np.flatnonzero(host.thread[1:] == host.thread[:-1]) + 1
        edges = Edges.of(first + follows - 1, first + follows, host.lag_ns[follows])
        begins = np.diff(follows, prepend=-1) > 1
        cost, waited = host.units[follows] * cost_ns, host.waited[follows]
        return cls(edges, cost, host.overhead_ns[follows], host.room_ns[follows], begins, waited)

    @classmethod
    def joined(cls, parts: list[_Chain]) -> _Chain:
        columns = ("cost_ns", "overhead_ns", "room_ns", "first", "waited")
        return cls(
            Edges.joined([part.edges for part in parts]),
            *(np.concatenate([getattr(part, name) for part in parts]) for name in columns),
        )


def _shifted(graph: RankGraph, first: int, cost_ns: float) -> Edges:
    """The edges with nodes numbered from ``first`` on, and their units in ns."""
    edges = graph.edges
    return Edges(edges.source + first, edges.target + first, edges.lag_ns, edges.units * cost_ns)


@dataclass(frozen=True, slots=True, eq=False)
class _Meetings:
    """Messages and collectives as nodes: their times, the edges from and to their members, and the (nodes, lags) of members that
    had waited: nothing but the meeting kept those longer than their lag.
    """

    time_ns: Int64
    edges: list[Edges]
    relaxed: tuple[Int64, Int64]

    @classmethod
    def of(
        cls,
        graphs: Mapping[int, RankGraph],
        times: Mapping[int, Int64],
        first: Mapping[int, int],
        comms: pd.DataFrame,
        num_nodes: int,
    ) -> _Meetings:
        none = np.empty(0, dtype=np.int64)
        members = _members(graphs, times, first, comms)
        if not len(members):
            return cls(none, [], (none, none))
        number, index = np.unique(members["match"].to_numpy(), return_inverse=True)
        start, end, asked = (members[name].to_numpy() for name in ("start_ns", "end_ns", "asked_ns"))
        ready = np.full(len(number), np.iinfo(np.int64).min)
        np.maximum.at(ready, index, start)
        node = num_nodes + index
        waited = asked <= ready[index]
        depends = end >= ready[index]
        lag = np.where(waited, end - ready[index], 0)
        to_end = Edges.of(node[depends], members["end_node"].to_numpy()[depends], lag[depends])
        relaxed = depends & waited
        ends, lags = members["end_node"].to_numpy()[relaxed], lag[relaxed]
        return cls(ready, [Edges.of(members["start_node"].to_numpy(), node, 0), to_end], (ends, lags))


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
        start_node[host] = _numbered(_index_of((on_host,), (start[host],)), first[rank])
        end_node[host] = _numbered(_index_of((on_host,), (end[host],)), first[rank])
        work = _index_of((starts, ends), (start[device], end[device]))
        start_node[device] = _numbered(work, first[rank] + len(graph.host))
        end_node[device] = _numbered(work, first[rank] + len(graph.host) + len(graph.device))
    rows = rows.assign(start_node=start_node, end_node=end_node)
    has_nodes = pd.Series((start_node >= 0) & (end_node >= 0)).groupby(rows["match"])
    return rows[(has_nodes.transform("all") & (has_nodes.transform("size") > 1)).to_numpy(dtype=np.bool_)]


def _numbered(index: Int64, first: int) -> Int64:
    return np.where(index >= 0, index + first, -1)


def _index_of(known: tuple[Int64, ...], wanted: tuple[Int64, ...]) -> Int64:
    """The index of each wanted row of columns among known ones, the first of equal ones; −1 where there is none."""
    table = pd.DataFrame(dict(enumerate(known))).drop_duplicates()
    found = pd.MultiIndex.from_frame(table).get_indexer(pd.MultiIndex.from_arrays(wanted))
    return np.where(found >= 0, table.index.to_numpy()[found], -1)


def _ordered(
    time: Int64, edges: Edges, chain: _Chain, relaxed: tuple[Int64, Int64], parts: Mapping[int, tuple[int, int]]
) -> RunGraph:
    """Put nodes and edges in order. The first edges are those of the chain, the last those of meetings.

    Args:
        relaxed: nodes that waited for a meeting, and the longest lag that their other edges may have.
        parts: the first node of each rank and their number.
    """
    most = np.full(len(time), np.iinfo(np.int64).max)
    most[relaxed[0]] = relaxed[1]
    from_meeting = edges.source >= sum(size for _, size in parts.values())
    lag = np.where(from_meeting, edges.lag_ns, np.minimum(edges.lag_ns, most[edges.target]))
    waited = chain.waited | (most[chain.edges.target] < np.iinfo(np.int64).max)
    ahead = time[edges.source] <= time[edges.target]  # clocks that are off may show an effect before its cause
    order = np.lexsort((_level_among_equals(time, edges.source[ahead], edges.target[ahead]), time))
    position = np.empty(len(time), dtype=np.int64)
    position[order] = np.arange(len(time))
    lag = _tight(time, edges.source, edges.target, lag, ahead)
    used = np.flatnonzero(ahead)
    used = used[np.argsort(position[edges.target[used]], kind="stable")]
    target = position[edges.target[used]]
    index = np.full(len(edges), -1)
    index[used] = np.arange(len(used))
    of_chain = index[: len(chain.edges)]  # boundaries of a thread are in order of time
    return RunGraph(
        time[order],
        {rank: position[first : first + size] for rank, (first, size) in parts.items()},
        np.searchsorted(target, np.arange(len(time) + 1)),
        position[edges.source[used]],
        lag[used],
        edges.units[used],
        of_chain,
        chain.cost_ns,
        chain.overhead_ns,
        chain.room_ns,
        chain.first,
        waited,
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
    least = np.full(len(time), np.iinfo(np.int64).max)
    np.minimum.at(least, target, slack)
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
