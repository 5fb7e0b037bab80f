"""Derive the pipelines of a run whose processes record the sizes of its mesh, but not the order of its axes.

Megatron-LM lays the pipeline out as the slowest axis (``tp-cp-ep-dp-pp``), or before the data-parallel one with
``--use-tp-pp-dp-mapping`` (``parallel_state.py``). Where the two differ, the order of ops speaks: of 1F1B a later rank of the
pipeline runs no more forwards before its first backward than one before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import pandas as pd

from pptrace.axes import MESH_ORDER
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.model.traces import PARALLEL

_ORDERS = {
    "tp-cp-dp-pp": "the pipeline as the slowest axis",
    "tp-cp-pp-dp": "the pipeline before the data-parallel axis",
}

Facts = Mapping[int, Mapping[str, Any]]


def with_layout(facts: Facts, ops: pd.DataFrame) -> tuple[Facts, tuple[str, ...]]:
    """Add ``mesh`` and ``pp_ranks`` to the facts where sizes and the order of ops give them; with a warning where assumed.

    Args:
        facts: by rank; those without :data:`~pptrace.model.traces.PARALLEL` stay as they are.
        ops: of all ranks, in the order of time on each.
    """
    with_sizes = {
        rank: rank_facts for rank, rank_facts in facts.items() if isinstance(rank_facts.get(PARALLEL), Mapping)
    }
    if not with_sizes:
        return facts, ()
    sizes = next(iter(with_sizes.values()))[PARALLEL]
    axes = {str(axis): int(sizes.get(axis, 1)) for axis in MESH_ORDER}
    world = prod(axes.values())
    if any(rank >= world for rank in with_sizes) or any(
        rank_facts[PARALLEL]["pp"] != axes["pp"] for rank_facts in with_sizes.values()
    ):
        return facts, ("the ranks and the sizes of the mesh in the spans contradict each other: the mesh is null",)
    order, line = _order(with_sizes, axes, _leading_forwards(ops))
    if order is None:
        return facts, (line,)
    chunks = {rank_facts[PARALLEL].get("vpp") for rank_facts in with_sizes.values()} - {None}
    mesh = {**axes, "vpp": chunks.pop() if len(chunks) == 1 else None, "ep": None, "order": order}
    laid_out = {
        rank: {**rank_facts, "mesh": mesh, "pp_ranks": _pipeline(rank, axes, order)}
        if rank in with_sizes
        else rank_facts
        for rank, rank_facts in facts.items()
    }
    return laid_out, (line,) if line else ()


def _order(with_sizes: Facts, axes: Mapping[str, int], leading: Mapping[int, int]) -> tuple[str | None, str]:
    """The first order of axes that nothing contradicts, with a warning where it is not certain; None without one."""
    if axes["dp"] == 1 or axes["pp"] == 1:
        return next(iter(_ORDERS)), ""
    possible = [order for order in _ORDERS if _agrees(with_sizes, axes, order, leading)]
    if not possible:
        return None, "the order of ops matches no known layout of the ranks in the spans: stages are null"
    reason = "confirmed by the order of ops" if len(possible) == 1 else "assumed, as Megatron-LM's default"
    return possible[0], f"pipelines of {axes['pp']} ranks with {_ORDERS[possible[0]]} of the ranks: {reason}"


def _agrees(with_sizes: Facts, axes: Mapping[str, int], order: str, leading: Mapping[int, int]) -> bool:
    """Return whether declared pipeline ranks and leading forwards are those of this order of axes."""
    forwards_by_pp_rank: dict[int, set[int]] = {}
    for rank, rank_facts in with_sizes.items():
        pp_rank = _pipeline(rank, axes, order).index(rank)
        declared = rank_facts[PARALLEL].get("pp_rank")
        if declared is not None and declared != pp_rank:
            return False
        if rank in leading:
            forwards_by_pp_rank.setdefault(pp_rank, set()).add(leading[rank])
    in_order = [forwards_by_pp_rank[pp_rank] for pp_rank in sorted(forwards_by_pp_rank)]
    same = all(len(counts) == 1 for counts in in_order)
    return same and all(max(after) <= min(before) for before, after in pairwise(in_order))


def _pipeline(rank: int, axes: Mapping[str, int], order: str) -> list[int]:
    """The global ranks of the pipeline of a rank."""
    stride = 1
    for axis in order.split("-"):
        if axis == "pp":
            break
        stride *= axes[axis]
    first = rank - rank // stride % axes["pp"] * stride
    return [first + pp_rank * stride for pp_rank in range(axes["pp"])]


def _leading_forwards(ops: pd.DataFrame) -> dict[int, int]:
    """Number of forwards of each rank before the first backward of its fullest step."""
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)].sort_values("start_ns", kind="stable")
    leading: dict[int, int] = {}
    for rank, rank_ops in compute.groupby("rank"):
        kinds: Sequence[str] = max((part["kind"].tolist() for _, part in rank_ops.groupby("step")), key=len)
        leading[int(str(rank))] = next((index for index, kind in enumerate(kinds) if kind != "F"), len(kinds))
    return leading
