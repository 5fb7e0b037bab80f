"""Bindings, critical paths and charges of many steps at once are those found op by op, to the nanosecond."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pptrace.analysis.explain.binding import bindings_of
from pptrace.analysis.explain.blame import _part_of, charge_bubbles, typical_of
from pptrace.analysis.explain.critical_path import critical_paths
from pptrace.analysis.explain.explain import host_of_idle
from pptrace.analysis.explain.slack import _Edges, _least, _of_meetings, _RankOrder, meetings_of, slacks_of
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan_table import NONE
from pptrace.slices import Slice
from tests.analysis.explain.op_by_op import (
    WINDOWS,
    bound_ops,
    charged,
    held_by_starts,
    hops_back,
    random_times,
    random_waits,
    typical_by_op,
)
from tests.support.extent import ALL

SEEDS = range(400 if ALL else 60)
_OF_ENDS = ("window", "rank", "match", "ready", "asked", "done", "met_ns", "moved_ns")
_NOTHING = {name: np.empty(0, dtype=np.int64) for name in _OF_ENDS}
NO_MEETINGS = meetings_of(Slice(_NOTHING | {"is_send": np.empty(0, dtype=np.bool_)}))


@pytest.mark.parametrize("first", SEEDS[::20])
def test_each_op_is_bound_to_what_it_waited_for_last(first: int) -> None:
    for seed in range(first, first + 20):
        times = random_times(random.Random(seed))
        bindings = bindings_of(times)
        for cell, bound in bound_ops(times).items():
            found = (bindings.row[cell], bindings.ready[cell], bindings.is_message[cell], bindings.moving[cell])
            assert found == tuple(bound), (seed, cell)


def test_ranks_wait_for_those_that_have_run_nothing_yet() -> None:
    num_held = 0
    for seed in range(150 if ALL else 60):
        times = random_times(random.Random(seed))
        bindings, expected = bindings_of(times), np.zeros((2, *times.start.shape), dtype=np.int64)
        for (step, row), entry in held_by_starts(times, bound_ops(times)).items():
            expected[:, step, row] = entry
        assert (bindings.held.tolist(), bindings.held_by.tolist()) == tuple(expected.tolist()), seed
        num_held += int((bindings.held > 0).sum())
    assert num_held > 1


def test_the_parts_of_a_critical_path_are_those_of_its_hops() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        times = random_times(rng)
        table, bindings = times.table, bindings_of(times)
        host_before = np.array([[rng.randint(0, 15) for _ in range(len(table))] for _ in range(WINDOWS)])
        windows = np.array(rng.sample(range(WINDOWS), rng.randint(1, WINDOWS)))
        paths, on_path = critical_paths(times, bindings, windows, host_before)
        for number, step in enumerate(windows.tolist()):
            last = int(times.end[step].argmax())
            work = {last: int(times.durations[step, last])}
            parts = dict.fromkeys((str(kind) for kind in Kind if kind.code in table.kind), 0)
            parts |= dict.fromkeys(("transfer", "idle", "host"), 0)
            by_stage = dict.fromkeys(range(table.num_stages), 0)
            for hop in hops_back(times, bindings, step, last):
                of_host = min(int(host_before[step, hop.row]), hop.idle)
                parts["host"] += of_host
                parts["idle"] += hop.idle - of_host
                parts["transfer"] += hop.transfer
                by_stage[int(table.stage[hop.row])] += hop.idle
                by_stage[int(table.stage[max(hop.source, 0)])] += hop.transfer
                if hop.source != NONE:
                    work[hop.source] = work.get(hop.source, 0) + hop.work
            for row, ns in work.items():
                by_stage[int(table.stage[row])] += ns
                inside = min(int(times.host[step, row]), ns)
                parts["host"] += inside
                parts[str(list(Kind)[table.kind[row]])] += ns - inside
            assert {row: ns for row, ns in enumerate(on_path[number].tolist()) if ns} == {
                row: ns for row, ns in work.items() if ns
            }
            hosts = sum(path.parts.get("host", 0) for path in paths)
            if not hosts and not times.knows_host[windows].any():
                del parts["host"]
            assert paths[number].parts == parts
            assert paths[number].by_stage == by_stage
            assert paths[number].span_ns == times.windows[step].end_ns - times.windows[step].start_ns


def test_what_is_usual_is_the_median_of_ops_alike_and_the_plans_bubbles_are_those_of_its_replay() -> None:
    for seed in SEEDS[::2]:
        rng = random.Random(seed)
        times = random_times(rng)
        table, waits, bindings = times.table, random_waits(rng, times), bindings_of(times)
        typical = typical_of(times, bindings, waits)
        expected = typical_by_op(times, bindings, waits.sums(times.start.shape))
        for name, of_ops in expected.items():
            assert getattr(typical, name).tolist() == of_ops.tolist(), name
        for step in range(WINDOWS):
            work, reading = ((expected["work"] + expected["held"])[step], expected["transfer"][step])
            end: dict[int, int] = {}
            for row in table.order.tolist():
                needs = [end[row - 1]] if table.position[row] else [0]
                needs += [
                    end[int(table.dep[entry])] + int(reading[row]) * int(table.dep_is_message[entry])
                    for entry in range(*table.dep_ptr[row : row + 2])
                ]
                assert typical.gap[step, row] == max(needs) - needs[0]
                end[row] = max(needs) + int(work[row])
            lasts = [end[int(row) - 1] for row in table.rank_ptr[1:]]
            assert typical.tail[step].tolist() == [max(lasts) - last for last in lasts]


@given(*[st.integers(0, 10**14)] * 3)
@example(22, 15, 22)  # 22 · (15 / 22) is less than 15 in floating point
@example(7, 0, 0)
def test_a_part_of_an_amount_is_rounded_down_however_large_it_is(amount: int, part: int, whole: int) -> None:
    columns = (np.array([value], dtype=np.int64) for value in (amount, part, whole))
    assert _part_of(*columns).tolist() == [amount if part >= whole else amount * part // whole]


def test_bubbles_are_charged_as_one_by_one() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        times = random_times(rng)
        waits = random_waits(rng, times)
        bindings = bindings_of(times)
        typical = typical_of(times, bindings, waits)
        charges = charge_bubbles(times, bindings, typical, waits)
        expected = charged(times, bindings, typical, waits)
        for name in ("work", "transfer", "idle", "inner"):
            assert getattr(charges, name).tolist() == expected[name].tolist(), (seed, name)


def test_the_hosts_part_of_what_is_charged_to_idle_times_is_in_proportion() -> None:
    charges, idle, host = (
        np.array(column) for column in ([0, 7, 7, 9, 5, 3], [0, 10, 10, 4, 8, 0], [3, 5, 0, 9, 3, 2])
    )
    assert host_of_idle(charges, idle, host).tolist() == [0, 3, 0, 9, 1, 0]


def test_ops_on_the_path_are_those_that_the_walk_back_passes() -> None:
    for seed in SEEDS:
        times = random_times(random.Random(seed))
        bindings = bindings_of(times)
        found = slacks_of(times, bindings, NO_MEETINGS).on_path
        for step in range(WINDOWS):
            last = int(times.end[step].argmax())
            passed = {last} | {hop.source for hop in hops_back(times, bindings, step, last)}
            assert set(np.flatnonzero(found[step]).tolist()) == passed - {NONE}


def test_ops_before_and_after_a_message_are_those_that_a_search_finds() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        times = random_times(rng)
        order, table = _RankOrder.of(times), times.table
        window, rank = (np.array([rng.randrange(most) for _ in range(40)]) for most in (WINDOWS, table.pp))
        at = np.array([rng.randint(*(int(part[step]) for part in (times.begin, times.finish))) for step in window])
        done = at + np.array([rng.choice((0, rng.randint(0, 30))) for _ in at])
        ended, held = order.last_ended(window, rank, at), order.held_up(window, rank, at, done)
        for index in range(len(at)):
            step = window[index]
            rows = range(*table.rank_ptr[rank[index] : rank[index] + 2])
            over = [row for row in rows if times.end[step, row] <= at[index]]
            after = [row for row in rows if times.start[step, row] >= done[index]]
            is_idle = len(over) + len(after) == len(rows)
            assert ended[index] == (step * len(table) + over[-1] if over else NONE)
            assert held[index] == (step * len(table) + after[0] if after and is_idle else NONE), seed


def test_ops_held_by_a_message_depend_on_what_came_before_it_on_both_of_its_ranks() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        times = random_times(rng)
        table, bindings, rows = times.table, bindings_of(times), []
        for _ in range(12):
            step = rng.randrange(WINDOWS)
            window = times.windows[step]
            side = [
                (rng.randrange(table.pp), *sorted(rng.randint(window.start_ns, window.end_ns) for _ in range(3)))
                for _ in range(2)
            ]
            met = max(ready for _, ready, *_ in side)
            rows.append((step, met, *side[0], met + rng.randint(0, 9), *side[1], met + rng.randint(0, 9)))
        names = [
            f"{side}_{name}" for side in ("send", "recv") for name in ("rank", "ready", "asked", "done", "moved_ns")
        ]
        meetings = Slice(dict(zip(("window", "met_ns", *names), np.array(rows).T, strict=True)))
        order = _RankOrder.of(times)
        needed = bindings.ready.ravel().tolist()
        held = []
        for row in range(len(meetings)):
            one = {name: meetings[name][row : row + 1] for name in meetings.columns}
            for side_ in ("send", "recv"):
                reader = int(
                    order.held_up(one["window"], *(one[f"{side_}_{name}"] for name in ("rank", "asked", "done")))[0]
                )
                met, asked, done = (int(one[name][0]) for name in ("met_ns", f"{side_}_asked", f"{side_}_done"))
                has_waited = met - done <= done - asked and int(times.start.ravel()[reader]) >= met
                if reader != NONE and has_waited:
                    at = int(one[f"{side_}_moved_ns"][0])
                    needed[reader] = max(needed[reader], at)
                    held.append((reader, at, one))
        expected = []
        for reader, at, one in held:
            for side_ in ("send", "recv"):
                ready = one[f"{side_}_ready"]
                source = int(order.last_ended(one["window"], one[f"{side_}_rank"], ready)[0])
                if source != NONE:
                    expected.append((source, reader, int(one["met_ns"][0] - ready[0]) + needed[reader] - at))
        edges = _of_meetings(times, bindings, meetings)
        columns = (edges.source, edges.reader, edges.slack)
        assert sorted(zip(*(column.tolist() for column in columns), strict=True)) == sorted(expected)


def test_the_least_slack_is_that_of_the_shortest_way_to_an_end() -> None:
    rng = random.Random(3)
    for _ in range(200):
        size = rng.randint(2, 9)
        edges = [(*sorted(rng.sample(range(size), 2)), rng.randint(0, 20)) for _ in range(rng.randint(0, 3 * size))]
        own = [rng.randint(0, 60) for _ in range(size)]
        expected = own.copy()
        for source, reader, slack in sorted(edges, key=lambda edge: -edge[0]):
            expected[source] = min(expected[source], expected[reader] + slack)
        columns = np.array(edges, dtype=np.int64).reshape(-1, 3).T
        assert _least(_Edges(*columns), np.array(own)).tolist() == expected


def test_messages_of_which_both_ends_are_known_are_meetings() -> None:
    rng = random.Random(4)
    columns = ("window", "match", "is_send", "rank", "ready", "asked", "done", "met_ns", "moved_ns")
    for _ in range(50):
        ends = [
            {"window": window, "match": match, "is_send": is_send} | {name: rng.randint(0, 99) for name in columns[3:]}
            for window in range(2)
            for match in range(4)
            for is_send in (False, True)
            if rng.random() < 0.8
        ]
        rng.shuffle(ends)
        types: dict[str, Callable[[list[int]], np.ndarray]] = {
            "is_send": lambda values: np.array(values, dtype=np.bool_)
        }  # type: ignore[type-arg]
        sides = Slice(
            {
                name: types.get(name, lambda values: np.array(values, dtype=np.int64))([end[name] for end in ends])
                for name in columns
            }
        )
        by_key = {(end["window"], end["match"], end["is_send"]): end for end in ends}
        expected = [
            (
                window,
                by_key[window, match, False]["met_ns"],
                by_key[window, match, True]["ready"],
                by_key[window, match, False]["rank"],
            )
            for window in range(2)
            for match in range(4)
            if {(window, match, False), (window, match, True)} <= set(by_key)
        ]
        found = meetings_of(sides)
        names = ("window", "met_ns", "send_ready", "recv_rank")
        assert list(zip(*(found[name].tolist() for name in names), strict=True)) == expected
