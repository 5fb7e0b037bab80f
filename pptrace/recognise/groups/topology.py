"""Shapes of process groups: rank lists, chains of ranks that exchange messages, and the sizes of the axes; and axes by the
descriptions of groups.

Sources of descriptions: Megatron-LM core 0.16.1 ``parallel_state.py``; torch ``distributed/device_mesh.py`` (``mesh_<dim>``) with
the names of torchtitan, NeMo AutoModel and FSDP; torch ``distributed_c10d.py`` (``<parent>:split:<n>``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TypeAlias

import numpy as np
import pandas as pd
from msgspec import Struct

from pptrace.axes import MESH_ORDER, SHARING, Axis
from pptrace.marks import P2P
from pptrace.model.tables import Int64
from pptrace.slices import distinct_of, rows_where

_WORDS = (
    ("tp-dp", r"TENSOR_AND_DATA_PARALLEL_GROUP\w*"),
    ("tp-cp", r"TENSOR_AND_CONTEXT_PARALLEL_GROUP"),
    ("tp-pp", r"MODEL_PARALLEL_GROUP"),
    ("etp-ep-pp", r"EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP(?:_WITH_EGTP)?"),
    ("etp-ep", r"EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"),
    ("etp", r"EXPERT_TENSOR_PARALLEL_GROUP"),
    ("ep", r"EXPERT_MODEL_PARALLEL_GROUP"),
    ("edp", r"(?:INTRA_PARTIAL_|INTER_PARTIAL_)?EXPERT_DATA_PARALLEL_GROUP\w*"),
    ("tp", r"TENSOR_MODEL_PARALLEL_GROUP"),
    ("pp", r"PIPELINE_MODEL_PARALLEL_GROUP"),
    ("dp-cp", r"(?:INTRA_PARTIAL_|INTER_PARTIAL_)?DATA_PARALLEL_GROUP_WITH_CP\w*"),
    ("dp-cp", r"HYBRID_DP_CP_GROUP_\d+"),
    ("dp", r"DATA_PARALLEL_GROUP"),
    ("dp", r"INTER_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"),
    ("tp-cp-dp-pp", r"INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"),  # all ranks of an instance
    ("cp", r"(?:HIERARCHICAL_)?CONTEXT_PARALLEL_GROUP(?:_L\d+)?"),
    ("embd", r"(?:POSITION_)?EMBEDDING_GROUP"),
)
_DIMS = {
    "pp": "pp pipe pipeline pipeline_parallel stage",
    "tp": "tp tensor model tensor_parallel sp",
    "cp": "cp context context_parallel seq ulysses ring",
    "dp": "dp data data_parallel ddp fsdp dp_replicate dp_shard replicate replica shard batch hsdp",
    "ep": "ep expert expert_parallel dp_shard_in_ep",
    "dp-cp": "dp_cp dp_shard_cp loss loss_mesh",
    "etp": "etp",
    "edp": "edp efsdp dp_mod_ep dp_shard_mod_ep ep_shard ep_replicate",
    "world": "world",
}
_AXES = tuple(map(str, (*MESH_ORDER, *SHARING)))
_AXIS_OF_DIM = {axis: axis for axis in _AXES} | {dim: axis for axis, dims in _DIMS.items() for dim in dims.split()}
_BARE = frozenset(
    {
        *_AXES,
        *("etp", "fsdp", "ddp", "hsdp", "dp_replicate", "dp_shard", "dp_cp"),
        *("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel", "expert_parallel"),
    }
)


@lru_cache(maxsize=4096)
def axis_of_description(description: str) -> str:
    """The axis that a group's description names; "" for the default group, none and strangers."""
    text = description.split(":split:", maxsplit=1)[0].removesuffix("_GLOO")
    text = re.sub(r"_GLOO(?=_L\d+$)", "", text)
    if match := re.fullmatch(r"mesh_(\w+)", text):
        return _AXIS_OF_DIM.get(match[1].lower(), "")
    if text.lower() in _BARE:
        return _AXIS_OF_DIM[text.lower()]
    return next((axis for axis, pattern in _WORDS if re.fullmatch(pattern, text)), "")


def framework_of_descriptions(descriptions: Iterable[str]) -> tuple[str, str]:
    """(framework, description that identifies it); ("", "") where none is specific to a framework."""
    for description in sorted(descriptions):
        text = description.split(":split:", maxsplit=1)[0].removesuffix("_GLOO")
        if any(re.fullmatch(pattern, text) for _, pattern in _WORDS):
            return "megatron-lm", description
    return "", ""


UNKNOWN = "unknown"
_MODEL_AXES: tuple[str, ...] = tuple(axis for axis in MESH_ORDER if axis is not Axis.DP)
"""The axes over which a model or its sequences are split; data parallelism takes the ranks that are left."""
GROUP_COLUMNS = ["group_id", "description", "group_ranks", "group_size"]
CallKey: TypeAlias = tuple[int, str, str, str, int]
"""Rank, and the :data:`GROUP_COLUMNS` of a call."""


class Group(Struct, frozen=True):
    """A process group: ``ranks`` are its global ranks in order, () where no trace tells them; ``size`` -1 if unknown."""

    id: str
    description: str
    ranks: tuple[int, ...]
    size: int

    @property
    def is_named(self) -> bool:
        """Return whether calls with this group are of one group: it has a name or its ranks."""
        return bool(self.id or self.ranks)

    @property
    def key(self) -> str:
        """The same text on all members; "" where it is not known of which group a call is."""
        if self.ranks:
            return ",".join(map(str, self.ranks))
        return f"{self.id} {self.description}" if self.id else ""

    @property
    def stride(self) -> int | None:
        """The distance between neighbours; None where it is not the same for all."""
        if len(self.ranks) < 2:
            return None
        steps = {after - before for before, after in zip(self.ranks, self.ranks[1:], strict=False)}
        return steps.pop() if len(steps) == 1 else None


class KeyedCalls(Struct, frozen=True):
    """A rank's calls with the number of the key of each, and the keys by their numbers: as they come first."""

    calls: pd.DataFrame
    number: Int64
    keys: Sequence[CallKey]

    def by_key(self, columns: Sequence[str], only: Collection[str] = ()) -> Iterator[tuple[CallKey, pd.DataFrame]]:
        """Some columns of the calls of each key, of some kinds alone if ``only`` names any."""
        chosen = self.calls["kind"].isin(only).to_numpy() if only else np.ones(len(self.calls), dtype=np.bool_)
        table, number = rows_where(self.calls[list(columns)], chosen), self.number[chosen]
        present = np.bincount(number, minlength=len(self.keys))
        for index, key in enumerate(self.keys):
            if present[index]:
                yield key, rows_where(table, number == index)


def call_keys(rank: int, calls: pd.DataFrame) -> tuple[Int64, list[CallKey]]:
    """(number of the key of each call, the keys) of a rank's calls; keys as they come first."""
    columns = [calls[name] for name in GROUP_COLUMNS]
    number, first = distinct_of(columns)
    keys = zip(*(column.iloc[first].tolist() for column in columns), strict=True)
    return number, [(rank, str(name), str(text), str(ranks), int(size)) for name, text, ranks, size in keys]


_REPLICAS = ("mesh_dp_replicate", "mesh_replicate", "mesh_replica")
_SHARDS = ("mesh_dp_shard", "mesh_shard", "mesh_fsdp")
"""Dimensions of a mesh that are data parallel together (HSDP)."""


def sizes_of(axes: Mapping[Group, str], pipelines: Sequence[Sequence[int]], world: int | None) -> dict[str, int]:
    """Sizes of the axes; a single axis that no group describes gets what is left of the world size."""
    sizes: dict[str, int] = {}
    described = False
    parts: dict[str, dict[str, int]] = {}
    for group, axis in axes.items():
        if group.size > 0 and axis in (*MESH_ORDER, *SHARING, Axis.DP_CP):
            parts.setdefault(axis, {})[group.description] = group.size
            described = described or bool(axis_of_description(group.description))
    for axis, by_description in parts.items():
        replicate, shard = (
            next((by_description[name] for name in names if name in by_description), None)
            for names in (_REPLICAS, _SHARDS)
        )
        sizes[axis] = replicate * shard if replicate and shard else max(by_description.values())
    if pipelines:
        sizes["pp"] = len(pipelines[0])
    dp_cp = sizes.pop("dp-cp", None)
    if world is None:
        return sizes
    if dp_cp is not None and "cp" in sizes:
        sizes["dp"] = max(dp_cp // sizes["cp"], sizes.get("dp", 1))
    if described:
        ones = {axis: 1 for axis in _MODEL_AXES if axis not in sizes and not (axis == Axis.CP and dp_cp)}
        if "dp" not in sizes or world == prod((sizes | ones).get(axis, 1) for axis in MESH_ORDER):
            sizes |= ones  # else an axis that no group describes has more than one rank
    known = prod(sizes.get(axis, 1) for axis in MESH_ORDER)
    if known == world:
        sizes |= {axis: 1 for axis in MESH_ORDER if axis not in sizes}
    elif "dp" not in sizes and set(_MODEL_AXES) <= set(sizes) and world % known == 0:
        sizes["dp"] = world // known
    return sizes


def multiply_up(sizes: Mapping[str, int | None], world: int) -> bool:
    """Return whether a mesh with these sizes can have that many ranks; an unknown size may be any."""
    known = [size for axis in MESH_ORDER if (size := sizes.get(axis)) is not None]
    return prod(known) == world if len(known) == len(MESH_ORDER) else world % max(prod(known), 1) == 0


Edges: TypeAlias = Mapping[Group, Collection[tuple[int, int]]]
"""Pairs of global ranks (source, target) between which messages go, by group."""


class Chain(Struct, frozen=True):
    """Ranks connected by messages, in order. Where it is not ``is_whole``, ranks without a trace may belong to it."""

    ranks: tuple[int, ...]
    edges: frozenset[tuple[int, int]]
    is_whole: bool

    @property
    def ends(self) -> set[int]:
        """The two ranks with one neighbour each, if the messages form a line."""
        peers = _peers(self.edges)
        last = {rank for rank, others in peers.items() if len(others) == 1}
        return last if len(last) == 2 and max(map(len, peers.values())) == 2 else set()

    def runs_along(self, group: Group, world: int | None) -> bool:
        """Return whether the group is the pipeline that these ranks are of: all talk to their neighbours in it alone, as in a
        ring.

        The group of the whole world holds them without telling anything.
        """
        if not set(self.ranks) <= set(group.ranks) or group.size == world:
            return False
        if self.is_whole:
            return len(group.ranks) == len(self.ranks)
        group_rank = {rank: index for index, rank in enumerate(group.ranks)}
        distances = {(group_rank[target] - group_rank[source]) % len(group_rank) for source, target in self.edges}
        return distances <= {1, len(group_rank) - 1}


def _peers(edges: Iterable[tuple[int, int]]) -> dict[int, set[int]]:
    """The ranks at the other ends of each rank's messages."""
    peers: dict[int, set[int]] = {}
    for source, target in edges:
        peers.setdefault(source, set()).add(target)
        peers.setdefault(target, set()).add(source)
    return peers


def chains_of(
    edges: Edges, axes: Mapping[Group, str], rings: Collection[Group], present: Collection[int], world: int | None
) -> tuple[Chain, ...]:
    """Connected sets of ranks by their messages outside ``rings`` and the groups of other axes.

    Args:
        present: the ranks that have a trace.
        world: how many ranks there are.
    """
    free = ("world", UNKNOWN)
    links = {
        edge
        for group, pairs in edges.items()
        if (axis := axes.get(group, UNKNOWN)) == "pp" or (axis in free and group not in rings)
        for edge in pairs
    }
    links = {edge for edge in links if edge[::-1] in links} or links  # neighbours that train send both ways
    peers = _peers(links)
    chains: list[Chain] = []
    seen: set[int] = set()
    for first in sorted(peers):
        members, new = {first}, {first} - seen
        while new:
            new = {peer for rank in new for peer in peers[rank]} - members
            members |= new
        if len(members) > 1:
            is_whole = len(members) == world or all(rank in present or len(peers[rank]) > 1 for rank in members)
            of_chain = frozenset(edge for edge in links if edge[0] in members)
            chains.append(Chain(tuple(sorted(members)), of_chain, is_whole))
        seen |= members
    return tuple(chains)


def one_way_rings(edges: Edges) -> frozenset[Group]:
    """Groups in which each rank of three or more sends to one and receives from one other, around a ring, and never back.

    A pipeline that trains sends gradients back, and one that only runs forward ends at its last rank.
    """
    rings = set()
    for group, pairs in edges.items():
        after = dict(pairs)
        is_ring = len(after) == len(pairs) and set(after) == set(after.values())
        if is_ring and all(after[after[rank]] != rank for rank in after):
            rings.add(group)
    return frozenset(rings)


def exchanges(calls: Mapping[int, KeyedCalls], of_call: Mapping[CallKey, Group], edges: Edges) -> frozenset[Group]:
    """Groups whose ranks send only while they receive, both in one kernel: two ranks, or several that never send back.

    A ring of context parallelism does so from its first message to its last. A pipeline begins and ends with a message that goes
    one way; seen only in its middle, it may look the same, so that such a group is of no axis for sure.
    """
    possible = {
        group
        for group, pairs in edges.items()
        if len({rank for pair in pairs for rank in pair}) == 2 or not any(pair[::-1] in pairs for pair in pairs)
    }
    one_way = set()
    for table in calls.values() if possible else ():
        for key, part in table.by_key(("kind", "start_ns", "stream", "clock"), P2P):
            if (group := of_call[key]) not in possible:
                continue
            both = part.groupby(["start_ns", "stream"])["kind"].nunique() == 2
            if (part["clock"] != "device").any() or not both.all():
                one_way.add(group)
    return frozenset(possible - one_way)


_ENDS = ["kind", "peer", "local_peer"]


def edges_of(
    calls: Mapping[int, KeyedCalls], of_call: Mapping[CallKey, Group], unnamed: Mapping[int, Group]
) -> dict[Group, set[tuple[int, int]]]:
    """The messages whose peer is known, by the group of their calls."""
    edges: dict[Group, set[tuple[int, int]]] = {}
    for rank, table in calls.items():
        for key, part in table.by_key(_ENDS, P2P):
            group = of_call[key]
            named = group if group.is_named else unnamed[rank]
            ends = [part[name].to_numpy() for name in _ENDS]
            _, first = distinct_of(ends)
            for kind, global_rank, group_rank in zip(*(column[first].tolist() for column in ends), strict=True):
                peer = global_peer(global_rank, group_rank, named)
                if peer >= 0:
                    edges.setdefault(group, set()).add((rank, peer) if kind == "send" else (peer, rank))
    return edges


def global_peer(peer: int, local_peer: int, group: Group) -> int:
    """The global rank of a peer known only by its rank in the group; -1 where that is unknown."""
    if peer >= 0 or local_peer < 0:
        return int(peer)
    if group.ranks:
        return group.ranks[local_peer] if local_peer < len(group.ranks) else -1
    return int(local_peer) if group.description == "default_pg" else -1
