"""Explanations of a pipeline with missing ranks: the schedules that the traced ranks may have run, and their pipeline ranks.

One rank's order is that of a single schedule of the registry, of several, or of none. What all of them have in common is known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pptrace.recognise.infer.candidates import CandidatePlan, candidates_by_kinds, has_kinds, variants_of
from pptrace.recognise.infer.traced_ranks import Detail, TracedRank
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import SCHEDULES
from pptrace.schedule.replay import replay, unit_cost


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan that the traced ranks match in ops and messages, with their pipeline ranks in it."""

    plan: Plan
    pp_ranks: Mapping[int, int]

    def phases_of(self, rank: int) -> list[str]:
        return [str(action.phase) for action in self.plan.compute_actions(self.pp_ranks[rank])]


@dataclass(frozen=True, slots=True)
class PipelineFacts:
    """Facts about the pipeline apart from the ops of the traced ranks.

    ``pipelines`` are those of process groups that hold these ranks, () where none tell them; ``lengths`` the sizes that the
    pipeline may have, () where nothing limits them; ``world`` the number of all ranks, None if unknown; ``names`` the schedules
    that the framework has, () for any.
    """

    pipelines: tuple[tuple[int, ...], ...] = ()
    lengths: tuple[int, ...] = ()
    world: int | None = None
    names: tuple[str, ...] = ()

    def pp_ranks(self, traced_ranks: Sequence[TracedRank], plan: Plan) -> Iterator[dict[int, int]]:
        """The pipeline ranks that these ranks may have in a plan."""
        if self.pipelines:
            of_rank = {rank: index for pipeline in self.pipelines for index, rank in enumerate(pipeline)}
            yield {traced.rank: of_rank[traced.rank] for traced in traced_ranks}
        elif all(traced.detail is Detail.STAGES for traced in traced_ranks):
            yield from _pp_ranks_by_stages(traced_ranks, plan)
        elif self.world is not None:
            yield from _pp_ranks_in_regular_mesh([traced.rank for traced in traced_ranks], plan.pp, self.world)
        elif len(traced_ranks) == 1:
            yield from ({traced_ranks[0].rank: pp_rank} for pp_rank in range(plan.pp))


def _pp_ranks_by_stages(traced_ranks: Sequence[TracedRank], plan: Plan) -> Iterator[dict[int, int]]:
    holders = {tuple(sorted(plan.stages_of(pp_rank))): pp_rank for pp_rank in range(plan.pp)}
    pp_ranks = {traced.rank: holders.get(traced.stages) for traced in traced_ranks}
    held_pp_ranks = {rank: pp_rank for rank, pp_rank in pp_ranks.items() if pp_rank is not None}
    if len(held_pp_ranks) == len(pp_ranks):
        yield held_pp_ranks


def _pp_ranks_in_regular_mesh(ranks: Sequence[int], pp: int, world: int) -> Iterator[dict[int, int]]:
    """Pipeline ranks in a mesh whose neighbours in a pipeline are equally far apart."""
    seen: set[tuple[int, ...]] = set()
    for stride in strides(pp, world):
        pp_ranks = tuple(rank // stride % pp for rank in ranks)
        if pp_ranks not in seen:
            seen.add(pp_ranks)
            yield dict(zip(ranks, pp_ranks, strict=True))


def strides(pp: int, world: int) -> list[int]:
    """Possible distances between neighbours in a pipeline, for a mesh of this size."""
    if pp < 1 or world % pp:
        return []
    return [stride for stride in range(1, world // pp + 1) if (world // pp) % stride == 0]


def find_explanations(traced_ranks: Sequence[TracedRank], facts: PipelineFacts) -> tuple[tuple[Explanation, ...], bool]:
    """Every explanation of the traced ranks, and whether all candidates were tried."""
    if any(traced.is_last_first for traced in traced_ranks):
        return (), True  # a pipeline by hand may do that with one stage as looped-bfs does it with several
    explanations: list[Explanation] = []
    is_complete = True
    for plan in _plans(traced_ranks, facts):
        if plan is None:
            is_complete = False
            continue
        for pp_ranks in facts.pp_ranks(traced_ranks, plan):
            if all(_is_possible(traced, plan, pp_ranks[traced.rank]) for traced in traced_ranks):
                explanation = Explanation(plan, pp_ranks)
                explanations += [] if explanation in explanations else [explanation]
    return tuple(explanations), is_complete


def _is_possible(traced: TracedRank, plan: Plan, pp_rank: int) -> bool:
    return pp_rank < plan.pp and traced.follows(plan, pp_rank) and traced.messages.allow(plan, pp_rank)


_MOST_FORWARDS = 250_000
"""A plan with more forwards is not built only to be compared: it would take seconds."""
_MOST_IN_ALL = 1_500_000
"""Nor are plans with more forwards than that, all together."""
_MOST_SEARCHED = 2_000
"""Searched schedules are tried up to this many forwards: beyond, the search takes too long."""


def _plans(traced_ranks: Sequence[TracedRank], facts: PipelineFacts) -> Iterator[Plan | None]:
    """The plans worth comparing; None in place of one that is too large to build."""
    total = 0
    for candidate in _candidates(traced_ranks, facts):
        size = candidate.num_forwards
        if size > _MOST_FORWARDS or total > _MOST_IN_ALL:
            yield None
        elif not (candidate.entry.searches and size > _MOST_SEARCHED) and (plan := candidate.build()) is not None:
            total += size
            yield plan


def _candidates(traced_ranks: Sequence[TracedRank], facts: PipelineFacts) -> Iterator[CandidatePlan]:
    """The plans that the ranks may have run by their kinds and sizes, and by the labels of the first."""
    kinds, first = {kind for traced in traced_ranks for kind in traced.kinds}, traced_ranks[0]
    for pp in _lengths(traced_ranks, facts):
        if first.num_chunks is None:
            candidates = candidates_by_kinds(pp, kinds, first.num_microbatches, first.num_leading)
        elif pp > 1 or first.num_chunks == 1:  # nobody cuts a model for one rank
            candidates = _labelled_candidates(pp, kinds, first, first.num_chunks)
        else:
            continue
        yield from (candidate for candidate in candidates if candidate.entry.name in (facts.names or SCHEDULES))


def _labelled_candidates(pp: int, kinds: Collection[str], traced: TracedRank, chunks: int) -> Iterator[CandidatePlan]:
    for entry in SCHEDULES.values():
        if has_kinds(entry, kinds):
            microbatches = traced.num_microbatches
            for group_size, lean in variants_of(entry, _group_sizes(traced, pp, microbatches)):
                yield CandidatePlan(entry, pp, chunks, microbatches, group_size, lean)


def _group_sizes(traced: TracedRank, pp: int, microbatches: int) -> Sequence[int]:
    """The size N > p of microbatch groups: as many ops as a rank runs on its first chunk before it turns to another."""
    first = traced.cells[0].partition("F")[0]
    turn = next((index for index, cell in enumerate(traced.cells) if cell.partition("F")[0] != first), microbatches)
    return (min(turn, microbatches),) if turn > pp else ()


def _lengths(traced_ranks: Sequence[TracedRank], facts: PipelineFacts) -> list[int]:
    """The numbers of ranks that the pipeline may have."""
    if facts.pipelines:
        return sorted({len(pipeline) for pipeline in facts.pipelines})
    stage_sets = [traced.stages for traced in traced_ranks if traced.detail is Detail.STAGES]
    if stage_sets and max(map(len, stage_sets)) > 1:
        lengths = pipeline_lengths_of_stages(stage_sets)
    elif facts.lengths:
        lengths = set(facts.lengths)
    elif facts.world is not None:
        lengths = {size for size in range(1, facts.world + 1) if facts.world % size == 0}
    else:
        first = max((stages[0] for stages in stage_sets), default=0)
        lengths = set(range(1, first + max(traced.num_leading for traced in traced_ranks) + 3))
    return sorted(length for length in lengths if not facts.lengths or length in facts.lengths)


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
    if not explanations:
        return None
    first, *rest = explanations
    return first if all(_visible_part(other) == _visible_part(first) for other in rest) else None


def _visible_part(explanation: Explanation) -> tuple[object, ...]:
    plan = explanation.plan
    timeline = replay(plan, unit_cost)
    rows = [timeline.ranks[pp_rank] for pp_rank in explanation.pp_ranks.values()]
    spans = [(row[0].start, row[-1].end) for row in rows if row]
    actions = [
        [(action.key, action.phase) for action in plan.compute_actions(p)] for p in explanation.pp_ranks.values()
    ]
    return plan.name, plan.num_microbatches, plan.placement, explanation.pp_ranks, timeline.makespan, spans, actions
