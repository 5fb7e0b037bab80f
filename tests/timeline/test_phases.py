"""Phases of ops of several steps and ranks, with plans for some of them, and their spans in each step's window."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from pptrace.model.tables import OPS
from pptrace.schedule.actions import Phase
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.simulator import IDEAL, simulate
from pptrace.slices import slice_of
from pptrace.timeline.windows import PhaseSpan, phase_spans_of_steps, tag_ops
from tests.support.tables import named, table_of

SHORT, LONG = build("1f1b", 2, 2), build("1f1b", 2, 4)


def ops_of(plan: Plan, step: int) -> pd.DataFrame:
    return simulate(plan, IDEAL).ops().assign(step=step)


def two_steps() -> pd.DataFrame:
    """Step 3 of two microbatches, step 7 of four."""
    return pd.concat([ops_of(SHORT, 3), ops_of(LONG, 7)], ignore_index=True)


def phases_of(tagged: pd.DataFrame) -> list[str]:
    return tagged["phase"].astype(str).tolist()


def test_the_ops_of_each_step_take_the_phases_of_its_plan() -> None:
    """In a plan of four microbatches the first op of rank 0 is as in one of two, but not the second."""
    ops = two_steps()
    by_plans = tag_ops(ops.assign(phase=""), {3: SHORT, 7: LONG}.get)
    assert phases_of(by_plans) == phases_of(ops)
    gpipe = build("gpipe", 2, 4)
    partly = tag_ops(ops.assign(phase="steady"), {7: gpipe}.get)
    expected = {(rank, str(a.kind), a.stage, a.microbatch): str(a.phase) for rank in (0, 1) for a in gpipe.ranks[rank]}
    for row in partly.itertuples():
        planned = expected[row.rank, row.kind, row.stage, row.microbatch]
        assert row.phase == (planned if row.step == 7 else "steady")


def test_without_an_order_what_neither_plan_nor_label_tells_stays_untagged() -> None:
    ops = two_steps().assign(phase="")
    ops.loc[0, "phase"] = "cooldown"
    ops.loc[1, "phase"] = "a word of another tool"
    in_order = tag_ops(ops, {7: LONG}.get)
    kept = tag_ops(ops, {7: LONG}.get, by_order=False)
    is_short = (ops["step"] == 3).to_numpy()
    assert phases_of(kept[is_short]) == ["cooldown"] + [""] * (is_short.sum() - 1)
    assert phases_of(kept[~is_short]) == phases_of(in_order[~is_short]) == phases_of(ops_of(LONG, 7))
    in_order_of_rank_0 = ["cooldown", "warmup", "cooldown", "cooldown"]  # two forwards, two backwards: as in GPipe
    assert phases_of(in_order[is_short]) == in_order_of_rank_0 + ["steady"] * 4


def test_the_order_gives_phases_only_to_ops_that_compute() -> None:
    ops = two_steps().assign(phase="")
    ops.loc[0, "kind"] = "OPTIMIZER"
    tagged = tag_ops(ops, lambda step: None)
    assert phases_of(tagged)[0] == ""
    assert "" not in phases_of(tagged)[1:]
    none = tag_ops(ops.iloc[:1], lambda step: LONG)
    assert phases_of(none) == [""]
    assert phases_of(tag_ops(ops.iloc[:0], lambda step: LONG)) == []


def test_a_step_whose_ops_are_all_labelled_keeps_its_labels_beside_one_that_is_ordered() -> None:
    ops = two_steps().assign(phase="")
    labelled = (ops["step"] == 3) | (ops["rank"] == 1)
    ops.loc[labelled, "phase"] = "warmup"
    tagged = tag_ops(ops, lambda step: None)
    assert set(phases_of(tagged[labelled])) == {"warmup"}
    assert phases_of(tagged[~labelled]) == phases_of(two_steps()[~labelled])


Row = tuple[int, str, str, int, int]
"""(index of the window, kind, phase, start, end)."""


def spans_of(rows: list[Row], *windows: tuple[int, int]) -> list[tuple[PhaseSpan, ...]]:
    table = table_of(OPS, named("kind phase start_ns end_ns", (row[1:] for row in rows)))
    steps = np.array([row[0] for row in rows], dtype=np.int64)
    starts, ends = [start for start, _ in windows], [end for _, end in windows]
    return phase_spans_of_steps(slice_of(table), steps, starts, ends)


def edges(spans: tuple[PhaseSpan, ...]) -> list[int]:
    assert [span.phase for span in spans] == list(Phase)
    assert [span.end_ns for span in spans[:-1]] == [span.start_ns for span in spans[1:]]
    return [spans[0].start_ns, *(span.end_ns for span in spans)]


def counts(spans: tuple[PhaseSpan, ...]) -> list[tuple[int, int]]:
    return [(span.num_forward, span.num_backward) for span in spans]


def test_each_window_is_cut_at_its_own_steady_ops_or_else_after_its_last_warmup_op() -> None:
    rows: list[Row] = [
        *((0, "F", "warmup", 5, 9), (0, "F", "steady", 20, 22), (0, "B", "steady", 25, 30)),
        *((0, "B", "cooldown", 40, 45), (1, "F", "warmup", 105, 109), (1, "F", "warmup", 102, 112)),
        *((1, "B", "cooldown", 140, 145), (3, "F", "steady", 320, 322)),
    ]
    first, second, empty, fourth = spans_of(rows, (0, 50), (100, 150), (200, 250), (300, 350))
    assert edges(first) == [0, 20, 30, 50]
    assert counts(first) == [(1, 0), (1, 1), (0, 1)]
    assert edges(second) == [100, 112, 112, 150]
    assert counts(second) == [(2, 0), (0, 0), (0, 1)]
    assert edges(empty) == [200, 200, 200, 250]
    assert counts(empty) == [(0, 0)] * 3
    assert edges(fourth) == [300, 320, 322, 350]
    assert counts(fourth) == [(0, 0), (1, 0), (0, 0)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("F", (1, 0)), ("B", (0, 1)), ("I", (0, 1)), ("W", (0, 0)), ("OVERLAP_F_B", (1, 1)), ("OPTIMIZER", (0, 0))],
)
def test_a_pair_is_a_forward_and_a_backward_and_a_weight_gradient_is_neither(
    kind: str, expected: tuple[int, int]
) -> None:
    (spans,) = spans_of([(0, kind, "steady", 20, 30), (0, kind, "steady", 30, 34)], (0, 50))
    assert counts(spans) == [(0, 0), (2 * expected[0], 2 * expected[1]), (0, 0)]
    assert edges(spans) == [0, 20, 34, 50]


def test_phases_of_a_rank_without_ops_are_all_cooldown() -> None:
    (spans,) = spans_of([], (7, 9))
    assert edges(spans) == [7, 7, 7, 9]
