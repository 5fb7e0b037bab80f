"""Calls of a schedule that are steps, of which several share an update."""

from __future__ import annotations

import pandas as pd
import pytest

from pptrace.recognise.steps.shared_updates import line_of_updates


@pytest.mark.parametrize(
    ("updates", "line"),
    [
        ({0: (1, 3, 5), 1: (1, 3, 5)}, True),
        ({0: (1, 2, 3)}, False),
        ({0: (1, 3, 4)}, False),
        ({0: (3,)}, False),
        ({0: (1, 3)}, False),
        ({}, False),
    ],
)
def test_calls_of_a_schedule_that_share_an_update_are_said_to_be_no_updates(
    updates: dict[int, tuple[int, ...]], line: bool
) -> None:
    rows = [(rank, step, kind) for rank in range(2) for step in range(6) for kind in ("F", "B")]
    rows += [(rank, step, "OPTIMIZER") for rank, steps in updates.items() for step in steps]
    lines = line_of_updates(pd.DataFrame(rows, columns=["rank", "step", "kind"]))
    assert [text for text in lines if "an update takes 2 of them" in text] == list(lines)
    assert bool(lines) is line


def test_steps_are_counted_that_are_recorded_and_train() -> None:
    """A profiler may record each third step, and calls that evaluate may lie between those that train."""
    rows = [(0, step, kind) for step in (2, 5, 8, 11) for kind in ("F", "B", "OPTIMIZER")]
    rows += [(0, step, "F") for step in (3, 6, 9)]
    assert line_of_updates(pd.DataFrame(rows, columns=["rank", "step", "kind"])) == ()
