"""Changes of a run that are worth predicting, each with its name: those that are tried where nothing is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from pptrace.analysis.whatif.change import Change, plan_of
from pptrace.analysis.whatif.ideals import parse_ideal
from pptrace.analysis.whatif.stage_costs import StageCosts
from pptrace.analysis.whatif.study import Study
from pptrace.errors import ScheduleError
from pptrace.model.wording import counted
from pptrace.schedule.message_graph import Messaging
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import SCHEDULES

_MOST_PLAN_OPS = 200_000
"""Larger plans of other schedules are built only where one is asked for by its name."""
_PREFETCH_DEPTHS = (1, 2)
REPAIRED = "receives posted later"
"""The name of the change of the order of sends and receives."""


def all_changes(study: Study) -> list[tuple[str, Change]]:
    """All sensible changes of the run, each with its name."""
    plan, costs = study.costs.plan, study.costs
    changes = [
        (name, change)
        for name, change, made in _schedules(study, Change())
        if (change.schedule, made.num_chunks) != (study.name, plan.num_chunks) and _is_worth_a_try(made, plan)
    ]
    if study.name in SCHEDULES:
        changes += [(name, change) for name, change in _sizes(study) if _built(study, change) is not None]
    if costs.transfer.any():
        changes.append(("links twice as fast", Change(link_speed=2.0)))
    if study.baseline.messaging is not Messaging.AHEAD and not study.tells_shapes:
        depths = [depth for depth in _PREFETCH_DEPTHS if depth < max(map(len, plan.ranks))]
        changes += [(prefetch_name(depth), Change(prefetch=depth)) for depth in depths]
    if study.order is not None:
        changes.append((REPAIRED, Change(order=study.order.repaired)))
    changes += [(recompute_name(number), Change(recompute_layers=number)) for number in _recomputing(costs)]
    split = study.best_split
    if split is not None and split != costs.layers:
        changes.append((f"split {','.join(map(str, split))}", Change(split=split)))
    ideals = ["jitter", "communication", "host"]
    if costs.routed_work is not None:
        ideals.append("routing")
    ideals += [f"outside={part}" for part in study.outside.of_parts]
    if costs.num_stages > 1:  # the stage whose microbatch takes longest
        ideals.append(f"stage={int(costs.typical.sum(axis=1).argmax())}")
    return [*changes, *((f"ideal {ideal}", Change(ideals=(parse_ideal(ideal),))) for ideal in ideals)]


def all_schedules(study: Study, change: Change) -> list[tuple[str, Change]]:
    """A change with every schedule of the catalogue that has such a plan, and the numbers of chunks that make sense for it."""
    return [(name, with_schedule) for name, with_schedule, _ in _schedules(study, change)]


def prefetch_name(depth: int) -> str:
    """Words for receives that are posted so many ops before they are needed."""
    return f"receives posted {counted(depth, 'op')} ahead" if depth else "receives posted when needed"


def recompute_name(num_layers: int) -> str:
    """Words for so many layers of each stage that recompute."""
    return f"recompute {counted(num_layers, 'layer')} of each stage" if num_layers else "without recompute"


def _schedules(study: Study, change: Change) -> Iterator[tuple[str, Change, Plan]]:
    for name, entry in SCHEDULES.items():
        if entry.is_for_experts and not study.has_experts:
            continue
        chunks = [change.chunks] if change.chunks else [2, 4] if entry.takes_any_chunks else [None]
        for number in chunks:
            with_schedule = replace(change, schedule=name, chunks=number)
            plan = _built(study, with_schedule)
            if plan is not None:
                yield name if number is None else f"{name}, {number} chunks", with_schedule, plan


def _recomputing(costs: StageCosts) -> list[int]:
    """Fewer layers of each stage that recompute than today: none, and half of the largest stage's where all of them do."""
    if not np.nan_to_num(costs.recompute).any():
        return []
    most = max(costs.layers or (0,))
    return [0, *([most // 2] if most > 1 and len(costs.recomputing) and min(costs.recomputing) == 1 else [])]


def _sizes(study: Study) -> Iterator[tuple[str, Change]]:
    """The same work in twice and in half as many microbatches."""
    number = study.costs.plan.num_microbatches
    if study.sequences is None or study.sequences % 2 == 0:
        yield f"{2 * number} microbatches of half the size", Change(microbatches=2 * number, microbatch_size=0.5)
    if number % 2 == 0 and number > 1:
        halved = counted(number // 2, "microbatch", "microbatches")
        yield f"{halved} of twice the size", Change(microbatches=number // 2, microbatch_size=2.0)


def _built(study: Study, change: Change) -> Plan | None:
    """The plan of a change with the layers that come of it; None where there is none of a size that is tried unasked."""
    plan = study.costs.plan
    size = plan.pp * (change.chunks or 2) * (change.microbatches or plan.num_microbatches) * 3
    if size > _MOST_PLAN_OPS:
        return None
    try:
        built = plan_of(replace(change, split=None), study.name, study.costs)
    except ScheduleError:
        return None
    return built if change.split is None or len(change.split) == built.chain_length else None


def _is_worth_a_try(plan: Plan, today: Plan) -> bool:
    """Return whether a plan is another one than that of the run, is none that has the whole model on every rank, and none with
    its backwards split to fill bubbles where that of the run has them split already.
    """
    is_today = (plan.ranks, plan.placement) == (today.ranks, today.placement)
    has_whole_model = plan.num_chains > today.num_chains and plan.chain_length <= plan.num_chains
    return not (is_today or has_whole_model or (plan.splits_backward and today.splits_backward and not plan.has_pairs))
