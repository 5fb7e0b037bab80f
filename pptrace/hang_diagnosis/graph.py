"""Graph algorithms: reachability, hops, and strongly connected components, without recursion, since runs have many ranks; and
conflicts between calls of several ranks that should match: another kind, root, size, dtype or order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pptrace.hang_diagnosis.calls import ANY_PEER, Call, CallState, RankCalls, Stream

Targets = Mapping[int, Collection[int]]
_MAX_STARTS = 64


def reachable(targets: Targets, starts: Iterable[int]) -> set[int]:
    """``starts`` and all that can be reached from them."""
    seen = set(starts)
    stack = list(seen)
    while stack:
        for other in targets.get(stack.pop(), ()):
            if other not in seen:
                seen.add(other)
                stack.append(other)
    return seen


def hops_to(targets: Targets, goals: Collection[int]) -> dict[int, int]:
    """Distance of each node to the nearest of ``goals``, in edges; nodes that reach none are left out."""
    sources = _reverse(targets)
    hops = dict.fromkeys(goals, 0)
    queue = deque(goals)
    while queue:
        node = queue.popleft()
        for source in sources.get(node, ()):
            if source not in hops:
                hops[source] = hops[node] + 1
                queue.append(source)
    return {node: count for node, count in hops.items() if count}


def rings(targets: Targets) -> list[tuple[int, ...]]:
    """The strongly connected components with an edge inside, those that reach no other such component first."""
    return [
        tuple(sorted(component))
        for component in _components(targets)
        if len(component) > 1 or any(node in targets.get(node, ()) for node in component)
    ]


def _components(targets: Targets) -> list[list[int]]:
    """Kosaraju's algorithm, on the reversed graph first: each component comes after those that it reaches."""
    finished: list[int] = []
    seen: set[int] = set()
    sources = _reverse(targets)
    nodes = sorted({*targets, *sources})
    for node in nodes:
        if node not in seen:
            _finish(node, sources, seen, finished)
    components: list[list[int]] = []
    seen.clear()
    for node in reversed(finished):
        if node not in seen:
            component: list[int] = []
            _finish(node, targets, seen, component)
            components.append(component)
    return components


def _finish(start: int, targets: Targets, seen: set[int], finished: list[int]) -> None:
    """Depth-first search from ``start``; nodes are added in postorder."""
    seen.add(start)
    stack = [(start, iter(sorted(targets.get(start, ()))))]
    while stack:
        node, others = stack[-1]
        following = next((other for other in others if other not in seen), None)
        if following is None:
            finished.append(node)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(sorted(targets.get(following, ())))))


def _reverse(targets: Targets) -> dict[int, set[int]]:
    sources: dict[int, set[int]] = defaultdict(set)
    for node, others in targets.items():
        for other in others:
            sources[other].add(node)
    return sources


def shortest_ring(targets: Targets, component: Collection[int]) -> tuple[int, ...]:
    """The nodes of a shortest cycle through one of the first nodes of a component, in the order of its edges."""
    through = (_ring_through(targets, component, start) for start in sorted(component)[:_MAX_STARTS])
    return min(filter(None, through), key=len, default=())


def _ring_through(targets: Targets, component: Collection[int], start: int) -> tuple[int, ...]:
    came_from: dict[int, int] = {}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for other in sorted(targets.get(node, ())):
            if other == start:
                path = [node]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return tuple(reversed(path))
            if other in component and other not in came_from:
                came_from[other] = node
                queue.append(other)
    return ()


_SAME_SIZE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
"""Collectives in which the larger of input and output is the same on all ranks."""
_LONGEST_CONTEXT = 16
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


@dataclass(frozen=True, slots=True)
class Conflict:
    """The calls at one index of a stream, by rank, and the ranks whose call differs from the others'.

    Where it is undecidable which are wrong, ``guilty`` are all that differ. ``text`` is the format of a call with that in which
    they do.
    """

    stream: Stream
    seq: int
    calls: Mapping[int, Call]
    guilty: tuple[int, ...]
    text: str


def find_conflicts(ranks: Sequence[RankCalls]) -> tuple[Conflict, ...]:
    """The first conflict of each stream with a call that is not done, the oldest first."""
    history = {rank.rank: rank.calls for rank in ranks}
    conflicts: dict[Stream, Conflict] = {}
    open_streams = {call.stream(rank.rank) for rank in ranks for call in rank.calls if call.state is not CallState.DONE}
    for stream, seq, calls in _meetings(ranks, open_streams):
        if stream not in conflicts and (difference := _difference(calls)) is not None:
            text, clusters = difference
            conflicts[stream] = Conflict(stream, seq, calls, _guilty(clusters, calls, history), text)
    return tuple(
        sorted(
            conflicts.values(),
            key=lambda one: min((call.since_ns for call in one.calls.values() if call.since_ns >= 0), default=0),
        )
    )


def _meetings(ranks: Sequence[RankCalls], streams: set[Stream]) -> Iterator[tuple[Stream, int, Mapping[int, Call]]]:
    """The matching calls of two ranks or more, in the order of their numbers."""
    meetings: dict[tuple[Stream, int], dict[int, Call]] = defaultdict(dict)
    for rank in ranks:
        for call in rank.calls:
            stream = call.stream(rank.rank)
            if stream in streams and not (call.is_message and call.peer in (ANY_PEER, rank.rank)):
                meetings[stream, call.seq][rank.rank] = call
    for (stream, seq), calls in sorted(meetings.items(), key=lambda item: item[0][1]):
        if len(calls) > 1:
            yield stream, seq, calls


def _difference(calls: Mapping[int, Call]) -> tuple[str, list[list[int]]] | None:
    """(format of a call with that in which they differ, the ranks grouped by it, largest group first); None where all match."""
    by_kind = _by(calls, lambda call: "message" if call.is_message else call.kind)
    if len(by_kind) > 1:
        return "{0.kind}", by_kind
    if all(call.state is CallState.DONE for call in calls.values()):
        return None  # of the same kind, and done: they matched
    for text, aspect in (
        ("{0.kind} with root {0.peer}", _root),
        ("{0.kind} of {0.num_bytes} bytes", _size),
        ("{0.kind} of {0.dtype}", lambda call: call.dtype or None),
    ):
        calls_with_value = {rank: call for rank, call in calls.items() if aspect(call) is not None}
        if len(parts := _by(calls_with_value, aspect)) > 1:
            return text, parts
    return None


def _by(calls: Mapping[int, Call], aspect: Callable[[Call], Hashable]) -> list[list[int]]:
    parts: dict[Hashable, list[int]] = defaultdict(list)
    for rank, call in calls.items():
        parts[aspect(call)].append(rank)
    return sorted(parts.values(), key=len, reverse=True)


def _root(call: Call) -> int | None:
    return call.peer if call.kind in _ROOTED and call.peer >= 0 else None


def _size(call: Call) -> int | None:
    return call.num_bytes if call.num_bytes >= 0 and (call.is_message or call.kind in _SAME_SIZE) else None


def _guilty(
    clusters: list[list[int]], calls: Mapping[int, Call], history: Mapping[int, Sequence[Call]]
) -> tuple[int, ...]:
    """Ranks outside the largest cluster; of equal ones, the ranks whose call is new in its context."""
    if len(clusters[0]) > len(clusters[1]):
        return tuple(sorted(rank for cluster in clusters[1:] for rank in cluster))
    all_ranks = sorted(rank for cluster in clusters for rank in cluster)
    return tuple(deviants({rank: calls[rank] for rank in all_ranks}, history)) or tuple(all_ranks)


def deviants(calls: Mapping[int, Call], history: Mapping[int, Sequence[Call]]) -> list[int]:
    """The ranks whose call never followed the calls before it earlier, where the others' calls did.

    Empty where that does not separate them: early in a run every call is new.
    """
    new = {rank: _is_new(call, history.get(rank, ())) for rank, call in calls.items()}
    deviating = [rank for rank, value in new.items() if value is True]
    return deviating if deviating and all(new[rank] is False for rank in new if rank not in deviating) else []


def _is_new(call: Call, calls: Sequence[Call]) -> bool | None:
    """Return whether the call never came after the calls before it, of which as many count as occurred together earlier.

    None where not even the last of them did. What comes only now and then, such as a barrier every five steps, is not new where
    it has come after a whole iteration of these calls before.
    """
    indices = [index for index, other in enumerate(calls) if other is call]
    if not indices:
        return None
    position = indices[0]
    signatures = [other.signature for other in calls[: position + 1]]
    alike = {end: length for end in range(1, position) if (length := _num_alike(signatures, end, position))}
    if not alike:
        return None
    longest = [end for end, length in alike.items() if length == max(alike.values())]
    if any(signatures[end] == signatures[position] for end in longest):
        return False
    followed = max((length for end, length in alike.items() if signatures[end] == signatures[position]), default=0)
    return followed < position - longest[-1]


def _num_alike(signatures: Sequence[Hashable], end: int, position: int) -> int:
    """Number of calls before two positions that are the same, counted up to a limit."""
    most = min(end, _LONGEST_CONTEXT)
    return next((back for back in range(most) if signatures[end - 1 - back] != signatures[position - 1 - back]), most)
