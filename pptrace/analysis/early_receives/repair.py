"""The order in which a run posts its sends and receives, one with receives posted later, and what that would get back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from msgspec import Struct, structs

from pptrace.analysis.early_receives.of_rank import STREAM, RankOrder
from pptrace.analysis.matrix.step_matrix import StepMatrix, longest_of_steps, usual_plan
from pptrace.errors import ScheduleError
from pptrace.model.tables import Int64
from pptrace.schedule.actions import KINDS, Action
from pptrace.schedule.lower import lower
from pptrace.schedule.message_graph import Messaging, make_graph
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import unit_cost
from pptrace.schedule.text import to_rows
from pptrace.schedule.validate import validate

MOST_ERROR = 0.05
"""Largest distance of the replay of a run in its own order from the run, as a part of the step: beyond it no gain is known."""
_ON_STREAM = (Messaging.IN_ORDER, Messaging.RENDEZVOUS, Messaging.ONE_CALL_AT_A_TIME)
NO_PLAN = "there is no whole step whose plan is known"
NO_BETTER = "no order with receives posted later that was tried is shorter in the replay"


class RepairedOrder(Struct, frozen=True, eq=False):
    """Order of the ops, sends and receives of a run (``posted``), and the same ops with receives posted later (``repaired``).

    ``messaging`` is the way in which calls wait for each other. ``gains`` is what each step would get back, ns, by replay.
    """

    posted: Plan
    repaired: Plan
    messaging: Messaging
    gains: Int64

    @property
    def gain(self) -> int:
        """Gain of a mean step, ns."""
        return int(self.gains.sum()) // len(self.gains)


def repaired_order(plans: Sequence[StepMatrix], ranks: Mapping[int, RankOrder]) -> RepairedOrder | str:
    """The order of a run and a better one, from the costs of its whole steps and what each rank posted; or why there is none."""
    costs = usual_plan(plans)
    if costs is None or costs.plan is None:
        return NO_PLAN
    try:
        posted = posted_order(costs.plan.compute_only(), [ranks.get(rank) for rank in costs.ranks[0].tolist()])
    except ScheduleError as error:
        return str(error)
    if isinstance(posted, str):
        return posted
    if any(order.where == STREAM for order in ranks.values()):  # the ops may wait too, as the host does
        return _best(costs, posted, _ON_STREAM)
    one_by_one = all(order.one_by_one for order in ranks.values())
    return _best(costs, posted, (Messaging.ONE_CALL_AT_A_TIME if one_by_one else Messaging.RENDEZVOUS,))


def posted_order(plan: Plan, ranks: Sequence[RankOrder | None]) -> Plan | str:
    """The plan with the sends and receives where its ranks post them, or why that is not known.

    Raises:
        ScheduleError: the sends and receives are not those of the plan.
    """
    rows = []
    for pp_rank, order in enumerate(ranks):
        compute = plan.compute_actions(pp_rank)
        if order is None or order.posted is None:
            return (order and (order.reason or order.order_reason)) or f"nothing is known of pipeline rank {pp_rank}"
        columns = (order.posted[name].tolist() for name in ("position", "kind", "stage", "microbatch"))
        row: list[Action] = []
        done = 0
        for position, code, stage, microbatch in zip(*columns, strict=True):
            row += compute[done:position]
            row.append(Action(KINDS[code], stage, microbatch))
            done = position
        rows.append((*row, *compute[done:]))
    posted = replace(plan, ranks=tuple(rows))
    validate(posted)
    return posted


def _best(costs: StepMatrix, posted: Plan, ways: Sequence[Messaging]) -> RepairedOrder | str:
    """The order whose replay is the shortest of those that are tried."""
    measured = longest_of_steps(costs.step, costs.spans)
    lengths = {way: found for way in ways if (found := lengths_along(costs, posted, way)) is not None}
    errors = {
        way: float(np.median(np.abs(found - measured) / np.maximum(measured, 1))) for way, found in lengths.items()
    }
    way = min(errors, key=errors.__getitem__, default=None)
    if way is None or errors[way] > MOST_ERROR:
        off = "cannot be made" if way is None else f"is {errors[way]:.0%} off (limit {MOST_ERROR:.0%})"
        return f"the replay of the steps in the order that was posted {off}"
    tried = [
        (found, order)
        for order in later_orders(costs, posted)
        if (found := lengths_along(costs, order, way)) is not None
    ]
    best, order = min(tried, key=lambda entry: float(np.median(entry[0])), default=(lengths[way], posted))
    if np.median(best) >= np.median(lengths[way]):
        return NO_BETTER
    return RepairedOrder(posted, order, way, lengths[way] - best)


def lengths_along(costs: StepMatrix, order: Plan, messaging: Messaging) -> Int64 | None:
    """The length of each step replayed in an order of sends and receives, ns; None where it cannot run to its end so."""
    try:
        graph = make_graph(order, messaging)
    except ScheduleError:
        return None
    return structs.replace(costs, graph=graph, posted=None, before_posting=None).lengths


def later_orders(costs: StepMatrix, posted: Plan) -> list[Plan]:
    """Orders of the same ops in which each receive comes when its sender can send, none of which can deadlock.

    :func:`pptrace.schedule.lower.lower` says when that is if ops take what they usually took, and if F = I = W.
    """
    compute = posted.compute_only()
    usual = np.median(costs.durations, axis=0).astype(np.int64).tolist()
    keys = [(rank, action.key) for rank in range(compute.pp) for action in compute.compute_actions(rank)]
    taken = dict(zip(keys, usual, strict=True))
    orders = [lower(compute, lambda rank, action: max(taken[rank, action.key], 1)), lower(compute, unit_cost)]
    for order in orders:
        validate(order)
    return [order for order in orders if to_rows(order) != to_rows(posted)]
