"""The pipelines of a run whose processes say the sizes of its mesh and not how ranks are laid out on it.

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
from pptrace.ingest.otlp.process_facts import PARALLEL
from pptrace.model.tables import COMPUTE_KINDS

_ORDERS = {
    "tp-cp-dp-pp": "the pipeline as the slowest axis",
    "tp-cp-pp-dp": "the pipeline before the data-parallel axis",
}

Facts = Mapping[int, Mapping[str, Any]]


def with_layout(facts: Facts, ops: pd.DataFrame) -> tuple[Facts, tuple[str, ...]]:
    """The facts with ``mesh`` and ``pp_ranks`` where sizes and order tell them, and a line where they are taken or open.

    Args:
        facts: by rank; those without :data:`~pptrace.ingest.otlp.process_facts.PARALLEL` stay as they are.
        ops: of all ranks, in the order of time on each.
    """
    known = {rank: own for rank, own in facts.items() if isinstance(own.get(PARALLEL), Mapping)}
    if not known:
        return facts, ()
    sizes = next(iter(known.values()))[PARALLEL]
    axes = {str(axis): int(sizes[axis]) for axis in MESH_ORDER}
    world = prod(axes.values())
    if any(rank >= world for rank in known) or any(own[PARALLEL]["pp"] != axes["pp"] for own in known.values()):
        return facts, ("ranks and sizes in the spans contradict each other: the mesh is not taken from them",)
    order, line = _order(known, axes, _leading_forwards(ops))
    if order is None:
        return facts, (line,)
    chunks = {own[PARALLEL].get("vpp") for own in known.values()} - {None}
    mesh = {**axes, "vpp": chunks.pop() if len(chunks) == 1 else None, "ep": None, "order": order}
    laid_out = {
        rank: {**own, "mesh": mesh, "pp_ranks": _pipeline(rank, axes, order)} if rank in known else own
        for rank, own in facts.items()
    }
    return laid_out, (line,) if line else ()


def _order(known: Facts, axes: Mapping[str, int], leading: Mapping[int, int]) -> tuple[str | None, str]:
    """The order of axes that nothing contradicts, with a line where it is not certain; None where none is left."""
    if axes["dp"] == 1 or axes["pp"] == 1:
        return next(iter(_ORDERS)), ""
    left = [order for order in _ORDERS if _agrees(known, axes, order, leading)]
    if not left:
        return None, "the order of ops fits no known layout of the ranks in the spans: stages are null"
    told = "the order of ops tells" if len(left) == 1 else "Megatron-LM's default, which no span tells"
    return left[0], f"pipelines of {axes['pp']} ranks with {_ORDERS[left[0]]} of the ranks: {told}"


def _agrees(known: Facts, axes: Mapping[str, int], order: str, leading: Mapping[int, int]) -> bool:
    """Whether the places that processes say, and the forwards that ranks begin with, are those of this order."""
    by_place: dict[int, set[int]] = {}
    for rank, own in known.items():
        place = _pipeline(rank, axes, order).index(rank)
        said = own[PARALLEL].get("pp_rank")
        if said is not None and said != place:
            return False
        if rank in leading:
            by_place.setdefault(place, set()).add(leading[rank])
    in_order = [by_place[place] for place in sorted(by_place)]
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
    return [first + place * stride for place in range(axes["pp"])]


def _leading_forwards(ops: pd.DataFrame) -> dict[int, int]:
    """How many forwards each rank runs before the first backward of its fullest step."""
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)].sort_values("start_ns", kind="stable")
    found: dict[int, int] = {}
    for rank, own in compute.groupby("rank"):
        kinds: Sequence[str] = max((part["kind"].tolist() for _, part in own.groupby("step")), key=len)
        found[int(str(rank))] = next((place for place, kind in enumerate(kinds) if kind != "F"), len(kinds))
    return found
