"""Costs by stage of the model, and rows of other plans put together from them, one by one on random costs."""

from __future__ import annotations

import random
from statistics import median

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.matrix.step_matrix import StepMatrix, pipelines_of
from pptrace.analysis.whatif.change import Change, even_split
from pptrace.analysis.whatif.predict import Baseline, _bounds, _bounds_of_variants, _variants
from pptrace.analysis.whatif.replay import Target, _Builder, costs_of_step, replay, replay_step
from pptrace.analysis.whatif.stage_costs import (
    BACKWARD,
    F,
    StageCosts,
    W,
    stage_costs,
    with_fixed_share,
)
from pptrace.analysis.whatif.stage_map import StageMap, end_shares, stage_map
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from tests.analysis.whatif.random_costs import PLANS, random_costs, two_pipelines

SEEDS = range(20)


def measured(seed: int, *names: str) -> tuple[StepMatrix, StageCosts]:
    rng = random.Random(seed)
    plan = build(*rng.choice([plan for plan in PLANS if not names or plan[0] in names])).compute_only()
    costs = random_costs(rng, plan)
    return costs, stage_costs(plan, costs, None)


def test_rows_of_another_plan_are_made_of_the_parts_of_the_measured_stages() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        _, costs = measured(seed, "1f1b", "zb-h1", "interleaved-1f1b")
        name, pp = rng.choice((("1f1b", 2), ("zb-h1", 3), ("dualpipe", 2)))
        plan = build(name, pp, rng.choice((4, 6)) if name != "dualpipe" else 8).compute_only()
        shares = np.array(
            [[[rng.random() for _ in range(costs.num_stages)] for _ in range(plan.chain_length)] for _ in range(3)]
        )
        source = np.array([rng.randrange(costs.num_stages) for _ in range(plan.chain_length)])
        costs = replace(costs, fixed=rng.choice((0.0, 100.0)) * np.array([1.0, 2.0, 0.5]))
        scale = rng.choice((1.0, 0.5))
        target = Target(plan, StageMap(shares, source), scale=scale)
        builder = _Builder(costs, target)
        work, late = builder.durations(slice(1, 3))
        inner, table = builder.inner(slice(1, 3)), plan.table
        weights = [1.0, 1.0, 1.0] if costs.splits_backward else [1.0, 0.5, 0.5]
        for row in range(len(table)):
            kind = list(Kind)[table.kind[row]]
            halves = {
                Kind.F: [(F,)],
                Kind.I: [(BACKWARD,)],
                Kind.W: [(W,)],
                Kind.B: [(BACKWARD, W)],
                Kind.OVERLAP_F_B: [(F,), (BACKWARD, W)],
            }[kind]
            slots = [int(table.slot[row]), int(table.second_slot[row])]
            for window in range(2):
                total = of_inner = 0.0
                for half, (outputs, slot) in enumerate(zip(halves, slots, strict=False)):
                    stage, microbatch = divmod(slot // 3, plan.num_microbatches)
                    stage %= plan.chain_length
                    at = microbatch * costs.plan.num_microbatches // plan.num_microbatches
                    num_ops = sum(shares[output, stage].sum() * weights[output] for output in outputs) * scale
                    for output in outputs:
                        stays = np.minimum(costs.fixed[output] / costs.typical[:, output], 1)
                        factors = shares[output, stage] * (1 - stays + stays / num_ops)
                        total += factors @ costs.work[window + 1, :, at, output]
                        of_inner += factors @ costs.inner[window + 1, :, at, output]
                    if half == 0:
                        assert builder.ops_in_rows[row] == pytest.approx(num_ops)
                        assert late[window, row] == costs.delay[window + 1, source[stage], at, outputs[0]]
                assert work[window, row] == pytest.approx(total * scale)
                assert inner[window, row] == pytest.approx(of_inner * scale)


def test_messages_go_where_the_measured_ones_go_or_take_what_those_of_their_link_took() -> None:
    for seed in SEEDS:
        _, costs = measured(seed, "1f1b", "interleaved-1f1b")
        table = costs.plan.table
        layers = (1,) * costs.num_stages
        own = stage_map(layers, layers, end_shares(costs.typical, layers))
        senders = table.dep[table.dep_is_message]
        outputs = [F if table.kind[sender] == Kind.F.code else BACKWARD for sender in senders]
        readers = table.rank[table.dep_reader[table.dep_is_message]].tolist()
        found = _Builder(costs, Target(costs.plan, own, scale=0.5, link_speed=4.0)).transfers(slice(0, 2))
        expected = costs.transfer[:2, table.stage[senders], table.microbatch[senders], outputs] / 8
        assert found.tolist() == expected.tolist()
        order = tuple(np.random.default_rng(seed).permutation(costs.plan.pp).tolist())
        moved = _Builder(costs, Target(costs.plan, own, placement=order)).transfers(slice(0, 2))
        links = costs.links()
        of_links: dict[tuple[int, int, int], list[int]] = {}
        for message, (sender, reader, output) in enumerate(zip(senders.tolist(), readers, outputs, strict=True)):
            of_links.setdefault((order[table.rank[sender]], order[reader], int(output)), []).append(message)
        for (begin, end, output), messages in of_links.items():
            cells = [cell for cell in links.get((begin, end), links[F]).tolist() if cell % 2 == output]
            places = cells or links.get((begin, end), links[BACKWARD]).tolist()
            for window in range(2):
                there = costs.transfer[window].ravel()[places].tolist()
                taken = moved[window, messages].tolist()
                assert sorted(taken) == sorted(there) if len(taken) == len(there) else set(taken) <= set(there)
        same = _Builder(costs, Target(costs.plan, own, placement=tuple(range(costs.plan.pp)))).transfers(slice(0, 2))
        assert same.tolist() == (8 * expected).tolist()


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "whole", "expected"),
    [(7, 3, True, (3, 2, 2)), (7, 2, False, (3.5, 3.5)), (2, 3, True, (2 / 3,) * 3), (3, 3, True, (1, 1, 1))],
)
def test_even_splits(num_layers: int, num_stages: int, whole: bool, expected: tuple[float, ...]) -> None:
    assert even_split(num_layers, num_stages, whole) == expected


def test_a_step_is_as_long_as_the_longer_of_its_pipelines() -> None:
    for seed in range(9):
        costs = two_pipelines(seed)
        assert [(ranks[0], windows.tolist()) for ranks, windows in pipelines_of(costs.ranks)] == [
            (0, [0, 2, 4]),
            (10, [1, 3, 5]),
        ]
        medians = [
            [median(costs.work[:, stage, :, output].ravel().tolist()) for output in range(3)]
            for stage in range(costs.num_stages)
        ]
        assert costs.typical.tolist() == medians
        layers = (1,) * costs.num_stages
        target = Target(costs.plan, stage_map(layers, layers, end_shares(costs.typical, layers)))
        builder, table = _Builder(costs, target), costs.plan.table
        work, late = builder.durations(slice(0, 6))
        transfers, inner = builder.transfers(slice(0, 6)), builder.inner(slice(0, 6))
        ends = []
        for window in range(6):
            end: dict[int, float] = {}
            for row in table.order.tolist():
                needs = [end[row - 1]] if table.position[row] else [0.0]
                for entry in range(*table.dep_ptr[row : row + 2]):
                    message = table.dep_message[entry]
                    needs.append(end[int(table.dep[entry])] + (transfers[window, message] if message >= 0 else 0.0))
                end[row] = max(needs) + work[window, row] + late[window, row]
            ends.append([end[row] for row in range(len(table))])
        found = replay(costs, target)
        for index, step in enumerate((4, 5, 7)):
            windows = [2 * index, 2 * index + 1]
            spans = [round(max(ends[window])) for window in windows]
            assert found.spans[index] == max(spans)
            total = float((work - inner)[windows].sum())
            assert found.bubble_ratios[index] == pytest.approx(max(spans) * 2 * costs.plan.pp / total - 1)
            longer = windows[0] if max(ends[windows[0]]) >= max(ends[windows[1]]) else windows[1]
            picture = replay_step(costs, target, step).replayed
            assert np.abs(picture.end - np.array(ends[longer])).max() <= 0.5
            assert np.abs(picture.end - picture.start - work[longer]).max() <= 1
            taken, moved = costs_of_step(costs, target, step)
            assert taken.tolist() == np.rint((work + late)[windows[0]]).tolist()
            assert moved.tolist() == np.rint(transfers[windows[0]]).tolist()


def varied(costs: StageCosts, target: Target) -> list[tuple[StageCosts, Target]]:
    """The other assumptions, of which messages are none: receives are posted as a change says."""
    baseline = Baseline(costs, np.zeros(len(np.unique(costs.step)), dtype=np.int64))
    return list(_variants(baseline, Change(prefetch=0), costs, target))


def test_of_many_steps_assumptions_are_tried_with_some_and_bounds_are_close_to_those_with_all() -> None:
    _, measured_costs = measured(1, "1f1b")
    rng = np.random.default_rng(2)
    windows = rng.integers(0, len(measured_costs.step), 40)
    orders = np.array([rng.permutation(measured_costs.plan.num_microbatches) for _ in windows])
    many = measured_costs.drawn(windows, np.arange(40), orders)
    assert len(np.unique(many.few.step)) == 16
    assert many.few.few is many.few
    layers = (1,) * many.num_stages
    own_map = stage_map(layers, layers, end_shares(many.typical, layers))
    half = Target(many.plan, own_map, scale=0.5)
    variants = [(with_fixed_share(many, 0.5), half), *varied(many, half)]
    assert len(variants) == 3
    own = _bounds(many, half, replay(many, half))
    with_some = list(_bounds_of_variants((many, half), own, variants))
    with_all = [_bounds(*variant, replay(*variant)) for variant in variants]
    assert np.array(with_some) == pytest.approx(np.array(with_all), rel=0.1)
    assert with_some[0][1] > own[1] * 1.2, "with half of each op fixed steps are far longer"


def test_delays_may_go_in_proportion_to_what_ops_do() -> None:
    """Stages of one, two, … layers become one stage each of as many halves, with microbatches of three times the size."""
    _, costs = measured(1, "1f1b")
    layers = tuple(range(1, costs.num_stages + 1))
    none = np.zeros_like(costs.typical)
    halves = stage_map(layers, [count / 2 for count in layers for _ in range(2)], end_shares(none, layers))
    plan = build("interleaved-1f1b", costs.plan.pp, costs.plan.num_microbatches).compute_only()
    target = Target(plan, halves, scale=3.0)
    everything = slice(0, len(costs.step))
    _, late = _Builder(costs, target).durations(everything)
    _, scaled = _Builder(costs, replace(target, scales_delays=True)).durations(everything)
    assert late.any()
    assert scaled == pytest.approx(1.5 * late)
