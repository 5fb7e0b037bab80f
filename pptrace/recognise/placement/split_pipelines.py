"""Pipelines found in the orders in which ranks run their ops, where no process groups tell them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pandas as pd

from pptrace.model.mesh import MeshInfo
from pptrace.recognise.schedule.match_by_kinds import match_by_kinds
from pptrace.recognise.schedule.measured_steps import kinds_by_pp_rank
from pptrace.schedule.registry import SCHEDULES


def split_into_pipelines(ops: pd.DataFrame, mesh: MeshInfo) -> tuple[MeshInfo, tuple[str, ...]]:
    """The mesh with other pipelines, where its ranks were taken as one for want of process groups but their orders say more.

    Ranks of one pipeline stage run the same kinds of ops in the same order, and those of different stages mostly do not. Where
    ranks have no trace, the order of those that have one may fit only one place in a pipeline.
    """
    if len(mesh.pipelines) != 1 or any(size not in (None, 1) for size in (mesh.tp, mesh.cp, mesh.dp)):
        return mesh, ()
    ranks = mesh.pipelines[0]
    by_place = kinds_by_pp_rank(ops[(ops["microbatch"] >= 0) & (ops["stage"] < 0)], mesh)
    kinds = {ranks[place]: row for place, row in by_place.items()}
    is_partial = mesh.num_ranks > len(ranks)
    if len(kinds) != len(ranks) or max(ranks) >= mesh.num_ranks:
        return mesh, ()
    if not is_partial and (len(ranks) < 4 or match_by_kinds(len(ranks), by_place) is not None):
        return mesh, ()
    found = list(_readings(kinds, mesh.num_ranks, is_partial))
    fewest = [reading for reading in found if reading.chunks == min(other.chunks for other in found)]
    if not fewest or (is_partial and len({reading.pp for reading in fewest}) > 1):
        return mesh, ()
    if is_partial and mesh.is_guess and fewest[0].chunks > 1:
        return mesh, ()  # more ranks with fewer chunks would do as well
    chosen = fewest[0]
    share = mesh.num_ranks // chosen.pp
    alone = 1 if share == 1 else None
    pipelines = tuple(zip(*(chosen.stage(place, mesh.num_ranks) for place in range(chosen.pp)), strict=True))
    note = (
        f"{share} pipeline{'s' if share > 1 else ''} of {chosen.pp} ranks, inferred from the order in which the ranks with a "
        f"trace run their ops, with the pipeline as the {'slowest' if chosen.is_slowest else 'fastest'} axis of the ranks"
    )
    own = replace(mesh, pp=chosen.pp, pipelines=pipelines, in_order=False)
    return replace(own, tp=alone, cp=alone, dp=alone, ep=alone), (note,)


def is_truncated(ops: pd.DataFrame, mesh: MeshInfo) -> bool:
    """Whether a pipeline of which nothing tells the length seems to go on behind its last rank, which runs several forwards, but
    not all, before its first backward, in an order that is that of no schedule of this length.
    """
    if not mesh.in_order or not mesh.is_guess:
        return False
    by_place = kinds_by_pp_rank(ops[(ops["microbatch"] >= 0) & (ops["stage"] < 0)], mesh)
    if not by_place:
        return False
    last = by_place[max(by_place)]
    leading = next((place for place, kind in enumerate(last) if kind != "F"), len(last))
    return 1 < leading < last.count("F") and match_by_kinds(len(mesh.pipelines[0]), by_place) is None


@dataclass(frozen=True, slots=True)
class _Reading:
    """A way to cut the ranks into pipelines: of ``pp`` ranks, along the slowest axis (Megatron-LM, DeepSpeed) or the fastest."""

    pp: int
    is_slowest: bool
    chunks: int = 1

    def place(self, rank: int, num_ranks: int) -> int:
        return rank // (num_ranks // self.pp) if self.is_slowest else rank % self.pp

    def stage(self, place: int, num_ranks: int) -> list[int]:
        """The ranks that have this place in their pipelines."""
        return [rank for rank in range(num_ranks) if self.place(rank, num_ranks) == place]


def _readings(kinds: Mapping[int, list[str]], num_ranks: int, is_partial: bool) -> Iterator[_Reading]:
    """The readings that the kinds of ops of these ranks allow, longest pipelines first."""
    for pp in (size for size in range(num_ranks if is_partial else num_ranks // 2, 1, -1) if num_ranks % size == 0):
        for is_slowest in (True, False) if pp < num_ranks else (True,):
            reading = _Reading(pp, is_slowest)
            by_stage = {reading.place(rank, num_ranks): row for rank, row in kinds.items()}
            if any(row != by_stage[reading.place(rank, num_ranks)] for rank, row in kinds.items()):
                continue
            plan = match_by_kinds(pp, by_stage)
            if plan is not None and not (is_partial and SCHEDULES[plan.name].same_order_on_every_rank):
                yield replace(reading, chunks=plan.num_chunks)
