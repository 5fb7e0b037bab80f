"""Steps of which a trace lacks an op, and steps that only evaluate: their figures are null or left out, with the reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pptrace.analysis.report import Report
from pptrace.analysis.result import Severity
from pptrace.schedule.registry import build
from tests.support.analysed import analyse
from tests.support.synthetic import Event, make_trace, record, without


def report_without(is_lost: Callable[[int, Event], bool], steps: int = 12) -> Report:
    """The report of four ranks from whose traces some events are lost, by rank."""
    recording = record(build("1f1b", 4, 8), latency=9, steps=steps)
    traces = [
        make_trace(
            [event for event in recording.events_of(rank) if not is_lost(rank, event)],
            rank,
            recording.job.metadata(rank),
        )
        for rank in range(4)
    ]
    return analyse(traces).report


@pytest.mark.parametrize("op", ["1F3", "1B3"])
def test_a_rank_whose_trace_lacks_an_op_has_no_bubble_in_that_step(op: str) -> None:
    report = report_without(lambda rank, event: event.name.startswith(f"pp1:{op} ") and event.name.endswith("step=5"))
    damaged, whole = report.steps[5], report.steps[4]
    lacking, other = damaged.ranks[1], damaged.ranks[2]
    assert (lacking.compute_ns, lacking.exposed_comm_ns, lacking.bubble_ns, lacking.not_compute_ns) == (None,) * 4
    assert (lacking.bubble_low_ns, lacking.bubble_high_ns) == (None, None)
    assert all(phase.bubble_ns is None for phase in lacking.phases.values())
    assert other.bubble_ns == whole.ranks[2].bubble_ns is not None
    assert (damaged.bubble.ratio, damaged.causes, damaged.blame, damaged.critical_path) == (None,) * 4
    assert report.typical_step is not damaged
    (line,) = (line for line in report.warnings if line.startswith("compute and bubble"))
    assert "of rank 1 are not known in step 5: its trace lacks ops of the plan" in line
    assert not any("other side of their messages" in line for line in report.warnings)


def test_steps_of_forwards_alone_are_no_training_steps() -> None:
    def is_backward(_: int, event: Event) -> bool:
        return event.name[:6] in {f"pp1:{stage}B" for stage in range(4)} and event.name.endswith((" step=3", " step=7"))

    report = report_without(is_backward)
    assert [step.step for step in report.steps if step.is_evaluation] == [3, 7]
    assert (report.step_series.num_steps, report.step_series.evaluations) == (10, (3, 7))
    assert report.step_series.median_ns == report.step_series.max_ns == report.steps[0].period_ns
    assert not report.typical_step.is_evaluation
    assert any(line.startswith("step 3, 7 has forwards alone") for line in report.warnings)
    assert report.schedule.mismatches == ()
    assert not [finding for finding in report.findings if finding.severity is Severity.CRITICAL]


@pytest.mark.parametrize(
    ("present", "num_ranks", "pp"),
    [((0, 1), 3, None), ((1,), 3, None), ((2, 3), 4, 4), ((0, 1, 2, 3), 4, 4)],
)
def test_peers_of_messages_count_as_ranks_of_the_run(present: tuple[int, ...], num_ranks: int, pp: int | None) -> None:
    """Without facts: peers tell of a rank above; the length of the pipeline is not known where nobody holds its last stage."""
    traces = record(build("1f1b", 4, 8), latency=9, steps=2).traces(with_metadata=False)
    for rank in {0, 1, 2, 3} - set(present):
        traces = without(traces, rank)
    report = analyse(traces).report
    assert (report.mesh.num_ranks, report.mesh.pp) == (num_ranks, pp)
    if pp is None:
        assert all(step.causes is None and step.bubble.ratio is None for step in report.steps)
        assert (report.mesh.tp, report.mesh.dp) == (None, None)
    else:
        assert all((step.causes is not None) == (len(present) == pp) for step in report.steps)
