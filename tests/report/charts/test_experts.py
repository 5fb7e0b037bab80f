"""Charts of experts: their marks are the figures of the report, and of many ranks or steps they stay small."""

from __future__ import annotations

from typing import Any

import numpy as np

from pptrace.analysis.experts.types import NO_PAIRS, ExpertsReport, ExpertStep, TrafficMatrix
from pptrace.report.charts.experts import MOST_IN_MATRIX, late_steps_chart, ranks_in_matrix, traffic_map

MS = 1_000_000


def experts_of(steps: list[ExpertStep]) -> ExpertsReport:
    return ExpertsReport("splits", None, None, (), (), (), None, (), steps=tuple(steps))


def late(step: int, rank: int | None, wait_ms: int = 8) -> ExpertStep:
    known = rank is not None
    return ExpertStep(step, wait_ms * MS, rank, 6 * MS if known else None, 0.75 if known else None, None, 1.0)


def points_of(figure: Any) -> dict[str, tuple[list[int], str]]:
    """Name of each rank → its steps, and its colour."""
    return {part.name: (list(part.x), part.marker.color) for part in figure.data if part.name}


def test_each_step_has_the_colour_of_the_rank_that_is_late() -> None:
    unknown = ExpertStep(9, None, None, None, None, None, None)
    figure = late_steps_chart(experts_of([late(2, 5, 4), late(3, 0), late(5, 5), late(6, None), unknown]))
    points = points_of(figure)
    assert {name: steps for name, (steps, _) in points.items()} == {"rank 5": [2, 5], "rank 0": [3], "nobody": [6]}
    assert len({colour for _, colour in points.values()}) == 3
    assert (list(figure.data[0].x), list(figure.data[0].y)) == ([2, 3, 5, 6], [4, 8, 8, 8])
    (hover, _) = next(part.customdata for part in figure.data if part.name == "rank 5")
    assert hover == "<b>step 2</b><br>4.00 ms of waits<br>6.00 ms of them for rank 5 (75.0%)"


def test_of_a_thousand_steps_and_as_many_ranks_six_have_a_colour() -> None:
    often = [late(step, step % 7 if step % 2 else 100 + step) for step in range(1000)]
    figure = late_steps_chart(experts_of(often))
    assert len(figure.data) == 6 + 1
    points = points_of(figure)
    assert sum(len(steps) for steps, _ in points.values()) == 1000
    assert len(points["other ranks"][0]) == 500 + len([step for step in range(1, 1000, 2) if step % 7 == 6])


def test_steps_whose_calls_are_not_matched_have_no_chart() -> None:
    assert late_steps_chart(experts_of([ExpertStep(1, None, None, None, None, None, 1.0)])) is None
    assert late_steps_chart(experts_of([])) is None


def matrix_of(groups: list[tuple[int, ...]], rows: list[int], width: int = 2) -> TrafficMatrix:
    """Groups whose members send each other so many rows."""
    cells = [(a, b, of, of * width) for group, of in zip(groups, rows, strict=True) for a in group for b in group]
    return TrafficMatrix("splits", *np.array(cells).T, tuple(groups))


def test_the_matrix_has_a_cell_for_each_pair_of_a_group_and_none_across_groups() -> None:
    figure = traffic_map(matrix_of([(0, 3), (1, 2)], [5, 7]))
    heat = figure.data[0]
    assert list(heat.x) == list(heat.y) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert [list(line) for line in heat.z] == [
        *([5, None, None, 5], [None, 7, 7, None], [None, 7, 7, None], [5, None, None, 5]),
    ]
    assert heat.text[0][3] == "5"
    assert heat.customdata[0][3] == "<b>rank 0 → rank 3</b><br>5 rows, 10 B<br>50.0% of what rank 0 sends"
    assert heat.customdata[0][0] == "<b>rank 0 → rank 0</b><br>5 rows<br>50.0% of what rank 0 sends"  # they stay there
    assert traffic_map(matrix_of([(0, 1)], [5], width=0)) is not None
    assert traffic_map(NO_PAIRS) is None
    assert traffic_map(matrix_of([(0, 1)], [0])) is None
    assert traffic_map(None) is None


def test_of_many_ranks_the_matrix_has_the_whole_groups_with_most_rows() -> None:
    groups = [tuple(range(first, first + 24)) for first in range(0, 120, 24)]
    ranks = ranks_in_matrix(matrix_of(groups, [1, 9, 2, 3, 8]))
    assert ranks.tolist() == [*groups[1], *groups[4]]
    assert len(ranks) <= MOST_IN_MATRIX
    figure = traffic_map(matrix_of(groups, [1, 9, 2, 3, 8]))
    assert np.shape(figure.data[0].z) == (48, 48)


def test_of_one_large_group_the_matrix_has_the_ranks_with_most_rows() -> None:
    size = MOST_IN_MATRIX + 36
    source, target = np.divmod(np.arange(size * size), size)
    rows = np.where((source >= 36) & (target >= 36), 2, 1)
    matrix = TrafficMatrix("splits", source, target, rows, rows, (tuple(range(size)),))
    assert ranks_in_matrix(matrix).tolist() == list(range(36, size))
