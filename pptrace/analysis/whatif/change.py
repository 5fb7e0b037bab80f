"""A change of a run that is to be predicted, and the plan that it makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from pptrace.analysis.whatif.ideals import Ideal
from pptrace.analysis.whatif.stage_costs import StageCosts
from pptrace.analysis.whatif.stage_map import FEWEST_STAGES, StageMap, most_in_ends, stage_map
from pptrace.errors import ScheduleError, ShapeError, UsageError
from pptrace.schedule.actions import Kind
from pptrace.schedule.needs import Output
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import SCHEDULES, get, shape_for
from pptrace.schedule.shape import OpCosts
from pptrace.schedule.text import to_rows

_PARTS_IN_ENDS = (0.25, 0.5, 0.75, 1.0)
_MOST_FORWARDS = 200_000
"""Larger plans are not predicted, unless the run has as large a one."""


class Change(Struct, frozen=True):
    """Differences from the measured run; None leaves a thing as it was.

    ``microbatch_size`` is that of a microbatch in parts of today's, and ``microbatches`` how many there are in a step: where both
    are given and their product is today's number, a step does the same work. ``split`` are the layers of each stage of the
    model, ``link_speed`` how many times as fast messages are, ``placement`` the pipeline rank of today that each rank of the
    pipeline then is. ``prefetch``: receives are posted so many ops before they are needed. ``recompute_layers`` of each stage run
    their forward again in the backward, and no others. ``collective_speeds`` is for some axes how many times as fast their
    collectives inside ops are. ``order`` is today's plan with its sends and receives in another order.
    """

    schedule: str | None = None
    chunks: int | None = None
    microbatches: int | None = None
    microbatch_size: float = 1.0
    split: tuple[int, ...] | None = None
    ideals: tuple[Ideal, ...] = ()
    link_speed: float = 1.0
    placement: tuple[int, ...] | None = None
    prefetch: int | None = None
    order: Plan | None = None
    recompute_layers: int | None = None
    collective_speeds: tuple[tuple[str, float], ...] = ()

    @property
    def keeps_plan(self) -> bool:
        return self.schedule is None and self.chunks is None and self.microbatches is None

    def work(self, plan: Plan) -> float:
        """The work of a step in parts of that of a step of ``plan``."""
        return (self.microbatches or plan.num_microbatches) * self.microbatch_size / plan.num_microbatches


def plan_of(change: Change, schedule: str, costs: StageCosts) -> Plan:
    """The plan after a change of a run that has a schedule of the catalogue, or another one (which keeps its plan).

    Raises:
        ShapeError: the schedule has no plan of this size, or one that is too large, or more stages than the model has layers;
            receives cannot be posted so far ahead.
        UsageError: the run's own schedule is none of the catalogue, and its size changes.
    """
    if change.order is not None:
        return change.order
    plan = costs.plan if change.keeps_plan else _other_plan(change, schedule, costs)
    most = max(map(len, plan.ranks))
    if change.prefetch is not None and change.prefetch >= most:
        raise ShapeError(
            f"--prefetch {change.prefetch}: a rank of {plan.name} runs {most} ops; expected less than that"
        )
    return plan


def _other_plan(change: Change, schedule: str, costs: StageCosts) -> Plan:
    name = change.schedule or schedule
    if name not in SCHEDULES and change.schedule is None:
        raise UsageError(
            f"the run's own schedule is not in the catalogue; name another with --schedule: {', '.join(SCHEDULES)}"
        )
    entry, plan = get(name), costs.plan
    chunks = change.chunks
    if chunks is None:
        chunks = plan.num_chunks if name == schedule or (entry.takes_any_chunks and plan.num_chunks > 1) else None
    shape = shape_for(
        name,
        plan.pp,
        change.microbatches or plan.num_microbatches,
        chunks,
        group_of(plan, name, change.microbatches or plan.num_microbatches) if name == schedule else None,
        costs=op_costs(costs, change, name) if entry.searches else None,
    )
    forwards = shape.pp * shape.num_chunks * shape.num_microbatches
    if forwards > max(_MOST_FORWARDS, plan.num_stages * plan.num_microbatches):
        raise ShapeError(
            f"{name}: {shape.num_microbatches} microbatches on {shape.pp} ranks are {forwards:,} forwards; expected at most "
            f"{_MOST_FORWARDS:,}, as larger plans take minutes to predict; a step repeats itself long before that"
        )
    changed = entry.build_shape(shape).compute_only()
    if costs.layers is not None and changed.chain_length > max(sum(costs.layers), costs.num_stages):
        raise ShapeError(
            f"{name}: {changed.num_stages} stages, {changed.num_chunks} on each rank, and the model has {sum(costs.layers)} "
            "layers; expected at least one for each stage"
        )
    return changed


def group_of(plan: Plan, name: str, num_microbatches: int) -> int | None:
    """The group of microbatches with which a run's own schedule goes on with another number of them; None for the usual one.

    Where the groups of the measured ``plan`` are equal (as torch has them: as many of p microbatches or more as there can be),
    those of another number are equal too; else the size of the group stays.
    """
    entry = get(name)
    if not entry.takes_group_size or plan.num_chunks == 1 or num_microbatches < plan.pp:
        return None
    forwards = [action.stage for action in plan.ranks[0] if action.kind is Kind.F]
    size = next((nth for nth, stage in enumerate(forwards) if stage != forwards[0]), len(forwards))
    if size in (0, plan.pp):
        return None
    try:
        of_size = entry.build_shape(shape_for(name, plan.pp, plan.num_microbatches, plan.num_chunks, size))
    except ScheduleError:
        return None
    if to_rows(of_size.compute_only()) != to_rows(plan):
        return None
    if size != _equal_groups(plan.pp, plan.num_microbatches):
        return min(size, num_microbatches)
    return _equal_groups(plan.pp, num_microbatches)


def _equal_groups(pp: int, num_microbatches: int) -> int | None:
    """The size of equal groups of ``pp`` microbatches or more, as many as there can be; None where they do not divide."""
    num_groups = max(num_microbatches // pp, 1)
    return num_microbatches // num_groups if num_microbatches % num_groups == 0 else None


def op_costs(costs: StageCosts, change: Change, name: str) -> OpCosts:
    """The usual costs of each rank's ops and of a message, ns, for schedules that are searched; these have a stage per rank."""
    shares = stage_map_of(costs, change, costs.plan.pp, name).shares
    ops = np.maximum(shares.sum(axis=2).T * costs.parts_of_ops * change.microbatch_size, np.finfo(np.float64).tiny)
    usual = costs.typical
    work, fixed = (np.einsum("ons,so->no", shares, part) for part in (usual, costs.fixed_shares * usual))
    of_stages = (work + fixed * (1 / ops - 1)) * change.microbatch_size
    of_ranks = tuple((forward, back, weight) for forward, back, weight in np.rint(of_stages).astype(int).tolist())
    message = float(np.median(costs.transfer[:, :-1, :, Output.FORWARD])) if costs.num_stages > 1 else 0.0
    return OpCosts(p2p=round(message / change.link_speed), of_ranks=of_ranks)


def stage_map_of(costs: StageCosts, change: Change, num_stages: int, name: str) -> StageMap:
    """The parts of the measured stages that each of the ``num_stages`` of schedule ``name`` has after a change.

    Raises:
        UsageError: the split does not fit the schedule or the model.
    """
    measured, wanted = _layers_before_and_after(costs, change, num_stages, name)
    weights = None if costs.measured is None else costs.measured.weights
    return stage_map(measured, wanted, costs.ends(), weights)


def other_stage_maps(costs: StageCosts, change: Change, num_stages: int, name: str) -> Iterator[StageMap]:
    """The same with a quarter, a half, … and all of what one of two measured stages takes beyond the other in its embedding or
    head; none of other runs.

    Two stages do not tell whether that is in their layers. A step may be shortest with a part of it there.
    """
    measured, wanted = _layers_before_and_after(costs, change, num_stages, name)
    ends = most_in_ends(costs.of_layers(), measured) if costs.measured is None else None
    if ends is not None:
        yield from (stage_map(measured, wanted, ends * part) for part in _PARTS_IN_ENDS)


def _layers_before_and_after(
    costs: StageCosts, change: Change, num_stages: int, name: str
) -> tuple[Sequence[float], Sequence[float]]:
    """(layers of each measured stage, of each of the ``num_stages``).

    Raises:
        UsageError: the split does not fit the schedule or the model.
    """
    measured, split = costs.layers or (1,) * costs.num_stages, change.split
    if split is None:
        return measured, layers_of_stages(costs, num_stages)
    wanted = f"--split {','.join(map(str, split))}"
    if len(split) != num_stages:
        raise UsageError(f"{wanted}: {len(split)} numbers; expected {num_stages}, the layers of each stage of {name}")
    if costs.layers is None:
        return [sum(split) / costs.num_stages] * costs.num_stages, split
    if sum(split) != sum(costs.layers):
        raise UsageError(f"{wanted}: {sum(split)} layers; expected {sum(costs.layers)}, as the model has")
    if costs.num_stages < FEWEST_STAGES and not all(split) and all(costs.layers):
        raise UsageError(
            f"{wanted}: what the embedding or the head alone would take is not known of a run of {costs.num_stages} stages; it "
            f"follows from stages between them, of which a run of {FEWEST_STAGES} has one"
        )
    return measured, split


def layers_of_stages(costs: StageCosts, num_stages: int) -> tuple[float, ...]:
    """Layers of each of ``num_stages`` without another split: as measured where there are as many, else even shares.

    Of a run whose layers are not known they are in parts of a measured stage.
    """
    if num_stages == costs.num_stages:
        return costs.layers or (1,) * num_stages
    return even_split(sum(costs.layers or (1,) * costs.num_stages), num_stages, costs.layers is not None)


def even_split(num_layers: int, num_stages: int, whole: bool) -> tuple[float, ...]:
    """Layers of stages with even shares: whole ones, the first stages with one more where they do not divide, or parts."""
    if not whole or num_layers < num_stages:
        return (num_layers / num_stages,) * num_stages
    share, rest = divmod(num_layers, num_stages)
    return tuple(float(share + (stage < rest)) for stage in range(num_stages))
