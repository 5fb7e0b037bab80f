"""Memory that recorders measured, read from facts that may be anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pptrace.model.step_memory import MemoryKind, PeakMemory, kind_of_events, read_recorded_memory

WHOLE: dict[str, Any] = {
    "steps": [3, 4],
    "process": {"peak_bytes": [10, None], "start_bytes": [7, None]},
    "device": {"name": "cuda:0", "peak_bytes": [5, 6], "start_bytes": [None, 1], "reserved_peak_bytes": [8, 9]},
}


def test_each_step_has_its_own_peaks() -> None:
    recorded = read_recorded_memory(WHOLE)
    assert recorded.process_of(3) == PeakMemory(MemoryKind.PROCESS_RESIDENT, 10, 7)
    assert recorded.process_of(4) is None
    assert recorded.device_of(3) == PeakMemory(MemoryKind.DEVICE_ALLOCATED, 5, None, 8)
    assert recorded.device_of(4) == PeakMemory(MemoryKind.DEVICE_ALLOCATED, 6, 1, 9)
    assert recorded.device_of(5) is None


def test_a_device_that_holds_nothing_is_not_used() -> None:
    recorded = read_recorded_memory(WHOLE | {"device": {"peak_bytes": [0, 0], "start_bytes": [0, 0]}})
    assert recorded.device_of(3) is None
    assert recorded.process_of(3) is not None


@pytest.mark.parametrize(
    "facts",
    [
        *(None, 7, [], {}, {"steps": []}, {"steps": "34"}, {"steps": [1.5]}, {"steps": [True]}, {"steps": [-1]}),
        {"steps": None},
    ],
)
def test_what_is_no_record_of_memory_is_none(facts: object) -> None:
    assert read_recorded_memory(facts) is None


@pytest.mark.parametrize("column", [None, [1], [1, 2, 3], [1, "2"], [1, -2], [1, 2.5], [1, 2**63], "12", {"0": 1}])
def test_a_damaged_column_is_unknown(column: object) -> None:
    recorded = read_recorded_memory({"steps": [0, 1], "process": {"peak_bytes": column}, "device": 3})
    assert recorded.process_of(0) is None


def test_events_tell_their_kind_by_what_was_reserved() -> None:
    allocated = np.array([1, 5, 3])
    for reserved, kind in (
        ([0, 0, 0], MemoryKind.HOST_ALLOCATED),
        ([8, 8, 8], MemoryKind.DEVICE_ALLOCATED),
        ([1, 5, 3], MemoryKind.DEVICE_RESERVED),
        ([-1, -1, -1], MemoryKind.ALLOCATED),
    ):
        assert kind_of_events(allocated, np.array(reserved)) is kind
