"""Random costs of steps, as measured by row of a plan and by stage of its model."""

from __future__ import annotations

import random

import numpy as np
from msgspec.structs import replace

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.whatif.stage_costs import StageCosts, stage_costs
from pptrace.model.tables import Int64
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from tests.support.measured import measured_costs

PLANS = (("1f1b", 3, 3), ("zb-h1", 2, 4), ("interleaved-1f1b", 2, 4), ("zbv", 2, 4), ("dualpipe", 2, 8))
STEPS = 3


def random_costs(rng: random.Random, plan: Plan) -> StepMatrix:
    table = plan.table

    def some(most: int, columns: int = len(table), least: int = 0) -> Int64:
        return np.array([[rng.randint(least, most) for _ in range(columns)] for _ in range(STEPS)])

    transfers = some(40, table.num_messages, -1)
    durations, delays = some(900, least=100), some(9)
    costs = measured_costs(table, *(part[:, np.newaxis] for part in (durations, transfers, delays)))
    return replace(costs, spans=np.full(STEPS, 9_999), inner=some(50), sender_is_last=transfers > 0)


def two_pipelines(seed: int) -> StageCosts:
    """Costs of three steps of two pipelines each."""
    plan = build(*PLANS[seed % 3]).compute_only()
    first, second = (random_costs(random.Random(2 * seed + index), plan) for index in (0, 1))
    costs = [stage_costs(plan, part, None) for part in (first, second)]
    order = np.array([0, 3, 1, 4, 2, 5])
    names = ("work", "inner", "delay", "transfer")
    values = {name: np.concatenate([getattr(part, name) for part in costs])[order] for name in names}
    ranks = np.concatenate((first.ranks, second.ranks + 10))[order]
    return replace(costs[0], step=np.repeat(np.array([4, 5, 7]), 2), ranks=ranks, **values)
