"""The shapes of process groups: rank lists, pipelines by who talks to whom, and the sizes of the axes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from pptrace.recognise.group_descriptions import axis_of_description

UNKNOWN = "unknown"
GROUP_COLUMNS = ["group_id", "description", "group_ranks", "group_size"]
CallKey: TypeAlias = tuple[int, str, str, str, int]
"""Rank, and the :data:`GROUP_COLUMNS` of a call."""


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: ``ranks`` are its global ranks in order, () where no trace tells them; ``size`` -1 if unknown."""

    id: str
    description: str
    ranks: tuple[int, ...]
    size: int

    @property
    def stride(self) -> int | None:
        """The distance between neighbours; None where it is not the same for all."""
        if len(self.ranks) < 2:
            return None
        steps = {after - before for before, after in zip(self.ranks, self.ranks[1:], strict=False)}
        return steps.pop() if len(steps) == 1 else None


def key_of(rank: int, columns: Any) -> CallKey:
    """The key of a call of ``rank`` with these :data:`GROUP_COLUMNS`."""
    group_id, description, ranks, size = columns
    return rank, str(group_id), str(description), str(ranks), int(size)


def ranks_of(value: object) -> tuple[int, ...]:
    """A list of ranks, as a list or as JSON; () where it is elided or none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ()
    if not isinstance(value, list) or not all(type(rank) is int and rank >= 0 for rank in value):
        return ()
    return tuple(value)


def sizes_of(axes: Mapping[Group, str], pipelines: Sequence[Sequence[int]], world: int | None) -> dict[str, int]:
    """The axes' sizes. What is described completely but for one axis, the size of the world completes."""
    sizes: dict[str, int] = {}
    described = False
    parts: dict[str, dict[str, int]] = {}
    for group, axis in axes.items():
        if group.size > 0 and axis in ("tp", "cp", "pp", "ep", "dp", "dp-cp"):
            parts.setdefault(axis, {})[group.description] = group.size
            described = described or bool(axis_of_description(group.description))
    for axis, by_description in parts.items():
        replicate, shard = by_description.get("mesh_dp_replicate"), by_description.get("mesh_dp_shard")
        sizes[axis] = replicate * shard if replicate and shard else max(by_description.values())
    if pipelines:
        sizes["pp"] = len(pipelines[0])
    whole_dp = sizes.pop("dp-cp", None)
    if world is None:
        return sizes
    if whole_dp is not None and "dp" not in sizes and "cp" in sizes:
        sizes["dp"] = max(whole_dp // sizes["cp"], 1)
    if described:
        sizes |= {axis: 1 for axis in ("tp", "cp", "pp") if axis not in sizes and not (axis == "cp" and whole_dp)}
    known = _product(sizes.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))
    if known == world:
        sizes |= {axis: 1 for axis in ("tp", "cp", "pp", "dp") if axis not in sizes}
    elif "dp" not in sizes and {"tp", "cp", "pp"} <= set(sizes) and world % known == 0:
        sizes["dp"] = world // known
    return sizes


def _product(numbers: Iterable[int]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


def peer_pipelines(
    calls: Mapping[int, pd.DataFrame],
    of_call: Mapping[CallKey, Group],
    axes: Mapping[Group, str],
    unnamed: Mapping[int, Group],
    rings: Collection[Group] = (),
) -> tuple[tuple[int, ...], ...]:
    """Pipelines from who sends to whom outside ``rings`` and the groups of other axes: each connected set of ranks, in order."""
    leader: dict[int, int] = {}

    def find(rank: int) -> int:
        while leader.setdefault(rank, rank) != rank:
            rank = leader[rank]
        return rank

    for group, source, target in _messages(calls, of_call, unnamed):
        if axes.get(group, UNKNOWN) in ("pp", "world", UNKNOWN) and group not in rings:
            leader[find(source)] = find(target)
    members: dict[int, list[int]] = {}
    for rank in sorted(leader):
        members.setdefault(find(rank), []).append(rank)
    return tuple(tuple(ranks) for _, ranks in sorted(members.items()) if len(ranks) > 1)


def one_way_rings(
    calls: Mapping[int, pd.DataFrame], of_call: Mapping[CallKey, Group], unnamed: Mapping[int, Group]
) -> frozenset[Group]:
    """Groups in which each rank of three or more sends to one and receives from one other, around a ring, and never back.

    A pipeline that trains sends gradients back, and one that only runs forward ends at its last rank.
    """
    edges: dict[Group, set[tuple[int, int]]] = {}
    for group, source, target in _messages(calls, of_call, unnamed):
        edges.setdefault(group, set()).add((source, target))
    return frozenset(group for group, pairs in edges.items() if _goes_around(pairs))


def _goes_around(edges: Collection[tuple[int, int]]) -> bool:
    after = dict(edges)
    one_way = len(after) == len(edges) and set(after) == set(after.values())
    return one_way and all(after[after[rank]] != rank for rank in after)


def _messages(
    calls: Mapping[int, pd.DataFrame], of_call: Mapping[CallKey, Group], unnamed: Mapping[int, Group]
) -> Iterator[tuple[Group, int, int]]:
    """(group, source, target) of messages whose peer is known, each peer of a call's group once per rank and kind."""
    for rank, table in calls.items():
        messages = table[table["kind"].isin(("send", "recv"))]
        for columns, part in messages.groupby(GROUP_COLUMNS, sort=False):
            group = of_call[key_of(rank, columns)]
            named = group if group.id or group.ranks else unnamed[rank]
            for kind, told, place in set(zip(part["kind"], part["peer"], part["local_peer"], strict=True)):
                peer = global_peer(told, place, named)
                if peer >= 0:
                    yield (group, rank, peer) if kind == "send" else (group, peer, rank)


def global_peer(peer: int, local_peer: int, group: Group) -> int:
    """The global rank of a peer that may be known by its place in the group only; -1 where that does not tell."""
    if peer >= 0 or local_peer < 0:
        return int(peer)
    if group.ranks:
        return group.ranks[local_peer] if local_peer < len(group.ranks) else -1
    return int(local_peer) if group.description == "default_pg" else -1
