"""Windows of a rank cut at its ops, nanosecond by nanosecond; rows and matrices of some windows alone."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from pptrace.analysis.explain.binding import bindings_of
from pptrace.analysis.explain.measured import moved_together_of, receiving_of
from pptrace.analysis.explain.step_times import (
    UNKNOWN,
    RankTimes,
    StepTimes,
    _collections,
    _cut,
    _starved_between,
    before_ops,
    planned_rows,
    rows_in_steps,
)
from pptrace.intervals import EMPTY, Int64, union
from pptrace.model.device_idle import IdleTime
from pptrace.model.tables import GARBAGE_COLLECTION
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan_table import NONE
from pptrace.schedule.registry import build
from pptrace.slices import Slice
from pptrace.timeline.lanes import Lane
from tests.analysis.explain.op_by_op import WINDOWS, random_times
from tests.support.replayed_times import replayed_times

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


def test_rows_of_some_steps_get_the_index_of_their_step() -> None:
    rng = random.Random(0)
    for _ in range(100):
        present = sorted(rng.choices(range(12), k=rng.randint(0, 20)))
        steps = rng.sample(range(12), rng.randint(1, 6))
        indices = np.array(rng.sample(range(50), len(steps)))
        rows = Slice({"step": np.array(present, dtype=np.int64), "at": np.arange(len(present))})
        found, index = rows_in_steps(rows, np.array(steps), indices)
        chosen = [at for at, step in enumerate(present) if step in steps]
        assert found["at"].tolist() == chosen
        assert index.tolist() == [indices[steps.index(present[at])] for at in chosen]


def test_the_row_of_an_op_is_that_of_its_kind_stage_and_microbatch() -> None:
    for name in ("zb-h1", "dualpipe"):
        table = build(name, 2, 4).table
        actions = {
            (int(kind), int(stage), int(microbatch)): row
            for row, (kind, stage, microbatch) in enumerate(zip(table.kind, table.stage, table.microbatch, strict=True))
        }
        keys = [(kind, stage, microbatch) for kind in Kind for stage in range(-1, 3) for microbatch in range(-1, 5)]
        columns = {
            "kind": np.array([str(kind) for kind, *_ in keys], dtype=object),
            "stage": np.array([stage for _, stage, _ in keys]),
            "microbatch": np.array([microbatch for *_, microbatch in keys]),
        }
        expected = [actions.get((kind.code, stage, microbatch), NONE) for kind, stage, microbatch in keys]
        assert planned_rows(table, Slice(columns)).tolist() == expected


def test_the_whole_windows_are_the_rows_of_those_that_have_every_op() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        times = random_times(rng)
        assert times.whole() is times
        is_whole = np.array([rng.random() < 0.6 for _ in range(WINDOWS)])
        if is_whole.all():
            continue
        whole = replace(times, is_whole=is_whole).whole()
        kept = np.flatnonzero(is_whole).tolist()
        assert whole.windows == tuple(times.windows[window] for window in kept)
        for name in ("start", "end", "arrival", "transfer", "tail_bubble", "knows_host", "before"):
            assert getattr(whole, name).tolist() == getattr(times, name)[kept].tolist()
        assert whole.is_whole.tolist() == [True] * len(kept)
        waits = [
            (kept.index(step), rank, freed, peer, ready)
            for step, rank, freed, peer, ready in zip(*waits_of(times), strict=True)
            if step in kept
        ]
        assert list(zip(*waits_of(whole), strict=True)) == waits
        assert whole.begin.tolist() == [times.windows[window].start_ns for window in kept]
        assert whole.finish.tolist() == [times.windows[window].end_ns for window in kept]


def test_what_messages_cost_by_the_trace_alone_is_kept_where_it_differs() -> None:
    for seed in range(20):
        times = random_times(random.Random(seed))
        found = moved_together_of(times)
        expected = [
            (window, message, times.recorded[window, message])
            for window, message in np.ndindex(times.arrival.shape)
            if times.arrival[window, message] != UNKNOWN
            if times.recorded[window, message] != times.transfer[window, message]
        ]
        assert list(zip(found["window"], found["message"], found["ns"], strict=True)) == expected


def test_a_kernel_still_receives_from_when_all_that_it_carries_had_been_sent_to_its_end() -> None:
    num_waits = 0
    for seed in range(80):
        times = random_times(random.Random(seed))
        bindings, table = bindings_of(times), times.table
        expected = []
        for window, row in np.ndindex(times.start.shape):
            could_run = int(bindings.ready[window, row] + bindings.moving[window, row])
            begin, longest = int(times.start[window, row]), 0
            for entry in np.flatnonzero(table.dep_is_message & (table.dep_reader == row)).tolist():
                sent, received = (int(of[window, table.dep_message[entry]]) for of in (times.sent, times.received))
                longest = max(longest, min(received, begin) - max(sent, could_run))
            if longest:
                expected.append((window, row, longest))
        found = receiving_of(times, bindings)
        assert list(zip(found["window"], found["row"], found["ns"], strict=True)) == expected
        num_waits += len(expected)
    assert num_waits > 40


def waits_of(times: StepTimes) -> list[list[int]]:
    return [getattr(times.waits, name).tolist() for name in ("step", "rank", "freed", "peer", "ready")]


def test_the_times_of_some_windows_are_those_rows_numbered_from_the_first_of_them() -> None:
    rng = random.Random(1)
    for _ in range(20):
        parts = []
        for number in range(7):
            window = np.array(sorted(rng.choices(range(6), k=rng.randint(0, 9))), dtype=np.int64)
            parts.append(Slice({"window": window, "at": 100 * number + np.arange(len(window))}))
        sets = [covered(random_set(rng)) for _ in range(3)]
        ops, tails, messages, waits, inner, outside, calls = parts
        first = rng.randint(0, 4)
        last = rng.randint(first, 6)
        found = RankTimes(ops, tails, messages, waits, *sets, inner, outside, calls).of_windows(first, last)
        for before, after in zip(
            parts,
            (found.ops, found.tails, found.messages, found.waits, found.inner, found.outside, found.calls),
            strict=True,
        ):
            chosen = [
                (window - first, at)
                for window, at in zip(before["window"], before["at"], strict=True)
                if first <= window < last
            ]
            assert list(zip(after["window"], after["at"], strict=True)) == chosen
        assert [found.starved is sets[0], found.exposed is sets[1], found.collections is sets[2]] == [True] * 3


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
        found = before_ops(zip(ops, map(covered, sets), strict=True), ready, is_whole)
        for number, window in enumerate(kept.tolist()):
            for rank, moments in enumerate(sets):
                between = range(int(ready[number, rank]), int(starts[window, rank]))
                assert found[number, rank] == len(moments & set(between))


def test_nothing_lies_before_ops_of_a_rank_without_such_times() -> None:
    ops = Slice({"window": np.array([0]), "row": np.array([1]), "start": np.array([50])})
    assert before_ops([(ops, EMPTY)], np.array([[0, 10]]), np.array([True])).tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("on_device", "arrival", "is_known"), [(False, 7, True), (True, 7, False), (False, UNKNOWN, False)]
)
def test_lateness_is_known_of_windows_without_devices_whose_messages_all_are(
    on_device: bool, arrival: int, is_known: bool
) -> None:
    table = build("1f1b", 2, 2).table
    times = replayed_times(table, np.full((1, len(table)), 10))
    arrivals = times.arrival.copy()
    arrivals[0, -1] = arrival
    assert replace(times, on_device=np.array([on_device]), arrival=arrivals).knows_lateness.tolist() == [is_known]
