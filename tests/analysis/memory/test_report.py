"""The block of memory of a report, rank by rank, and the levels of memory events in steps."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.memory.answer import _by_events, report_memory
from pptrace.analysis.memory.types import InFlight, PredictedMemory, StageActivations
from pptrace.analysis.result import RankStep, StepReport
from pptrace.model.predicted import MemoryParts, RankPrediction
from pptrace.model.step_memory import MemoryKind, PeakMemory
from pptrace.schedule.registry import build
from pptrace.slices import Slice
from pptrace.workflow.analyse import Analysis
from tests.support.analysed import analyse
from tests.support.synthetic import record

UNPREDICTED = "there is none"


@pytest.fixture(scope="module")
def run() -> Analysis:
    """Two ranks of two chunks each, in two steps."""
    return analyse(record(build("interleaved-1f1b", 2, 4, 2), steps=2).traces())


def with_memory(step: StepReport, **of_rank: tuple[int | None, int | None]) -> StepReport:
    """The step with (peak bytes, microbatches in flight) of its ranks."""

    def changed(rank: RankStep) -> RankStep:
        peak, in_flight = of_rank[f"rank{rank.rank}"]
        more = (
            {"start_memory_bytes": 1, "peak_reserved_bytes": 9, "peak_memory_kind": "device"}
            if peak is not None
            else {}
        )
        return replace(rank, peak_memory_bytes=peak, peak_in_flight=in_flight, **more)

    return replace(step, ranks=tuple(map(changed, reversed(step.ranks))))


def test_a_rank_has_its_largest_peak_and_the_most_in_flight_of_all_steps(run: Analysis) -> None:
    first, second = run.report.steps
    steps = [with_memory(first, rank0=(50, 3), rank1=(None, 2)), with_memory(second, rank0=(70, None), rank1=(2, 4))]
    memory = report_memory(steps, run.mesh, run.schedule, {}, UNPREDICTED)
    zero, one = memory.ranks
    assert (zero.rank, zero.pp_rank, zero.stages, zero.step, zero.peak_bytes) == (0, 0, (0, 2), second.step, 70)
    assert (one.rank, one.pp_rank, one.stages, one.step, one.peak_bytes) == (1, 1, (1, 3), second.step, 2)
    assert (zero.kind, zero.start_bytes, zero.reserved_bytes, zero.predicted) == ("device", 1, 9, None)
    assert [rank.in_flight for rank in (zero, one)] == [InFlight(5, 3), InFlight(3, 4)]
    assert memory.reasons == (f"predicted: {UNPREDICTED}",)


def test_what_nothing_measured_is_null_with_reasons(run: Analysis) -> None:
    steps = [with_memory(step, rank0=(None, None), rank1=(5, 1)) for step in run.report.steps]
    memory = report_memory(steps, run.mesh, run.schedule, {}, UNPREDICTED)
    assert (memory.ranks[0].step, memory.ranks[0].peak_bytes, memory.ranks[1].step) == (None, None, steps[0].step)
    assert [reason.split(":")[0] for reason in memory.reasons] == ["peak_bytes", "predicted", "in_flight.measured"]
    assert report_memory([], run.mesh, run.schedule, {}, UNPREDICTED) is None


def test_what_a_rank_predicted_is_beside_what_it_had(run: Analysis) -> None:
    steps = [with_memory(step, rank0=(50, 3), rank1=(5, 1)) for step in run.report.steps]
    parts = MemoryParts(10, 20, 30, 7, {0: 3, 2: 4}, None)
    unknown = replace(parts, activations=None, of_stage={}, reason="routes were not counted")
    predictions = {rank: RankPrediction((), of_rank) for rank, of_rank in enumerate((parts, unknown))}
    memory = report_memory(steps, run.mesh, run.schedule, predictions, UNPREDICTED)
    stages = (StageActivations(0, 3), StageActivations(2, 4))
    assert [rank.predicted for rank in memory.ranks] == [
        PredictedMemory(10, 20, 30, 7, 67, stages),
        PredictedMemory(10, 20, 30, None, None, ()),
    ]
    assert memory.reasons == ("activations_bytes and total_bytes: routes were not counted",)


def test_the_level_of_events_holds_until_the_next_one() -> None:
    rng = random.Random(0)
    for _ in range(100):
        times = sorted(rng.choices(range(40), k=rng.randint(1, 9)))
        allocated, reserved = ([rng.randint(0, 99) for _ in times] for _ in range(2))
        columns = {"t_ns": times, "allocated_bytes": allocated, "reserved_bytes": reserved}
        events = Slice({name: np.array(values, dtype=np.int64) for name, values in columns.items()})
        start = [rng.randint(0, 40) for _ in range(4)]
        end = [first + rng.randint(0, 12) for first in start]
        expected = []
        for first, last in zip(start, end, strict=True):
            inside = [index for index, at in enumerate(times) if first <= at <= last]
            before = [index for index, at in enumerate(times) if at <= first]
            levels = [*before[-1:], *inside]
            peak = max((allocated[index] for index in levels), default=0)
            most = max((reserved[index] for index in levels), default=0)
            begin = allocated[before[-1]] if before else None
            expected.append(PeakMemory(MemoryKind.DEVICE_ALLOCATED, peak, begin, most) if inside else None)
        assert _by_events(events, np.array(start), np.array(end)) == expected
