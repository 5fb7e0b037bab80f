"""Runs whose ops vary by chance have no finding; those in which a place is slow have one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.stragglers import detectors
from pptrace.analysis.stragglers.detectors import Noise, noise_of
from pptrace.model.tables import Int64
from pptrace.schedule.actions import Kind
from pptrace.schedule.message_graph import Messaging, make_graph
from pptrace.schedule.registry import build
from pptrace.schedule.replay_table import makespans
from tests.support.measured import measured_costs

PP, DP, STEPS = 4, 2, 12
TABLE = build("1f1b", PP, 8).table
USUAL = np.where(TABLE.kind == Kind.F.code, 10_000_000, 20_000_000)


def noise_in(seed: int, relative: float, change: Callable[[Int64], None] | None = None, dp: int = DP) -> Noise:
    """The noise of a run whose ops vary so much; ``change`` is made to the durations (steps, pipelines, rows)."""
    deviations = np.random.default_rng(seed).standard_normal((STEPS, dp, len(TABLE)))
    durations = np.rint(USUAL * (1 + relative * deviations)).astype(np.int64)
    if change is not None:
        change(durations)
    return noise_of([measured_costs(TABLE, durations)])


@pytest.mark.parametrize("relative", [0.01, 0.1])
def test_no_place_is_slow_where_ops_vary_by_chance(relative: float) -> None:
    assert [noise_in(seed, relative).slow for seed in range(30)] == [frozenset()] * 30


def test_a_rank_slower_than_its_replica_by_less_than_its_ops_vary_is_slow() -> None:
    def slow(durations: Int64) -> None:
        durations[:, 1, TABLE.rank == 2] = durations[:, 1, TABLE.rank == 2] * 109 // 100

    found = [("rank", 2 * DP + 1) in noise_in(seed, 0.1, slow).slow for seed in range(10)]
    assert sum(found) >= 9


def test_a_stage_that_costs_more_than_the_others_is_slow_and_a_single_pipeline_has_no_slow_rank() -> None:
    def heavy(durations: Int64) -> None:
        durations[..., TABLE.stage == 3] = durations[..., TABLE.stage == 3] * 107 // 100

    for seed in range(10):
        assert noise_in(seed, 0.1, heavy, dp=1).slow == {("stage", 3)}


def test_ordinary_noise_costs_what_replays_with_as_much_noise_take_longer() -> None:
    usual = int(makespans(TABLE, USUAL))
    deviations = np.random.default_rng(77).standard_normal((4000, DP, len(TABLE)))
    longer = makespans(TABLE, np.rint(USUAL * (1 + 0.1 * deviations)).astype(np.int64)).max(axis=1).mean() - usual
    assert noise_in(3, 0.0).of_ordinary_ops == pytest.approx(longer, rel=0.1)
    assert longer / 2 < noise_in(3, 0.1).of_ordinary_ops < longer  # medians differ by chance, which is not noise


NOISE = Noise(frozenset({("rank", 3)}), 100, 4)
STAGE = Noise(frozenset({("stage", 3)}), 100, 3)


@pytest.mark.parametrize(
    ("noise", "cause", "where", "gain", "explained"),
    [
        (NOISE, "straggler", {"rank": 3}, 5, False),
        (NOISE, "straggler", {"rank": 2}, 5, True),
        (NOISE, "straggler", {}, 5, False),
        (STAGE, "straggler", {}, 5, True),
        (STAGE, "straggler", {"rank": 3}, 5, True),
        (Noise(STAGE.slow | NOISE.slow, 100, 3), "straggler", {}, 5, False),
        (NOISE, "imbalance", {"stage": 3}, 5, True),
        (NOISE, "imbalance", {}, 5, True),
        (STAGE, "imbalance", {"stage": 3}, 5, False),
        (STAGE, "imbalance", {"stage": 2}, 5, True),
        (STAGE, "imbalance", {}, 5, False),
        (Noise(STAGE.slow | NOISE.slow, 100, 3), "imbalance", {}, 5, False),
        (NOISE, "jitter", {}, 100, True),
        (NOISE, "jitter", {}, 101, False),
        (STAGE, "jitter", {"rank": 0}, 100, False),
        (Noise(frozenset(), 100, 2), "jitter", {"rank": 0}, 100, True),
        (NOISE, "communication", {}, 5, False),
        (NOISE, "host", {}, 5, False),
    ],
)
def test_noise_explains_what_is_at_no_slow_place(
    noise: Noise, cause: str, where: dict[str, int | str], gain: int, explained: bool
) -> None:
    assert noise.explains(cause, where, gain) is explained


def test_ordinary_noise_costs_more_where_messages_hold_up_ranks() -> None:
    plan = build("looped-bfs", 4, 8)
    costs = measured_costs(plan.table, np.full((1, 1, len(plan.table)), 10_000), 20)
    blocking = replace(costs, graph=make_graph(plan, Messaging.RENDEZVOUS))
    assert detectors._cost_of_ordinary(blocking) > 1.2 * detectors._cost_of_ordinary(costs) > 0
