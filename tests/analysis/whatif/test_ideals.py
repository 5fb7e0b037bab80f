"""Costs with something made ideal, op by op, on random costs of two pipelines."""

from __future__ import annotations

from statistics import fmean, median

import numpy as np
import pytest

from pptrace.analysis.whatif.ideals import apply_ideal, parse_ideal
from pptrace.analysis.whatif.stage_costs import BACKWARD, F, StageCosts, W
from pptrace.errors import UsageError
from tests.analysis.whatif.random_costs import two_pipelines

SEEDS = range(6)
OUTPUTS = (F, BACKWARD, W)
OF_KIND = {"F": (F,), "B": (BACKWARD, W), "I": (BACKWARD,), "W": (W,)}


def ideal(costs: StageCosts, text: str) -> StageCosts:
    return apply_ideal(costs, parse_ideal(text))


@pytest.mark.parametrize("kind", OF_KIND)
def test_a_kind_costs_the_mean_of_all_stages_and_steps(kind: str) -> None:
    for seed in SEEDS:
        costs = two_pipelines(seed)
        found = ideal(costs, f"kind={kind}")
        for output in OUTPUTS:
            for name in ("work", "inner"):
                before, after = (getattr(part, name)[..., output] for part in (costs, found))
                is_ideal = output in OF_KIND[kind]
                assert np.allclose(after, fmean(before.ravel().tolist()) if is_ideal else before)
        assert found.transfer is costs.transfer
        assert found.delay is costs.delay


def test_without_stragglers_ops_cost_means_messages_medians_and_nothing_is_late() -> None:
    for seed in SEEDS:
        costs = two_pipelines(seed)
        found = ideal(costs, "stragglers")
        for output in OUTPUTS:
            assert np.allclose(found.work[..., output], fmean(costs.work[..., output].ravel().tolist()))
        last = costs.num_stages - 1
        for direction, without in ((F, last), (BACKWARD, 0)):
            sending = [stage for stage in range(costs.num_stages) if stage != without]
            usual = median(costs.transfer[:, sending, :, direction].ravel().tolist())
            assert (found.transfer[:, sending, :, direction] == usual).all()
            assert (found.transfer[:, without, :, direction] == 0).all()
        assert not found.delay.any()
        assert costs.delay.any()


def test_without_jitter_what_ops_compute_is_the_median_of_their_stage_in_their_pipeline() -> None:
    for seed in SEEDS:
        costs = two_pipelines(seed)
        found = ideal(costs, "jitter")
        for name in ("inner", "delay", "transfer"):
            assert (getattr(found, name) == getattr(costs, name)).all(), name
        for pipeline in (0, 1):
            windows = np.flatnonzero(costs.ranks[:, 0] == 10 * pipeline)
            for stage, output in np.ndindex(costs.num_stages, costs.work.shape[-1]):
                before, after = ((of.work - of.inner)[windows, stage, :, output] for of in (costs, found))
                assert after == pytest.approx(median(before.ravel().tolist()))


def usual_of(costs: StageCosts, stage: int, output: int, pipelines: tuple[int, ...] = (0, 1)) -> float:
    windows = np.flatnonzero(np.isin(costs.ranks[:, 0], [10 * pipeline for pipeline in pipelines]))
    return float(median(costs.work[windows, stage, :, output].ravel().tolist()))


def test_a_stage_costs_no_more_than_the_median_of_the_others() -> None:
    for seed in SEEDS:
        costs = two_pipelines(seed)
        for stage in range(costs.num_stages):
            found = ideal(costs, f"stage={stage}")
            for other, output in np.ndindex(costs.num_stages, 3):
                others = [usual_of(costs, at, output) for at in range(costs.num_stages) if at != stage]
                factor = min(median(others) / usual_of(costs, stage, output), 1) if other == stage else 1
                for name in ("work", "inner"):
                    before, after = (getattr(part, name)[:, other, :, output] for part in (costs, found))
                    assert np.allclose(after, before * factor)
        with pytest.raises(UsageError, match=f"stages 0 to {costs.num_stages - 1}"):
            ideal(costs, f"stage={costs.num_stages}")


def test_a_rank_costs_no_more_than_its_replicas() -> None:
    for seed in SEEDS:
        costs = two_pipelines(seed)
        for pipeline, place in ((0, 0), (1, costs.plan.pp - 1)):
            found = ideal(costs, f"rank={10 * pipeline + place}")
            for window, stage, output in np.ndindex(6, costs.num_stages, 3):
                is_own = costs.plan.placement[stage] == place and costs.ranks[window, 0] == 10 * pipeline
                of_both = [usual_of(costs, stage, output, (each,)) for each in (0, 1)]
                factor = min(min(of_both) / of_both[pipeline], 1) if is_own else 1
                assert np.allclose(found.work[window, stage, :, output], costs.work[window, stage, :, output] * factor)
        with pytest.raises(UsageError, match="the run has ranks 0, 1"):
            ideal(costs, "rank=99")
