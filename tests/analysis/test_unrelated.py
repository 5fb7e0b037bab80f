"""What a report says of ranks that cannot be compared, or are not there."""

from __future__ import annotations

import time
from dataclasses import replace

from pptrace.analysis.analyse import analyse
from pptrace.analysis.notes import notes
from pptrace.analysis.steps import report_step
from pptrace.recognise.recognise import recognise
from pptrace.schedule.registry import build
from tests.synthetic import record

RECORDING = record(build("1f1b", 2, 3, 1))


def test_where_clocks_cannot_be_related_a_step_is_null_and_each_rank_keeps_what_it_shows_itself() -> None:
    analysis = analyse(RECORDING.traces())
    apart = replace(analysis.data, relates=lambda ranks: len(ranks) < 2)
    step = report_step(analysis.windows, apart, analysis.plan, None, 2)
    assert (step.span_ns, step.bubble.ratio, step.bubble.share, step.bubble.waterfall_ns) == (None, None, None, None)
    for mine, whole in zip(step.ranks, analysis.report.steps[0].ranks, strict=True):
        assert mine.compute_ns == whole.compute_ns > 0
        assert (mine.bubble_ns, mine.exposed_comm_ns) == (None, None)
        assert mine.window_ns == max(op.end_ns for op in mine.ops) - min(op.start_ns for op in mine.ops)
        assert all(phase.bubble_ns is None for phase in mine.phases.values())


def test_absent_ranks_are_counted_and_not_listed_however_many_a_file_claims() -> None:
    found = recognise(RECORDING.traces())
    huge = replace(found, mesh=replace(found.mesh, num_ranks=10**12))
    begin = time.monotonic()
    lines = notes(huge, ())
    assert time.monotonic() - begin < 1
    told = "no trace of rank 2, 3, 4, 5, 6, 7, 8, 9 and 999999999990 more (of 1000000000000)"
    assert any(line.startswith(told) for line in lines)
