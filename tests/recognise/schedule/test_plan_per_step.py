"""Steps with other numbers of microbatches than the longest, and steps of which a trace has a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest

from pptrace.analysis.result import RankStep, StepReport
from pptrace.model.traces import Trace
from pptrace.schedule.registry import build
from tests.roundtrip.files import step_begins
from tests.roundtrip.styles import Host, Style, TorchBatched, TorchLabels
from tests.support.analysed import analyse, recognise
from tests.support.synthetic import Event, PaperRun, make_trace, run_on_paper

Op = tuple[int | None, str, int | None]


class WithStepRanges(TorchBatched):
    """With the profiler's own range around each step."""

    def finish(self, host: Host, run: PaperRun, rank: int, number: int) -> None:
        super().finish(host, run, rank, number)
        host.range(f"ProfilerStep#{number + 4}", -90, run.end + 60)


def runs_of(schedule: str, counts: Sequence[int], chunks: int = 1, pp: int = 3) -> list[PaperRun]:
    return [
        run_on_paper(build(schedule, pp, m, chunks), lambda action: 500 + 10 * action.stage, latency=130)
        for m in counts
    ]


def events_of(style: Style, runs: Sequence[PaperRun], rank: int) -> list[Event]:
    at, events = step_begins(runs[0], 0), []
    for number, run in enumerate(runs):
        events += style.step(run, rank, number, at)
        at += run.end + 1000
    return events


def traces_of(
    style: Style, runs: Sequence[PaperRun], is_recorded: Callable[[Event], bool] = lambda event: True
) -> list[Trace]:
    ranks = range(runs[0].plan.pp)
    return [make_trace(list(filter(is_recorded, events_of(style, runs, rank))), rank) for rank in ranks]


@cache
def step_alone(schedule: str, num_microbatches: int, chunks: int) -> StepReport:
    """A step in a trace of its own, in which labels tell the ops."""
    return analyse(traces_of(TorchLabels(), runs_of(schedule, [num_microbatches], chunks))).report.steps[0]


@pytest.mark.parametrize(
    ("style", "schedule", "counts", "chunks"),
    [
        (TorchLabels(), "interleaved-1f1b", [3, 6], 2),
        (TorchLabels(), "zb-h1", [4, 8], 1),
        (WithStepRanges(), "1f1b", [3, 6, 5], 1),
        (WithStepRanges(), "interleaved-1f1b", [6, 9], 2),
    ],
)
def test_each_step_follows_the_schedule_with_its_own_number_of_microbatches(
    style: Style, schedule: str, counts: list[int], chunks: int
) -> None:
    runs = runs_of(schedule, counts, chunks)
    analysis = analyse(traces_of(style, runs))
    report = analysis.report
    assert (report.schedule.name, report.schedule.num_microbatches) == (schedule, max(counts))
    assert report.schedule.mismatches == ()
    for run, step in zip(runs, report.steps, strict=True):
        assert analysis.schedule.plan_of(step.step) == build(schedule, 3, run.plan.num_microbatches, chunks)
        ideal = step_alone(schedule, run.plan.num_microbatches, chunks)
        assert step.bubble.ideal_ratio == ideal.bubble.ideal_ratio is not None
        for rank, alone in zip(step.ranks, ideal.ranks, strict=True):
            ops = [(op.stage, op.kind, op.microbatch, op.phase) for op in rank.ops]
            assert ops == [(op.stage, op.kind, op.microbatch, op.phase) for op in alone.ops]
            edges = [(phase.num_forward, phase.num_backward) for phase in rank.phases.values()]
            assert edges == [(phase.num_forward, phase.num_backward) for phase in alone.phases.values()]
    assert any("has another number of microbatches: compared with" in line for line in report.warnings)


def test_the_number_of_microbatches_is_that_of_most_steps_and_the_others_are_named() -> None:
    report = analyse(traces_of(WithStepRanges(), runs_of("1f1b", [6, 4, 6, 4, 4], 1))).report
    assert report.schedule.num_microbatches == 4
    assert any("step 4, 6 has another number of microbatches: compared with" in line for line in report.warnings)


def ops_and_plan(rank: RankStep, run: PaperRun) -> tuple[list[Op], list[Op]]:
    """The ops of a rank, which are a part of the plan's, and those."""
    ops = [(op.stage, op.kind, op.microbatch) for op in rank.ops]
    planned = [(a.stage, str(a.kind), a.microbatch) for a in run.plan.compute_actions(rank.rank)]
    assert 0 < len(ops) < len(planned)
    return ops, planned


def test_a_step_that_has_part_of_its_ops_is_of_the_longer_plan() -> None:
    """Cut off at another op on each rank, it has no number of microbatches of its own."""
    whole = run_on_paper(build("1f1b", 3, 6), lambda _: 500, latency=130)
    end = step_begins(whole, 1) + whole.end // 2
    run = recognise(traces_of(TorchLabels(), [whole, whole], lambda event: event.end <= end))
    assert (run.schedule.name, run.schedule.mismatches, run.schedule.plan_by_step) == ("1f1b", (), {})


@pytest.mark.parametrize("share", [0.4, 0.8])
def test_a_step_cut_off_at_its_end_keeps_its_stages_and_hides_nothing_of_the_others(share: float) -> None:
    runs = runs_of("interleaved-1f1b", [9, 9], 2)
    whole = analyse(traces_of(WithStepRanges(), runs[:1])).report.steps[0]
    end = step_begins(runs[0], 1) + int(share * runs[1].end)
    report = analyse(
        traces_of(
            WithStepRanges(),
            runs,
            lambda event: event.end <= end or (event.start < end and event.name.startswith("Profiler")),
        )
    ).report
    assert report.steps[0].bubble == whole.bubble
    for rank in report.steps[1].ranks:
        ops, planned = ops_and_plan(rank, runs[0])
        assert ops == planned[: len(ops)]


def test_a_step_cut_off_at_its_beginning_is_the_end_of_its_plan() -> None:
    """A range of the step may be there nevertheless, as marked by a profiler that began within it."""
    runs = runs_of("interleaved-1f1b", [9, 9], 2)
    begin = step_begins(runs[0], 0) + int(0.4 * runs[0].end)
    report = analyse(
        traces_of(WithStepRanges(), runs, lambda event: event.start >= begin or event.name.startswith("Profiler"))
    ).report
    assert report.schedule.name == "interleaved-1f1b"
    for rank in report.steps[0].ranks:
        ops, planned = ops_and_plan(rank, runs[0])
        assert ops in (planned[-len(ops) :], [(None, kind, None) for _, kind, _ in ops])
    assert any(rank.ops[0].stage is not None for rank in report.steps[0].ranks)


def test_messages_whose_kernels_were_cut_off_say_nothing_of_the_clocks() -> None:
    """The posting call of a kernel that is not in the trace ends long before the message does."""
    runs = runs_of("1f1b", [6, 6])
    whole = analyse(traces_of(WithStepRanges(), runs)).report
    end = step_begins(runs[0], 1) + 3 * runs[1].end // 4
    report = analyse(traces_of(WithStepRanges(), runs, lambda event: event.end <= end)).report
    assert [step.step for step in report.steps] == [4]
    assert report.steps[0].bubble == whole.steps[0].bubble
    assert not any("contradict" in line or "no matching" in line for line in report.warnings)


def test_what_cannot_have_run_with_one_stage_on_each_rank_gets_no_names() -> None:
    """Weight gradients of their own look like backwards where nothing is labelled."""
    run = run_on_paper(build("zb-h1", 3, 6), lambda _: 500, latency=130)
    report = analyse(traces_of(WithStepRanges(), [run, run])).report
    assert (report.schedule.name, report.mesh.vpp) == ("unknown", None)
    for step in report.steps:
        for rank in step.ranks:
            assert rank.stage is None
            assert {(op.stage, op.chunk, op.microbatch) for op in rank.ops} == {(None, None, None)}
    assert any("stages, chunks and microbatches are null" in line for line in report.warnings)
    assert not any("of ranks assumed" in line or "its trace has" in line for line in report.warnings)
