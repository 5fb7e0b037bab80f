"""Slowdowns of the what-if study, against closed forms and against replays one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
import pytest

from pptrace.analysis.matrix.step_matrix import RECEIVES, StepMatrix, joined
from pptrace.analysis.stragglers.detectors import study_steps
from pptrace.analysis.stragglers.slowdowns import slowdowns
from pptrace.analysis.whole_run import Stragglers
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.schedule.replay_table import replay_table
from pptrace.workflow.load import load
from tests.schedule.event_replay import replay_events
from tests.support.known import known
from tests.support.measured import measured_costs

CODES = [str(kind) for kind in Kind]


def study(costs: StepMatrix) -> Stragglers:
    return known(slowdowns([costs]))


def of(stragglers: Stragglers) -> tuple[dict[int, float], dict[int, float], dict[str, float]]:
    """(workers, stages, kinds) with their slowdowns."""
    return (
        {entry.rank: entry.slowdown for entry in stragglers.workers},
        {entry.stage: entry.slowdown for entry in stragglers.stages},
        {entry.kind: entry.slowdown for entry in stragglers.op_kinds},
    )


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zbv", "interleaved-1f1b"])
def test_steps_that_cost_what_is_typical_have_a_slowdown_of_1_and_no_shares(name: str) -> None:
    table = build(name, 4, 8).table
    usual = np.where(table.kind == Kind.F.code, 10_000, 20_000)
    stragglers = study(measured_costs(table, np.tile(usual, (3, 2, 1)), 100))
    assert stragglers.slowdown == 1
    assert (stragglers.m_w, stragglers.m_s, stragglers.num_steps) == (None, None, 3)
    assert all(set(entries.values()) == {1.0} for entries in of(stragglers))


@pytest.mark.parametrize(("dp", "factor"), [(4, 3), (2, 2), (64, 5)])
def test_one_slow_worker_among_replicas_is_the_whole_slowdown(dp: int, factor: int) -> None:
    table = build("gpipe", 1, 6).table
    durations = np.full((2, dp, len(table)), 6_400)
    durations[:, 1] *= factor
    stragglers = study(measured_costs(table, durations))
    ideal = (dp - 1 + factor) / dp
    assert stragglers.slowdown == pytest.approx(factor / ideal)
    workers, stages, _ = of(stragglers)
    assert workers[1] == stages[0] == stragglers.slowdown
    assert {slowdown for rank, slowdown in workers.items() if rank != 1} == {1.0}
    assert stragglers.m_w == pytest.approx(1)
    assert stragglers.m_s == pytest.approx(1)  # the only stage is the last one


def test_a_heavier_last_stage_is_the_whole_slowdown_and_no_worker_is() -> None:
    pp, microbatches, dp = 3, 9, 4
    table = build("gpipe", pp, microbatches).table
    durations = np.tile(np.where(table.stage == pp - 1, 24_000, 12_000), (2, dp, 1))
    stragglers = study(measured_costs(table, durations))
    # forwards: they run through the light stages, then queue up at the heavy one; backwards start there and leave it one by one
    measured = 2 * ((pp - 1) * 12_000 + microbatches * 24_000)
    ideal = 2 * (microbatches + pp - 1) * 16_000
    assert stragglers.slowdown == pytest.approx(measured / ideal)
    without = 2 * (microbatches * 16_000 + (pp - 1) * 12_000)
    assert stragglers.m_s == pytest.approx((measured - without) / (measured - ideal))
    workers, stages, _ = of(stragglers)
    last = range((pp - 1) * dp, pp * dp)
    assert all(workers[rank] == stragglers.slowdown for rank in last)
    assert all(workers[rank] < 1 for rank in workers if rank not in last)
    assert stages[pp - 1] > stragglers.slowdown > 1 > max(stages[0], stages[1])
    assert stragglers.m_w == pytest.approx(0)  # one of four replicas that are all as slow


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zbv", 2), ("zb-h1", 1)])
@pytest.mark.parametrize("seed", [0, 1])
def test_slowdowns_are_those_of_replays_one_by_one(name: str, chunks: int, seed: int) -> None:
    plan = build(name, 3, 6, chunks)
    random = np.random.default_rng(seed)
    durations = random.integers(500, 4_000, (3, 3, len(plan.table)))
    transfers = random.integers(0, 500, (3, 3, plan.table.num_messages))
    transfers[random.random(transfers.shape) < 0.1] = -1
    costs = measured_costs(plan.table, durations, transfers)
    stragglers, oracle = study(costs), _Oracle(plan, costs)
    workers, stages, kinds = of(stragglers)
    assert stragglers.slowdown == pytest.approx(oracle.slowdown(lambda *_: True))
    assert stages == pytest.approx(
        {stage: oracle.slowdown(lambda _, __, at, ___, stage=stage: at == stage) for stage in range(plan.num_stages)}
    )
    assert kinds == pytest.approx(
        {kind: oracle.slowdown(lambda _, __, ___, of_kind, kind=kind: of_kind == kind) for kind in kinds}
    )
    pipelines = [oracle.slowdown(lambda at, _, __, ___, number=number: at == number) for number in range(3)]
    places = [oracle.slowdown(lambda _, at, __, ___, place=place: at == place) for place in range(3)]
    assert workers == pytest.approx(
        {place * 3 + number: min(pipelines[number], places[place]) for place in range(3) for number in range(3)}
    )
    lost = stragglers.slowdown - 1
    slowest = max(sorted(workers), key=lambda rank: workers[rank])
    without = oracle.slowdown(lambda number, place, _, __: place * 3 + number != slowest)
    assert stragglers.m_w == pytest.approx((stragglers.slowdown - without) / lost)
    without = oracle.slowdown(lambda _, __, stage, ___: stage != plan.num_stages - 1)
    assert stragglers.m_s == pytest.approx((stragglers.slowdown - without) / lost)


Stays = Callable[[int, int, int, str], bool]
"""(pipeline, pipeline rank, stage, kind) → whether it costs what was measured."""


class _Oracle:
    """Replays action by action, with dicts."""

    def __init__(self, plan: Plan, costs: StepMatrix) -> None:
        self.plan, self.costs = plan, costs
        self.keys = [action.key for rank in range(plan.pp) for action in plan.compute_actions(rank)]
        values: dict[str, list[int]] = {}
        for window in range(len(costs.step)):
            for (kind, _, _), cost in zip(self.keys, costs.durations[window].tolist(), strict=True):
                values.setdefault(str(kind), []).append(cost)
        self.typical = {kind: round(sum(of_kind) / len(of_kind)) for kind, of_kind in values.items()}
        for code in RECEIVES:
            known = costs.transfers[:, costs.message_kind == code]
            self.typical[CODES[code]] = round(median(known[known >= 0].tolist()))

    def slowdown(self, stays: Stays) -> float:
        return self.length(stays) / self.length(lambda *_: False)

    def length(self, stays: Stays) -> int:
        spans: dict[int, int] = {}
        for window, step in enumerate(self.costs.step.tolist()):
            spans[step] = max(spans.get(step, 0), self.span(window, stays))
        return sum(spans.values())

    def span(self, window: int, stays: Stays) -> int:
        table, costs, pipeline = self.plan.table, self.costs, int(self.costs.ranks[window, 0])
        own = dict(zip(self.keys, costs.durations[window].tolist(), strict=True))
        readers = table.rank[costs.reader], table.stage[costs.reader], table.dep[table.dep_is_message]
        messages = {
            (self.keys[source], rank): (int(stage), CODES[code], transfer)
            for rank, stage, source, code, transfer in zip(
                *readers, costs.message_kind.tolist(), costs.transfers[window].tolist(), strict=True
            )
        }

        def duration(rank: int, action: Action) -> int:
            kind = str(action.kind)
            return own[action.key] if stays(pipeline, rank, action.stage, kind) else self.typical[kind]

        def latency(action: Action, _source: int, rank: int) -> int:
            stage, kind, transfer = messages[action.key, rank]
            return transfer if transfer >= 0 and stays(pipeline, rank, stage, kind) else self.typical[kind]

        return max(end for spans in replay_events(self.plan, duration, latency) for _, end in spans)


def test_the_order_of_windows_changes_nothing_and_other_numbers_of_ranks_change_theirs_alone() -> None:
    table = build("1f1b", 4, 8).table
    costs = measured_costs(table, np.random.default_rng(3).integers(500, 4_000, (5, 3, len(table))))
    order = np.random.default_rng(4).permutation(len(costs.step))
    assert [entry.rank for entry in study(costs).workers] == list(range(12))
    shuffled = joined(costs.of_windows(np.array([index])) for index in order)
    assert slowdowns(shuffled) == study(costs)
    renumbered = study(replace(costs, ranks=costs.ranks[::-1].max() - costs.ranks))
    workers = {11 - entry.rank: entry.slowdown for entry in renumbered.workers}
    assert workers == of(study(costs))[0]
    assert (renumbered.stages, renumbered.m_s) == (study(costs).stages, study(costs).m_s)


def test_plans_of_different_length_share_what_is_typical() -> None:
    short, long = build("gpipe", 1, 1).table, build("gpipe", 1, 3).table
    plans = [measured_costs(short, np.full((1, 1, 2), 40_000)), measured_costs(long, np.full((1, 1, 6), 20_000))]
    stragglers = known(slowdowns(plans))
    assert stragglers.slowdown == pytest.approx(1)
    assert stragglers.num_steps == 2
    assert of(stragglers)[2] == {"F": pytest.approx(1), "B": pytest.approx(1)}


def test_a_large_run_is_studied_in_evenly_spaced_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    table = build("1f1b", 2, 4).table
    costs = measured_costs(table, np.full((10, 1, len(table)), 1_000))
    replayed = 10 * len(table) * (2 + 2)
    monkeypatch.setattr("pptrace.analysis.stragglers.detectors._MOST_REPLAYED", replayed // 3)
    stragglers = known(study_steps([costs]).stragglers)
    assert stragglers.num_steps == 3
    monkeypatch.setattr("pptrace.analysis.stragglers.detectors._MOST_REPLAYED", replayed)
    everything = known(study_steps([costs]).stragglers)
    assert everything.num_steps == 10


def test_parts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = build("1f1b", 2, 4).table
    costs = measured_costs(table, np.random.default_rng(5).integers(500, 4_000, (5, 3, len(table))))
    together = study(costs)
    monkeypatch.setattr("pptrace.analysis.matrix.step_matrix._CELLS", 2 * len(table))
    assert study(costs) == together


def test_a_simulated_run_read_back_has_a_slowdown_of_1(tmp_path: Path) -> None:
    table = build("1f1b", 3, 6).table
    times = replay_table(table, np.where(table.kind == Kind.F.code, 10_000, 20_000))
    rows = [
        pd.DataFrame(
            {
                "rank": table.rank,
                "pp_rank": table.rank,
                "step": step,
                "kind": [CODES[code] for code in table.kind],
                "stage": table.stage,
                "microbatch": table.microbatch,
                "start_ns": times.start + step * 10**6,
                "end_ns": times.end + step * 10**6,
            }
        )
        for step in range(3)
    ]
    pd.concat(rows).to_csv(tmp_path / "ops.csv", index=False)
    report = load([tmp_path / "ops.csv"]).report
    assert report.stragglers is not None
    assert report.stragglers.slowdown == 1
    assert (report.stragglers.m_w, report.stragglers.num_steps) == (None, 3)
    assert [finding.evidence["cause"] for finding in report.findings] == ["structural"]
    assert any(
        "how much of the slowdown the slowest ranks or the last stage cause (ops that vary make the step less than 3%"
        in line
        for line in report.warnings
    )
