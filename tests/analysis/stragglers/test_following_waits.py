"""Pipelines that meet in a collective at the begin of each op: gains are what a run without the fault really takes less."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.detectors import study_steps
from pptrace.analysis.stragglers.reason import with_following_waits
from pptrace.model.tables import Int64
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.registry import build
from pptrace.slices import Slice
from tests.support.measured import measured_costs

STEPS = 3
Times = npt.NDArray[np.int64]


def met(table: PlanTable, work: Times, late: Times) -> StepMatrix:
    """Costs of two pipelines, shape (2, rows) each: an op begins when what it needs is there and its rank has been ``late``
    before it, and computes when that of the other pipeline has begun too.
    """
    end, wait = np.zeros(work.shape, dtype=np.int64), np.zeros(work.shape, dtype=np.int64)
    before = np.where(table.position > 0, np.arange(len(table)) - 1, -1)
    for row in np.argsort(table.level, kind="stable").tolist():
        needed = [one for one in (before[row], *table.dep[table.dep_reader == row]) if one >= 0]
        begin = late[:, row] + (end[:, needed].max(axis=1) if needed else 0)
        wait[:, row] = begin.max() - begin
        end[:, row] = begin.max() + work[:, row]
    costs = measured_costs(table, np.tile(work + wait, (STEPS, 1, 1)), 0, np.tile(late, (STEPS, 1, 1)))
    window, row = np.nonzero(np.tile(wait, (STEPS, 1)))
    late_rank = costs.ranks[window ^ 1, table.rank[row]]
    columns = {"window": window, "row": row, "ns": wait[window % 2, row], "rank": late_rank, "late_row": row}
    waits = Slice({**columns, "longer": np.zeros_like(row)})
    return replace(costs, waits=waits, inner=np.tile(wait, (STEPS, 1)), spans=costs.window_lengths)


def usual(table: PlanTable) -> tuple[Times, Times]:
    shape = (2, len(table))
    return 1000 + np.random.default_rng(0).integers(0, 3, shape), np.zeros(shape, dtype=np.int64)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("kind", ["slow", "late"])
def test_a_rank_for_which_the_other_pipeline_waits_has_the_whole_gain(schedule: str, kind: str) -> None:
    table = build(schedule, 3, 6).table
    work, late = usual(table)
    clean = met(table, work, late)
    of_rank = (np.arange(2)[:, np.newaxis] == 1) & (table.rank == 1)
    costs = met(table, work + 500 * of_rank * (kind == "slow"), late + 500 * of_rank * (kind == "late"))
    real = int((costs.lengths - clean.lengths)[0])
    study = study_steps([costs])
    rank = {"rank": int(costs.ranks[1, 1])}
    if kind == "slow":
        (gains,) = (gains for place, gains in study.gains.items() if dict([place]) == rank)
    else:
        (gains,) = (reason.gains for reason in study.reasons if reason.where == rank)
    assert gains.tolist() == pytest.approx([real] * STEPS, rel=0.02)


def test_a_pipeline_that_begins_late_is_so_by_what_the_other_waits_for_it_in_its_first_op() -> None:
    """Its own times do not tell: they begin with that op."""
    table = build("1f1b", 2, 4).table
    work, none = usual(table)
    late = none + 800 * (np.arange(2)[:, np.newaxis] == 1) * ((table.rank == 0) & (table.position == 0))
    costs, clean = met(table, work, late), met(table, work, none)
    (reason,) = study_steps([replace(costs, delays=np.zeros_like(costs.delays))]).reasons
    assert (reason.name, reason.where) == ("late start", {"rank": int(costs.ranks[1, 0])})
    assert reason.gains.tolist() == pytest.approx([int((costs.lengths - clean.lengths)[0])] * STEPS, rel=0.02)


def test_what_becomes_shorter_on_both_pipelines_alike_changes_no_wait() -> None:
    table = build("1f1b", 2, 4).table
    costs = met(table, usual(table)[0] + np.array([[0], [100]]), usual(table)[1])
    shorter: Int64 = costs.durations - 50
    assert (with_following_waits(costs, replace(costs, durations=shorter)).durations == shorter).all()
