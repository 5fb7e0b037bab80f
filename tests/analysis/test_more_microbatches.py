"""The share of fill and drain that twice as many microbatches save, against the closed forms of the schedules."""

from __future__ import annotations

import pytest

from pptrace.analysis.more_microbatches import part_saved_by_twice
from pptrace.analysis.result import ScheduleSummary


def summary_of(name: str, num_microbatches: int | None, num_stages: int, num_chunks: int = 1) -> ScheduleSummary:
    return ScheduleSummary(name, num_microbatches, num_stages, num_chunks, "given", ())


@pytest.mark.parametrize(
    ("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 4)]
)
def test_the_bubble_of_p_minus_1_over_m_v_is_halved(name: str, chunks: int) -> None:
    assert part_saved_by_twice(summary_of(name, 8, 4 * chunks, chunks)) == pytest.approx(0.5)


def test_nothing_is_said_of_what_cannot_be_built() -> None:
    assert part_saved_by_twice(summary_of("unheard-of", 8, 4)) is None
    assert part_saved_by_twice(summary_of("1f1b", None, 4)) is None
    assert part_saved_by_twice(summary_of("interleaved-1f1b", 8, 5, 2)) is None
    assert part_saved_by_twice(summary_of("1f1b", 5001, 2)) is None


def test_a_single_stage_has_no_bubble_to_save() -> None:
    assert part_saved_by_twice(summary_of("1f1b", 8, 1)) is None
