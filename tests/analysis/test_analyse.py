"""Whole analyses of synthetic runs, against what the paper run is known to have done."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from pptrace.analysis.report import Report
from pptrace.analysis.result import RankStep
from pptrace.errors import UsageError
from pptrace.marks import SpanKind, SpanMark
from pptrace.model.device import DeviceBreakdown
from pptrace.model.tables import MEMORY, make_table
from pptrace.model.traces import Category, Trace
from pptrace.report.to_json import dump, report_object
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.schedule.text import from_rows
from pptrace.workflow.analyse import Analysis
from tests.roundtrip.files import events_of, step_begins
from tests.roundtrip.styles import TorchLabels, Unlabelled
from tests.support.analysed import analyse
from tests.support.extent import ALL
from tests.support.synthetic import (
    BYTES,
    START,
    Done,
    Event,
    PaperRun,
    Recording,
    make_trace,
    marked,
    record,
    renamed,
    run_on_paper,
    without,
)


def uneven(action: Action) -> int:
    """Stages of unequal cost, and ops that vary."""
    base = 100 if action.kind is Kind.F else 170
    return base + 13 * action.stage + 7 * (((action.microbatch or 0) * 5 + action.stage) % 4)


RECORDINGS = {
    "gpipe": record(build("gpipe", 3, 4)),
    "gpipe with latency": record(build("gpipe", 3, 4), latency=70),
    "1f1b": record(build("1f1b", 4, 8)),
    "1f1b with latency": record(build("1f1b", 4, 8), latency=70),
    "1f1b of few microbatches": record(build("1f1b", 4, 2), uneven, latency=70),
    "uneven 1f1b": record(build("1f1b", 4, 7), uneven, latency=90),
    "one rank": record(build("1f1b", 1, 3)),
    "interleaved": record(build("interleaved-1f1b", 2, 4, 2), latency=70),
    "split backward": record(
        from_rows([["0F0", "0F1", "0I0", "0I1", "0W1", "0W0"], ["1F0", "1F1", "1I0", "1I1", "1W0", "1W1"]], "custom"),
        latency=70,
    ),
    "two steps": record(build("1f1b", 2, 4), uneven, latency=70, steps=2),
    "replicas": record(build("1f1b", 2, 4), uneven, latency=70, dp=3, steps=2),
    "gpipe on devices": record(build("gpipe", 3, 4), latency=70, device=True),
    "1f1b on devices": record(build("1f1b", 4, 8), latency=70, device=True),
    "uneven 1f1b on devices": record(build("1f1b", 4, 7), uneven, latency=90, device=True),
    "interleaved on devices": record(build("interleaved-1f1b", 2, 4, 2), latency=70, device=True, dp=2, steps=2),
}
PART_OF_OTHERS = {"gpipe", "1f1b", "1f1b with latency", "two steps", "gpipe on devices", "1f1b on devices"}
"""Recordings of which others have everything: the same with latency, with replicas, or of unequal ops."""
EACH = pytest.mark.parametrize(
    "recording",
    [pytest.param(each, id=name) for name, each in RECORDINGS.items() if ALL or name not in PART_OF_OTHERS],
)


@cache
def analysis_of(recording: Recording) -> Analysis:
    """The analysis of a recording as it is; tests that only look at it share it."""
    return analyse(recording.traces())


def is_device(recording: Recording) -> bool:
    return recording.events.__name__ == "device_events"


def expected_partition(recording: Recording, index: int) -> tuple[int, int, int]:
    """(compute, exposed transfer, bubble) of a pipeline rank, counted one nanosecond after the other."""
    run: PaperRun = recording.run
    start, end = run.window
    window = set(range(start, end))
    compute = {t for done in run.computes(index) for t in range(done.start, done.end)}
    if is_device(recording):
        compute -= {(d.start + d.end) // 2 + gap for d in run.computes(index) for gap in range(3)}
    moving = {t for done in run.transfers(index) for t in range(done.met, moved_until(recording, done))}
    exposed = (moving & window) - compute
    return len(compute), len(exposed), len(window - compute - exposed)


def moved_until(recording: Recording, done: Done) -> int:
    """A host sees that a receive is over only after those before it in its group."""
    return done.through if done.action.kind.is_send or is_device(recording) else done.end


def ranks_of(report: Report, recording: Recording) -> list[tuple[int, RankStep]]:
    """Every rank of every step with its place in the pipeline."""
    return [(rank.rank // recording.job.dp, rank) for step in report.steps for rank in step.ranks]


@EACH
def test_the_window_of_every_rank_is_split_exactly_as_it_was_spent(recording: Recording) -> None:
    report = analysis_of(recording).report
    job, (start, end) = recording.job, recording.run.window
    assert [step.step for step in report.steps] == list(range(job.steps))
    for step in report.steps:
        assert (step.start_ns, step.end_ns) == (recording.begin(step.step) + start, recording.begin(step.step) + end)
        assert step.span_ns == end - start
        assert [rank.rank for rank in step.ranks] == list(range(job.dp * job.plan.pp))
    for index, rank in ranks_of(report, recording):
        assert (rank.compute_ns, rank.exposed_comm_ns, rank.bubble_ns) == expected_partition(recording, index)
        assert rank.compute_ns + rank.exposed_comm_ns + rank.bubble_ns == rank.window_ns == end - start
        assert rank.stage == index


@EACH
def test_phases_cover_the_window_and_their_bubbles_are_the_ranks_bubble(recording: Recording) -> None:
    report = analysis_of(recording).report
    for step in report.steps:
        for rank in step.ranks:
            parts = list(rank.phases.values())
            assert list(rank.phases) == ["warmup", "steady", "cooldown"]
            assert (parts[0].start_ns, parts[-1].end_ns) == (step.start_ns, step.end_ns)
            assert [part.end_ns for part in parts[:-1]] == [part.start_ns for part in parts[1:]]
            assert all(part.start_ns <= part.end_ns and part.bubble_ns >= 0 for part in parts)
            assert sum(part.bubble_ns for part in parts) == rank.bubble_ns
            per_rank = recording.job.plan.num_microbatches * recording.job.plan.num_chunks
            assert sum(part.num_forward for part in parts) == sum(part.num_backward for part in parts) == per_rank


@EACH
def test_the_waterfall_sums_to_the_span(recording: Recording) -> None:
    for step in analysis_of(recording).report.steps:
        fall = step.bubble.waterfall_ns
        assert sum(part for part in asdict(fall).values() if part is not None) == step.span_ns
        assert sum(step.span_parts.values()) == step.span_ns
        for name, ns in asdict(fall).items():  # as the causes have it, and the table and picture of them
            of_cause = [cause.ns for cause in step.causes or () if cause.cause == name]
            assert ns == sum(of_cause) if name != "compute" else step.ideal_ns or not of_cause


@EACH
def test_waiting_and_moving_sum_to_the_time_of_the_calls(recording: Recording) -> None:
    for index, rank in ranks_of(analysis_of(recording).report, recording):
        transfers = recording.run.transfers(index)
        for kind in ("send", "recv"):
            sent = [done for done in transfers if done.action.kind.is_send == (kind == "send")]
            rows = [comm for comm in rank.comms if (comm.axis, comm.kind) == ("pp", kind)]
            assert len(rows) == (1 if sent else 0)
            for summary in rows:
                moved = sum(moved_until(recording, done) - done.met for done in sent)
                assert (summary.count, summary.bytes) == (len(sent), BYTES * len(sent))
                assert summary.wait_ns == summary.total_ns - moved
                if moved:
                    assert summary.algbw_gbps == pytest.approx(BYTES * len(sent) / moved)
                    assert summary.busbw_gbps == summary.algbw_gbps
                else:
                    assert summary.algbw_gbps is None
                    assert summary.overlap_ratio is None


MOMENTS = {"start_ns", "end_ns", "first_ns", "last_ns"}


def without_origin(report: Report, origin_ns: int = START) -> dict[str, Any]:
    """All that a report says, with its moments counted from ``origin_ns`` and its inputs sorted."""

    def moved(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: moved(of, key) for key, of in value.items()}
        if isinstance(value, list):
            return [moved(of) for of in value]
        return value - origin_ns if name in MOMENTS and value is not None else value

    fields: dict[str, Any] = moved(json.loads(dump(report_object(report, with_ops=True))))
    return fields | {"inputs": sorted(fields["inputs"], key=lambda entry: entry["path"])}


@EACH
def test_shifting_all_times_and_the_order_of_traces_events_and_names_change_nothing(recording: Recording) -> None:
    ranks = range(recording.job.dp * recording.job.plan.pp)
    straight = without_origin(analysis_of(recording).report)
    shifts = (-START + 100_000, 3_600_000_000_007)
    number = next(n for n, each in enumerate(RECORDINGS.values()) if each is recording)
    for shift_ns in shifts if ALL else shifts[number % 2 :][:1]:  # back to the beginning of time, or on
        shifts_ns = dict.fromkeys(ranks, shift_ns)
        moved = analyse(recording.traces(shifts_ns=shifts_ns, shuffle=random.Random(number))).report
        assert without_origin(moved, START + shift_ns) == straight


@pytest.mark.parametrize("name", ["uneven 1f1b", "uneven 1f1b on devices"])
def test_ranks_on_clocks_of_their_own_are_put_right_within_the_uncertainty(name: str) -> None:
    recording = RECORDINGS[name]
    (straight,) = analysis_of(recording).report.steps
    wrong = {0: 0, 1: 90_000_000_000, 2: -1_234_567, 3: 40}
    report = analyse(recording.traces(shifts_ns=wrong, one_host=False)).report
    assert report.clock.method == "message-bounds"
    uncertainty = report.clock.uncertainty_ns
    assert uncertainty <= 90 * 4
    (step,) = report.steps
    for rank in range(4):
        assert abs(report.clock.offsets_ns[str(rank)] + wrong[rank]) <= uncertainty
        assert step.ranks[rank].compute_ns == straight.ranks[rank].compute_ns
    assert abs(step.span_ns - straight.span_ns) <= 2 * uncertainty


def test_replicas_have_a_window_each_and_one_report_per_rank() -> None:
    recording = RECORDINGS["replicas"]
    analysis = analysis_of(recording)
    report = analysis.report
    assert (report.mesh.num_ranks, report.mesh.pp, report.mesh.dp) == (6, 2, 3)
    assert [(window.step, window.ranks) for window in analysis.windows] == [
        (step, pipeline) for step in range(2) for pipeline in ((0, 3), (1, 4), (2, 5))
    ]
    for rank in report.steps[1].ranks:
        reduces = [comm for comm in rank.comms if comm.kind == "all_reduce"]
        assert [(comm.axis, comm.count, comm.bytes) for comm in reduces] == [("dp", 1, 1 << 20)]
        first_rank_of_group = rank.rank // 3 * 3
        assert reduces[0].wait_ns == first_rank_of_group + 2 - rank.rank, "each waits for the last of its group"
        moved = 60 - (first_rank_of_group + 2)
        assert reduces[0].algbw_gbps == pytest.approx((1 << 20) / moved)
        assert reduces[0].busbw_gbps == pytest.approx((1 << 20) / moved * 2 * 2 / 3)
        assert rank.spans == {"STEP": recording.run.end + 265, "OPTIMIZER": 50, "GRAD_SYNC": 80 - rank.rank}


def test_a_report_can_be_of_one_step() -> None:
    traces = RECORDINGS["two steps"].traces()
    report = analyse(traces, step=1).report
    assert [step.step for step in report.steps] == [1]
    assert report.steps == analysis_of(RECORDINGS["two steps"]).report.steps[1:]
    with pytest.raises(UsageError, match="step 7: the trace has no such step; it has 0, 1"):
        analyse(traces, step=7)


def test_a_missing_rank_is_named_and_what_remains_is_analysed() -> None:
    recording = RECORDINGS["1f1b with latency"]
    report = analyse(without(recording.traces(), 2)).report
    assert (
        "no trace of rank 2 (of 4): windows and waits do not include it, and bubbles that depend on it are not known"
        in report.warnings
    )
    assert "what the bubble consists of is not known where a step lacks ops of the plan" in report.warnings
    (step,) = report.steps
    assert [rank.rank for rank in step.ranks] == [0, 1, 3]
    assert step.bubble.waterfall_ns is None
    assert (step.bubble.ratio, step.bubble.share) == (None, None)
    for rank in step.ranks:
        assert rank.compute_ns == 8 * 300
        if rank.rank == 0:  # it speaks with rank 1 alone
            assert rank.compute_ns + rank.exposed_comm_ns + rank.bubble_ns == rank.window_ns
        else:
            assert (rank.exposed_comm_ns, rank.bubble_ns) == (None, None)
    by_rank = {rank.rank: rank.comms for rank in step.ranks}
    assert all(comm.wait_ns is None and comm.algbw_gbps is None for comm in by_rank[3])
    assert report.schedule.mismatches == ()


@pytest.mark.parametrize("name", sorted(SCHEDULES) if ALL else ["interleaved-1f1b", "zbv", "dualpipe"])
def test_a_rank_is_called_short_only_when_an_op_is_missing(name: str) -> None:
    def notes_of(traces: list[Trace]) -> list[str]:
        return [line for line in analyse(traces).report.warnings if "its trace has" in line]

    plan = build(name, 4, 8, SCHEDULES[name].default_chunks)
    traces = record(plan).traces()
    assert notes_of(traces) == []
    lost = next(action for action in reversed(plan.ranks[2]) if action.kind in (Kind.B, Kind.I))
    traces[2] = renamed(traces[2], lambda mark: mark.replace(f"pp1:{lost} ", "lost "))
    assert len(notes_of(traces)) == 1


def test_a_missing_rank_of_another_run_is_counted_from_its_size() -> None:
    traces = RECORDINGS["gpipe"].traces(with_metadata=False)
    report = analyse(without(traces, 1), num_ranks=3).report
    assert (
        "no trace of rank 1 (of 3): windows and waits do not include it, and bubbles that depend on it are not known"
        in report.warnings
    )


def test_a_trace_without_marks_says_what_cannot_be_given_and_why() -> None:
    report = analyse([make_trace([Event(Category.CPU_OP, "aten::mm", START, START + 5, thread=1)])]).report
    assert report.framework == "unlabelled"
    assert report.steps == ()
    assert report.findings == ()
    assert (report.schedule.name, report.schedule.source, report.schedule.num_microbatches) == ("unknown", "none", None)
    assert any(
        line.startswith("no forward or backward of a microbatch recognised (neither marks of pptrace nor known labels)")
        for line in report.warnings
    )
    assert any(line.startswith("no device events in these traces") for line in report.warnings)


def test_marks_of_steps_alone_are_told_from_no_marks() -> None:
    report = analyse([make_trace([marked(SpanMark(SpanKind.STEP, 3), START, START + 9)])]).report
    assert report.framework == "unlabelled"  # whoever ran the script, it was not pptrace's runtime
    (step,) = report.steps
    assert (step.step, step.span_ns, step.bubble.ratio, step.has_pipeline) == (3, 9, None, False)
    assert [(rank.window_ns, rank.compute_ns, rank.bubble_ns) for rank in step.ranks] == [(9, None, None)]
    assert any("no pipeline in these traces" in line for line in report.warnings)


def test_a_trace_without_marks_still_has_its_device_breakdown() -> None:
    events = [
        Event(Category.KERNEL, "gemm", START, START + 60, 0, 7),
        Event(Category.KERNEL, "ncclDevKernel_AllReduce", START + 40, START + 90, 0, 8),
        Event(Category.MEMCPY, "copy", START + 100, START + 110, 0, 7),
    ]
    (device,) = analyse([make_trace(events)]).report.device
    assert device.breakdown == DeviceBreakdown(START, START + 110, 100, 60, 30, 10, 10, 20 / 50)


def test_marks_of_another_version_are_warned_about() -> None:
    traces = [renamed(trace, lambda name: name.replace("pp1:", "pp2:")) for trace in RECORDINGS["gpipe"].traces()]
    report = analyse(traces).report
    versions = [line for line in report.warnings if "grammar version 2; this pptrace reads version 1" in line]
    assert [line.split(":")[0] for line in versions] == ["rank 0"]
    assert "and 2 more ranks like rank 0" in report.warnings
    assert report.steps == ()


def test_a_schedule_asked_for_is_compared_and_its_mismatches_told() -> None:
    report = analyse(RECORDINGS["1f1b"].traces(), schedule="gpipe").report
    assert (report.schedule.name, report.schedule.source) == ("gpipe", "option")
    assert report.schedule.mismatches[0] == "rank 0: op 5 is 0B0 where gpipe has 0F4"
    assert len(report.schedule.mismatches) == 4
    assert report.findings[0].detail.startswith("4 of its orders differ from gpipe; the first: rank 0: op 5 is 0B0")


def test_peak_memory_is_the_most_within_the_ranks_step() -> None:
    recording = RECORDINGS["two steps"]
    begin = recording.begin(1)
    samples = [
        (START - 10_000, 999),
        (START - 9_000, 30),
        (begin, 50),
        (begin + 5, 80),
        (begin + 9, 20),
        (begin + 10**9, 999),
    ]
    memory = make_table(
        MEMORY,
        {
            "rank": [-1] * len(samples),
            "t_ns": [t for t, _ in samples],
            "allocated_bytes": [size for _, size in samples],
            "reserved_bytes": [100] * len(samples),
        },
    )
    traces = recording.traces()
    traces[1] = replace(traces[1], memory=memory)
    first, second = analyse(traces).report.steps
    assert [rank.peak_memory_bytes for rank in second.ranks] == [None, 80]
    assert [rank.peak_memory_bytes for rank in first.ranks] == [None, None]


def test_one_rank_of_a_pipeline_of_unknown_length_has_its_compute_and_bounds_of_its_bubble() -> None:
    run = run_on_paper(build("1f1b", 4, 8), lambda _: 500, latency=130)
    report = analyse([make_trace(events_of(Unlabelled(), run, 1, 2), 0)]).report
    assert (report.mesh.pp, report.schedule.num_microbatches) == (None, None)
    assert ("1f1b", 4) in {(result.name, result.pp) for result in report.schedule.candidates}
    for step in report.steps:
        (rank,) = step.ranks
        assert (rank.pp_rank, rank.bubble_ns, step.bubble.ratio, step.bubble.ideal_ratio) == (None, None, None, None)
        assert rank.not_compute_ns == rank.window_ns - rank.compute_ns
    assert any("its length and the stages are null" in line for line in report.warnings)
    assert not any("no forward or backward" in line for line in report.warnings)


def test_several_ranks_of_a_pipeline_that_nothing_tells_have_no_steps() -> None:
    run = run_on_paper(build("1f1b", 4, 8), lambda _: 500, latency=130)
    traces = [make_trace(events_of(Unlabelled(), run, rank, 2), rank) for rank in (0, 1, 2)]
    report = analyse(traces).report
    assert report.steps == ()
    assert any(
        line.startswith("pipeline steps, phases and bubbles are not known: forwards") for line in report.warnings
    )
    assert not any("no forward or backward" in line for line in report.warnings)


def test_the_ideal_of_a_step_with_fewer_microbatches_is_that_of_so_many() -> None:
    short, long = (run_on_paper(build("1f1b", 2, m), lambda _: 500, latency=130) for m in (3, 6))
    traces = []
    for rank in range(2):
        begin = step_begins(short, 0)
        events = [
            *TorchLabels().step(short, rank, 0, begin),
            *TorchLabels().step(long, rank, 1, begin + short.end + 900),
        ]
        traces.append(make_trace(events, rank))
    report = analyse(traces).report
    assert report.schedule.num_microbatches == 6
    assert [step.bubble.ideal_ratio for step in report.steps] == pytest.approx([1 / 3, 1 / 6])
