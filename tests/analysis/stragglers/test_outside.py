"""Work of ranks before and after their ops: chains of it, with collectives and ranges in which all ranks wait."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace

from pptrace.analysis.stragglers.outside import AFTER, BEFORE, chains_of
from pptrace.analysis.stragglers.slowdowns import slowdowns
from pptrace.analysis.whole_run import Stragglers
from pptrace.model.tables import GARBAGE_COLLECTION, Int64
from pptrace.schedule.registry import build
from pptrace.slices import Slice
from pptrace.workflow.load import load
from tests.support.measured import measured_costs

Item = tuple[int, int, int, str, int, int, int]
"""(window, pp_rank, side, name, match, start, end); a collective begins when its last member is there."""


def rows_of(*items: Item) -> Slice:
    table = pd.DataFrame(items, columns=["window", "pp_rank", "side", "name", "match", "start", "end"])
    begun = table.groupby(["window", "match"])["start"].transform("max").where(table["match"] >= 0, table["start"])
    columns = {name: table[name].to_numpy(dtype=np.int64) for name in table if name != "name"}
    return Slice({**columns, "name": table["name"].to_numpy(dtype=np.str_), "work": (table["end"] - begun).to_numpy()})


ONE_STEP = np.array([7])


def ends(rows: Slice, ready: list[int], step: Int64 = ONE_STEP) -> list[list[int]]:
    chains = chains_of(rows, step, len(ready), AFTER)
    return chains.ends(np.tile(ready, (len(chains.work), 1)), chains.work).tolist()


def test_a_range_that_all_ranks_end_together_is_one_in_which_they_wait() -> None:
    rows = rows_of((0, 0, AFTER, "OPTIMIZER", -1, 10, 105), (0, 1, AFTER, "OPTIMIZER", -1, 100, 104))
    chains = chains_of(rows, ONE_STEP, 2, AFTER)
    assert chains.name.tolist() == ["OPTIMIZER (all ranks)"] * 2
    assert chains.work.tolist() == [[5, 4]]
    assert ends(rows, [10, 20]) == [[25, 24]]
    apart = rows_of((0, 0, AFTER, "OPTIMIZER", -1, 10, 15), (0, 1, AFTER, "OPTIMIZER", -1, 100, 104))
    assert ends(apart, [10, 20]) == [[15, 24]]


def two_steps(second: list[Item]) -> Slice:
    return rows_of((0, 0, AFTER, "GC", -1, 10, 13), (0, 0, AFTER, "OPTIMIZER", -1, 13, 20), *second)


@pytest.mark.parametrize(
    "second",
    [
        [(1, 0, AFTER, "GC", -1, 10, 13)],
        [(1, 0, AFTER, "OPTIMIZER", -1, 10, 13), (1, 0, AFTER, "GC", -1, 14, 20)],
        [(1, 0, AFTER, "GC", -1, 10, 14), (1, 0, AFTER, "OPTIMIZER", -1, 11, 20)],
        [(1, 0, AFTER, "GC", -1, 9_000, 9_106), (1, 0, AFTER, "OPTIMIZER", -1, 9_100, 9_200)],
    ],
    ids=["less in one step", "another order", "two things at once", "more than a twentieth of it"],
)
def test_steps_that_differ_and_things_at_once_have_no_chains(second: list[Item]) -> None:
    assert chains_of(two_steps(second), np.array([7, 8]), 1, AFTER) is None


@pytest.mark.parametrize(("name", "covers"), [(GARBAGE_COLLECTION, "step"), ("GRAD_SYNC", "pipeline")])
def test_collections_that_come_now_and_then_are_left_out_of_the_steps_work(name: str, covers: str) -> None:
    """An optimizer of 50, 50 and 110 after a forward and a backward of 100 each; something else in the second step."""
    table = build("gpipe", 1, 1).table
    optimizers = [(step, 0, AFTER, "OPTIMIZER", -1, 200, 200 + ns) for step, ns in enumerate((50, 50, 110))]
    rows = rows_of(*optimizers, (1, 0, AFTER, name, -1, 250, 290))
    stragglers = slowdowns([replace(measured_costs(table, np.full((3, 1, 2), 100)), outside=rows)])
    assert (stragglers.covers, stragglers.slowdown) == (covers, 1)
    kinds = {entry.kind for entry in stragglers.op_kinds}
    assert kinds == ({"F", "B", "OPTIMIZER"} if covers == "step" else {"F", "B"})


def test_a_step_begins_when_the_first_rank_of_a_pipeline_has_done_what_comes_before_its_ops() -> None:
    """Two pipelines of two ranks: forward and backward take 400, what comes before them 30 and 70 on the first ranks."""
    table = build("gpipe", 2, 1).table
    items = [
        (2 * step + pipeline, rank, BEFORE, "DATA", -1, 0, ns)
        for step in range(2)
        for pipeline, rank, ns in ((0, 0, 30), (0, 1, 20), (1, 0, 70), (1, 1, 20))
    ]
    stragglers = slowdowns([replace(measured_costs(table, np.full((2, 2, 4), 100)), outside=rows_of(*items))])
    ideal = 400 + (30 + 20 + 70 + 20) / 4
    assert (stragglers.covers, stragglers.slowdown) == ("step", pytest.approx(470 / ideal))
    assert {entry.kind: entry.slowdown for entry in stragglers.op_kinds}["DATA"] == stragglers.slowdown
    workers = {entry.rank: entry.slowdown for entry in stragglers.workers}
    assert workers == {1: pytest.approx(470 / ideal), 0: 1, 2: 1, 3: 1}


def stragglers_with(folder: Path, optimizer: tuple[int, int]) -> Stragglers:
    """Two replicas of one F and B a step, 100 each, and then an all-reduce of 50 and an optimizer of each its own length."""
    ops, comms = [], []
    for step, replica in np.ndindex(4, 2):
        begin = step * 10_000
        common = {"rank": replica, "pp_rank": 0, "dp_rank": replica, "step": step}
        begun = {"F": 0, "B": 100, "OPTIMIZER": 250}
        lengths = {"F": 100, "B": 100, "OPTIMIZER": optimizer[replica]}
        for kind, start in begun.items():
            place = {"stage": 0, "microbatch": 0} if kind != "OPTIMIZER" else {"stage": -1, "microbatch": -1}
            times = {"start_ns": begin + start, "end_ns": begin + start + lengths[kind]}
            ops.append({**common, **place, "kind": kind, **times})
        times = {"start_ns": begin + 200, "end_ns": begin + 250}
        comms.append({"rank": replica, "step": step, "kind": "all_reduce", "axis": "dp", "group_size": 2, **times})
    pd.DataFrame(ops).to_csv(folder / "ops.csv", index=False)
    pd.DataFrame(comms).to_csv(folder / "comms.csv", index=False)
    return load([folder]).report.stragglers


def test_a_slow_optimizer_on_one_rank_slows_the_step_down(tmp_path: Path) -> None:
    stragglers = stragglers_with(tmp_path, (150, 450))
    assert stragglers.covers == "step"
    ideal = 100 + 100 + 50 + 300
    assert stragglers.slowdown == pytest.approx((100 + 100 + 50 + 450) / ideal)
    assert stragglers.m_w == pytest.approx(1)
    kinds = {entry.kind: entry.slowdown for entry in stragglers.op_kinds}
    assert kinds == {"F": 1, "B": 1, "OPTIMIZER": pytest.approx(stragglers.slowdown), "dp all_reduce": 1}
    workers = {entry.rank: entry.slowdown for entry in stragglers.workers}
    assert workers == {0: 1, 1: pytest.approx(stragglers.slowdown)}
