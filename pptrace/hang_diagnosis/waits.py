"""The wait-for graph over ranks.

Calls that can complete are completed first, as the backends would: a call whose partners have all made theirs is in transfer,
and no reason for a hang, unless one of them is halted: a device or the network takes a call to be complete on one rank while
threads of that rank's process still carry its data to the other. A remaining call waits for ranks that have not made the matching
call, or have it queued behind one that waits. A rank waits for *all* ranks of an edge, except in a receive from any rank.

A collective that a member has completed has had the part of all others. A rank in whose dump it is open waits for none of them:
its own device, or the host that watches it, is stuck.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pptrace.hang_diagnosis.calls import ANY_PEER, Call, CallState, Presence, RankCalls, Stream

_IN_ORDER = (CallState.QUEUED, CallState.LAUNCHED)
_OF_ALL = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
"""Collectives that end on no rank before all have given their part. Messages and calls with a root may; so may an all-to-all
between ranks that have nothing for each other."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A call in which ``rank`` waits, and the ranks that it waits for; ``any_of`` where one of them suffices."""

    rank: int
    waits_for: tuple[int, ...]
    call: Call
    any_of: bool = False

    def as_json(self) -> dict[str, object]:
        return {
            "rank": self.rank,
            "waits_for": list(self.waits_for),
            "call": self.call.kind,
            "group": str(self.call.group),
            "seq": self.call.number,
        }


@dataclass(frozen=True, slots=True)
class Waits:
    """The wait-for graph. ``in_transfer`` are the ranks that wait in calls that all others have made too; ``stuck`` those that
    do not complete what others have completed, with the call.
    """

    edges: tuple[Edge, ...]
    in_transfer: tuple[int, ...]
    stuck: Mapping[int, Call]


def targets_of(edges: Iterable[Edge]) -> dict[int, set[int]]:
    """Rank → the ranks that it waits for."""
    targets: dict[int, set[int]] = defaultdict(set)
    for edge in edges:
        targets[edge.rank].update(edge.waits_for)
    return dict(targets)


def find_waits(ranks: Sequence[RankCalls], conflicting: Collection[tuple[Stream, int]] = ()) -> Waits:
    """Build the wait-for graph of the ranks' open calls. ``conflicting`` calls (stream, seq) never complete."""
    return _Matching(ranks, conflicting).waits()


class _Matching:
    """Completes the calls that can complete. The calls of ranks that are gone count: their messages may still arrive."""

    def __init__(self, ranks: Sequence[RankCalls], conflicting: Collection[tuple[Stream, int]]) -> None:
        self._ranks = {rank.rank: rank for rank in ranks}
        self._conflicting = set(conflicting)
        self._made = {rank.rank: dict(rank.num_made) for rank in ranks}
        for rank in ranks:
            made = self._made[rank.rank]
            for call in rank.calls:
                stream = call.stream(rank.rank)
                made[stream] = max(made.get(stream, 0), call.seq + 1)
        self._done: dict[Stream, int] = {}
        for rank in ranks:
            for stream, count in rank.num_done.items():
                self._done[stream] = max(self._done.get(stream, 0), count)
        self._members = _members(ranks)
        self._open = {
            rank.rank: [call for call in rank.calls if call.state.is_open]
            for rank in ranks
            if rank.presence is Presence.ALIVE
        }
        self._halted = {rank.rank for rank in ranks if rank.is_halted}
        self._queued_behind: dict[int, set[tuple[Stream, int]]] = {}
        self._wildcards = Counter(  # receives from any rank that are open
            (rank.rank, call.group.name)
            for rank in ranks
            for call in rank.calls
            if call.kind == "recv" and call.peer == ANY_PEER and call.state.is_open
        )

    def waits(self) -> Waits:
        blocking = {rank: [call for call in calls if _blocks(call)] for rank, calls in self._open.items()}
        self._complete()
        stuck = {
            rank: call for rank, calls in self._open.items() for call in reversed(calls) if self._is_stuck(rank, call)
        }
        edges = tuple(edge for edge in self._edges() if edge.rank not in stuck)
        in_transfer = {rank for rank, calls in blocking.items() if calls} - stuck.keys() - {edge.rank for edge in edges}
        ended = [self._ended_transfer(rank, blocking[rank]) for rank in sorted(in_transfer - self._halted)]
        of_halted = tuple(edge for edge in ended if edge is not None)
        halting = {rank for edge in of_halted for rank in edge.waits_for}
        waiting = tuple(edge for edge in edges if edge.rank not in halting)
        return Waits((*waiting, *of_halted), tuple(sorted(in_transfer - {edge.rank for edge in of_halted})), stuck)

    def _ended_transfer(self, rank: int, calls: Sequence[Call]) -> Edge | None:
        """The last of the rank's calls with a halted rank, which has made its part of it but transfers nothing any more."""
        for call in reversed(calls):
            halted = self._halted.intersection(self._partners(rank, call))
            if halted and not (call.is_message and call.peer == ANY_PEER):
                return Edge(rank, tuple(sorted(halted)), call)
        return None

    def _complete(self) -> None:
        self._queued_behind = {rank: _queued_behind(rank, calls) for rank, calls in self._open.items()}
        moved = True
        while moved:
            moved = False
            for rank, calls in self._open.items():
                remaining = self._remaining(rank, calls)
                if len(remaining) < len(calls):
                    self._open[rank], moved = remaining, True
                    self._queued_behind[rank] = _queued_behind(rank, remaining)

    def _remaining(self, rank: int, calls: Sequence[Call]) -> list[Call]:
        """The rank's open calls without those that can complete one after the other."""
        remaining: list[Call] = []
        first: Call | None = None
        for call in calls:
            if _is_behind(call, first) or self._awaited_ranks(rank, call) or self._is_stuck(rank, call):
                remaining.append(call)
                first = _first(first, call)
        return remaining

    def _is_stuck(self, rank: int, call: Call) -> bool:
        """Return whether the call is open on this rank alone: another has completed it, and it waits for none."""
        return self._is_done(call, (*_OF_ALL, "all_to_all")) and not self._awaited_ranks(rank, call)

    def _is_done(self, call: Call, kinds: Collection[str]) -> bool:
        """Return whether the call is of one of these kinds, and complete on another rank."""
        return call.kind in kinds and call.seq < self._done.get(Stream(call.group), 0)

    def _awaited_ranks(self, rank: int, call: Call) -> list[int]:
        """The ranks that the call waits for; its own rank where it can never complete."""
        stream = call.stream(rank)
        partners = self._partners(rank, call)
        if (stream, call.seq) in self._conflicting:
            return list(partners) or [rank]
        if call.is_message and call.peer == ANY_PEER:
            # A sent message is left for it: taken neither by receives from one sender nor by earlier ones.
            made = self._made[rank]
            streams = [Stream(call.group, other, rank, call.tag) for other in partners]
            sent = [self._made.get(stream.source, {}).get(stream, 0) - made.get(stream, 0) for stream in streams]
            return [] if sum(max(0, surplus) for surplus in sent) > call.seq else list(partners)
        return [other for other in partners if not self._has_offered(other, stream, call)]

    def _partners(self, rank: int, call: Call) -> Sequence[int]:
        if call.is_message and call.peer != ANY_PEER:
            return (call.peer,)
        members = call.group.ranks or self._members.get(call.group.name, ())
        return [other for other in members if other != rank]

    def _has_offered(self, other: int, stream: Stream, call: Call) -> bool:
        made = self._made.get(other, {}).get(stream, 0)
        if call.kind == "send" and made <= call.seq and self._wildcards.get((other, stream.group.name), 0):
            return True  # one of its receives from any rank can take the message
        if self._is_done(call, _OF_ALL):
            return call.seq < made or other not in self._open
        return call.seq < made and (stream, call.seq) not in self._queued_behind.get(other, ())

    def _edges(self) -> Iterator[Edge]:
        for rank, calls in self._open.items():
            queued = self._queued_behind[rank]
            for call in calls:
                if not _blocks(call) or (call.stream(rank), call.seq) in queued:
                    continue
                if awaited := self._awaited_ranks(rank, call):
                    yield Edge(rank, tuple(sorted(awaited)), call, call.is_message and call.peer == ANY_PEER)


def _blocks(call: Call) -> bool:
    return call.state is not CallState.OFFERED


def _queued_behind(rank: int, calls: Sequence[Call]) -> set[tuple[Stream, int]]:
    """The calls that are queued on their rank's device behind earlier ones."""
    queued: set[tuple[Stream, int]] = set()
    first: Call | None = None
    for call in calls:
        if _is_behind(call, first):
            queued.add((call.stream(rank), call.seq))
        first = _first(first, call)
    return queued


def _is_behind(call: Call, first: Call | None) -> bool:
    """Return whether it begins after ``first``, the rank's oldest open call; those of one batch begin together."""
    return call.state in _IN_ORDER and first is not None and (call.launch < 0 or call.launch != first.launch)


def _first(first: Call | None, call: Call) -> Call | None:
    return call if first is None and call.state is not CallState.OFFERED else first


def _members(ranks: Sequence[RankCalls]) -> Mapping[str, tuple[int, ...]]:
    """Members of groups whose ranks are unknown: the ranks that made calls in them."""
    members_of: dict[str, set[int]] = defaultdict(set)
    for rank in ranks:
        for call in rank.calls:
            if not call.group.ranks:
                members_of[call.group.name].add(rank.rank)
    return {name: tuple(sorted(members)) for name, members in members_of.items()}
