"""Costs of causes op by op, where causes are, and what is most to blame, counted one by one."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from pptrace.analysis.explain.binding import bindings_of
from pptrace.analysis.explain.blame import Charges, charge_bubbles, typical_of
from pptrace.analysis.explain.causes import (
    HOST,
    INNER,
    MESSAGES,
    ROUTING,
    _lower_medians,
    _means_of_kinds,
    at_places,
    late_members,
    merged,
    part_of,
)
from pptrace.analysis.explain.explain import _blames, _most_blamed, _parts, axes_inside_ops
from pptrace.analysis.whole_run import Cause
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from pptrace.slices import Slice, group_medians
from pptrace.timeline.windows import StepWindow
from tests.analysis.explain.op_by_op import WINDOWS, costs_by_cause, random_times, random_waits
from tests.support.known import known

KINDS = [str(kind) for kind in Kind]


def test_on_a_rank_alone_a_step_takes_what_its_ops_take_with_the_causes_that_are_present() -> None:
    table = build("gpipe", 1, 3).table
    rng = np.random.default_rng(0)
    own, of_rank, of_stage, of_kind, inner, moving, host = rng.integers(1, 99, (7, 2, len(table)))
    levels, nothing, no_messages = (of_kind, of_stage, of_rank, own), np.zeros_like(own), np.zeros((2, 0), np.int64)
    costs = costs_by_cause(table, levels, inner, no_messages, moving, host, nothing)
    everything = frozenset(costs.players)
    assert everything == {"imbalance", "straggler", "jitter", MESSAGES, INNER, HOST}
    causes = {INNER: inner, HOST: host, MESSAGES: moving}
    for name, added in causes.items():
        assert costs.makespans(frozenset({name})).tolist() == (of_kind + added).sum(axis=1).tolist()
    assert costs.makespans(everything).tolist() == (own + inner + host + moving).sum(axis=1).tolist()
    assert costs.makespans(frozenset()).tolist() == of_kind.sum(axis=1).tolist()
    product = of_kind * (of_stage / of_kind) * (own / of_rank)
    some = frozenset({"imbalance", "jitter"})
    assert costs.makespans(some).tolist() == np.rint(product).sum(axis=1).astype(int).tolist()
    routed = costs_by_cause(table, levels, inner, no_messages, moving, host, moving)
    assert routed.makespans(everything | {ROUTING}).tolist() == (own + inner + host + 2 * moving).sum(axis=1).tolist()
    late = costs_by_cause(table, levels, inner, no_messages, moving, host, nothing, late=own)
    assert late.makespans(everything).tolist() == (2 * own + inner + host + moving).sum(axis=1).tolist()
    alone = costs_by_cause(table, levels, nothing, no_messages, moving, nothing, nothing)
    assert alone.players == ("imbalance", "straggler", "jitter", MESSAGES)
    assert costs_by_cause(table, (own,) * 4, nothing, no_messages, nothing, host, nothing).players == (HOST,)
    free = costs_by_cause(
        table, (own, own, own * (np.arange(len(table)) > 0), own), nothing, no_messages, *[nothing] * 3
    )
    assert free.makespans(frozenset({"straggler"})).tolist() == own[:, 1:].sum(axis=1).tolist()


def test_messages_of_which_nothing_is_moved_are_a_cause_by_their_transfers() -> None:
    table = build("gpipe", 2, 2).table
    own = np.ones((1, len(table)), dtype=np.int64)
    nothing, transfers = np.zeros_like(own), np.ones((1, table.num_messages), dtype=np.int64)
    assert costs_by_cause(table, (own,) * 4, nothing, transfers, *[nothing] * 3).players == (MESSAGES,)
    assert not costs_by_cause(table, (own,) * 4, nothing, -transfers, *[nothing] * 3).players, (
        "their ends did not match"
    )


def test_usual_costs_are_lower_medians_of_replicas_and_means_of_kinds() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        times = random_times(rng)
        table = times.table
        step = np.array([[0, 0, 0], [0, 0, 1], [0, 1, 1]][seed % 3])
        key, of_row = np.unique(table.kind.astype(np.int64) * table.num_stages + table.stage, return_inverse=True)
        medians = group_medians(times.computing, of_row, len(key))
        usual = _lower_medians(medians, step)
        for window in range(WINDOWS):
            replicas = np.flatnonzero(step == step[window]).tolist()
            for cell in range(len(key)):
                ordered = sorted(medians[at, cell] for at in replicas)
                assert usual[window, cell] == ordered[(len(replicas) - 1) // 2]
        means = _means_of_kinds(usual, key // table.num_stages, of_row)
        for window in range(WINDOWS):
            for kind in np.unique(table.kind).tolist():
                rows = np.flatnonzero(table.kind == kind)
                mean = Fraction(sum(int(usual[window, of_row[row]]) for row in rows), len(rows))
                assert all(abs(int(means[window, row]) - mean) <= 0.5 for row in rows)


def test_a_cause_is_at_places_of_a_twentieth_of_it_at_least() -> None:
    places = {("rank", 0): 95, ("rank", 3): 5}
    assert at_places("jitter", 1000, places) == [Cause("jitter", {"rank": 0}, 950), Cause("jitter", {"rank": 3}, 50)]
    small = {("rank", 0): 96, ("rank", 3): 4}
    assert at_places("waiting", 1000, small) == [Cause("jitter", {"rank": 0}, 1000)]
    assert at_places("pp", 7, {}) == [Cause("communication", {}, 7)]
    assert at_places("inner", 7, {("axis", "tp"): 0}) == [Cause("communication", {}, 7)]
    assert at_places("host", 7, {("rank", 1): 1, ("rank", 2): 1, ("rank", 3): 1}) == [
        Cause("host", {"rank": 1}, 3),
        Cause("host", {"rank": 2}, 2),
        Cause("host", {"rank": 3}, 2),
    ]


def test_causes_of_one_name_at_one_place_are_one() -> None:
    causes = [Cause("a", {"rank": 1}, 3), Cause("a", {"rank": 2}, 4), Cause("b", {}, 1), Cause("a", {"rank": 1}, -1)]
    assert merged(causes) == [Cause("a", {"rank": 1}, 2), Cause("a", {"rank": 2}, 4), Cause("b", {}, 1)]


def test_a_part_of_nothing_is_nothing() -> None:
    columns = (np.array(column) for column in ([10, 10, 9, 9], [3, 0, 2, 1], [4, 0, 3, 1]))
    assert part_of(*columns).tolist() == [7, 0, 6, 9]


def test_waits_of_a_window_are_for_the_ranks_of_those_that_came_last_as_far_as_they_are_slower_for_that() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        times = random_times(rng)
        waits = random_waits(rng, times)
        excess = np.array([[rng.choice((0, 5, 10**6)) for _ in range(times.table.pp)] for _ in range(WINDOWS)])
        of_ranks = late_members(waits, excess, times)
        for window in range(WINDOWS):
            late: Counter[tuple[int, int]] = Counter()
            for index in np.flatnonzero(waits.step == window).tolist():
                late[waits.late_step[index], times.table.rank[waits.late_row[index]]] += int(waits.ns[index])
            slower: Counter[tuple[str, int | str]] = Counter()
            rest: Counter[tuple[str, int | str]] = Counter()
            for (step, place), ns in late.items():
                at = "rank", times.windows[step].ranks[place]
                slower[at] += min(ns, excess[step, place])
                rest[at] += max(ns - excess[step, place], 0)
            assert of_ranks[window] == (slower, rest)


def test_axes_inside_ops_are_those_of_communication_without_a_microbatch() -> None:
    """Of steps: not what was launched before the recording."""
    rows = [
        ("tp", "all_reduce", 0, -1, 10, 17),
        ("tp", "all_reduce", 0, 2, 10, 90),
        ("pp", "send", 0, -1, 0, 50),
        ("pp", "all_reduce", 0, -1, 0, 50),
        ("cp", "send", 1, -1, 5, 8),
        ("tp", "all_gather", 1, -1, 20, 21),
        ("unknown", "all_gather", -1, -1, 20, 25),
    ]
    names = ("axis", "kind", "step", "microbatch", "start_ns", "end_ns")
    columns = zip(names, zip(*rows, strict=True), strict=True)
    comms = Slice(
        {name: np.array(values, dtype=object if name in ("axis", "kind") else np.int64) for name, values in columns}
    )
    assert axes_inside_ops(comms) == {"tp": 8, "cp": 3}
    assert axes_inside_ops(comms.where(comms["axis"] == "pp")) == {}


@pytest.mark.parametrize(
    ("sizes", "cells", "expected"),
    [
        ([2, 2, 2, 2], 48, [(0, 2), (2, 4)]),
        ([2, 2, 2, 2], 47, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([5, 1, 1, 0, 3], 36, [(0, 1), (1, 4), (4, 5)]),
        ([0, 0, 3], 12, [(0, 3)]),
        ([1, 1], 0, [(0, 1), (1, 2)]),
        ([0], 12, []),
        ([], 12, []),
    ],
)
def test_parts_of_steps_have_no_more_cells_unless_a_step_has(
    sizes: list[int], cells: int, expected: list[tuple[int, int]]
) -> None:
    table = build("1f1b", 2, 3).table
    assert len(table) == 12
    steps = [[StepWindow(step, (0, 1), 0, 1)] * size for step, size in enumerate(sizes)]
    assert list(_parts(table, steps, cells)) == expected


def test_blame_sums_charges_by_rank_stage_and_kind_and_gives_hosts_their_part() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        times = random_times(rng)
        table, waits, bindings = times.table, random_waits(rng, times), bindings_of(times)
        host_before = np.array([[rng.randint(0, 12) for _ in range(len(table))] for _ in range(WINDOWS)])
        charges = charge_bubbles(times, bindings, typical_of(times, bindings, waits), waits)
        blames = _blames(times, bindings, waits, np.array([0, 0, 2]), [2, 1, 1], host_before)
        assert blames[1] is None
        for number, windows in ((0, [0, 1]), (2, [2])):
            blame = known(blames[number])
            by_rank: Counter[int] = Counter()
            by_stage: Counter[int] = Counter()
            by_kind: Counter[str] = Counter(
                {name: 0 for name, kind in zip(KINDS, Kind, strict=True) if kind.code in table.kind}
            )
            by_kind.update({"transfer": 0, "idle": 0, "wait": 0, "host": 0})
            for window in windows:
                for row in range(len(table)):
                    work, transfer, idle, inner = (
                        int(getattr(charges, name)[window, row]) for name in ("work", "transfer", "idle", "inner")
                    )
                    by_rank[times.windows[window].ranks[table.rank[row]]] += work + transfer + idle + inner
                    by_stage[int(table.stage[row])] += work + transfer + idle + inner
                    length = int(times.start[window, row] - bindings.ready[window, row] - bindings.moving[window, row])
                    of_host = idle * min(int(host_before[window, row]), length) // max(length, 1)
                    inside = min(int(times.host[window, row]), inner)
                    by_kind[KINDS[table.kind[row]]] += work
                    by_kind["transfer"] += transfer
                    by_kind["idle"] += idle - of_host
                    by_kind["wait"] += inner - inside
                    by_kind["host"] += of_host + inside
                    if not times.knows_host[windows].all():
                        by_kind["idle"] += of_host
                        by_kind["wait"] += inside
            if not times.knows_host[windows].all():
                del by_kind["host"]
            assert sum(blame.by_kind.values()) == blame.total_ns
            assert blame.by_rank == {rank: by_rank[rank] for window in windows for rank in times.windows[window].ranks}
            assert blame.by_stage == {stage: by_stage[stage] for stage in range(table.num_stages)}
            assert blame.by_kind == dict(by_kind)
            assert blame.total_ns == by_rank.total()
            assert blame.ops == _most_blamed(charges, times, np.array(windows))


def test_the_ten_ops_with_the_largest_charges_are_named() -> None:
    times = random_times(random.Random(2))
    table = times.table
    rng = random.Random(9)
    work = np.array([[rng.randint(1, 10**6) for _ in range(len(table))] for _ in range(WINDOWS)])
    nothing = np.zeros_like(work)
    windows = np.array([2, 0])
    ops = _most_blamed(Charges(work, nothing, nothing, nothing), times, windows)
    cells = sorted(
        ((int(work[window, row]), window, row) for window in (0, 2) for row in range(len(table))), reverse=True
    )
    assert [op.ns for op in ops] == [ns for ns, *_ in cells[:10]]
    for op, (_, window, row) in zip(ops, cells, strict=False):
        where = (
            times.windows[window].ranks[table.rank[row]],
            KINDS[table.kind[row]],
            table.stage[row],
            table.microbatch[row],
        )
        assert (op.rank, op.kind, op.stage, op.microbatch) == where
    few = nothing.copy()
    few[0, 1] = 5
    (only,) = _most_blamed(Charges(few, nothing, nothing, nothing), times, windows)
    assert (only.ns, only.microbatch) == (5, table.microbatch[1])
