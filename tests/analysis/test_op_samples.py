"""Samples of the costs of ops, and the test for two groups of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pptrace.analysis.op_costs import MOST_POINTS, OpGroup, op_costs, op_samples, two_groups
from pptrace.workflow.load import load
from tests.support.programs import SAMPLES


def ascending(values: Any) -> Any:
    return np.sort(np.asarray(values, dtype=np.float64) * 1_000).astype(np.int64)


def test_a_slow_replica_makes_two_groups_and_the_samples_are_of_the_ops_that_are_summed_up() -> None:
    data = load([SAMPLES / "faults_pp2_dp2"]).data
    samples = {(sample.stage, sample.kind): sample for sample in op_samples(data)}
    assert {key for key, sample in samples.items() if sample.groups} == {(0, "F"), (0, "B")}, "rank 1 is slow"
    assert [group.count for group in samples[0, "F"].groups] == [20, 20]
    for cost in op_costs(data):
        sample = samples[cost.stage, cost.kind]
        assert (len(sample.costs_ns), int(sample.costs_ns[-1])) == (cost.count, cost.max_ns)


@pytest.mark.parametrize("count", [60, 4_000])
@pytest.mark.parametrize("shape", ["normal", "uniform", "exponential", "lognormal"])
def test_one_group_of_any_shape_is_one(shape: str, count: int) -> None:
    rng = np.random.default_rng(1)
    values = {
        "normal": rng.normal(100, 15, count),
        "uniform": rng.uniform(50, 150, count),
        "exponential": 50 + rng.exponential(30, count),
        "lognormal": np.exp(rng.normal(4, 0.5, count)),
    }
    assert two_groups(ascending(values[shape])) == ()


def test_two_groups_are_told_with_their_counts_and_medians() -> None:
    rng = np.random.default_rng(2)
    values = np.concatenate((rng.normal(100, 5, 80), rng.normal(160, 8, 20)))
    low, high = two_groups(ascending(values))
    assert (low.count, high.count) == (80, 20)
    assert (low.median_ns, high.median_ns) == (pytest.approx(100_000, rel=0.02), pytest.approx(160_000, rel=0.03))


def test_a_few_outliers_few_ops_and_little_difference_are_no_second_group() -> None:
    assert two_groups(ascending([100] * 38 + [300] * 2)) == (), "two ops"
    assert two_groups(ascending([100] * 7 + [300] * 7)) == (), "14 ops"
    assert two_groups(ascending([100] * 20 + [109] * 20)) == (), "9 %"
    assert two_groups(ascending([100] * 20 + [111] * 20)) == (OpGroup(20, 100_000), OpGroup(20, 111_000))


def test_of_many_ops_as_many_quantiles_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {(0, "F"): {0: np.arange(50_000)[::-1]}}
    monkeypatch.setattr("pptrace.analysis.op_costs.computed_by_op", lambda _: costs)
    (sample,) = op_samples(None)
    assert len(sample.costs_ns) == MOST_POINTS
    assert (sample.costs_ns[0], sample.costs_ns[-1]) == (0, 49_999)
    assert np.diff(sample.costs_ns).max() <= 17
