"""The search for slow ranks, on sequences of steps whose times are made up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pptrace.analysis.live_cost import cost_of
from pptrace.analysis.slow_rank import OpTimes, SlowRank, SlowRanks, op_times
from pptrace.slices import Slice, Texts

Times = dict[int, dict[tuple[str, int], OpTimes]]


def _steps(
    num: int, factor: Callable[[int, int], float], noise: float = 0.03, seed: int = 0, replicas: int = 1, pp: int = 4
) -> list[tuple[int, Times]]:
    """Steps of pp × replicas ranks, of which every fifth is not observed; ``factor`` of step and rank."""
    generator = np.random.default_rng(seed)
    stage_ms = [2.0, 3.0, 3.0, 5.0]
    steps = []
    for step in range(num):
        ranks: Times = {}
        for rank in range(pp * replicas):
            stage, spread = rank % pp, generator.lognormal(0, noise, 2)
            pace = factor(step, rank)
            ranks[rank] = {
                ("F", stage): OpTimes(8, 1e6 * stage_ms[stage] * pace * spread[0]),
                ("B", stage): OpTimes(8, 2e6 * stage_ms[stage] * pace * spread[1]),
            }
        if step % 5 != 4:
            steps.append((step, ranks))
    return steps


def _named(steps: list[tuple[int, Times]]) -> list[SlowRank]:
    search = SlowRanks()
    return [slow for step, ranks in steps for slow in search.add(step, ranks)]


@pytest.mark.parametrize("start", [20, 21, 22, 23, 24])
@pytest.mark.parametrize("factor", [1.3, 2.0])
def test_a_rank_that_becomes_slow_is_named_within_three_steps_and_no_other(start: int, factor: float) -> None:
    named = _named(_steps(40, lambda step, rank: factor if rank == 2 and step >= start else 1.0))
    assert {slow.rank for slow in named} == {2}
    assert named[0].step <= start + 2  # the third slow step at the latest
    assert named[0].since in (start, start + 1)
    assert named[0].excess == pytest.approx(factor - 1, rel=0.3)
    assert named[-1].step == 38, "it stays slow, and stays named"


@pytest.mark.parametrize("start", [10, 11, 12])
def test_of_two_ranks_one_that_becomes_slow_at_step_ten_is_named_within_three_steps(start: int) -> None:
    for seed in range(10):
        named = _named(_steps(20, lambda step, rank: 1.3 if rank == 1 and step >= start else 1.0, 0.01, seed, pp=2))
        assert {one.rank for one in named} == {1}
        assert named[0].step <= start + 2 + (start == 12)  # step 14 is not observed


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_healthy_runs_raise_no_alarm(noise: float) -> None:
    for seed in range(20):
        assert not _named(_steps(100, lambda *_: 1.0, noise, seed))


def test_of_two_ranks_the_slow_one_is_named_as_long_as_it_is_slow() -> None:
    named = _named(_steps(120, lambda step, rank: 1.4 if rank == 1 and step >= 20 else 1.0, noise=0.02, pp=2))
    assert {slow.rank for slow in named} == {1}
    assert [slow.step for slow in named][-1] == 118


def test_a_rank_that_waits_for_a_core_is_no_slow_rank() -> None:
    """Rank 1 takes twice as long: because others run on its core in one sequence, by itself in the other."""
    steps = _steps(40, lambda step, rank: 2.0 if rank == 1 and step >= 20 else 1.0)
    more_ns = 8 * 1e6 * 3 * 3
    for waited_ns, is_named in ((more_ns, False), (0.1 * more_ns, True)):
        search = SlowRanks()
        waits = {step: {1: int(1e7 + (waited_ns if step >= 20 else 0))} for step, _ in steps}
        named = [slow for step, ranks in steps for slow in search.add(step, ranks, waits[step])]
        assert bool(named) == is_named


def test_a_slow_rank_is_named_again_after_steps_in_which_it_may_have_waited_for_a_core() -> None:
    def busy(step: int) -> bool:
        return 22 <= step < 30

    search = SlowRanks()
    steps = _steps(40, lambda step, rank: 1 + (rank == 1 and step >= 20) * (1 + busy(step)), noise=0.02)
    waits = {step: {1: int(1e8 * busy(step))} for step, _ in steps}
    named = [slow.step for step, ranks in steps for slow in search.add(step, ranks, waits[step])]
    assert named == [21, *(step for step, _ in steps if step > 30)], "the second step after those at the latest"


def test_a_machine_that_slows_all_ranks_down_is_no_slow_rank() -> None:
    assert not _named(_steps(60, lambda step, _: 1.8 if step >= 30 else 1.0))


def test_single_slow_steps_of_a_rank_raise_no_alarm() -> None:
    assert not _named(_steps(60, lambda step, rank: 3.0 if rank == 1 and step in (20, 32, 43) else 1.0))


def _with_long_ops(steps: list[tuple[int, Times]], seed: int) -> list[tuple[int, Times]]:
    """Each kind of op takes far longer in one step of fifty, on any rank."""
    generator = np.random.default_rng(seed)
    return [
        (
            step,
            {
                rank: {
                    kind: OpTimes(times.count, times.median_ns * (4 if generator.random() < 0.02 else 1))
                    for kind, times in ops.items()
                }
                for rank, ops in ranks.items()
            },
        )
        for step, ranks in steps
    ]


@pytest.mark.parametrize("replicas", [1, 2])
def test_long_ops_of_one_kind_raise_no_alarm_and_hide_no_slow_rank(replicas: int) -> None:
    for seed in range(5):
        healthy = _steps(100, lambda *_: 1.0, 0.02, seed, replicas)
        assert not _named(_with_long_ops(healthy, seed))
        slow = _steps(60, lambda step, rank: 1.3 if rank == 1 and step >= 30 else 1.0, 0.02, seed, replicas)
        named = _named(_with_long_ops(slow, seed))
        assert {slow.rank for slow in named} == {1}
        assert named[0].step <= 33


def test_a_replica_that_waits_for_a_core_is_no_slow_rank() -> None:
    steps = _steps(40, lambda _, rank: 1.6 if rank == 1 else 1.0, replicas=2)
    search = SlowRanks()
    waits = {rank: int((0.6 if rank == 1 else 0) * 8 * 3e6 * 3) for rank in range(8)}
    assert not [slow for step, ranks in steps for slow in search.add(step, ranks, waits)]


def test_warm_up_is_no_past_to_compare_with() -> None:
    assert not _named(_steps(40, lambda step, rank: 8.0 - 3 * step + rank if step < 2 else 1.0))


def test_a_rank_that_was_slow_from_the_start_is_named_by_its_replicas() -> None:
    named = _named(_steps(20, lambda _, rank: 1.4 if rank == 6 else 1.0, replicas=4))
    assert {(slow.rank, slow.than) for slow in named} == {(6, "those of its replicas")}
    assert named[0].excess == pytest.approx(0.4, rel=0.2)


def test_a_rank_that_recovers_is_named_no_longer() -> None:
    named = _named(_steps(60, lambda step, rank: 1.5 if rank == 0 and 20 <= step < 30 else 1.0))
    assert {slow.rank for slow in named} == {0}
    assert max(slow.step for slow in named) < 30


def _pairs(share: float, noise: float, num: int, seed: int = 1) -> list[tuple[int, int, bool, bool]]:
    """Steps of 100 ms that drift, of which the observed ones are longer by ``share``."""
    generator = np.random.default_rng(seed)
    return [
        (
            step,
            int(1e8 * (1 + step / num) * (1 + share * (step % 5 != 4)) * generator.lognormal(0, noise)),
            step % 5 != 4,
            False,
        )
        for step in range(num)
    ]


@pytest.mark.parametrize("share", [0.0, 0.004, 0.05])
def test_the_cost_is_found_and_its_interval_holds_it(share: float) -> None:
    hits = 0
    for seed in range(40):
        cost = cost_of(_pairs(share, 0.02, 400, seed))
        assert cost.low is not None
        assert cost.high is not None
        assert cost.num_pairs == 79  # of steps 4, 9, … the last has nothing behind it
        hits += cost.low <= share <= cost.high
    assert hits >= 35  # 95 % of 40 are 38; fewer than 35 in one of 60 such tests


def test_few_unobserved_steps_have_no_interval_and_profiled_ones_do_not_count() -> None:
    few = cost_of(_pairs(0.01, 0.01, 25))
    assert few.low is None
    assert "too few" in str(few)
    assert cost_of([(step, 10**8, step % 5 != 4, True) for step in range(50)]) is None


@pytest.mark.parametrize(("share_of_backwards", "is_named"), [(0.1, True), (1.0, False)])
def test_of_a_rank_whose_forwards_alone_become_slow_it_counts_what_part_of_its_time_they_are(
    share_of_backwards: float, is_named: bool
) -> None:
    def forwards_slow(times: Times, step: int) -> Times:
        return {
            rank: {
                (kind, stage): OpTimes(
                    one.count,
                    one.median_ns
                    * (share_of_backwards / 2 if kind == "B" else 2.0 if rank == 2 and step >= 20 else 1.0),
                )
                for (kind, stage), one in ops.items()
            }
            for rank, ops in times.items()
        }

    named = _named([(step, forwards_slow(times, step)) for step, times in _steps(40, lambda *_: 1.0)])
    assert {slow.rank for slow in named} == ({2} if is_named else set())


def test_ops_of_unknown_stages_are_compared_with_no_other_rank() -> None:
    def rows(stage: int) -> Any:
        columns = {"step": [3, 3], "stage": [stage, stage], "start_ns": [0, 50], "end_ns": [40, 90]}
        arrays = {name: np.array(values) for name, values in columns.items()}
        return SimpleNamespace(ops=Slice({**arrays, "kind": Texts(np.zeros(2, np.int8), ("F",))}))

    def data(*stages: int) -> Any:
        lane = SimpleNamespace(compute=np.array([[0, 40], [50, 90]]))
        of_rank = dict(enumerate(map(rows, stages)))
        return SimpleNamespace(lanes=dict.fromkeys(of_rank, lane), rows=SimpleNamespace(of_rank=of_rank.__getitem__))

    known, unknown = op_times(data(2, 2))[3], op_times(data(-1, -1))[3]
    assert known == {rank: {("F", 2): OpTimes(2, 40)} for rank in (0, 1)}
    assert set(unknown[0]).isdisjoint(unknown[1])
