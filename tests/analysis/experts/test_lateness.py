"""Slowness of ranks, from exchanges on paper."""

from __future__ import annotations

import numpy as np
import pytest

from pptrace.analysis.experts.exchanges import EXCHANGES
from pptrace.analysis.experts.lateness import slowness_of_ranks
from pptrace.slices import Slice

ROWS = {0: 100, 1: 20, 2: 100, 3: 20}
"""Rank → rows of its experts; ranks 0 and 1 are a stage, 2 and 3 the next."""


def exchanges(row_ns: dict[int, int], microbatches: int = 3) -> Slice:
    """Forwards of four ranks whose experts take ``row_ns`` of each row."""
    places = [(rank, microbatch) for microbatch in range(microbatches) for rank in ROWS]
    columns = {name: np.zeros(len(places), dtype=np.int64) for name in EXCHANGES}
    columns["rank"] = np.array([rank for rank, _ in places])
    columns["stage"] = columns["rank"] // 2
    columns["out_match"] = columns["back_match"] = np.array([2 * number + rank // 2 for rank, number in places])
    columns["rows"] = np.array([ROWS[rank] for rank, _ in places])
    columns["back_start_ns"] = np.array([row_ns[rank] * ROWS[rank] for rank, _ in places])
    return Slice(columns)


def test_ranks_that_take_as_long_for_each_row_are_equally_slow() -> None:
    assert slowness_of_ranks(exchanges(dict.fromkeys(ROWS, 10))) == pytest.approx(dict.fromkeys(ROWS, 1.0))


def test_nobody_is_expected_to_take_less_for_a_row_than_others_of_its_group_do() -> None:
    of_ranks = slowness_of_ranks(exchanges({0: 10, 1: 10, 2: 1, 3: 1}))  # the slope of all is not that of a fast stage
    assert [of_ranks[rank] for rank in (2, 3)] == pytest.approx([1.0, 1.0])
