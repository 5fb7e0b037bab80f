"""Costs of ops by stage and kind, against costs that were put in."""

from __future__ import annotations

import pandas as pd
import pytest
from msgspec.structs import replace

import pptrace
from pptrace.analysis.op_costs import OpCost, op_costs
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from pptrace.simulator import Costs, simulate
from tests.support.programs import SAMPLES

MS = 1_000_000
FACTORS = tuple(range(1, 12))
"""Factors by which the ops of each step are longer."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pptrace.Run:
    """1F1B on 2 ranks and 2 replicas: F takes 1 and 3 ms in its stages, B twice that, and rank 3 a tenth more."""
    plan, tables = build("1f1b", 2, 4), []
    for step, factor in enumerate(FACTORS):
        for replica, slow in enumerate((1.0, 1.1)):
            stages = {
                (kind, stage): round(MS * cost * (1 + 2 * stage) * factor * (slow if stage else 1))
                for kind, cost in ((Kind.F, 1), (Kind.B, 2))
                for stage in (0, 1)
            }
            ops = simulate(plan, Costs(stages=stages)).ops()[
                ["rank", "kind", "stage", "microbatch", "start_ns", "end_ns"]
            ]
            later = 1_000 * MS * step
            moved = {name: ops[name] + later for name in ("start_ns", "end_ns")}
            tables.append(ops.assign(rank=ops["rank"] + 2 * replica, step=step, **moved))
    path = tmp_path_factory.mktemp("stages") / "ops.csv"
    pd.concat(tables).to_csv(path, index=False)
    return pptrace.load(path)


def cost(run: pptrace.Run, stage: int, kind: str) -> OpCost:
    return next(one for one in op_costs(run.analysis.data) if (one.stage, one.kind) == (stage, kind))


def test_percentiles_are_those_of_the_ops_that_were_put_in(run: pptrace.Run) -> None:
    assert [(one.stage, one.kind) for one in op_costs(run.analysis.data)] == [(0, "B"), (0, "F"), (1, "B"), (1, "F")]
    forward = cost(run, 0, "F")
    assert forward.count == 4 * len(FACTORS) * 2
    assert (forward.p10_ns, forward.median_ns, forward.p90_ns, forward.max_ns) == (2 * MS, 6 * MS, 10 * MS, 11 * MS)
    assert forward.mean_ns == 6 * MS
    assert cost(run, 0, "B").median_ns == 12 * MS


def test_the_slowest_rank_of_a_stage_is_named(run: pptrace.Run) -> None:
    backward = cost(run, 1, "B")
    assert (backward.num_ranks, backward.slowest_rank, backward.slowest_ns) == (2, 3, round(6 * 2 * 3 * 1.1 * MS))
    assert cost(run, 0, "F").slowest_rank == 0, "of equal ones the first"


def test_the_api_has_them_as_a_table(run: pptrace.Run) -> None:
    assert run.stages.to_dict("records") == [
        {name: getattr(one, name) for name in OpCost.__struct_fields__} for one in op_costs(run.analysis.data)
    ]
    assert set(run.stages.drop(columns="kind").dtypes.astype(str)) == {"int64"}


def test_ops_of_devices_that_were_not_recorded_have_no_cost(run: pptrace.Run) -> None:
    data = run.analysis.data
    unseen = replace(data, work=dict.fromkeys(data.work, replace(data.work[0], missing_device_events=True)))
    assert op_costs(unseen) == ()


def test_the_median_of_a_stages_only_rank_is_that_of_its_ops() -> None:
    costs = op_costs(pptrace.load(SAMPLES / "1f1b_p4").analysis.data)
    assert len(costs) == 8
    assert all(one.num_ranks == 1 and one.slowest_ns == one.median_ns for one in costs)
