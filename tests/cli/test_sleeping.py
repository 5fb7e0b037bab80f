"""A run whose ops sleep for known times: what is measured is what the plan, simulated with the measured ops, says.

On two ranks, and on four with PPTRACE_ALL set; tests/instrument/pipeline/test_sleeping_schedules.py has four without the command.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pptrace.model.tables import COMPUTE_KINDS
from pptrace.simulator import Costs, simulate
from pptrace.slices import slice_of
from pptrace.workflow.load import load
from tests.support.costs_by_keys import measured_costs
from tests.support.extent import ALL
from tests.support.programs import EXAMPLE, pptrace, sizes

_TINY = sizes(layers=4, hidden=16, heads=2, seq=8, microbatches=6)
_SLEEP = ("--sleep-forward", "80", "--sleep-backward", "160")


pytestmark = pytest.mark.processes


@pytest.mark.parametrize("ranks", [2, 4] if ALL else [2])
def test_the_measured_bubble_is_that_of_the_plan_simulated_with_the_measured_ops(ranks: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    steps = ("--steps", "1:4")
    script = (EXAMPLE, "--steps", "4", *_TINY, *_SLEEP)
    ended = pptrace("run", "-n", str(ranks), *steps, "-o", run, *script, forked=True)
    assert ended.code == 0, ended.err
    assert "Where the step went" in ended.out

    analysis = load([run])
    errors = []
    for step in analysis.report.steps:
        ops = analysis.data.ops
        of_rank = ops[(ops["step"] == step.step) & ops["kind"].isin(COMPUTE_KINDS)]
        costs = measured_costs(
            slice_of(of_rank), slice_of(analysis.data.comms[analysis.data.comms["step"] == step.step])
        )
        simulated = simulate(analysis.schedule.plan, Costs(ops=costs.ops))
        measured_bubble = sum(rank.bubble_ns for rank in step.ranks)
        simulated_bubble = sum(rank.bubble_ns for rank in simulated.ranks)
        errors.append(measured_bubble / simulated_bubble - 1)
        assert step.bubble.ideal_ratio == pytest.approx((ranks - 1) / 6)
        assert step.bubble.waterfall_ns is not None
    assert len(errors) == 3
    # What lies between two ops (sending, the host) is in the measured bubble alone: a busy machine adds milliseconds there.
    assert min(map(abs, errors)) <= 0.06, errors
