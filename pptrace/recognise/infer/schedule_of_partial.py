"""The schedule of a run with missing pipeline ranks: the only one that matches the traced ranks, or the candidates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pandas as pd

from pptrace.errors import UsageError
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import Candidate, PlanSource, ScheduleInfo
from pptrace.recognise.infer.explanations import Explanation, agreed_explanation, strides
from pptrace.recognise.infer.mesh_and_stages import Partial
from pptrace.recognise.infer.traced_ranks import message_kinds_of
from pptrace.recognise.schedule.measured_steps import MeasuredStep, measured_steps, most_complete
from pptrace.recognise.schedule.recognise_schedule import (
    closest_to_step,
    compare_with_plan,
    only_forwards,
)
from pptrace.schedule import registry


def schedule_of_partial(partial: Partial, wanted: str | None) -> ScheduleInfo:
    """The schedule named by ``wanted``, else the one that all explanations agree on.

    Raises:
        UsageError: ``wanted`` names no schedule, or these ranks do not tell its shape.
        ScheduleError: ``wanted`` is illegal for the run's p, m and v.
    """
    ops, mesh = partial.placed.ops, partial.placed.mesh
    measured = [step for step in measured_steps(ops, mesh) if not only_forwards(step)]
    explanations = partial.explanations if partial.is_complete else ()
    candidates = tuple(map(_candidate, explanations))
    if wanted is not None:
        pp, m, v = _shape(wanted, explanations, ops, mesh)
        return compare_with_plan(registry.build(registry.get(wanted).name, pp, m, v), PlanSource.OPTION, measured)
    chosen = agreed_explanation(explanations)
    if chosen is not None:
        return replace(compare_with_plan(chosen.plan, PlanSource.RECOGNISED, measured), candidates=candidates)
    names = list(dict.fromkeys(explanation.plan.name for explanation in explanations))
    if not explanations:
        reason = _why_none(partial, measured, ops, mesh)
        return ScheduleInfo(None, "unknown", PlanSource.NONE, warnings=(reason,))
    if len(names) == 1:
        line = (
            f"the traced ranks run {names[0]} with {_alternatives(_shapes(explanations))}: what depends on that is null until "
            f"{_deciding_trace(explanations, mesh)} is given"
        )
        return ScheduleInfo(
            None, names[0], PlanSource.RECOGNISED, warnings=(line,), candidates=candidates, has_phases=False
        )
    line = (
        f"the order of ops on the traced ranks matches {_alternatives(names)}: the schedule, and what depends on it, is null "
        f"until {_deciding_trace(explanations, mesh)} is given"
    )
    return ScheduleInfo(None, "unknown", PlanSource.NONE, warnings=(line,), candidates=candidates, has_phases=False)


_MOST_TRIED = 8
"""Number of ranks without a trace, and of explanations for each, that are searched at most for one that decides between the
explanations.
"""


def _deciding_trace(explanations: Sequence[Explanation], mesh: MeshInfo) -> str:
    """Name the rank whose trace would decide between the explanations: each explanation expects something else of it."""
    absent = [] if mesh.is_guess else [rank for rank in range(mesh.num_ranks) if rank not in explanations[0].pp_ranks]
    for rank in (
        (*absent[:_MOST_TRIED], *absent[-_MOST_TRIED:]) if len(explanations) <= _MOST_TRIED * _MOST_TRIED else ()
    ):
        expected = [_expected(explanation, rank, mesh.num_ranks) for explanation in explanations]
        if all(expected) and len(set().union(*expected)) == sum(map(len, expected)):
            return f"the trace of rank {rank}"
    return "another rank's trace"


def _expected(explanation: Explanation, rank: int, world: int) -> set[tuple[object, ...]]:
    """(kinds of ops, messages) that a rank without a trace may have run, for each possible mesh."""
    plan = explanation.plan
    pp_ranks = {
        rank // stride % plan.pp
        for stride in strides(plan.pp, world)
        if all(other_rank // stride % plan.pp == pp_rank for other_rank, pp_rank in explanation.pp_ranks.items())
    }
    return {
        (tuple(action.kind for action in plan.compute_actions(pp_rank)), message_kinds_of(plan, pp_rank))
        for pp_rank in pp_ranks
    }


def _candidate(explanation: Explanation) -> Candidate:
    plan = explanation.plan
    return Candidate(plan.name, plan.pp, plan.num_microbatches, plan.num_stages, plan.num_chunks, explanation.pp_ranks)


def _shapes(explanations: Sequence[Explanation]) -> Iterator[str]:
    """Describe what the explanations of one schedule differ in."""
    for explanation in explanations:
        pp_ranks = ", ".join(
            f"rank {rank} as pipeline rank {pp_rank}" for rank, pp_rank in explanation.pp_ranks.items()
        )
        yield f"{explanation.plan.pp} ranks with {pp_ranks}"


_MOST_LISTED = 4


def _alternatives(words: Sequence[str] | Iterator[str]) -> str:
    unique = list(dict.fromkeys(words))
    more = f" or {len(unique) - _MOST_LISTED} more" if len(unique) > _MOST_LISTED else ""
    return " or ".join(unique[:_MOST_LISTED]) + more


def _why_none(partial: Partial, measured: Sequence[MeasuredStep], ops: pd.DataFrame, mesh: MeshInfo) -> str:
    if not partial.is_complete:
        return "no schedule recognised: the plans for a pipeline of this size are too large to compare with a part of its ranks"
    line = "no schedule recognised: the order of ops on the traced ranks matches no known schedule"
    closest = closest_to_step(most_complete(measured), ops, mesh) if measured and mesh.pp is not None else None
    return (
        f"{line}; the closest, {closest.plan.name}, has {closest.share:.0%} of the ops in this order"
        if closest
        else line
    )


def _shape(wanted: str, explanations: Sequence[Explanation], ops: pd.DataFrame, mesh: MeshInfo) -> tuple[int, int, int]:
    """(p, m, v): those of the explanations, else of the mesh and the microbatches."""
    shapes = {_size_of(explanation) for explanation in explanations}
    named = {_size_of(explanation) for explanation in explanations if explanation.plan.name == wanted}
    for shapes_or_named in (named, shapes):
        if len(shapes_or_named) == 1:
            return shapes_or_named.pop()
    if mesh.pp is None or mesh.vpp is None:
        raise UsageError(
            f"schedule {wanted}: the length of the pipeline cannot be derived from the traced ranks; give the "
            "traces of all of its "
            "ranks"
        )
    return mesh.pp, int(ops["microbatch"].max()) + 1, mesh.vpp


def _size_of(explanation: Explanation) -> tuple[int, int, int]:
    plan = explanation.plan
    return plan.pp, plan.num_microbatches, plan.num_chunks
