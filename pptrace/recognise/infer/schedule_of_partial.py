"""The schedule of a run with missing pipeline ranks: the only one that matches the traced ranks, or the candidates."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from msgspec.structs import replace

from pptrace.errors import UsageError
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import Candidate, PlanSource, ScheduleInfo
from pptrace.recognise.infer.candidates import message_kinds_of
from pptrace.recognise.infer.explanations import Explanation, agreed_explanation, strides
from pptrace.recognise.infer.stages import StageAssignment
from pptrace.recognise.schedule.measured_steps import MeasuredStep, measured_steps, most_complete
from pptrace.recognise.schedule.recognise_schedule import (
    closest_to_step,
    compare_with_plan,
    only_forwards,
)
from pptrace.schedule import registry
from pptrace.schedule.plan import Plan


def schedule_of_partial(assignment: StageAssignment, name: str | None) -> ScheduleInfo:
    """The schedule of this name, else the one that all explanations agree on.

    Raises:
        UsageError: no schedule has the name, or these ranks do not tell its shape.
        ScheduleError: it is illegal for the run's p, m and v.
    """
    ops, mesh = assignment.ops, assignment.mesh
    measured = [step for step in measured_steps(ops, mesh) if not only_forwards(step)]
    explanations = (assignment.explanations or ()) if assignment.is_complete else ()
    plans = [explanation.plan for explanation in explanations]
    if name is not None:
        pp, m, v = _shape(name, plans, ops, mesh)
        return compare_with_plan(registry.build(registry.get(name).name, pp, m, v), PlanSource.OPTION, measured)
    if not explanations:
        reason = _why_none(assignment, measured)
        return ScheduleInfo(None, "unknown", PlanSource.NONE, warnings=(reason,))
    candidates = tuple(
        Candidate(plan.name, plan.pp, plan.num_microbatches, plan.num_stages, plan.num_chunks, explanation.pp_ranks)
        for plan, explanation in zip(plans, explanations, strict=True)
    )
    chosen = agreed_explanation(explanations)
    if chosen is not None:
        return replace(compare_with_plan(chosen.plan, PlanSource.RECOGNISED, measured), candidates=candidates)
    names, deciding = list(dict.fromkeys(plan.name for plan in plans)), _deciding_trace(explanations, mesh)
    if len(names) == 1:
        shapes = []
        for explanation in explanations:
            ranks = (f"rank {rank} as pipeline rank {pp_rank}" for rank, pp_rank in explanation.pp_ranks.items())
            shapes.append(f"{explanation.plan.pp} ranks with {', '.join(ranks)}")
        line = (
            f"the traced ranks run {names[0]} with {_alternatives(shapes)}: what depends on that is null until "
            f"{deciding} is given"
        )
    else:
        line = (
            f"the order of ops on the traced ranks matches {_alternatives(names)}: the schedule, and what depends on it, is null "
            f"until {deciding} is given"
        )
    found, source = (names[0], PlanSource.RECOGNISED) if len(names) == 1 else ("unknown", PlanSource.NONE)
    return ScheduleInfo(None, found, source, warnings=(line,), candidates=candidates, has_phases=False)


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
        expected = []  # (kinds of ops, messages) that the rank may have run, for each possible mesh
        for explanation in explanations:
            plan, known = explanation.plan, explanation.pp_ranks.items()
            pp_ranks = {
                rank // stride % plan.pp
                for stride in strides(plan.pp, mesh.num_ranks)
                if all(other // stride % plan.pp == pp_rank for other, pp_rank in known)
            }
            expected.append(
                {
                    (tuple(action.kind for action in plan.compute_actions(pp_rank)), message_kinds_of(plan, pp_rank))
                    for pp_rank in pp_ranks
                }
            )
        if all(expected) and len(set().union(*expected)) == sum(map(len, expected)):
            return f"the trace of rank {rank}"
    return "another rank's trace"


_MOST_LISTED = 4


def _alternatives(words: Sequence[str]) -> str:
    unique = list(dict.fromkeys(words))
    more = f" or {len(unique) - _MOST_LISTED} more" if len(unique) > _MOST_LISTED else ""
    return " or ".join(unique[:_MOST_LISTED]) + more


def _why_none(assignment: StageAssignment, measured: Sequence[MeasuredStep]) -> str:
    if not assignment.is_complete:
        return "no schedule recognised: the plans for a pipeline of this size are too large to compare with a part of its ranks"
    line = "no schedule recognised: the order of ops on the traced ranks matches no known schedule"
    if not measured or assignment.mesh.pp is None:
        return line
    closest, share = closest_to_step(most_complete(measured), assignment.ops, assignment.mesh)
    if closest is None:
        return line
    return f"{line}; the closest, {closest.name}, has {share:.0%} of the ops in this order"


def _shape(name: str, plans: Sequence[Plan], ops: pd.DataFrame, mesh: MeshInfo) -> tuple[int, int, int]:
    """(p, m, v): those of the explanations' plans, of that name or else of all, else of the mesh and the microbatches."""
    for some_plans in ([plan for plan in plans if plan.name == name], plans):
        shapes = {(plan.pp, plan.num_microbatches, plan.num_chunks) for plan in some_plans}
        if len(shapes) == 1:
            return shapes.pop()
    if mesh.pp is None or mesh.vpp is None:
        raise UsageError(
            f"schedule {name}: the length of the pipeline cannot be derived from the traced ranks; give the "
            "traces of all of its ranks"
        )
    return mesh.pp, int(ops["microbatch"].max()) + 1, mesh.vpp
