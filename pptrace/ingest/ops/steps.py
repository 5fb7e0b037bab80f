"""Assign what an op table lacks: steps, stages and the mesh.

column with gaps                the step of the neighbouring ops on its rank, if this op is missing there
no column, but microbatches     an op that repeats on its rank begins the next step
neither                         a step ends where the whole pipeline has drained

    interleaved   stage = chunk · p + r                  (Megatron-LM's virtual pipeline)
    V             stage = r, and 2p − 1 − r for chunk 1  (zbv, v-half, DualPipeV)

The first microbatch shows the placement: its chunk 1 begins on the rank of stage p.

The mesh comes from columns of coordinates, else from the members of collectives.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, cast

import numpy as np
import pandas as pd

from pptrace.axes import MESH_ORDER
from pptrace.marks import P2P
from pptrace.model.tables import BACKWARD_KINDS, COMPUTE_KINDS, FORWARD_KINDS, Int64
from pptrace.schedule.shape import loop, zigzag
from pptrace.slices import group_codes, rows_where

StepsAndNotes = tuple[pd.DataFrame, tuple[str, ...]]
"""(ops with steps, notes on steps that were inferred from the order of ops)."""


def assign_steps(ops: pd.DataFrame, is_gap: pd.Series[bool], has_microbatches: bool) -> StepsAndNotes:
    """Assign a step to every op of a file where possible (0 if they may all be of one step); drop compute ops without a step.

    ``is_gap`` marks the rows with an empty cell; a row with -1 belongs to no step.
    """
    if "step" in ops and (ops["step"] >= 0).any():
        filled, notes = _fill_gaps(ops, is_gap)
        return rows_where(filled, (filled["step"] >= 0) | ~filled["kind"].isin(COMPUTE_KINDS)), notes
    return (number_by_repetition(ops), ()) if has_microbatches else _split_where_drained(ops)


def number_by_repetition(ops: pd.DataFrame) -> pd.DataFrame:
    """Number steps by repetition: an op that repeats on its rank begins the next step."""
    return ops.assign(step=ops.sort_values("start_ns", kind="stable").groupby(_key(ops), observed=True).cumcount())


def _key(ops: pd.DataFrame) -> list[str]:
    """Columns that identify an op within its step."""
    return [name for name in ("rank", "kind", "stage", "chunk", "microbatch") if name in ops]


def _fill_gaps(ops: pd.DataFrame, is_gap: pd.Series[bool]) -> StepsAndNotes:
    if not (is_gap[ops.index] & ops["kind"].isin(COMPUTE_KINDS)).any():
        return ops, ()
    ordered = ops.sort_values("start_ns", kind="stable")
    known_steps = ordered["step"].where(ordered["step"] >= 0).groupby(ordered["rank"])
    around = pd.DataFrame({"before": known_steps.ffill(), "after": known_steps.bfill()}).fillna(-1).astype("int64")
    compute = ordered[ordered["kind"].isin(COMPUTE_KINDS)]
    unnumbered = compute.index[is_gap[compute.index]]
    keys = pd.Series(list(compute[_key(ops)].itertuples(index=False, name=None)), index=compute.index)
    used_ops: set[tuple[Hashable, int]] = set()
    if "microbatch" in ops:  # without it many ops of a step have the same key
        used_ops = set(zip(keys.tolist(), compute["step"].tolist(), strict=True))
    step_by_row: dict[int, int] = {}
    for row in unnumbered.tolist():
        candidates = {step for step in around.loc[row].tolist() if step >= 0 and (keys[row], step) not in used_ops}
        if len(candidates) == 1:
            step_by_row[row] = candidates.pop()
            used_ops |= {(keys[row], step_by_row[row])} if "microbatch" in ops else set()
    assigned = pd.Series(step_by_row, dtype="int64").reindex(ops.index)
    steps = assigned.fillna(ops["step"]).astype("int64")
    note = f"{len(unnumbered)} of {len(compute)} ops have no step: {len(step_by_row)} got that of the ops before and after them"
    if len(step_by_row) < len(unnumbered):
        note += "; the others are left out, so that their steps lack ops"
    return ops.assign(step=steps), (note,)


def _split_where_drained(ops: pd.DataFrame) -> StepsAndNotes:
    """Split steps where every rank has run as many backwards as forwards, and all ranks the same number.

    Within a step only the last stage is ever in that state: the others have microbatches in flight.
    """
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)].sort_values("start_ns", kind="stable")
    rows_of_rank = dict(iter(compute.groupby("rank")))
    one_step = ops.assign(step=0)
    unknown_note = (
        "no columns step and microbatch, and the order of ops shows no end of a step: all ops are read as one step; "
        "add a column step"
    )
    stage_sets = {frozenset(rows["stage"].tolist()) if "stage" in rows else rank for rank, rows in rows_of_rank.items()}
    if len(stage_sets) < 2:
        return one_step, (unknown_note,) if len(compute) else ()
    starts = {rank: _drained_starts(rows) for rank, rows in rows_of_rank.items()}
    common = sorted(set.intersection(*(set(starts_of_rank) for starts_of_rank in starts.values())))
    if not common:
        totals = {(_count(rows, FORWARD_KINDS), _count(rows, BACKWARD_KINDS)) for rows in rows_of_rank.values()}
        is_one_step = len(totals) == 1 and len(set(*totals)) == 1
        return one_step, () if is_one_step else (unknown_note,)
    steps = pd.Series(0, index=ops.index, dtype="int64")
    for rank, starts_of_rank in starts.items():
        is_of_rank = ops["rank"] == rank
        cuts = [starts_of_rank[count] for count in common]
        steps[is_of_rank] = np.searchsorted(cuts, ops.loc[is_of_rank, "start_ns"].to_numpy(), side="right")
    note = f"no columns step and microbatch: split into {len(common) + 1} steps where the pipeline has drained"
    return ops.assign(step=steps), (note,)


def _count(rows: pd.DataFrame, kinds: tuple[str, ...]) -> int:
    return int(rows["kind"].isin(kinds).sum())


def _drained_starts(rows: pd.DataFrame) -> dict[int, int]:
    """Starts, ns, of forwards with no microbatch in flight, by the number of microbatches done. Rows in order of start."""
    forwards, backwards = rows["kind"].isin(FORWARD_KINDS).cumsum(), rows["kind"].isin(BACKWARD_KINDS).cumsum()
    starts = (rows["kind"] == "F") & (forwards - 1 == backwards) & (backwards > 0)
    return dict(zip(backwards[starts].tolist(), rows.loc[starts, "start_ns"].tolist(), strict=True))


def assign_stages(ops: pd.DataFrame, pp_rank_of: Mapping[int, int]) -> Int64:
    """Stage of each op, shape (n,); -1 where it has no chunk.

    Args:
        ops: columns rank, kind, chunk and start_ns of all ranks of a run, roughly on one clock.
        pp_rank_of: pipeline rank by rank.
    """
    pp = max(pp_rank_of.values(), default=0) + 1
    pp_rank = np.array([pp_rank_of.get(rank, 0) for rank in ops["rank"].tolist()], dtype=np.int64)
    chunk = ops["chunk"].to_numpy(dtype=np.int64)
    is_chunk_1 = ((ops["kind"] == "F") & (ops["chunk"] == 1)).to_numpy()
    is_v = False  # a V: two chunks, and chunk 1 of the first microbatch begins on the last rank
    if len(set(pp_rank.tolist())) > 1 and chunk.max() == 1 and is_chunk_1.any():
        first = ops["start_ns"].to_numpy()[is_chunk_1].argmin()
        is_v = bool(pp_rank[is_chunk_1][first] == pp - 1)
    return stages_of_chunks(chunk, pp_rank, pp, is_v)


def stages_of_chunks(chunk: Int64, pp_rank: Int64, pp: int, is_v: bool) -> Int64:
    """Stage of each chunk of each pipeline rank, shape (n,), under loop placement or a V; -1 where either is -1."""
    chunks, ranks = cast(Any, chunk), cast(Any, pp_rank)  # the formulas of single stages hold for arrays of them
    stage = np.where(is_v & (chunk == 1), zigzag(1, ranks, pp), loop(chunks, ranks, pp))
    return np.where((chunk >= 0) & (pp_rank >= 0), stage, -1)


def number_chunks(ops: pd.DataFrame) -> Int64:
    """The index of each op's stage among the stages of its rank, shape (n,); −1 without a stage."""
    pair_of_row, pairs = pd.factorize(group_codes([ops["rank"], ops["stage"]]))
    row_of_pair = np.empty(len(pairs), dtype=np.int64)
    row_of_pair[pair_of_row] = np.arange(len(ops))
    of_pair = ops[["rank", "stage"]].iloc[row_of_pair]
    staged = of_pair["stage"].where(of_pair["stage"] >= 0)
    index = staged.groupby(of_pair["rank"]).rank(method="dense").fillna(0).to_numpy().astype(np.int64) - 1
    return index[pair_of_row]


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
    tables = [table[[name for name in ("rank", *_COORDINATES) if name in table]] for table in (ops, comms)]
    coordinates = _coordinates(pd.concat(tables, ignore_index=True))
    return _from_coordinates(coordinates, ops) if len(coordinates.columns) else _from_groups(ops, comms)


def pp_ranks(table: pd.DataFrame) -> dict[int, int]:
    """Pipeline rank by rank: the coordinate, else the index among the ranks with equal other coordinates."""
    coordinates = _coordinates(table)
    if "pp" in coordinates:
        return dict(zip(coordinates.index.tolist(), coordinates["pp"].tolist(), strict=True))
    if not len(coordinates.columns):
        return {rank: index for index, rank in enumerate(sorted(table["rank"].unique().tolist()))}
    nth = coordinates.sort_index().groupby(list(coordinates.columns)).cumcount()
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
    facts_of = {rank: {"pp_ranks": ranks} for ranks in _groups(coordinates, "pp", other_axes) for rank in ranks}
    strides = {axis: _stride(coordinates, axis) for axis in sizes}
    return {"mesh": _mesh(sizes, strides, ops), "world_size": len(coordinates)}, facts_of


def _stride(coordinates: pd.DataFrame, axis: str) -> int:
    """Distance in ranks of two neighbours on an axis; 0 where it has one member."""
    groups = _groups(coordinates, axis, [name for name in coordinates.columns if name != axis])
    return next((ranks[1] - ranks[0] for ranks in groups if len(ranks) > 1), 0)


def _groups(coordinates: pd.DataFrame, axis: str, other_axes: list[str]) -> list[list[int]]:
    """The ranks of each group along an axis, in order: those with the same coordinates on the others."""
    ordered = coordinates.sort_values(axis)
    return [part.index.tolist() for _, part in ordered.groupby(other_axes)] if other_axes else [ordered.index.tolist()]


def _from_groups(ops: pd.DataFrame, comms: pd.DataFrame) -> Facts:
    """Derive the sizes of the axes from collectives with matched members."""
    matched = comms[(comms["match"] >= 0) & ~comms["kind"].isin(P2P) & comms["axis"].isin(_AXES)]
    sizes: dict[str, int] = {}
    strides: dict[str, int] = {}
    for axis, rows in matched.groupby("axis", observed=True):
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
