"""Split the ranks into pipelines by the order of their ops, where there are no process groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pandas as pd

from pptrace.axes import SIZED
from pptrace.model.mesh import MeshInfo
from pptrace.recognise.infer.candidates import match_by_kinds, num_leading
from pptrace.recognise.schedule.measured_steps import kinds_by_pp_rank
from pptrace.schedule.registry import SCHEDULES


def split_into_pipelines(ops: pd.DataFrame, mesh: MeshInfo) -> tuple[MeshInfo, tuple[str, ...]]:
    """Split ranks that were assumed to form one pipeline, where their order of ops shows several.

    Ranks of one pipeline stage run the same kinds of ops in the same order, and those of different stages mostly do not. Where
    ranks have no trace, the order of those that have one may fit only one pipeline rank.
    """
    if len(mesh.pipelines) != 1 or any(size not in (None, 1) for size in (mesh.tp, mesh.cp, mesh.dp)):
        return mesh, ()
    ranks = mesh.pipelines[0]
    kinds_by_rank = kinds_by_pp_rank(ops[(ops["microbatch"] >= 0) & (ops["stage"] < 0)], mesh)
    kinds = {ranks[pp_rank]: row for pp_rank, row in kinds_by_rank.items()}
    is_partial = mesh.num_ranks > len(ranks)
    if len(kinds) != len(ranks) or max(ranks) >= mesh.num_ranks:
        return mesh, ()
    if not is_partial and (len(ranks) < 4 or match_by_kinds(len(ranks), kinds_by_rank) is not None):
        return mesh, ()
    layouts = list(_possible_layouts(kinds, mesh.num_ranks, is_partial))
    with_fewest_chunks = [
        layout for layout in layouts if layout.chunks == min(candidate.chunks for candidate in layouts)
    ]
    if not with_fewest_chunks or (is_partial and len({layout.pp for layout in with_fewest_chunks}) > 1):
        return mesh, ()
    if is_partial and mesh.is_guess and with_fewest_chunks[0].chunks > 1:
        return mesh, ()  # more ranks with fewer chunks would do as well
    layout_chosen = with_fewest_chunks[0]
    num_pipelines = mesh.num_ranks // layout_chosen.pp
    one_replica = 1 if num_pipelines == 1 else None
    pipelines = tuple(
        zip(*(layout_chosen.ranks_of(pp_rank, mesh.num_ranks) for pp_rank in range(layout_chosen.pp)), strict=True)
    )
    note = (
        f"{num_pipelines} pipeline{'s' if num_pipelines > 1 else ''} of {layout_chosen.pp} ranks, inferred from the "
        "order in which the ranks with a "
        f"trace run their ops, with the pipeline as the {'slowest' if layout_chosen.is_slowest else 'fastest'} axis of the ranks"
    )
    split = replace(mesh, pp=layout_chosen.pp, pipelines=pipelines, in_order=False)
    return split.with_sizes(dict.fromkeys(SIZED, one_replica)), (note,)


def is_truncated(ops: pd.DataFrame, mesh: MeshInfo) -> bool:
    """Return whether later pipeline ranks are probably missing: the last traced rank has more than one warm-up forward, and no
    schedule of this length matches its order.
    """
    if not mesh.in_order or not mesh.is_guess:
        return False
    kinds_by_rank = kinds_by_pp_rank(ops[(ops["microbatch"] >= 0) & (ops["stage"] < 0)], mesh)
    if not kinds_by_rank:
        return False
    last = kinds_by_rank[max(kinds_by_rank)]
    return 1 < num_leading(last) < last.count("F") and match_by_kinds(len(mesh.pipelines[0]), kinds_by_rank) is None


@dataclass(frozen=True, slots=True)
class _PipelineLayout:
    """A split of the ranks into pipelines of ``pp`` ranks, along the slowest axis (Megatron-LM, DeepSpeed) or the fastest."""

    pp: int
    is_slowest: bool
    chunks: int = 1

    def pp_rank(self, rank: int, num_ranks: int) -> int:
        return rank // (num_ranks // self.pp) if self.is_slowest else rank % self.pp

    def ranks_of(self, pp_rank: int, num_ranks: int) -> list[int]:
        """The ranks that have this pipeline rank."""
        return [rank for rank in range(num_ranks) if self.pp_rank(rank, num_ranks) == pp_rank]


def _possible_layouts(kinds: Mapping[int, list[str]], num_ranks: int, is_partial: bool) -> Iterator[_PipelineLayout]:
    """The layouts that match the kinds of ops of these ranks, longest pipelines first."""
    for pp in (size for size in range(num_ranks if is_partial else num_ranks // 2, 1, -1) if num_ranks % size == 0):
        for is_slowest in (True, False) if pp < num_ranks else (True,):
            layout = _PipelineLayout(pp, is_slowest)
            kinds_by_pp_rank_seen = {layout.pp_rank(rank, num_ranks): row for rank, row in kinds.items()}
            if any(row != kinds_by_pp_rank_seen[layout.pp_rank(rank, num_ranks)] for rank, row in kinds.items()):
                continue
            plan = match_by_kinds(pp, kinds_by_pp_rank_seen)
            if plan is not None and not (is_partial and SCHEDULES[plan.name].same_order_on_every_rank):
                yield replace(layout, chunks=plan.num_chunks)
