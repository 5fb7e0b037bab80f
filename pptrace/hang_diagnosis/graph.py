"""Graph algorithms: reachability, hops, and strongly connected components. Without recursion: runs have many ranks."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping

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
    components = _components(targets)
    return [
        tuple(sorted(component))
        for component in components
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
    best: tuple[int, ...] = ()
    for start in sorted(component)[:_MAX_STARTS]:
        ring = _ring_through(targets, component, start)
        if ring and (not best or len(ring) < len(best)):
            best = ring
    return best


def _ring_through(targets: Targets, component: Collection[int], start: int) -> tuple[int, ...]:
    came_from: dict[int, int] = {}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for other in sorted(targets.get(node, ())):
            if other == start:
                return _path(came_from, start, node)
            if other in component and other not in came_from:
                came_from[other] = node
                queue.append(other)
    return ()


def _path(came_from: Mapping[int, int], start: int, end: int) -> tuple[int, ...]:
    path = [end]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return tuple(reversed(path))
