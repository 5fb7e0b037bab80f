"""Explanations of a pipeline with missing ranks: the schedules that the traced ranks may have run, and their pipeline ranks.

One rank's order is that of a single schedule of the registry, of several, or of none. What all of them have in common is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from pptrace.recognise.infer.candidates import (
    CandidatePlan,
    Detail,
    TracedRank,
    candidates_by_kinds,
    has_kinds,
    num_leading,
    variants_of,
)
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import SCHEDULES
from pptrace.schedule.replay import replay, unit_cost

_MOST_FORWARDS = 250_000
"""A plan with more forwards is not built only to be compared: it would take seconds."""
_MOST_IN_ALL = 1_500_000
"""Nor are plans with more forwards than that, all together."""
_MOST_SEARCHED = 2_000
"""Searched schedules are tried up to this many forwards: beyond, the search takes too long."""


class Explanation(Struct, frozen=True):
    """A plan that the traced ranks match in ops and messages, with their pipeline ranks in it."""

    plan: Plan
    pp_ranks: Mapping[int, int]


class PartialPipeline(Struct, frozen=True):
    """The traced ranks of a pipeline of which others have no trace, and what is known of it apart from their ops.

    ``pipelines`` are those of process groups that hold these ranks, () where none tell them; ``lengths`` the sizes that the
    pipeline may have, () where nothing limits them; ``world`` the number of all ranks, None if unknown; ``names`` the schedules
    that the framework has, () for any.
    """

    traced: Sequence[TracedRank]
    pipelines: tuple[tuple[int, ...], ...] = ()
    lengths: tuple[int, ...] = ()
    world: int | None = None
    names: tuple[str, ...] = ()

    @property
    def detail(self) -> Detail:
        """The explanation of all of its ranks."""
        return self.traced[0].detail

    def explanations(self) -> tuple[tuple[Explanation, ...], bool]:
        """Every explanation of the traced ranks, and whether all candidates were tried: some may be too large to build."""
        if any(traced.is_last_first for traced in self.traced):
            return (), True  # a pipeline by hand may do that with one stage as looped-bfs does it with several
        explanations: list[Explanation] = []
        is_complete, total = True, 0
        for candidate in self._candidates():
            size = candidate.pp * candidate.chunks * candidate.microbatches
            if size > _MOST_FORWARDS or total > _MOST_IN_ALL:
                is_complete = False
                continue
            if candidate.entry.searches and size > _MOST_SEARCHED:
                continue
            if (plan := candidate.build()) is None:
                continue
            total += size
            for pp_ranks in self._pp_ranks(plan):
                if all(traced.may_be(plan, pp_ranks[traced.rank]) for traced in self.traced):
                    explanation = Explanation(plan, pp_ranks)
                    explanations += [] if explanation in explanations else [explanation]
        return tuple(explanations), is_complete

    def _candidates(self) -> Iterator[CandidatePlan]:
        """The plans that the ranks may have run by their kinds and sizes, and by the labels of the first."""
        kinds, first = {kind for traced in self.traced for kind in traced.kinds}, self.traced[0]
        microbatches, names = first.num_microbatches, self.names or SCHEDULES
        for pp in self._lengths():
            if self.detail is Detail.KINDS:
                by_kinds = candidates_by_kinds(pp, kinds, microbatches, num_leading(first.kinds))
                yield from (candidate for candidate in by_kinds if candidate.entry.name in names)
            elif pp > 1 or len(first.stages) == 1:  # nobody cuts a model for one rank
                # Microbatch groups may be of N > p: as many ops as the rank runs on its first chunk before it turns to another.
                chunk_of = [cell.partition("F")[0] for cell in first.cells]
                turn = next((at for at, chunk in enumerate(chunk_of) if chunk != chunk_of[0]), microbatches)
                groups = (min(turn, microbatches),) if turn > pp else ()
                for entry in SCHEDULES.values():
                    if entry.name in names and has_kinds(entry, kinds):
                        for group_size, lean in variants_of(entry, groups):
                            yield CandidatePlan(entry, pp, len(first.stages), microbatches, group_size, lean)

    def _lengths(self) -> list[int]:
        """The numbers of ranks that the pipeline may have."""
        if self.pipelines:
            return sorted({len(pipeline) for pipeline in self.pipelines})
        stage_sets = [traced.stages for traced in self.traced if traced.detail is Detail.STAGES]
        if stage_sets and max(map(len, stage_sets)) > 1:
            lengths = pipeline_lengths_of_stages(stage_sets)
        elif self.lengths:
            lengths = set(self.lengths)
        elif self.world is not None:
            lengths = {size for size in range(1, self.world + 1) if self.world % size == 0}
        else:
            first = max((stages[0] for stages in stage_sets), default=0)
            lengths = set(range(1, first + max(num_leading(traced.kinds) for traced in self.traced) + 3))
        return sorted(length for length in lengths if not self.lengths or length in self.lengths)

    def _pp_ranks(self, plan: Plan) -> Iterator[dict[int, int]]:
        """The pipeline ranks that the traced ranks may have in a plan."""
        ranks = [traced.rank for traced in self.traced]
        if self.pipelines:
            of_rank = {rank: index for pipeline in self.pipelines for index, rank in enumerate(pipeline)}
            yield {rank: of_rank[rank] for rank in ranks}
        elif self.detail is Detail.STAGES:
            holders = {tuple(sorted(plan.stages_of(pp_rank))): pp_rank for pp_rank in range(plan.pp)}
            if all(traced.stages in holders for traced in self.traced):
                yield {traced.rank: holders[traced.stages] for traced in self.traced}
        elif self.world is not None:  # a mesh whose neighbours in a pipeline are equally far apart
            options = (tuple(rank // stride % plan.pp for rank in ranks) for stride in strides(plan.pp, self.world))
            yield from (dict(zip(ranks, pp_ranks, strict=True)) for pp_ranks in dict.fromkeys(options))
        elif len(ranks) == 1:
            yield from ({ranks[0]: pp_rank} for pp_rank in range(plan.pp))


def strides(pp: int, world: int) -> list[int]:
    """Possible distances between neighbours in a pipeline, for a mesh of this size."""
    if pp < 1 or world % pp:
        return []
    return [stride for stride in range(1, world // pp + 1) if (world // pp) % stride == 0]


def pipeline_lengths_of_stages(stage_sets: Iterable[Sequence[int]]) -> set[int]:
    """The p for which the sets of stages of ranks with several chunks lie on a loop (r, p+r, 2p+r, …) or on a V (r, 2p−1−r)."""
    common: set[int] | None = None
    for stages in stage_sets:
        gaps = {after - before for before, after in pairwise(stages)}
        lengths = {gap for gap in gaps if len(gaps) == 1 and stages[0] < gap}
        if len(stages) == 2 and sum(stages) % 2:
            lengths.add((sum(stages) + 1) // 2)
        common = lengths if common is None else common & lengths
    return common or set()


def agreed_explanation(explanations: Sequence[Explanation]) -> Explanation | None:
    """The first explanation, if all others agree with it on the schedule and the traced ranks; else None.

    Plans of one schedule may differ elsewhere: in how ranks without a trace warm up, for one.
    """
    if len(explanations) < 2:
        return explanations[0] if explanations else None
    first, *others = map(_visible_part, explanations)
    return explanations[0] if all(other == first for other in others) else None


def _visible_part(explanation: Explanation) -> tuple[object, ...]:
    plan, pp_ranks = explanation.plan, explanation.pp_ranks
    timeline = replay(plan, unit_cost)
    rows = [timeline.ranks[pp_rank] for pp_rank in pp_ranks.values()]
    spans = [(row[0].start, row[-1].end) for row in rows if row]
    actions = [[(action.key, action.phase) for action in plan.compute_actions(p)] for p in pp_ranks.values()]
    return plan.name, plan.num_microbatches, plan.placement, pp_ranks, timeline.makespan, spans, actions
