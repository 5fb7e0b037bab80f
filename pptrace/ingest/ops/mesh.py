"""What an op table tells about its mesh: from columns of coordinates, else from the members of its collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from pptrace.axes import MESH_ORDER

_AXES = tuple(map(str, MESH_ORDER))
_COMPUTE = ("F", "B", "I", "W", "OVERLAP_F_B")

Facts = tuple[dict[str, Any], dict[int, dict[str, Any]]]
"""Facts of all ranks and of each rank, in the words of pptrace's metadata."""


def mesh_facts(ops: pd.DataFrame, comms: pd.DataFrame) -> Facts:
    """The mesh of a run; ({}, {}) where the table does not tell more than the stages do."""
    places = _coordinates(pd.concat([ops, comms], ignore_index=True))
    return _from_coordinates(places, ops) if len(places.columns) else _from_groups(ops, comms)


def pp_ranks(table: pd.DataFrame) -> dict[int, int]:
    """Each rank's place in its pipeline: its coordinate, else its place among the ranks with the same other coordinates."""
    places = _coordinates(table)
    if "pp" in places:
        return dict(zip(places.index.tolist(), places["pp"].tolist(), strict=True))
    others = [axis for axis in places.columns if axis != "pp"]
    ranks = sorted(table["rank"].unique().tolist())
    if not others:
        return {rank: place for place, rank in enumerate(ranks)}
    nth = places.sort_index().groupby(others).cumcount()
    return dict(zip(nth.index.tolist(), nth.tolist(), strict=True))


def _coordinates(table: pd.DataFrame) -> pd.DataFrame:
    """Index rank; a column for each axis that the table names."""
    names = [name for name in (f"{axis}_rank" for axis in _AXES) if name in table]
    known = table[(table[names] >= 0).all(axis=1)] if names else table
    places = known.groupby("rank")[names].first().astype("int64") if names else pd.DataFrame(index=[])
    return places.rename(columns=lambda name: name.removesuffix("_rank"))


def _from_coordinates(places: pd.DataFrame, ops: pd.DataFrame) -> Facts:
    sizes = {axis: int(places[axis].max()) + 1 for axis in places.columns}
    if "pp" not in sizes:
        own = pp_ranks(ops)
        places = places.assign(pp=[own.get(int(rank), 0) for rank in places.index])
        sizes["pp"] = int(places["pp"].max()) + 1
    others = [axis for axis in _AXES if axis != "pp" and axis in sizes]
    groups = places.sort_values("pp").groupby(others) if others else [((), places.sort_values("pp"))]
    facts_of = {
        int(rank): {"pp_ranks": [int(member) for member in part.index]} for _, part in groups for rank in part.index
    }
    strides = {axis: _stride(places, axis) for axis in sizes}
    return {"mesh": _mesh(sizes, strides, ops), "world_size": len(places)}, facts_of


def _stride(places: pd.DataFrame, axis: str) -> int:
    """How far apart two neighbours on an axis are; 0 where it has one member."""
    others = [name for name in places.columns if name != axis]
    for _, part in places.sort_values(axis).groupby(others) if others else [((), places.sort_values(axis))]:
        if len(part) > 1:
            return int(part.index[1]) - int(part.index[0])
    return 0


def _from_groups(ops: pd.DataFrame, comms: pd.DataFrame) -> Facts:
    """Sizes of the axes from collectives whose members the table has matched."""
    matched = comms[(comms["match"] >= 0) & ~comms["kind"].isin(("send", "recv")) & comms["axis"].isin(_AXES)]
    sizes: dict[str, int] = {}
    strides: dict[str, int] = {}
    for axis, rows in matched.groupby("axis"):
        members = rows.groupby("match")["rank"].unique().iloc[0]
        sizes[str(axis)] = len(members)
        strides[str(axis)] = int(np.diff(np.sort(members)).min()) if len(members) > 1 else 0
    if not sizes or ops["rank"].nunique() == 1:  # a file of one rank shows nobody else's part
        return {}, {}
    compute = ops[ops["kind"].isin(_COMPUTE)]
    holders: dict[tuple[int, ...], int] = {}
    for rank, own in sorted(compute.groupby("rank")["stage"].unique().to_dict().items()):
        holders.setdefault(tuple(sorted(own.tolist())), int(str(rank)))
    first = sorted(holders.values())
    sizes["pp"] = len(first)
    strides["pp"] = int(first[1] - first[0]) if len(first) > 1 else 0
    num_ranks = ops["rank"].nunique()
    if int(np.prod(list(sizes.values()))) != num_ranks:
        return {}, {}
    return {"mesh": _mesh(dict.fromkeys(_AXES, 1) | sizes, strides, ops), "world_size": num_ranks}, {}


def _mesh(sizes: Mapping[str, int], strides: Mapping[str, int], ops: pd.DataFrame) -> dict[str, Any]:
    chunks = ops[ops["kind"].isin(_COMPUTE)].groupby("rank")["stage"].nunique()
    return {
        **{axis: sizes.get(axis) for axis in _AXES},
        "vpp": int(chunks.max()) if len(chunks) else None,
        "ep": None,
        "order": "-".join(_ordered(strides)),
    }


def _ordered(strides: Mapping[str, int]) -> Sequence[str]:
    """All axes, the one with the smallest stride first."""
    return sorted(_AXES, key=lambda axis: (strides.get(axis, 0), _AXES.index(axis)))
