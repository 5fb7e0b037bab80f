"""Work before and after the ops of a rank, item by item, on random times of a few microseconds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from pptrace.analysis.stragglers.outside import AFTER, AMONG, BEFORE, chains_of, outside_of
from pptrace.model.tables import MESSAGES
from pptrace.slices import Slice
from tests.support.tables import rows_of, slice_with

Row = dict[str, Any]
SEEDS = range(60)
WINDOWS = 3
OF_SPANS = ("window", "kind", "start_ns", "end_ns")
OF_COMMS = (*OF_SPANS, "axis", "match", "transfer_start_ns")


def random_rows(rng: random.Random, kinds: tuple[str, ...]) -> list[Row]:
    rows = []
    for window in range(WINDOWS):
        for _ in range(rng.randint(0, 6)):
            start = 10**6 * window + rng.choice((0, 50_000)) + rng.randint(0, 20_000)
            end = start + rng.randint(0, 9_000)
            begin = rng.randint(start, end)
            row = {
                "window": window,
                "kind": rng.choice(kinds),
                "start_ns": start,
                "end_ns": end,
                "axis": rng.choice(("dp", "tp")),
            }
            rows.append(row | {"match": rng.choice((-1, 3)), "transfer_start_ns": begin})
    return rows


def test_work_is_before_or_after_all_ops_of_a_window_and_ranges_that_say_what_hosts_do_among_them_too() -> None:
    num_found = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        ops = [
            {"window": window, "start": 10**6 * window + at, "end": 10**6 * window + at + rng.randint(0, 9_000)}
            for window in range(WINDOWS)
            for at in sorted(rng.randint(8_000, 60_000) for _ in range(rng.randint(1, 4)))
        ]
        spans = random_rows(rng, ("STEP", "EVAL", "OPTIMIZER", "GC", "DATA", "GRAD_SYNC"))
        comms = random_rows(rng, (*MESSAGES, "all_reduce", "all_gather"))
        expected = []
        for row in [*spans, *comms]:
            is_comm = any(row is other for other in comms)
            if row["kind"] in (*MESSAGES, "STEP"):
                continue
            of_window = [op for op in ops if op["window"] == row["window"]]
            first, last = min(op["start"] for op in of_window), max(op["end"] for op in of_window)
            middle = row["start_ns"] + (row["end_ns"] - row["start_ns"]) // 2
            is_before, is_after = middle <= first + 1_000, middle >= last - 1_000
            is_among = not is_before and not is_after
            if is_among != (row["kind"] == "EVAL") and not (is_among and row["kind"] in ("DATA", "GRAD_SYNC")):
                continue
            begun = max(row["start_ns"], last) if is_after else row["start_ns"]
            together = max(row["transfer_start_ns"] if is_comm else row["start_ns"], begun)
            expected.append(
                {
                    "window": row["window"],
                    "pp_rank": 2,
                    "side": AMONG if is_among else BEFORE if is_before else AFTER,
                    "name": f"{row['axis']} {row['kind']}" if is_comm else row["kind"],
                    "match": row["match"] if is_comm else -1,
                    "start": begun,
                    "end": max(row["end_ns"], begun),
                    "work": max(row["end_ns"] - together, 0),
                }
            )
        expected.sort(key=lambda row: (row["window"], row["start"]))
        of_spans, of_comms = slice_with(spans, OF_SPANS), slice_with(comms, OF_COMMS)
        of_ops = slice_with(ops, ("window", "start", "end"))
        found = outside_of((of_spans, of_spans["window"]), (of_comms, of_comms["window"]), (of_ops, WINDOWS), 2)
        assert rows_of(found) == expected, seed
        num_found += len(expected)
    assert num_found > 5 * len(SEEDS)


def random_work(rng: random.Random, steps: int, ranks: int) -> tuple[Slice, list[list[list[Row]]]]:
    """Work of ranks after their ops: each its own ranges between collectives of all, the same in every step."""
    plan = [rng.choice(("all", "own", "some")) for _ in range(rng.randint(1, 4))]
    members = [sorted(rng.sample(range(ranks), rng.randint(1, ranks))) for _ in plan]
    of_steps: list[list[list[Row]]] = []
    rows: list[Row] = []
    for step in range(steps):
        now = [rng.randint(0, 50) for _ in range(ranks)]
        items: list[list[Row]] = [[] for _ in range(ranks)]
        for number, what in enumerate(plan):
            of_item = range(ranks) if what == "all" else members[number]
            is_collective = what == "all"
            together = max(now[rank] for rank in of_item)
            for rank in of_item:
                start, work = now[rank], rng.randint(1, 30)
                begun = together if is_collective else start
                row = {
                    "window": 2 * step + rank // 2,
                    "pp_rank": rank % 2,
                    "rank": rank,
                    "side": AFTER,
                    "name": f"dp item{number}" if is_collective else f"ITEM{number}",
                    "match": 100 * step + number if is_collective else -1,
                    "start": start,
                    "end": begun + work,
                    "work": work,
                }
                rows.append(row)
                items[rank].append(row)
                now[rank] = begun + work
        of_steps.append(items)
    rng.shuffle(rows)
    return slice_with(rows, ("window", "pp_rank", "side", "name", "match", "start", "end", "work")), of_steps


def test_chains_end_when_one_item_after_the_other_does() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        steps, ranks = rng.randint(1, 3), 4
        table, of_steps = random_work(rng, steps, ranks)
        chains = chains_of(table, np.repeat(np.arange(steps) + 7, 2), 2, AFTER)
        if any("(all ranks)" in name for name in chains.name.tolist()):
            continue  # by chance the ranges of all ranks end together
        ready = np.array([[rng.randint(0, 90) for _ in range(ranks)] for _ in range(steps)])
        ends = chains.ends(ready, chains.work)
        for step, items in enumerate(of_steps):
            now = ready[step].tolist()
            names = sorted({row["name"] for of_rank in items for row in of_rank}, key=lambda name: int(name[-1]))
            for name in names:
                of_item = {row["rank"]: row for of_rank in items for row in of_rank if row["name"] == name}
                together = max(now[rank] for rank in of_item)
                for rank, row in of_item.items():
                    now[rank] = (together if row["match"] >= 0 else now[rank]) + row["work"]
            assert ends[step].tolist() == now
        assert chains.rank.tolist() == [rank for rank, of_rank in enumerate(of_steps[0]) for _ in of_rank]
