"""Windows of a rank cut at its ops, nanosecond by nanosecond; rows and matrices of some windows alone."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
from msgspec.structs import replace

from pptrace.analysis.explain.step_times import (
    _collections,
    _cut,
    _starved_between,
    before_ops,
)
from pptrace.intervals import EMPTY, Int64, union
from pptrace.model.device import IdleTime
from pptrace.model.tables import GARBAGE_COLLECTION
from pptrace.schedule.plan_table import NONE
from pptrace.slices import Slice
from pptrace.timeline.lanes import Lane

SEEDS = range(80)


def random_set(rng: random.Random) -> set[int]:
    begins = [100 * window + rng.randint(0, 40) for window in range(3) for _ in range(4)]
    return {at for begin in begins for at in range(begin, begin + rng.randint(0, 6))}


def covered(times: set[int]) -> Int64:
    return union(sorted(times), [at + 1 for at in sorted(times)])


def idle_of(starved: set[int], unknown: set[int]) -> IdleTime:
    return IdleTime(launch_starved=covered(starved), unknown=covered(unknown))


def random_ops(rng: random.Random) -> Slice:
    rows = []
    for window in range(3):
        at = 100 * window + rng.randint(0, 5)
        for row in range(rng.randint(0, 5)):
            at += rng.choice((0, rng.randint(0, 7)))
            length = rng.randint(0, 9)
            rows.append((window, 10 * window + row, at, at + length))
            at += max(0, length - rng.choice((0, 0, 3)))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return Slice(dict(zip(("window", "row", "start_ns", "end_ns"), columns, strict=True)))


def test_a_window_is_cut_at_its_ops_and_what_is_neither_compute_nor_exposed_is_bubble() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        ops, compute, exposed, unknown = random_ops(rng), random_set(rng), random_set(rng), random_set(rng)
        lane = Lane(covered(compute), EMPTY, covered(exposed), EMPTY, EMPTY, True, idle_of(set(), unknown))
        begin = np.array([100 * window - rng.randint(0, 3) for window in range(3)])
        finish = begin + 60
        found, tails = _cut(lane, begin, finish, ops["window"], ops["row"], ops)
        assert list(found["window"]) == list(ops["window"])
        of_tails = []
        for window in range(3):
            rows = np.flatnonzero(ops["window"] == window).tolist()
            busy_until, before = int(begin[window]), NONE
            for row in rows:
                start, end = int(ops["start_ns"][row]), int(ops["end_ns"][row])
                gap = set(range(min(busy_until, start), start))
                inside = set(range(max(start, busy_until), max(end, busy_until)))
                assert (found["start"][row], found["end"][row]) == (start, end)
                assert found["before"][row] == before
                assert found["gap_exposed"][row] == len(gap & exposed)
                assert found["gap_bubble"][row] == len(gap - compute - exposed)
                assert found["inner_bubble"][row] == len(inside - compute - exposed), seed
                busy_until, before = max(busy_until, end), int(ops["row"][row])
            if rows:
                of_tail, whole = set(range(busy_until, int(finish[window]))), set(range(begin[window], finish[window]))
                of_tails.append((window, before, len(of_tail - compute - exposed), not whole & unknown))
        names = ("window", "row", "bubble", "knows_host")
        assert list(zip(*(tails[name].tolist() for name in names), strict=True)) == of_tails
        _, unknown_tails = _cut(replace(lane, idle=None), begin, finish, ops["window"], ops["row"], ops)
        assert not unknown_tails["knows_host"].any()


def test_hosts_starve_devices_between_ops_and_collections_count_where_they_do() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        ops, starved = random_ops(rng), random_set(rng)
        lane = Lane(EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, True, idle_of(starved, set()))
        inside = {at for begin, end in zip(ops["start_ns"], ops["end_ns"], strict=True) for at in range(begin, end)}
        between = starved - inside if len(ops) else set()
        assert _starved_between(lane, ops).tolist() == covered(between).tolist()
        assert not len(_starved_between(replace(lane, idle=None), ops))
        spans = Slice(
            {
                **ops.columns,
                "kind": np.array(
                    [rng.choice((GARBAGE_COLLECTION, "OPTIMIZER")) for _ in range(len(ops))], dtype=object
                ),
            }
        )
        chosen = spans["kind"] == GARBAGE_COLLECTION
        collecting = union(ops["start_ns"][chosen], ops["end_ns"][chosen])
        moments = {at for begin, end in collecting.tolist() for at in range(begin, end)}
        assert _collections(spans, lane).tolist() == covered(moments & starved).tolist()
        assert not len(_collections(spans, replace(lane, idle=None)))
        assert _collections(spans, replace(lane, on_device=False)).tolist() == collecting.tolist()


def test_what_lies_between_when_ops_could_have_run_and_their_starts() -> None:
    rng = random.Random(2)
    for _ in range(20):
        sets = [random_set(rng) for _ in range(2)]  # of two ranks, with a row each
        windows, starts = (
            np.arange(3),
            np.array([[100 * window + rng.randint(10, 40) for _ in "ab"] for window in range(3)]),
        )
        ops = [
            Slice({"window": windows, "row": np.full(3, rank), "start": starts[:, rank], "end": starts[:, rank] + 1})
            for rank in range(2)
        ]
        is_whole = np.array([rng.random() < 0.7 for _ in windows])
        kept = np.flatnonzero(is_whole)
        ready = starts[kept] - np.array([[rng.randint(0, 12) for _ in "ab"] for _ in kept]).reshape(-1, 2)
        ranks = [SimpleNamespace(ops=of, exposed=covered(moments)) for of, moments in zip(ops, sets, strict=True)]
        found = before_ops(ranks, "exposed", is_whole, ready)
        for number, window in enumerate(kept.tolist()):
            for rank, moments in enumerate(sets):
                between = range(int(ready[number, rank]), int(starts[window, rank]))
                assert found[number, rank] == len(moments & set(between))
