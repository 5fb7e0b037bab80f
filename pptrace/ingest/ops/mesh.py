"""Derive the mesh of an op table: from columns of coordinates, else from the members of its collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from pptrace.axes import MESH_ORDER
from pptrace.marks import P2P
from pptrace.model.tables import COMPUTE_KINDS

_AXES = tuple(map(str, MESH_ORDER))

_COORDINATES = tuple(f"{axis}_rank" for axis in _AXES)

Facts = tuple[dict[str, Any], dict[int, dict[str, Any]]]
"""(facts of all ranks, facts by rank), with the keys of pptrace's metadata."""


def mesh_facts(ops: pd.DataFrame, comms: pd.DataFrame) -> Facts:
    """Facts of the mesh; ({}, {}) where the table has no coordinates and no matched collectives, or is that of one rank alone,
    of whose run it shows only a part.
    """
    if ops["rank"].nunique() == 1:
        return {}, {}
    columns = [name for name in ("rank", *_COORDINATES) if name in ops or name in comms]
    tables = [table[[name for name in columns if name in table]] for table in (ops, comms)]
    is_in_table = len(columns) > 1
    coordinates = _coordinates(pd.concat(tables, ignore_index=True)) if is_in_table else pd.DataFrame(index=[])
    return _from_coordinates(coordinates, ops) if len(coordinates.columns) else _from_groups(ops, comms)


def pp_ranks(table: pd.DataFrame) -> dict[int, int]:
    """Pipeline rank by rank: the coordinate, else the index among the ranks with equal other coordinates."""
    coordinates = _coordinates(table)
    if "pp" in coordinates:
        return dict(zip(coordinates.index.tolist(), coordinates["pp"].tolist(), strict=True))
    other_axes = [axis for axis in coordinates.columns if axis != "pp"]
    ranks = sorted(table["rank"].unique().tolist())
    if not other_axes:
        return {rank: index for index, rank in enumerate(ranks)}
    nth = coordinates.sort_index().groupby(other_axes).cumcount()
    return dict(zip(nth.index.tolist(), nth.tolist(), strict=True))


def _coordinates(table: pd.DataFrame) -> pd.DataFrame:
    """Coordinates: index rank, a column per axis in the table."""
    names = [name for name in _COORDINATES if name in table]
    complete = table[(table[names] >= 0).all(axis=1)] if names else table
    coordinates = complete.groupby("rank")[names].first().astype("int64") if names else pd.DataFrame(index=[])
    return coordinates.rename(columns=lambda name: name.removesuffix("_rank"))


def _from_coordinates(coordinates: pd.DataFrame, ops: pd.DataFrame) -> Facts:
    sizes = {axis: int(coordinates[axis].max()) + 1 for axis in coordinates.columns}
    if "pp" not in sizes:
        pp_rank_by_rank = pp_ranks(ops)
        coordinates = coordinates.assign(pp=[pp_rank_by_rank.get(int(rank), 0) for rank in coordinates.index])
        sizes["pp"] = int(coordinates["pp"].max()) + 1
    other_axes = [axis for axis in _AXES if axis != "pp" and axis in sizes]
    groups = coordinates.sort_values("pp").groupby(other_axes) if other_axes else [((), coordinates.sort_values("pp"))]
    facts_of = {
        int(rank): {"pp_ranks": [int(member) for member in part.index]} for _, part in groups for rank in part.index
    }
    strides = {axis: _stride(coordinates, axis) for axis in sizes}
    return {"mesh": _mesh(sizes, strides, ops), "world_size": len(coordinates)}, facts_of


def _stride(coordinates: pd.DataFrame, axis: str) -> int:
    """Distance in ranks of two neighbours on an axis; 0 where it has one member."""
    other_axes = [name for name in coordinates.columns if name != axis]
    for _, part in (
        coordinates.sort_values(axis).groupby(other_axes) if other_axes else [((), coordinates.sort_values(axis))]
    ):
        if len(part) > 1:
            return int(part.index[1]) - int(part.index[0])
    return 0


def _from_groups(ops: pd.DataFrame, comms: pd.DataFrame) -> Facts:
    """Derive the sizes of the axes from collectives with matched members."""
    matched = comms[(comms["match"] >= 0) & ~comms["kind"].isin(P2P) & comms["axis"].isin(_AXES)]
    sizes: dict[str, int] = {}
    strides: dict[str, int] = {}
    for axis, rows in matched.groupby("axis"):
        members = rows.groupby("match")["rank"].unique().iloc[0]
        sizes[str(axis)] = len(members)
        strides[str(axis)] = int(np.diff(np.sort(members)).min()) if len(members) > 1 else 0
    if not sizes:
        return {}, {}
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)]
    rank_by_stages: dict[tuple[int, ...], int] = {}
    for rank, stages_of_rank in sorted(compute.groupby("rank")["stage"].unique().to_dict().items()):
        rank_by_stages.setdefault(tuple(sorted(stages_of_rank.tolist())), int(str(rank)))
    first = sorted(rank_by_stages.values())
    sizes["pp"] = len(first)
    strides["pp"] = int(first[1] - first[0]) if len(first) > 1 else 0
    num_ranks = ops["rank"].nunique()
    if int(np.prod(list(sizes.values()))) != num_ranks:
        return {}, {}
    return {"mesh": _mesh(dict.fromkeys(_AXES, 1) | sizes, strides, ops), "world_size": num_ranks}, {}


def _mesh(sizes: Mapping[str, int], strides: Mapping[str, int], ops: pd.DataFrame) -> dict[str, Any]:
    chunks = ops[ops["kind"].isin(COMPUTE_KINDS)].groupby("rank")["stage"].nunique()
    by_stride = sorted(_AXES, key=lambda axis: (strides.get(axis, 0), _AXES.index(axis)))
    return {
        **{axis: sizes.get(axis) for axis in _AXES},
        "vpp": int(chunks.max()) if len(chunks) else None,
        "ep": None,
        "order": "-".join(by_stride),
    }
