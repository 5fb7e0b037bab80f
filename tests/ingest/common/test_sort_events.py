"""The order of events that begin at the same time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.ingest.common import sort_events
from pptrace.ingest.common.sort_events import _break_ties

rows = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 2)), max_size=30)


@pytest.mark.parametrize("at_once", [1, 3, 1 << 20])
@given(rows)
def test_events_of_equal_start_are_ordered_alike_in_parts_and_at_once(
    at_once: int, result: list[tuple[int, int, int]]
) -> None:
    start, dur, key = np.array(result, dtype=np.int64).reshape(-1, 3).T
    order = np.argsort(start, kind="stable")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sort_events, "_TIES_AT_ONCE", at_once)
        _break_ties(order, start, (key,), dur)
    ordered = [result[index] for index in order]
    assert ordered == sorted(result, key=lambda row: (row[0], -row[1], row[2]))
