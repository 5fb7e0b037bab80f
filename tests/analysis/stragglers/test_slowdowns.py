"""Slowdowns of the what-if study, against closed forms and against replays one by one."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import numpy as np
import pytest

from pptrace.analysis.matrix.step_matrix import RECEIVES, StepMatrix
from pptrace.analysis.stragglers.detectors import study_steps
from pptrace.analysis.stragglers.slowdowns import slowdowns
from pptrace.analysis.whole_run import Stragglers
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from tests.schedule.event_replay import replay_events
from tests.support.extent import ALL
from tests.support.measured import measured_costs

CODES = [str(kind) for kind in Kind]


def study(costs: StepMatrix) -> Stragglers:
    return slowdowns([costs])


def of(stragglers: Stragglers) -> tuple[dict[int, float], dict[int, float], dict[str, float]]:
    """(workers, stages, kinds) with their slowdowns."""
    return (
        {entry.rank: entry.slowdown for entry in stragglers.workers},
        {entry.stage: entry.slowdown for entry in stragglers.stages},
        {entry.kind: entry.slowdown for entry in stragglers.op_kinds},
    )


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


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zbv", 2), ("zb-h1", 1)])
@pytest.mark.parametrize("seed", [0, 1] if ALL else [0])
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
        sender, reader, _ = table.messages
        readers = table.rank[reader], table.stage[reader], sender
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


def test_a_large_run_is_studied_in_evenly_spaced_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    table = build("1f1b", 2, 4).table
    costs = measured_costs(table, np.full((10, 1, len(table)), 1_000))
    replayed = 10 * len(table) * (2 + 2)
    monkeypatch.setattr("pptrace.analysis.stragglers.detectors._MOST_REPLAYED", replayed // 3)
    stragglers = study_steps([costs]).stragglers
    assert stragglers.num_steps == 3
    monkeypatch.setattr("pptrace.analysis.stragglers.detectors._MOST_REPLAYED", replayed)
    everything = study_steps([costs]).stragglers
    assert everything.num_steps == 10
