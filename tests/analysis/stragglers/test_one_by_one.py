"""Late ops, costs alike, noise and sequences of unequal length, found one by one on random costs of two pipelines."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product
from statistics import fmean, median

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers import alike, hosts, sequences
from pptrace.model.tables import Int64
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from pptrace.slices import Slice

PLANS = (("1f1b", 2, 3), ("1f1b", 3, 3), ("zb-h1", 2, 4), ("interleaved-1f1b", 2, 4))
STEPS = 3


def random_costs(rng: random.Random, pipelines: int = 2, plans: Sequence[tuple[str, int, int]] = PLANS) -> StepMatrix:
    table = build(*rng.choice(plans)).table
    windows = STEPS * pipelines

    def some(most: int, columns: int = len(table), least: int = 0) -> Int64:
        return np.array([[rng.randint(least, most) for _ in range(columns)] for _ in range(windows)])

    held = sorted(
        (rng.randrange(windows), rng.randrange(len(table)), rng.randint(1, 30), rng.randint(0, 1)) for _ in range(5)
    )
    window, row, ns, is_late = (np.array(column) for column in zip(*held, strict=True))
    ranks = np.array(
        [[10 * place + index for place in range(table.pp)] for _ in range(STEPS) for index in range(pipelines)]
    )
    late = ranks[window // pipelines * pipelines + (window + 1) % pipelines, table.rank[row]]
    durations = some(900, least=100)
    return StepMatrix(
        table=table,
        step=np.repeat(np.arange(STEPS), pipelines),
        ranks=ranks,
        durations=durations,
        transfers=some(40, table.num_messages, -1),
        delays=np.where(some(2) == 0, some(900), 0),
        sender_is_last=some(1, table.num_messages) > 0,
        moving=some(9),
        moved_with=some(3),
        inner=some(9),
        collected_before=some(9),
        collected_inside=some(9),
        spans=np.array([rng.randint(10**4, 10**5) for _ in range(windows)]),
        holds=Slice({"window": window, "row": row, "rank": row, "ns": ns, "is_late": is_late}),
        waits=Slice({"window": window, "row": row, "ns": ns, "longer": ns // 2, "rank": late, "late_row": row}),
    )


SEEDS = range(40)


def cell_of(costs: StepMatrix, row: int) -> tuple[int, int]:
    return int(costs.table.kind[row]), int(costs.table.stage[row])


def rows_of_cells(costs: StepMatrix) -> dict[tuple[int, int], list[int]]:
    cells: dict[tuple[int, int], list[int]] = {}
    for row in range(len(costs.table)):
        cells.setdefault(cell_of(costs, row), []).append(row)
    return dict(sorted(cells.items()))


def own_costs(costs: StepMatrix) -> Int64:
    """The durations without what ops waited for other members of collectives, which is communication."""
    waited: Counter[tuple[int, int]] = Counter()
    for window, row, ns in zip(*(costs.waits[name].tolist() for name in ("window", "row", "ns")), strict=True):
        waited[window, row] += ns
    own = costs.durations.copy()
    for at, ns in waited.items():
        own[at] -= min(ns, costs.inner[at])
    return own


def usual_of_cells(costs: StepMatrix) -> dict[tuple[int, tuple[int, int]], float]:
    """By the first rank of the pipeline and by cell."""
    own = own_costs(costs)
    return {
        (first, cell): median(own[np.ix_(costs.ranks[:, 0] == first, rows)].ravel().tolist())
        for first in sorted(set(costs.ranks[:, 0].tolist()))
        for cell, rows in rows_of_cells(costs).items()
    }


def test_the_only_stage_of_a_plan_is_not_compared() -> None:
    assert alike._slowest_stage([random_costs(random.Random(0), plans=[("zb-h1", 1, 3)])]) is None


def test_a_stage_as_the_others_and_a_rank_as_its_replicas() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        costs = random_costs(rng, rng.choice((2, 3)))
        table, usual = costs.table, usual_of_cells(costs)
        cells = rows_of_cells(costs)
        firsts = sorted(set(costs.ranks[:, 0].tolist()))
        of_windows = {cell: sorted(usual[first, cell] for first in costs.ranks[:, 0].tolist()) for cell in cells}
        lowest = {cell: values[(len(values) - 1) // 2] for cell, values in of_windows.items()}
        excess: Counter[int] = Counter()
        for kind, stage in cells:
            others = [lowest[other] for other in cells if other[0] == kind and other[1] != stage]
            excess[stage] += (lowest[kind, stage] - median(others) if others else 0) * len(costs.step)
        slowest = max(range(table.num_stages), key=lambda stage: excess[stage])
        assert alike._slowest_stage([costs]) == (slowest if excess[slowest] > 0 else None)
        replicas = {cell: sorted(usual[first, cell] for first in firsts)[(len(firsts) - 1) // 2] for cell in cells}
        of_ranks: Counter[int] = Counter()
        for window, row in np.ndindex(costs.durations.shape):
            cell = cell_of(costs, row)
            beyond = max(usual[int(costs.ranks[window, 0]), cell] - replicas[cell], 0)
            of_ranks[int(costs.ranks[window, table.rank[row]])] += beyond
        worst = max(sorted(of_ranks), key=lambda rank: of_ranks[rank])
        found = alike._slowest_rank([costs])
        assert of_ranks[found] == of_ranks[worst] > 0
        stage, rank = rng.randrange(table.num_stages), int(rng.choice(costs.ranks.ravel().tolist()))
        as_others = alike._with_stage_as_others(costs, costs, stage).durations
        as_replicas = alike._with_rank_as_replicas(costs, rank).durations
        alone = own_costs(costs)
        for window, row in np.ndindex(costs.durations.shape):
            cell, duration, work = cell_of(costs, row), int(costs.durations[window, row]), int(alone[window, row])
            others = [lowest[other] for other in cells if other[0] == cell[0] and other[1] != cell[1]]
            factor = min(median(others) / lowest[cell], 1) if others and cell[1] == stage else 1
            assert as_others[window, row] == pytest.approx(duration - work * (1 - factor), abs=0.5)
            own = usual[int(costs.ranks[window, 0]), cell]
            factor = min(replicas[cell] / own, 1) if costs.ranks[window, table.rank[row]] == rank else 1
            assert as_replicas[window, row] == pytest.approx(duration - work * (1 - factor), abs=0.5)


def test_what_a_stage_costs_more_because_of_one_of_its_ranks_is_that_ranks() -> None:
    """The gains of a stage and of a rank that has it are together what both bring: none is counted twice."""
    num_shared = 0
    for seed in SEEDS:
        costs = random_costs(random.Random(seed), 2)
        costs = replace(costs, waits=costs.waits.where(slice(0)))
        stage, rank = alike._slowest_stage([costs]), alike._slowest_rank([costs])
        stages_of_rank = costs.table.stage[np.flatnonzero((costs.ranks == rank).any(axis=0)[costs.table.rank])]
        if stage is None or rank is None or stage not in stages_of_rank:
            continue
        num_shared += 1
        both = alike._with_stage_as_others(alike._with_rank_as_replicas(costs, rank), costs, stage)
        gains = alike.gains_of_places([costs])
        assert (gains["stage", stage] + gains["rank", rank]).tolist() == (costs.lengths - both.lengths).tolist()
    assert num_shared > 3


def test_ops_are_late_beyond_what_is_usual_of_their_rank() -> None:
    num_late = 0
    for seed in SEEDS:
        costs = random_costs(random.Random(seed), 1 + seed % 2)
        table = costs.table
        late = hosts._late_firsts(costs)
        expected = np.zeros_like(late)
        for first in set(costs.ranks[:, 0].tolist()):
            windows = np.flatnonzero(costs.ranks[:, 0] == first)
            for place in range(table.pp):
                rows = np.flatnonzero(table.rank == place)
                usual = round(median(costs.delays[np.ix_(windows, rows)].ravel().tolist()))
                beyond = [max(int(costs.delays[window, rows[0]]) - usual, 0) for window in windows]
                if median(beyond) >= costs.durations.mean() / 4:
                    expected[windows, rows[0]] = beyond
        assert late.tolist() == expected.tolist()
        num_late += int((late > 0).sum())
        medians = sorted(
            median(costs.delays[window, table.rank == place].tolist())
            for window in range(len(costs.delays))
            for place in range(table.pp)
        )
        assert hosts._usual_delay(costs, costs.delays) == round(medians[(len(medians) - 1) // 2])
    assert num_late > 50


def test_microbatches_are_compared_with_their_stage_and_stages_with_the_others() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        costs = random_costs(rng)
        table = costs.table
        factor = np.array([1 + 0.4 * (microbatch % 3) for microbatch in range(table.num_microbatches)])
        costs = replace(
            costs, durations=np.rint((500 + costs.durations // 9) * factor[table.microbatch]).astype(np.int64)
        )
        found = sequences._of_microbatches(costs)
        forward, backward = (
            {
                (window, int(table.stage[row]), int(table.microbatch[row])): int(costs.durations[window, row])
                for window, row in np.ndindex(costs.durations.shape)
                if table.kind[row] in codes
            }
            for codes in ((Kind.F.code,), (Kind.B.code, Kind.I.code))
        )
        windows, stages, microbatches = range(len(costs.step)), range(table.num_stages), range(table.num_microbatches)
        ratios = []
        for taken, deviations in ((forward, found.forward), (backward, found.backward)):
            ratio = {}
            for stage in stages:
                means = [fmean(taken[window, stage, microbatch] for microbatch in microbatches) for window in windows]
                usual = median(means)
                for window in windows:
                    for microbatch in microbatches:
                        ratio[window, stage, microbatch] = taken[window, stage, microbatch] / usual
                        beyond = (taken[window, stage, microbatch] - means[window]) / usual
                        assert deviations[window, stage, microbatch] == pytest.approx(beyond)
            ratios.append(ratio)
        both = {key: (ratios[0][key] + ratios[1][key]) / 2 for key in ratios[0]}
        assert all(found.ratio[key] == pytest.approx(value) for key, value in both.items())
        total = found.forward + found.backward
        for window, stage, microbatch in both:
            own, others = found.stage_and_others[stage]
            rest = median(total[window, other, microbatch] for other in stages if other != stage)
            assert own[window, microbatch] == pytest.approx(total[window, stage, microbatch])
            assert others[window, microbatch] == pytest.approx(rest)
        evened = found.evened(costs)
        means = {
            (window, stage): fmean(both[window, stage, microbatch] for microbatch in microbatches)
            for window, stage in product(windows, stages)
        }
        shared = [sorted(means[window, stage] for stage in stages)[(len(stages) - 1) // 2] for window in windows]
        for window in windows:
            of_step = fmean(shared[other] for other in windows if costs.step[other] == costs.step[window])
            for row in range(len(table)):
                microbatch = int(table.microbatch[row])
                within = median(both[window, stage, microbatch] / means[window, stage] for stage in stages)
                even = costs.durations[window, row] / (shared[window] / of_step * within)
                assert evened[window, row] == pytest.approx(even, abs=0.5001)


def test_plans_of_one_stage_or_one_microbatch_have_nothing_to_compare() -> None:
    costs = random_costs(random.Random(0))
    for pp, num_microbatches in ((1, 3), (2, 1)):
        table = build("1f1b", pp, num_microbatches).table
        durations = np.full((len(costs.step), len(table)), 100)
        assert sequences._of_microbatches(replace(costs, table=table, durations=durations)) is None
    free = costs.durations * (costs.table.kind != Kind.F.code)
    assert sequences._of_microbatches(replace(costs, durations=free)) is None
