"""The rows of a timeline: the ranks of a run, in several orders, in groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from msgspec import Struct, field

from pptrace.axes import WITHIN_STAGE, Axis
from pptrace.model.mesh import MeshInfo

BLOCK = 32
"""Ranks of a tile."""
AXES = (Axis.DP, *(axis for axis in WITHIN_STAGE if axis is not Axis.DP), Axis.EP)
"""Axes by whose coordinate ranks are grouped."""
_NAMES = {Axis.DP: "replica"}


class RankRow(Struct, frozen=True):
    """A rank, the index of its pipeline and its place in it (−1 where unknown), its stages, and its coordinate on each of
    :data:`AXES` that is longer than 1.
    """

    rank: int
    pipeline: int
    pp_rank: int
    stages: tuple[int, ...]
    coordinates: Mapping[str, int] = field(default_factory=dict)


class Layout(Struct, frozen=True, dict=True):
    """All ranks with a trace, ascending; tiles and groups name them by their index."""

    rows: tuple[RankRow, ...]

    @cached_property
    def position(self) -> Mapping[int, int]:
        """The index of each rank."""
        return {row.rank: index for index, row in enumerate(self.rows)}

    @cached_property
    def orders(self) -> Mapping[str, tuple[tuple[str, tuple[int, ...]], ...]]:
        """Groups of ranks, each (label, indices): by their place in their pipeline, by pipeline, and by their coordinate on
        each axis on which they differ. What groups them as another order does is left out.
        """
        rows = self.rows
        orders = {
            "stage": tuple(
                (self._stage_label(place), at)
                for place, at in self._groups([row.pp_rank for row in rows], [row.pipeline for row in rows])
            ),
            "pipeline": self._groups_of("pipeline", [row.pipeline for row in rows]),
        }
        known = {frozenset(at for _, at in groups) for groups in orders.values()}
        for axis in AXES:
            name = _NAMES.get(axis, str(axis))
            groups = self._groups_of(name, [row.coordinates.get(axis, -1) for row in rows])
            if len(groups) > 1 and (members := frozenset(at for _, at in groups)) not in known:
                orders[name] = groups
                known.add(members)
        return orders

    def _groups_of(self, name: str, number: Sequence[int]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Groups of equal numbers, in each the ranks in order of their place in their pipeline."""
        groups = self._groups(number, [row.pp_rank for row in self.rows])
        return tuple((f"no {name}" if key < 0 else f"{name} {key}", at) for key, at in groups)

    def _groups(self, first: Sequence[int], then: Sequence[int]) -> Iterable[tuple[int, tuple[int, ...]]]:
        groups: dict[int, list[int]] = {}
        for at in sorted(range(len(self.rows)), key=lambda at: (then[at], at)):
            groups.setdefault(first[at], []).append(at)
        return ((key, tuple(groups[key])) for key in sorted(groups, key=lambda key: (key < 0, key)))

    def _stage_label(self, pp_rank: int) -> str:
        if pp_rank < 0:
            return "no pipeline"
        stages = next(row.stages for row in self.rows if row.pp_rank == pp_rank)
        return f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}" if stages else "no stage"

    def blocks(self, order: str) -> tuple[tuple[int, ...], ...]:
        """The ranks of an order in blocks of :data:`BLOCK`, as tiles have them."""
        ranks = [at for _, group in self.orders[order] for at in group]
        return tuple(tuple(ranks[first : first + BLOCK]) for first in range(0, len(ranks), BLOCK))


def layout_of(ranks: Iterable[int], mesh: MeshInfo, stages: Mapping[int, tuple[int, ...]]) -> Layout:
    """The rows of the ranks with a trace."""
    places = {
        rank: (number, place) for number, pipeline in enumerate(mesh.pipelines) for place, rank in enumerate(pipeline)
    }
    rows = []
    for rank in sorted(ranks):
        pipeline, pp_rank = places.get(rank, (-1, -1))
        if mesh.known_pp_ranks:
            pp_rank = dict(mesh.known_pp_ranks).get(rank, -1)
        rows.append(RankRow(rank, pipeline, pp_rank, stages.get(rank, ()), _coordinates(rank, mesh)))
    return Layout(tuple(rows))


def _coordinates(rank: int, mesh: MeshInfo) -> dict[str, int]:
    """The coordinate of a rank on each axis that is longer than 1; of none where its pipeline is unknown or assumed."""
    if mesh.in_order or not mesh.pipeline_of(rank):
        return {}
    coordinates = {}
    for axis in AXES:
        group = mesh.group_of(rank, axis) if (mesh.size_of(axis) or 1) > 1 else None
        if group is not None and rank in group:
            coordinates[str(axis)] = group.index(rank)
    return coordinates
