"""The schedule of a run of which some pipeline ranks have no trace: the only one that fits the others, or what is open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pandas as pd

from pptrace.errors import UsageError
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import Candidate, PlanSource, ScheduleInfo
from pptrace.recognise.partial.mesh_and_stages import Partial
from pptrace.recognise.partial.readings import Reading, agreed, strides
from pptrace.recognise.partial.traced_ranks import ways_of
from pptrace.recognise.schedule.plan_per_step import MeasuredStep
from pptrace.recognise.schedule.recognise_schedule import (
    compared,
    measured_steps,
    most_complete,
    nearest_of,
    only_forwards,
)
from pptrace.schedule import registry


def schedule_of_partial(partial: Partial, wanted: str | None) -> ScheduleInfo:
    """The schedule that was asked for with ``wanted``, else the one that all readings are of.

    Raises:
        UsageError: ``wanted`` names no schedule, or these ranks do not tell its shape.
        ScheduleError: ``wanted`` is illegal for the run's p, m and v.
    """
    ops, mesh = partial.placed.ops, partial.placed.mesh
    measured = [step for step in measured_steps(ops, mesh) if not only_forwards(step)]
    found = partial.readings if partial.is_complete else ()
    candidates = tuple(map(_candidate, found))
    if wanted is not None:
        pp, m, v = _shape(wanted, found, ops, mesh)
        return compared(registry.build(registry.get(wanted).name, pp, m, v), PlanSource.OPTION, measured)
    chosen = agreed(found)
    if chosen is not None:
        return replace(compared(chosen.plan, PlanSource.RECOGNISED, measured), candidates=candidates)
    names = list(dict.fromkeys(reading.plan.name for reading in found))
    if not found:
        told = _why_none(partial, measured, ops, mesh)
        return ScheduleInfo(None, "unknown", PlanSource.NONE, warnings=(told,))
    if len(names) == 1:
        line = (
            f"the ranks with a trace run {names[0]}, of {_listed(_shapes(found))}: what depends on that is null until "
            f"{_whose_trace(found, mesh)} tells"
        )
        return ScheduleInfo(
            None, names[0], PlanSource.RECOGNISED, warnings=(line,), candidates=candidates, has_phases=False
        )
    line = (
        f"the order of ops of the ranks with a trace is that of {_listed(names)}: the schedule, and what depends on it, is null "
        f"until {_whose_trace(found, mesh)} tells"
    )
    return ScheduleInfo(None, "unknown", PlanSource.NONE, warnings=(line,), candidates=candidates, has_phases=False)


_TRIED = 8
"""So many ranks without a trace, and so many readings for each of those, are tried for what they would tell."""


def _whose_trace(found: Sequence[Reading], mesh: MeshInfo) -> str:
    """In words, whose trace would tell which of the readings it was: a rank of which each reading expects something else."""
    absent = [] if mesh.is_guess else [rank for rank in range(mesh.num_ranks) if rank not in found[0].places]
    for rank in (*absent[:_TRIED], *absent[-_TRIED:]) if len(found) <= _TRIED * _TRIED else ():
        expected = [_expected(reading, rank, mesh.num_ranks) for reading in found]
        if all(expected) and len(set().union(*expected)) == sum(map(len, expected)):
            return f"the trace of rank {rank}"
    return "another rank's trace"


def _expected(reading: Reading, rank: int, world: int) -> set[tuple[object, ...]]:
    """What a rank without a trace may have run: for each mesh in which the others have their places, its kinds of ops and its
    messages."""
    plan = reading.plan
    places = {
        rank // stride % plan.pp
        for stride in strides(plan.pp, world)
        if all(other // stride % plan.pp == place for other, place in reading.places.items())
    }
    return {(tuple(action.kind for action in plan.compute_actions(place)), ways_of(plan, place)) for place in places}


def _candidate(reading: Reading) -> Candidate:
    plan = reading.plan
    return Candidate(plan.name, plan.pp, plan.num_microbatches, plan.num_stages, plan.num_chunks, reading.places)


def _shapes(found: Sequence[Reading]) -> Iterator[str]:
    """In words, what the readings of one schedule differ in."""
    for reading in found:
        places = ", ".join(f"rank {rank} as pipeline rank {place}" for rank, place in reading.places.items())
        yield f"{reading.plan.pp} ranks with {places}"


_SHOWN = 4


def _listed(words: Sequence[str] | Iterator[str]) -> str:
    unique = list(dict.fromkeys(words))
    more = f" or {len(unique) - _SHOWN} more" if len(unique) > _SHOWN else ""
    return " or ".join(unique[:_SHOWN]) + more


def _why_none(partial: Partial, measured: Sequence[MeasuredStep], ops: pd.DataFrame, mesh: MeshInfo) -> str:
    if not partial.is_complete:
        return "no schedule recognised: the plans for a pipeline of this size are too large to compare with a part of its ranks"
    line = "no schedule recognised: the order of ops of the ranks with a trace is that of no known schedule"
    near = nearest_of(most_complete(measured), ops, mesh) if measured and mesh.pp is not None else None
    return f"{line}; the nearest, {near.plan.name}, has {near.share:.0%} of the ops in this order" if near else line


def _shape(wanted: str, found: Sequence[Reading], ops: pd.DataFrame, mesh: MeshInfo) -> tuple[int, int, int]:
    """(p, m, v): those of the readings, else of the mesh and the microbatches."""
    shapes = {(reading.plan.pp, reading.plan.num_microbatches, reading.plan.num_chunks) for reading in found}
    named = {
        (reading.plan.pp, reading.plan.num_microbatches, reading.plan.num_chunks)
        for reading in found
        if reading.plan.name == wanted
    }
    for known in (named, shapes):
        if len(known) == 1:
            return known.pop()
    if mesh.pp is None or mesh.vpp is None:
        raise UsageError(
            f"schedule {wanted}: the ranks with a trace do not tell how long their pipeline is; give the traces of all of its "
            "ranks"
        )
    return mesh.pp, int(ops["microbatch"].max()) + 1, mesh.vpp
