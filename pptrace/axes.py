"""The axes of parallel training, and which global rank stands where on them. Standard library only: both sides use it.

A rank's coordinates count from the fastest-varying axis to the slowest. In Megatron-LM's order, tp · cp · dp · pp,
rank = tp + size_tp · (cp + size_cp · (dp + size_dp · pp)). An order may name ep too, which has no ranks of its own: it says in
which order the ranks of a stage are counted for its experts (:func:`expert_group_of`).

Source of the rank arithmetic: Megatron-LM ``core/parallel_state.py``, ``RankGenerator``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from math import prod


class Axis(StrEnum):
    """Along what a call communicates; the value is the word in marks, tables and reports."""

    PP = "pp"
    TP = "tp"
    CP = "cp"
    DP = "dp"
    EP = "ep"
    ETP = "etp"  # tensor parallelism within experts
    EDP = "edp"  # replicas of experts
    DP_CP = "dp-cp"  # both together: the ranks that hold equal parameters and different tokens
    WORLD = "world"
    EMBEDDING = "embd"  # first and last stage, for tied embeddings
    UNKNOWN = "unknown"
    MIRROR = "mirror"  # pipeline ranks r and p−1−r, which hold copies of the same stages (DualPipe)


MESH_ORDER = (Axis.TP, Axis.CP, Axis.DP, Axis.PP)
"""The axes whose sizes multiply up to the number of ranks, fastest-varying first, as Megatron-LM orders ranks."""
WITHIN_STAGE = tuple(axis for axis in MESH_ORDER if axis is not Axis.PP)
"""The axes along which the ranks of one stage differ."""
SHARING = (Axis.EP,)
"""Axes that share the ranks of others: experts are spread over ranks that tp, cp and dp number already."""
OF_EXPERTS = (Axis.ETP, Axis.EP, Axis.EDP)
"""The axes of experts within one stage, fastest-varying first; EDP is what the other two leave of its ranks."""
SIZED = (*WITHIN_STAGE, *SHARING)
"""The axes whose sizes a mesh has besides that of its pipelines."""


_OF_EXPERTS = {Axis.TP: Axis.ETP, Axis.EP: Axis.EP, Axis.DP: Axis.EDP}
"""The axes of experts in the places of others, in an order that names ep."""


def without_ep(order: Sequence[Axis]) -> tuple[Axis, ...]:
    """An order without ep: the axes that number the ranks."""
    return tuple(axis for axis in order if axis is not Axis.EP)


def complete_order(words: Sequence[str]) -> tuple[Axis, ...] | None:
    """An order of axes by their words, fastest first; those left out vary slowest, ep is there only where it is named.

    None where a word is no axis or repeated.
    """
    by_word = {str(axis): axis for axis in (*MESH_ORDER, Axis.EP)}
    if not set(words) <= set(by_word) or len(set(words)) != len(words):
        return None
    named = tuple(by_word[word] for word in words)
    return named + tuple(axis for axis in MESH_ORDER if axis not in named)


def coordinates_of(rank: int, sizes: Mapping[Axis, int], order: Sequence[Axis] = MESH_ORDER) -> dict[Axis, int]:
    """The coordinate of a global rank on each axis."""
    coordinates = {}
    for axis in without_ep(order):
        rank, coordinates[axis] = divmod(rank, sizes[axis])
    return coordinates


def rank_of(coordinates: Mapping[Axis, int], sizes: Mapping[Axis, int], order: Sequence[Axis] = MESH_ORDER) -> int:
    """The global rank at coordinates; the inverse of :func:`coordinates_of`."""
    rank = 0
    for axis in reversed(without_ep(order)):
        rank = rank * sizes[axis] + coordinates[axis]
    return rank


def group_of(
    rank: int, axes: Collection[Axis], sizes: Mapping[Axis, int], order: Sequence[Axis] = MESH_ORDER
) -> tuple[int, ...]:
    """The global ranks that differ from ``rank`` in ``axes`` alone, itself included, in ascending order.

    ``rank`` may be beyond the world: then so are its group's.
    """
    members, stride = [rank], 1
    for axis in without_ep(order):
        if axis in axes:
            coordinate = rank // stride % sizes[axis]
            members = [member + (index - coordinate) * stride for index in range(sizes[axis]) for member in members]
        stride *= sizes[axis]
    return tuple(sorted(members))


def expert_group_of(
    rank: int, axis: Axis, sizes: Mapping[Axis, int], order: Sequence[Axis], ep: int, etp: int = 1
) -> tuple[int, ...]:
    """The global ranks of the group along an axis of experts (:data:`OF_EXPERTS`) that ``rank`` belongs to, in its order.

    Experts are folded over the ranks of a stage, counted in ascending order: etp fastest, then ep, then edp; or, where ``order``
    names ep, as tp, ep and dp stand there. ``ep · etp`` divides them. Source: Megatron-LM's parallel folding (arXiv 2504.14960),
    whose ranks of experts have etp in the place of tp and edp in that of dp.
    """
    stage = group_of(rank, WITHIN_STAGE, sizes, order)
    sizes_within = {Axis.ETP: etp, Axis.EP: ep, Axis.EDP: len(stage) // (ep * etp)}
    within = [_OF_EXPERTS[each] for each in order if each in _OF_EXPERTS] if Axis.EP in order else OF_EXPERTS
    stride = prod(sizes_within[each] for each in within[: within.index(axis)])
    place = stage.index(rank)
    first = place - place // stride % sizes_within[axis] * stride
    return tuple(stage[first + index * stride] for index in range(sizes_within[axis]))


def groups_of(
    axes: Collection[Axis], sizes: Mapping[Axis, int], order: Sequence[Axis] = MESH_ORDER
) -> list[tuple[int, ...]]:
    """All groups of ranks that differ in ``axes`` alone: Megatron's ``get_ranks("tp-dp")``."""
    world = prod(sizes[axis] for axis in without_ep(order))
    return sorted({group_of(rank, axes, sizes, order) for rank in range(world)})
