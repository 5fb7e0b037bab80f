"""The rows of a timeline: the ranks of a run, in two orders, in groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from pptrace.model.mesh import MeshInfo

BLOCK = 32
"""Ranks of a tile."""


@dataclass(frozen=True)
class RankRow:
    """A rank, the index of its pipeline and its place in it (−1 where unknown), and its stages."""

    rank: int
    pipeline: int
    pp_rank: int
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """All ranks with a trace, ascending; tiles and groups name them by their index."""

    rows: tuple[RankRow, ...]

    @cached_property
    def position(self) -> Mapping[int, int]:
        """The index of each rank."""
        return {row.rank: index for index, row in enumerate(self.rows)}

    @cached_property
    def orders(self) -> Mapping[str, tuple[tuple[str, tuple[int, ...]], ...]]:
        """Groups of ranks, each (label, indices): by their place in their pipeline, or by pipeline."""
        return {
            "stage": tuple((self._stage_label(place), at) for place, at in self._groups("pp_rank", "pipeline")),
            "pipeline": tuple(
                ("no pipeline" if number < 0 else f"pipeline {number}", at)
                for number, at in self._groups("pipeline", "pp_rank")
            ),
        }

    def _groups(self, first: str, then: str) -> Iterable[tuple[int, tuple[int, ...]]]:
        groups: dict[int, list[int]] = {}
        order = sorted(range(len(self.rows)), key=lambda at: (getattr(self.rows[at], then), at))
        for at in order:
            groups.setdefault(getattr(self.rows[at], first), []).append(at)
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
        rows.append(RankRow(rank, pipeline, pp_rank, stages.get(rank, ())))
    return Layout(tuple(rows))
