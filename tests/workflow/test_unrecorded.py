"""Runs without their recording: real programs on a GPU, each measured without its profiler."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from pptrace.analysis.findings.verdict import verdict_lines
from pptrace.analysis.recording import UnrecordedSteps, unrecorded_steps
from pptrace.analysis.report import KERNELS_MISSING, RecordingReport, Report
from pptrace.clock import Clock
from pptrace.clock.result import ClockMethod
from pptrace.ingest import open_inputs, read_each
from pptrace.intervals import lengths_within, union
from pptrace.model.tables import COMMS, empty_table
from pptrace.model.traces import Category, InputFormat, Trace
from pptrace.recognise.recording.boundaries import Boundaries
from pptrace.recognise.recording.graph import graph_of
from pptrace.recognise.recording.replay import join_graphs
from pptrace.workflow import load as loading
from pptrace.workflow.analyse import analyse_ranks
from pptrace.workflow.load import load
from pptrace.workflow.rank_store import recognise_trace
from pptrace.workflow.unrecorded import _RankSteps, _StepNodes, _typical, undo_recording
from tests.support.programs import ROOT
from tests.support.recorded_program import Graph, Launch, Op, Python, run_programs

OBSERVED = ROOT.parent / "shared" / "data" / "gpu_observer"
GRAPHS = ROOT.parent / "shared" / "data" / "gpu_graph"
needs_runs = pytest.mark.skipif(not OBSERVED.is_dir(), reason="the recorded GPU runs of shared/data are not here")
RUNS = {"mid": "mid.shapes", "small": "small.cpu_cuda"}


def unrecorded_ms(program: str) -> float:
    """The step of the program in a process without a profiler, at the place at which it is recorded elsewhere."""
    return float(median(json.loads((OBSERVED / "walls_ms.json").read_text())[f"{program}.none"][10:15]))


def report_of(program: str, as_recorded: bool = False) -> Report:
    return load([OBSERVED / f"{RUNS[program]}.json.gz"], as_recorded=as_recorded).report


@needs_runs
@pytest.mark.parametrize("program", RUNS)
def test_the_predicted_step_and_idle_share_are_those_of_the_program_without_profiler(program: str) -> None:
    recording, truth = report_of(program).recording, unrecorded_ms(program) * 1e6
    assert recording.predicted_step_ns == pytest.approx(truth, rel=0.05)
    assert recording.low_ns < truth < recording.high_ns
    analysis = load([OBSERVED / f"{RUNS[program]}.json.gz"], as_recorded=True)
    work = analysis.data.work[0]
    steps = [(step.start_ns, step.end_ns) for step in analysis.report.steps]
    busy = lengths_within(union(work.start_ns, work.end_ns), *zip(*steps, strict=True))
    assert recording.device_idle_share == pytest.approx(1 - median(busy.tolist()) / truth, abs=0.03)


@needs_runs
@pytest.mark.parametrize("program", RUNS)
def test_the_figures_are_those_of_the_unrecorded_run_and_no_gain_is_larger_than_it_leaves(program: str) -> None:
    report, recorded = report_of(program), report_of(program, as_recorded=True)
    step = report.typical_step
    assert step.span_ns == pytest.approx(unrecorded_ms(program) * 1e6, rel=0.05)
    assert step.ranks[0].compute_ns == pytest.approx(recorded.steps[0].ranks[0].compute_ns, rel=0.01)
    left = step.span_ns - step.ranks[0].compute_ns
    assert all((finding.gain_ns or 0) <= left for finding in report.findings)


@needs_runs
def test_what_is_not_known_well_enough_is_no_finding_about_hosts_and_says_how_to_record() -> None:
    report = report_of("mid")
    assert not [finding for finding in report.findings if finding.evidence.get("cause") == "host"]
    (missing,) = [entry for entry in report.missing_evidence if entry.findings == ("host",)]
    assert "without its recording is known to ±" in missing.reason
    assert "record with less" in missing.reason
    assert verdict_lines(report).first.startswith("Record with less (no shapes, stacks or modules), by `pptrace run`")


@needs_runs
def test_the_figures_of_the_recording_stay_in_the_report_and_are_the_report_where_asked_for() -> None:
    report, recorded = report_of("mid"), report_of("mid", as_recorded=True)
    assert report.recording.figures == "unrecorded"
    assert [step.span_ns for step in report.recording.as_recorded.steps] == [step.span_ns for step in recorded.steps]
    assert report.recording.as_recorded.verdict == recorded.verdict
    assert recorded.recording.figures == "recorded"
    assert [finding for finding in recorded.findings if finding.evidence.get("cause") == "host"]
    assert report.device == recorded.device  # of whole traces, which are recordings


@needs_runs
def test_steps_that_were_measured_without_recording_decide_what_it_cost(tmp_path: Path) -> None:
    """The same trace with step times as ``pptrace run`` writes them: steps of 36 ms, and slower ones after the recording."""
    shutil.copy(OBSERVED / "mid.shapes.json.gz", tmp_path / "rank0.json.gz")
    lengths = [60, 50, *[36 + 0.1 * (step % 3) for step in range(8)], *[76] * 5, 90, *[47] * 6]
    start = [round(1e6 * sum(lengths[:step])) for step in range(len(lengths))]
    times = {
        "first_step": 0,
        "start_ns": start,
        "end_ns": [begin + round(1e6 * length) for begin, length in zip(start, lengths, strict=True)],
        "device_ns": None,
        "recorded": [10, 15],
        "disturbed": [15],
    }
    entry = {"rank": 0, "trace": "rank0.json.gz", "step_times": times}
    (tmp_path / "run.json").write_text(json.dumps({"schema": "pptrace.run/1", "world_size": 1, "ranks": [entry]}))
    recording = load([tmp_path]).report.recording
    assert recording.unrecorded_step_ns == 36_100_000
    assert recording.cost_source == "measured"
    assert recording.predicted_step_ns == pytest.approx(36.1e6, rel=0.02)
    assert recording.error == pytest.approx(recording.predicted_step_ns / 36.1e6 - 1)
    assert recording.slowdown == pytest.approx(recording.recorded_step_ns / 36.1e6)
    assert recording.slowed_after == pytest.approx(47 / 36.1)
    assert not recording.is_too_uncertain


@pytest.mark.skipif(not GRAPHS.is_dir(), reason="the recorded graphs of shared/data are not here")
def test_replays_of_a_graph_are_predicted_though_hosts_do_too_little_to_tell_what_recording_costs() -> None:
    """The script measured 13.2 ms a step. Steps begin where the device begins a replay, which the host launched long before."""
    recording = load([GRAPHS / "plain_rank0.json.gz"]).report.recording
    assert recording.predicted_step_ns == pytest.approx(13.2e6, rel=0.05)
    assert recording.events_per_step < 50
    assert recording.cost_per_event_ns == 3_000


def times_of(before: list[float], after: list[float], device: list[float | None] | None = None) -> dict[str, object]:
    """Times of steps as ``pptrace run`` writes them, ms: two to warm up, those before and after, three recorded between them."""
    lengths = [900.0, 80.0, *before, 60.0, 60.0, 60.0, *after]
    start = [round(1e6 * sum(lengths[:step])) for step in range(len(lengths))]
    recorded = [2 + len(before), 5 + len(before)]
    on_device = None if device is None else [None if ms is None else round(1e6 * ms) for ms in device]
    end = [begin + round(1e6 * length) for begin, length in zip(start, lengths, strict=True)]
    return {"first_step": 0, "start_ns": start, "end_ns": end, "device_ns": on_device, "recorded": recorded}


def test_steps_whose_device_was_not_read_do_not_count_where_that_of_others_was() -> None:
    """A host that runs ahead of its device: the last step's event had not come when the script ended."""
    device = [900.0, 80.0, 75.0, 75.0, 75.0, 76.0, 76.0, 76.0, 74.0, 74.0, None]
    steps = unrecorded_steps([times_of([40.0, 41.0, 40.0], [40.0, 41.0, 41.0], device)])
    assert steps.before.tolist() == [75_000_000] * 3
    assert steps.after.tolist() == [74_000_000] * 2
    assert steps.recorded.tolist() == [76_000_000] * 3
    (before, after) = (unrecorded_steps([times_of([40.0], [41.0], times)]).typical_ns for times in (None, [None] * 7))
    assert before == after == 40_500_000


def test_steps_that_begin_where_those_of_the_trace_do_stay_as_they_were_measured() -> None:
    """Of an even number of recorded steps that differ the typical one is the lower of the two in the middle, here as there."""
    recorded = np.array([30, 31, 32, 36, 43, 47]) * 1_000_000
    steps = UnrecordedSteps(np.array([20_000_000]), np.array([20_000_000]), recorded)
    assert steps.like(32_000_000).lengths.tolist() == [20_000_000] * 2
    assert steps.like(36_000_000).lengths.tolist() == [22_500_000] * 2


@pytest.mark.parametrize(
    ("before", "after", "detached", "slowed"),
    [
        ([30.0, 31.0, 30.0], [36.0, 37.0], True, 36.5 / 30),
        ([30.0], [36.0, 37.0, 36.0], False, 36 / 30),
        ([30.0], [36.0, 37.0, 36.0], True, None),
        ([30.0, 34.0], [33.0, 37.0, 36.0], False, None),
    ],
)
def test_steps_are_slowed_where_enough_of_them_tell(
    before: list[float], after: list[float], detached: bool, slowed: float | None
) -> None:
    steps = unrecorded_steps([times_of(before, after)], is_detached=detached)
    assert steps.slowed_after == (None if slowed is None else pytest.approx(slowed))
    assert steps.typical_ns == round(1e6 * median(before if slowed else before + after))


def of_profiled_steps(losing: Sequence[int]) -> RecordingReport:
    """The recording of eight steps of a host that is slow to launch, of which some have lost twenty kernels each."""
    layers = tuple(
        part
        for _ in range(60)
        for part in (
            Python(1_000),
            Op(601, 4_000, (Op(2_000, 1_000, (Launch(7, 3_000),), "aten::mm"),), "aten::linear"),
        )
    )
    steps = [
        part
        for number in range(8)
        for part in (Op(2_000, 2_000, layers, f"ProfilerStep#{number}", Category.ANNOTATION), Python(20_000))
    ]
    (events,), _ = run_programs([steps], 4_000)
    kernels = np.flatnonzero(events.category == Category.KERNEL)
    lost = np.concatenate([kernels[:0], *(kernels[60 * step + 20 : 60 * step + 40] for step in losing)])
    events = events.take(np.setdiff1d(np.arange(len(events)), lost))
    recognised = recognise_trace(Trace("rank0", InputFormat.KINETO, 0, "", events=events))
    return undo_recording(analyse_ranks([recognised]), {0: recognised.recording})[0]


def test_steps_begin_with_replays_on_the_device_that_a_host_ahead_of_it_launched_long_before() -> None:
    """Steps of 50 kernels of 20 µs, to each of which recording adds 0.25 µs; the host launches all of them at once."""
    (events, *_), _ = run_programs([[Python(10_000), Graph(7, (20_000,) * 50)] * 8], 4_000)
    kernels = np.flatnonzero(events.category == Category.KERNEL)
    begins = events.start_ns[kernels[::50]]
    steps = _RankSteps(
        np.arange(8), begins, 1, int(begins[1]), int(events.end_ns.max()), is_marked=True, on_device=True
    )
    of_rank = graph_of(events, Boundaries.of(events), begins[:0], 4_000)
    graph = join_graphs({0: of_rank}, {0: 4_000}, empty_table(COMMS), Clock(ClockMethod.SAME_HOST, {0: 0}, 0))
    nodes = _StepNodes.of(graph, of_rank, graph.position[0], steps)
    recorded, predicted = (_typical({0: nodes.steps_at(graph.replay(scale))}) for scale in (0.0, 1.0))
    assert recorded == pytest.approx(50 * 20_250, rel=0.002)
    assert predicted == pytest.approx(50 * 20_000, rel=0.002)


def test_steps_that_lost_kernels_tell_nothing_and_the_others_what_a_step_takes() -> None:
    whole, lossy = of_profiled_steps([]), of_profiled_steps([2, 5])
    assert whole.figures == lossy.figures == "unrecorded"
    assert lossy.recorded_step_ns == whole.recorded_step_ns
    assert lossy.predicted_step_ns == pytest.approx(whole.predicted_step_ns, rel=0.02)
    damaged = of_profiled_steps([1, 2, 5])
    assert (damaged.figures, damaged.reason) == ("recorded", KERNELS_MISSING)


def test_a_run_that_is_not_corrected_keeps_its_figures_and_has_no_findings_that_recording_may_have_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uncertain = RecordingReport(recorded_step_ns=100, predicted_step_ns=90, low_ns=50, high_ns=130)
    assert uncertain.is_too_uncertain
    monkeypatch.setattr("pptrace.workflow.load.undo_recording", lambda *_: (uncertain, None))
    run = [ROOT / "sample_traces" / "1f1b_p4"]
    plain, recorded = load(run).report, load(run, as_recorded=True).report
    assert plain.recording == recorded.recording == uncertain
    assert plain.steps == recorded.steps
    missing = [entry.findings for entry in recorded.missing_evidence]
    assert ("host",) not in missing
    assert [entry.findings for entry in plain.missing_evidence] == [*missing, ("host",)]
    of_host = [finding for finding in recorded.findings if finding.evidence.get("cause") == "host"]
    assert of_host, "the recording alone has some"
    assert not [finding for finding in plain.findings if finding.evidence.get("cause") == "host"]


@pytest.mark.parametrize("sample", ["dualpipe_p4", "hang_p4"])
def test_a_run_that_stays_as_it_was_recorded_has_the_answers_to_all_questions(sample: str) -> None:
    path = ROOT / "sample_traces" / sample
    undone, recorded = (load([path], cache=False, as_recorded=as_recorded) for as_recorded in (False, True))
    assert undone.corrections is None
    assert undone.report.stages is not None
    names = ("stages", "memory", "links", "recompute")
    assert [getattr(undone.report, name) for name in names] == [getattr(recorded.report, name) for name in names]


def test_an_analysis_that_leaves_questions_open_has_their_answers_when_they_are_asked_for() -> None:
    inputs = open_inputs([ROOT / "sample_traces" / "1f1b_p4"])
    ranks = read_each(inputs, recognise_trace, 1).traces
    whole, brief = analyse_ranks(ranks), analyse_ranks(ranks, is_brief=True)
    assert whole.report.stages is not None
    assert (brief.report.stages, brief.report.memory, brief.report.links) == (None, None, ())
    assert brief.report.steps == whole.report.steps
    assert brief.report.verdict == whole.report.verdict
    assert brief.answered().report == whole.answered().report == whole.report


@pytest.mark.parametrize(("sample", "num_files"), [("1f1b_p4", 4), ("table", 0)])
def test_traces_are_let_go_of_before_the_analysis_unless_they_are_corrected_after_it(
    sample: str, num_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of millions of ops may be a small file, and its traces most of the memory that there is."""
    made: list[Any] = []

    class Watched(loading._SmallTraces):
        def __post_init__(self) -> None:
            made.append(self)

    analyse = loading._analyse_read
    during = []
    monkeypatch.setattr(loading, "_SmallTraces", Watched)
    monkeypatch.setattr(
        loading,
        "_analyse_read",
        lambda *args, **options: during.append(len(made[0].by_path)) or analyse(*args, **options),
    )
    path = ROOT / "sample_traces" / sample
    if sample == "table":
        path = tmp_path / "ops.csv"
        path.write_text("rank,kind,stage,microbatch,start_ns,end_ns\n0,F,0,0,0,10\n0,B,0,0,10,30\n")
    load([path], cache=False)
    assert during[0] == num_files
