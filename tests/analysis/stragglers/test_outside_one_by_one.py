"""Work before and after the ops of a rank, item by item, on random times of a few microseconds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from pptrace.analysis.matrix.step_matrix import in_order, rows_of_windows
from pptrace.analysis.stragglers.outside import AFTER, BEFORE, chains_of, outside_of
from pptrace.model.tables import MESSAGES
from pptrace.slices import Slice
from tests.support.known import known

Row = dict[str, Any]
TEXTS = ("axis", "kind", "name")
SEEDS = range(60)
WINDOWS = 3
OF_SPANS = ("window", "kind", "start_ns", "end_ns")
OF_COMMS = (*OF_SPANS, "axis", "match", "transfer_start_ns")


def table_of(rows: list[Row], names: tuple[str, ...]) -> Slice:
    return Slice(
        {name: np.array([row[name] for row in rows], dtype=object if name in TEXTS else np.int64) for name in names}
    )


def rows_of(table: Slice) -> list[Row]:
    columns = {name: table[name].tolist() for name in table.columns}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


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


def test_work_is_before_or_after_all_ops_of_a_window_and_not_among_them() -> None:
    num_found = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        ops = [
            {"window": window, "start": 10**6 * window + at, "end": 10**6 * window + at + rng.randint(0, 9_000)}
            for window in range(WINDOWS)
            for at in sorted(rng.randint(8_000, 60_000) for _ in range(rng.randint(1, 4)))
        ]
        spans = random_rows(rng, ("STEP", "EVAL", "OPTIMIZER", "GC"))
        comms = random_rows(rng, (*MESSAGES, "all_reduce", "all_gather"))
        expected = []
        for row in [*spans, *comms]:
            is_comm = any(row is other for other in comms)
            if row["kind"] in (*MESSAGES, "STEP", "EVAL"):
                continue
            of_window = [op for op in ops if op["window"] == row["window"]]
            first, last = min(op["start"] for op in of_window), max(op["end"] for op in of_window)
            middle = row["start_ns"] + (row["end_ns"] - row["start_ns"]) // 2
            is_before, is_after = middle <= first + 1_000, middle >= last - 1_000
            if not is_before and not is_after:
                continue
            begun = max(row["start_ns"], last) if is_after else row["start_ns"]
            together = max(row["transfer_start_ns"] if is_comm else row["start_ns"], begun)
            expected.append(
                {
                    "window": row["window"],
                    "pp_rank": 2,
                    "side": BEFORE if is_before else AFTER,
                    "name": f"{row['axis']} {row['kind']}" if is_comm else row["kind"],
                    "match": row["match"] if is_comm else -1,
                    "start": begun,
                    "end": max(row["end_ns"], begun),
                    "work": max(row["end_ns"] - together, 0),
                }
            )
        expected.sort(key=lambda row: (row["window"], row["start"]))
        of_spans, of_comms = table_of(spans, OF_SPANS), table_of(comms, OF_COMMS)
        of_ops = table_of(ops, ("window", "start", "end"))
        found = outside_of((of_spans, of_spans["window"]), (of_comms, of_comms["window"]), (of_ops, WINDOWS), 2)
        assert rows_of(found) == expected, seed
        num_found += len(expected)
    assert num_found > 5 * len(SEEDS)


def test_a_long_window_is_rounded_by_as_much_as_times_in_floats_are() -> None:
    length = 1 << 40
    ops = table_of([{"window": 0, "start": 0, "end": length}], ("window", "start", "end"))
    rounding = length >> 21
    spans = [
        {"window": 0, "kind": "GC", "start_ns": at, "end_ns": at}
        for at in (rounding, rounding + 1, length - rounding - 1, length - rounding)
    ]
    of_spans, none = table_of(spans, OF_SPANS), table_of([], OF_COMMS)
    found = outside_of((of_spans, of_spans["window"]), (none, none["window"]), (ops, 1), 0)
    assert list(zip(found["side"].tolist(), found["start"].tolist(), strict=True)) == [
        (BEFORE, rounding),
        (AFTER, length),
    ]


def test_work_before_ops_takes_its_own_time_where_other_windows_have_no_ops() -> None:
    ops = table_of([{"window": 1, "start": 10_000, "end": 20_000}], ("window", "start", "end"))
    spans = table_of([{"window": 1, "kind": "GC", "start_ns": 5, "end_ns": 9}], OF_SPANS)
    none = table_of([], OF_COMMS)
    (row,) = rows_of(outside_of((spans, spans["window"]), (none, none["window"]), (ops, 3), 0))
    assert (row["side"], row["start"], row["work"]) == (BEFORE, 5, 4)


def test_rows_of_chosen_windows_are_numbered_as_these_and_in_their_order() -> None:
    rng = random.Random(0)
    for _ in range(60):
        window = sorted(rng.choices(range(5), k=rng.randint(0, 9)))
        rows = Slice({"window": np.array(window, dtype=np.int64), "at": np.arange(len(window))})
        chosen = rng.sample(range(5), rng.randint(0, 5))
        found = rows_of_windows(rows, np.array(chosen, dtype=np.int64))
        expected = [(number, at) for number, one in enumerate(chosen) for at, of in enumerate(window) if of == one]
        assert list(zip(found["window"].tolist(), found["at"].tolist(), strict=True)) == expected
        parts = [rows.where(rows["at"] % 2 == side) for side in (1, 0)]
        together = [
            (of, at)
            for of, at in sorted(zip(window, range(len(window)), strict=True), key=lambda row: (row[0], -(row[1] % 2)))
        ]
        both = in_order(parts)
        assert list(zip(both["window"].tolist(), both["at"].tolist(), strict=True)) == together


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
    return table_of(rows, ("window", "pp_rank", "side", "name", "match", "start", "end", "work")), of_steps


def test_chains_end_when_one_item_after_the_other_does() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        steps, ranks = rng.randint(1, 3), 4
        table, of_steps = random_work(rng, steps, ranks)
        chains = known(chains_of(table, np.repeat(np.arange(steps) + 7, 2), 2, AFTER))
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


def test_steps_of_more_and_fewer_pipelines_have_no_chains() -> None:
    table, _ = random_work(random.Random(0), 3, 4)
    fewer = table.where(table["window"] < 5)
    assert chains_of(fewer, np.array([7, 7, 8, 8, 9]), 2, AFTER) is None
    assert chains_of(table, np.array([7, 7, 8, 8, 9, 9]), 2, BEFORE) is not None
