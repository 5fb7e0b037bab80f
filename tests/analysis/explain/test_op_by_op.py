"""Bindings, critical paths and charges of many steps at once are those found op by op, to the nanosecond."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pptrace.analysis.explain.blame import charge_bubbles, part_of, typical_of
from pptrace.analysis.explain.critical_path import bindings_of, critical_paths
from pptrace.analysis.explain.explain import _blames
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan_table import NONE
from tests.analysis.explain.op_by_op import (
    WINDOWS,
    bound_ops,
    charged,
    held_by_starts,
    hops_back,
    random_times,
    random_waits,
)
from tests.support.extent import ALL

SEEDS = range(400 if ALL else 60)


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
    for seed in range(150):
        times = random_times(random.Random(seed))
        bindings, expected = bindings_of(times), np.zeros((2, *times.start.shape), dtype=np.int64)
        for (step, row), entry in held_by_starts(times, bound_ops(times)).items():
            expected[:, step, row] = entry
        assert (bindings.held.tolist(), bindings.held_by.tolist()) == tuple(expected.tolist()), seed
        num_held += int((bindings.held > 0).sum())
    assert num_held > 4


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


@given(*[st.integers(0, 10**14)] * 3)
@example(22, 15, 22)  # 22 · (15 / 22) is less than 15 in floating point
@example(7, 0, 0)
def test_a_part_of_an_amount_is_rounded_down_however_large_it_is(amount: int, part: int, whole: int) -> None:
    columns = (np.array([value], dtype=np.int64) for value in (amount, part, whole))
    assert part_of(*columns).tolist() == [amount if part >= whole else amount * part // whole]


def test_of_idle_time_and_waits_that_are_blamed_hosts_have_the_part_in_which_they_were_late() -> None:
    num_of_hosts = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        times = random_times(rng)
        bindings, waits = bindings_of(times), random_waits(rng, times)
        before = np.array([[rng.randint(0, 15) for _ in range(len(times.table))] for _ in range(WINDOWS)])
        charges = charge_bubbles(times, bindings, typical_of(times, bindings, waits), waits)
        for step, blame in enumerate(_blames(times, bindings, waits, np.arange(WINDOWS), [1] * WINDOWS, before)):
            expected = {name: int(charges[name][step].sum()) for name in ("transfer", "idle", "wait")}
            hosts = 0
            for row in range(len(times.table)) if times.knows_host[step] else ():
                here = step, row
                idle = int(times.start[here] - bindings.ready[here] - bindings.moving[here])
                late = int(charges["idle"][here]) * min(int(before[here]), idle) // max(idle, 1)
                inside = min(int(times.host[here]), int(charges["wait"][here]))
                expected["idle"], expected["wait"] = expected["idle"] - late, expected["wait"] - inside
                hosts += late + inside
            expected |= {"host": hosts} if times.knows_host[step] else {}
            assert {name: ns for name, ns in blame.by_kind.items() if name in (*expected, "host")} == expected, seed
            num_of_hosts += hosts > 0
    assert num_of_hosts > 4


def test_bubbles_are_charged_as_one_by_one() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        times = random_times(rng)
        waits = random_waits(rng, times)
        bindings = bindings_of(times)
        typical = typical_of(times, bindings, waits)
        charges = charge_bubbles(times, bindings, typical, waits)
        expected = charged(times, bindings, typical, waits)
        for name, charge in charges.items():
            assert charge.tolist() == expected[name].tolist(), (seed, name)
