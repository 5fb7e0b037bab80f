"""Replays of many timings at once, and of one plan action by action, against a replay of events and closed forms."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.needs import ranks_at_ends
from pptrace.schedule.plan import Plan
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.schedule.replay import Blocked, replay
from pptrace.schedule.replay_table import makespans, rank_ends, rank_ends_of_mixtures, replay_table
from pptrace.schedule.text import from_rows
from tests.schedule.event_replay import replay_events
from tests.schedule.shapes import legal_shapes, plans

Times = npt.NDArray[Any]


def expected_spans(plan: Plan, durations: list[int], latencies: list[int]) -> list[tuple[int, int]]:
    """Spans of one replay by the oracle, row by row."""
    table = plan.table
    actions = [action for rank in range(plan.pp) for action in plan.compute_actions(rank)]
    taken = {
        (rank, id(action)): cost for rank, action, cost in zip(table.rank.tolist(), actions, durations, strict=True)
    }

    def latency(half: Action, _source: int, _target: int) -> int:
        slot = table.slots_of(half.kind.code, half.stage, half.microbatch or 0)
        return latencies[table.slot_to_message[slot]]

    rows = replay_events(plan, lambda rank, action: taken[rank, id(action)], latency)
    return [span for row in rows for span in row]


def made_up(table: PlanTable, num: int, seed: int, lowest: int = 0) -> tuple[Times, Times]:
    draw = np.random.default_rng(seed)
    return draw.integers(lowest, 100, (num, len(table))), draw.integers(0, 60, (num, table.num_messages))


@pytest.mark.parametrize(
    ("name", "lowest", "most"), [("1f1b", 0, 60), ("interleaved-1f1b", -5, 60), ("zbv", 0, 1), ("1f1b", 0, 1 << 33)]
)
def test_a_mixture_takes_each_time_from_what_was_measured_or_from_the_other(name: str, lowest: int, most: int) -> None:
    table = build(name, pp=4, num_microbatches=8, num_chunks=2 if name.startswith("inter") else None).table
    draw = np.random.default_rng(3)
    durations, _ = made_up(table, 300, seed=1, lowest=lowest)
    latencies, other = draw.integers(0, most, (300, table.num_messages)), draw.integers(0, 50, len(table))
    other_latency = draw.integers(0, most, table.num_messages)
    mixtures = [(draw.random(len(table)) < share, draw.random(table.num_messages) < share) for share in (0, 0.3, 1)]
    results = rank_ends_of_mixtures(table, (durations, latencies), (other, other_latency), mixtures)
    for (rows, messages), ends in zip(mixtures, results, strict=True):
        taken = np.where(rows, durations, other), np.where(messages, latencies, other_latency)
        assert np.array_equal(ends, rank_ends(table, *taken))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_replay_of_a_batch_is_that_of_the_events_on_every_schedule(name: str) -> None:
    shapes = list(legal_shapes(name, max_pp=5, rounds=2))
    for seed, shape in enumerate(random.Random(name).sample(shapes, min(len(shapes), 6))):
        plan = build(name, *shape)
        durations, latencies = made_up(
            plan.table, 3, seed, lowest=-60 * (seed % 2)
        )  # measured noise can leave less than 0
        batch = replay_table(plan.table, durations, latencies)
        for index in range(3):
            spans = expected_spans(plan, durations[index].tolist(), latencies[index].tolist())
            assert list(zip(batch.start[index].tolist(), batch.end[index].tolist(), strict=True)) == spans, shape
        if seed % 2 == 0:
            assert makespans(plan.table, durations, latencies).tolist() == batch.end.max(axis=1).tolist()


def test_batches_of_more_replays_than_one_pass_holds_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    table = build("zbv", 3, 6).table
    durations, latencies = made_up(table, 23, 5)
    whole = replay_table(table, durations, latencies)
    monkeypatch.setattr("pptrace.schedule.replay_table._CHUNK", 5 * len(table))
    parts = replay_table(table, durations, latencies)
    assert parts.start.tolist() == whole.start.tolist()
    assert parts.end.tolist() == whole.end.tolist()
    assert makespans(table, durations, latencies).tolist() == whole.end.max(axis=1).tolist()


def test_durations_and_latencies_are_broadcast_to_scenarios_times_steps() -> None:
    """Three scenarios of latency over four steps; a latency may be one number, or one per message."""
    table = build("interleaved-1f1b", 2, 4, 2).table
    durations, latencies = made_up(table, 4, 1)[0], made_up(table, 3, 2)[1][:, np.newaxis]
    both = replay_table(table, durations, latencies)
    assert both.end.shape == (3, 4, len(table))
    for scenario, step in np.ndindex(3, 4):
        one = replay_table(table, durations[step], latencies[scenario, 0])
        assert both.end[scenario, step].tolist() == one.end.tolist()
    assert makespans(table, durations, latencies).tolist() == both.end.max(axis=2).tolist()
    every = np.full(table.num_messages, 7)
    assert makespans(table, durations, 7).tolist() == makespans(table, durations, every).tolist()
    assert makespans(table, durations[0], 7) > makespans(table, durations[0])


def test_times_beyond_64_bits_are_exact() -> None:
    table = build("1f1b", 4, 8).table
    huge = 10**18
    pair = np.where(table.kind == Kind.F.code, huge, 2 * huge)
    assert makespans(table, pair).tolist() == (8 + 4 - 1) * 3 * huge
    one = build("1f1b", 4, 1).table
    for latency in (10**18, 10**19, 10**20):  # of 64 bits with a sign, without one, and beyond
        assert makespans(one, [[1] * 8] * 2, latency).tolist() == [latency * 6 + 8] * 2


@given(st.integers(1, 6), st.integers(1, 12), st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), min_size=1))
def test_makespans_of_a_batch_are_the_closed_form(p: int, m: int, costs: list[tuple[int, int]]) -> None:
    for name in ("gpipe", "1f1b"):
        table = build(name, p, m).table
        durations = np.where(
            table.kind == Kind.F.code, *(np.array(part)[:, np.newaxis] for part in zip(*costs, strict=True))
        )
        assert makespans(table, durations).tolist() == [(m + p - 1) * (f + b) for f, b in costs]


@given(plans(max_pp=4), st.randoms(use_true_random=False))
def test_a_replay_by_functions_of_actions_is_that_of_the_events(plan: Plan, chance: random.Random) -> None:
    taken: dict[Any, int] = {}
    latency = chance.randrange(30)

    def duration(rank: int, action: Action) -> int:
        return taken.setdefault((rank, action.key), chance.randrange(50))

    one = replay(plan, duration, latency)
    spans = replay_events(plan, duration, lambda *_: latency)
    assert [[(timed.start, timed.end) for timed in row] for row in one.ranks] == spans
    assert [[timed.action for timed in row] for row in one.ranks] == list(map(list, plan.ranks))
    assert one.makespan == max(end for row in spans for _, end in row)
    assert not one.blocked


@given(st.randoms(use_true_random=False))
def test_ranks_in_any_order_get_as_far_as_events_let_them(chance: random.Random) -> None:
    cells = [[f"{rank}{kind}{mb}" for kind in "FB" for mb in range(3)] for rank in range(3)]
    for row in cells:
        chance.shuffle(row)
    plan = from_rows([row[: chance.randrange(4, 7)] for row in cells] + [["3F0", "3F1", "3F2"]], "custom")
    one = replay(plan, lambda _rank, action: 2 + (action.kind is Kind.B))
    assert [[(timed.start, timed.end) for timed in row] for row in one.ranks] == replay_events(
        plan, lambda _rank, action: 2 + (action.kind is Kind.B), lambda *_: 0
    )
    stuck = {entry.rank: entry.index for entry in one.blocked}
    assert stuck == {rank: len(row) for rank, row in enumerate(one.ranks) if len(row) < len(plan.ranks[rank])}


def test_a_stuck_rank_names_the_first_thing_that_it_waits_for() -> None:
    plan = from_rows([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]], "custom")
    assert replay(plan).blocked == (Blocked(0, 1, (Kind.B, 1, 0)), Blocked(1, 0, (Kind.F, 0, 1)))
    assert replay(plan).makespan == 1
    backwards_first = from_rows([["0B0", "0F0"], ["1F0", "1B0"]], "custom")
    assert replay(backwards_first).blocked == (Blocked(0, 0, (Kind.F, 0, 0)), Blocked(1, 0, (Kind.F, 0, 0)))


def test_of_an_action_that_a_measured_order_has_twice_the_first_run_counts() -> None:
    plan = from_rows([["0F0", "0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], "custom")
    ranks = replay(plan, lambda _rank, _action: 10).ranks
    assert ranks[1][0].start == 10
    assert ranks[0][2].start == 30


def test_tables_of_other_sizes_are_refused() -> None:
    table = build("1f1b", 2, 2).table
    with pytest.raises(ValueError, match=r"durations have shape \(3,\); expected \(…, 8\), one per row of the table"):
        replay_table(table, [1, 2, 3])
    with pytest.raises(ValueError, match=r"latencies have shape \(5,\); expected \(…, 4\), one per message"):
        replay_table(table, [1] * 8, [1] * 5)
    with pytest.raises(TypeError):
        replay_table(table, [0.5] * 8)


def test_actions_that_never_run_have_no_times() -> None:
    table = from_rows([["0F0", "0B0"], ["1B0", "1F0"]], "custom").table
    one = replay_table(table, [[5] * 4] * 2)
    assert one.start.tolist() == [[0, -1, -1, -1]] * 2
    assert one.end.tolist() == [[5, -1, -1, -1]] * 2
    assert makespans(table, [5] * 4) == 5
    assert makespans(from_rows([["0B0", "0F0"]], "custom").table, [5, 5]) == 0


def test_an_action_on_a_rank_that_is_not_that_of_its_stage_waits_all_the_same() -> None:
    forwards = [Action(Kind.F, stage, 0) for stage in range(3)]
    plan = Plan("misplaced", 1, (0, 0, 0), ((forwards[0], forwards[2]), (forwards[1],)))
    assert replay_table(plan.table, [5, 5, 5]).start.tolist() == [0, 10, 5]


def test_a_replay_takes_a_tick_an_action_and_no_time_for_messages_unless_it_is_told_otherwise() -> None:
    """One microbatch over two ranks: four actions in a row, and two messages."""
    plan = build("1f1b", 2, 1)
    assert replay(plan).makespan == 4
    assert replay(plan, latency=5).makespan == 14
    assert replay(plan, lambda rank, action: 10 * rank + 1).makespan == 2 * 1 + 2 * 11


@given(plans(), st.randoms(use_true_random=False))
def test_a_step_begins_and_ends_on_the_ranks_at_the_ends_of_its_plan(plan: Plan, draws: random.Random) -> None:
    compute = plan.compute_only()
    spans = replay_events(compute, lambda _rank, _action: draws.randrange(1, 100), lambda *_: draws.randrange(1, 20))
    ends = ranks_at_ends(compute)
    first = min(row[0][0] for row in spans)
    assert all(rank in ends for rank, row in enumerate(spans) if row[0][0] == first)
    assert all(rank in ends for rank, row in enumerate(spans) if row[-1][1] == max(row[-1][1] for row in spans))
