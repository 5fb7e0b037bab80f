"""Calls of a schedule that are steps, of which several share an update."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from pptrace.recognise.steps.shared_updates import with_whole_updates

COLUMNS = ["rank", "step", "kind", "microbatch"]


def run_of(updates: dict[int, tuple[int, ...]], num_calls: int = 6) -> pd.DataFrame:
    """Calls of two microbatches on two ranks, with updates behind some of them by rank."""
    rows = [
        (rank, step, kind, mb) for rank in range(2) for step in range(num_calls) for kind in ("F", "B") for mb in (0, 1)
    ]
    rows += [(rank, step, "OPTIMIZER", -1) for rank, steps in updates.items() for step in steps]
    return pd.DataFrame([*rows, (0, -1, "STALL", -1)], columns=COLUMNS).assign(pair="")


@pytest.mark.parametrize(
    ("updates", "steps"),
    [
        ({0: (1, 3, 5), 1: (1, 3, 5)}, [0, 0, 1, 1, 2, 2]),
        ({0: (1, 3, 5)}, [0, 0, 1, 1, 2, 2]),
        ({1: (2, 5, 8)}, [0, 0, 0, 1, 1, 1, 2, 2, 2]),
    ],
)
def test_calls_that_share_an_update_are_one_step_whose_microbatches_are_numbered_on(
    updates: dict[int, tuple[int, ...]], steps: list[int]
) -> None:
    ops, comms = run_of(updates, len(steps)), run_of({}, len(steps))
    joined, joined_comms, (line,) = with_whole_updates(ops, comms)
    for table, before in ((joined, ops), (joined_comms, comms)):
        for call, step in enumerate(steps):
            of_call = table[before["step"] == call]
            assert set(of_call["step"]) == {step}
            first = 2 * (call - steps.index(step))
            assert sorted(set(of_call["microbatch"]) - {-1}) == [first, first + 1]
        outside = before["step"] < 0
        pd.testing.assert_frame_equal(table.loc[outside, COLUMNS], before.loc[outside, COLUMNS])
        assert (table.dtypes[COLUMNS] == before.dtypes[COLUMNS]).all()
    assert line.startswith(f"{max(steps.count(step) for step in steps)} calls of a schedule share an update")


def test_overlapped_pairs_are_numbered_on_too() -> None:
    ops = run_of({0: (1, 3, 5)})
    is_pair = (ops["kind"] == "B") & (ops["microbatch"] == 1)
    ops["pair"] = np.where(is_pair, "(0F1;3B0)OVERLAP_F_B", "")
    joined, _, _ = with_whole_updates(ops, ops)
    assert joined.loc[is_pair & (ops["step"] == 0), "pair"].tolist() == ["(0F1;3B0)OVERLAP_F_B"] * 2
    assert joined.loc[is_pair & (ops["step"] == 3), "pair"].tolist() == ["(0F3;3B2)OVERLAP_F_B"] * 2
    assert set(joined.loc[~is_pair, "pair"]) == {""}


@pytest.mark.parametrize("updates", [{0: (1, 2, 3)}, {0: (1, 3, 4)}, {0: (3,)}, {0: (1, 3)}, {}])
def test_steps_whose_updates_are_no_pattern_stay_as_they_are(updates: dict[int, tuple[int, ...]]) -> None:
    ops = run_of(updates)
    assert with_whole_updates(ops, ops) == (ops, ops, ())


@pytest.mark.parametrize(
    ("updates", "other"),
    [
        ((1, 3, 5), (0, 0, "STEP", -1)),
        ((1, 3, 5), (0, 6, "F", 0)),
        ((1, 3, 5), (0, 6, "B", 0)),
        ((0, 2, 4), (0, 4, "W", 0)),
    ],
)
def test_calls_stay_steps_where_these_are_marked_or_evaluate_or_the_trace_begins_or_ends_within_one(
    updates: tuple[int, ...], other: tuple[int, int, str, int]
) -> None:
    ops = pd.concat([run_of({0: updates}), pd.DataFrame([other], columns=COLUMNS)], ignore_index=True)
    same, _, (line,) = with_whole_updates(ops, ops)
    assert same is ops
    assert "an update takes 2 of them" in line


def test_steps_are_counted_that_are_recorded_and_train() -> None:
    """A profiler may record each third step, and calls that evaluate may lie between those that train."""
    rows = [(0, step, kind, 0) for step in (2, 5, 8, 11) for kind in ("F", "B", "OPTIMIZER")]
    rows += [(0, step, "F", 0) for step in (3, 6, 9)]
    ops = pd.DataFrame(rows, columns=COLUMNS)
    assert with_whole_updates(ops, ops) == (ops, ops, ())
