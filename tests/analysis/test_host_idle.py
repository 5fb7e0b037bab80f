"""Devices that wait for their hosts, in runs with closed forms: the same answer in ranks, waterfall, causes and path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from msgspec.structs import asdict

from pptrace.analysis.findings.verdict import verdict_lines
from pptrace.analysis.result import Severity, StepReport
from pptrace.analysis.steps.host_idle import synchronisations_of_windows
from pptrace.marks import Axis, OpMark, P2PMark, SpanKind, SpanMark, Transfer
from pptrace.model.device import HostIdle, IdleTime, Synchronisations, with_host_waits
from pptrace.model.traces import Category, Trace
from pptrace.schedule.actions import Kind
from pptrace.schedule.messages import peer_of
from pptrace.schedule.registry import build
from pptrace.slices import Slice
from pptrace.timeline.lanes import host_waits
from pptrace.workflow.analyse import Analysis
from tests.support.analysed import analyse
from tests.support.synthetic import (
    AUTOGRAD_THREAD,
    BYTES,
    COMPUTE_STREAM,
    MAIN_THREAD,
    NCCL_STREAM,
    START,
    Event,
    PaperRun,
    Recording,
    device_events,
    groups_of,
    make_trace,
    marked,
    record,
)

P, M, GAP = 4, 8, 40
"""Each op has two kernels, and between them a gap before which the second had not been launched."""


def starved_events(run: PaperRun, rank: int, pipeline: Sequence[int], step: int = 0, at: int = 0) -> list[Event]:
    """The events of a device run whose ops' second kernels are launched only when they begin, GAP after the first ones ended.

    All other work is launched just before it begins, while the device is busy with what comes before it.
    """
    events: list[Event] = []
    number = (rank + 1) * 1_000_000 + step * 10_000

    def launch(name: str, call: int, start: int, end: int, thread: int, stream: int) -> None:
        nonlocal number
        number += 1
        made = Event(Category.RUNTIME, "cudaLaunchKernel", at + call - 2, at + call, thread=thread, correlation=number)
        events.append(made)
        events.append(Event(Category.KERNEL, name, at + start, at + end, 0, stream, correlation=number))

    for done in run.computes(rank):
        half = (done.start + done.end) // 2
        events.append(marked(OpMark(done.action, step), at + done.start - 6, at + half + GAP + 1))
        thread = MAIN_THREAD if done.action.kind is Kind.F else AUTOGRAD_THREAD
        launch("gemm_f16", done.start - 3, done.start, half, thread, COMPUTE_STREAM)
        launch("layer_norm", half + GAP, half + GAP, done.end, thread, COMPUTE_STREAM)
    for group in groups_of(run.transfers(rank)):
        transfers = [Transfer(done.action, pipeline[peer_of(run.plan, done.action)], BYTES) for done in group]
        start, end = group[0].start, max(done.end for done in group)
        events.append(marked(P2PMark(tuple(transfers), Axis.PP, step), at + start - 3, at + start))
        launch("ncclDevKernel_SendRecv", start - 1, start, end, MAIN_THREAD, NCCL_STREAM)
    return events


def traces_without(recording: Recording, is_left_out: Callable[[Event], bool]) -> list[Trace]:
    return [
        structs.replace(
            make_trace([e for e in recording.events_of(rank) if not is_left_out(e)], rank), metadata=trace.metadata
        )
        for rank, trace in enumerate(recording.traces())
    ]


@pytest.fixture(scope="module")
def starved() -> Analysis:
    return analyse(replace(record(build("1f1b", P, M), steps=3), events=starved_events).traces())


def only_step(analysis: Analysis) -> StepReport:
    return analysis.report.steps[1]


def test_causes_and_the_critical_path_name_the_host(starved: Analysis) -> None:
    step = only_step(starved)
    host = [cause for cause in step.causes if cause.cause == "host"]
    assert sum(cause.ns for cause in host) == (M + P - 1) * 2 * GAP
    assert {str(dict(cause.where)): cause.ns for cause in host} == {f"{{'rank': {rank}}}": 220 for rank in range(P)}
    assert step.critical_path.parts["host"] == (M + P - 1) * 2 * GAP
    assert sum(step.critical_path.parts.values()) == step.span_ns
    assert sum(step.critical_path.by_stage.values()) == step.span_ns


def test_the_first_finding_and_the_verdict_are_about_launching(starved: Analysis) -> None:
    report = starved.report
    first = next(finding for finding in report.findings if finding.severity is not Severity.INFO)
    assert first.evidence["cause"] == "host"
    assert first.evidence["where"] == {}  # all ranks alike
    assert first.gain_ns == (M + P - 1) * 2 * GAP
    assert first.evidence["launch_starved_ns"] == sum(
        rank.host.launch_starved_ns for rank in only_step(starved).ranks if rank.host is not None
    )
    assert report.verdict.startswith("The bubble is not your problem: the devices wait for the host to launch.")


def test_a_host_that_loads_data_meanwhile_is_told_to_load_it_sooner() -> None:
    """In a pipeline too: each gap but its first and last ns."""

    def loading(run: PaperRun, rank: int, pipeline: Sequence[int], step: int = 0, at: int = 0) -> list[Event]:
        middles = [at + (done.start + done.end) // 2 for done in run.computes(rank)]
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        ranges = [
            Event(Category.ANNOTATION, name, middle + 1, middle + GAP - 1, thread=MAIN_THREAD) for middle in middles
        ]
        return [*starved_events(run, rank, pipeline, step, at), *ranges]

    report = analyse(replace(record(build("1f1b", P, M), steps=3), events=loading).traces()).report
    ranks = [rank for step in report.steps for rank in step.ranks]
    assert [rank.idle_spans for rank in ranks] == [{"DATA": 2 * M * (GAP - 2)}] * len(ranks)
    first = next(finding for finding in report.findings if finding.severity is not Severity.INFO)
    starved = sum(rank.host.launch_starved_ns for rank in ranks)
    share = len(ranks) * 2 * M * (GAP - 2) / starved
    assert first.evidence["idle_spans"] == {"DATA": share}
    assert first.detail.startswith(f"{share:.0%} of it while hosts load data: have the next batch ready")
    assert verdict_lines(report).first.startswith("Have the next batch ready before its step begins")


def test_a_step_of_which_the_host_is_not_known_has_no_such_cause_though_others_have() -> None:
    """The middle step's second kernels have no recorded launches: which ops they are of is not known, nor its parts."""
    run = replace(record(build("1f1b", P, M), steps=3), events=starved_events)
    lost: set[int] = set()
    for rank in range(P):
        late = [event.correlation for event in run.events_of(rank) if event.name == "layer_norm"]
        lost |= set(late[len(late) // 3 : 2 * len(late) // 3])
    traces = traces_without(run, lambda event: event.category is Category.RUNTIME and event.correlation in lost)
    steps = analyse(traces).report.steps
    falls = [step.bubble.waterfall_ns for step in steps]
    assert [fall is not None and fall.host is not None for fall in falls] == [True, False, True]
    for step, named in zip(steps, (True, False, True), strict=True):
        assert (step.span_parts is not None) == named
        if step.span_parts is not None:
            assert "host" in step.span_parts
            assert sum(step.span_parts.values()) == step.span_ns


def test_without_launches_host_is_null_with_the_reason() -> None:
    recording = record(build("1f1b", 2, 4), device=True)
    report = analyse(traces_without(recording, lambda event: event.category is Category.RUNTIME)).report
    assert all(entry.breakdown.idle_ns is not None and entry.host is None for entry in report.device)
    assert [
        line
        for line in report.warnings
        if "why the device was idle is not known" in line and "no runtime calls of CUDA or HIP" in line
    ]


def test_synchronisations_belong_to_the_window_in_which_they_end() -> None:
    columns = np.array([(10, 20, 15, 25), (30, 60, 60, 60), (61, 70, 65, 90)]).T
    names = (("cudaStreamSynchronize", "aten::item"), ("cudaDeviceSynchronize", ""))
    syncs = Synchronisations(columns[0], columns[1], np.array([0, 1, 0]), *columns[2:], names)
    first, second = synchronisations_of_windows(
        syncs, [0, 60], [60, 80], lambda end: f"op at {end}", lambda time: time + 1000
    )
    (sync,) = first
    assert (sync.call, sync.operator, sync.count, sync.total_ns, sync.drained_ns) == (*names[0], 1, 10, 10)
    assert (sync.longest_ns, sync.longest_start_ns, sync.longest_op) == (10, 1010, "op at 1020")
    assert [(sync.call, sync.count, sync.total_ns, sync.drained_ns) for sync in second] == [
        ("cudaStreamSynchronize", 1, 9, 15),
        ("cudaDeviceSynchronize", 1, 30, 0),
    ]


def test_a_blocking_call_is_named_in_the_finding_with_its_place() -> None:
    def events(run: PaperRun, rank: int, pipeline: Sequence[int], step: int = 0, at: int = 0) -> list[Event]:
        made = starved_events(run, rank, pipeline, step, at)
        for done in run.computes(rank):
            half = at + (done.start + done.end) // 2
            made.append(Event(Category.CPU_OP, "aten::item", half - 12, half + 6, thread=MAIN_THREAD))
            made.append(Event(Category.RUNTIME, "cudaStreamSynchronize", half - 10, half + 5, thread=MAIN_THREAD))
        return made

    report = analyse(replace(record(build("1f1b", P, M)), events=events).traces()).report
    (host,) = [finding for finding in report.findings if finding.evidence.get("cause") == "host"]
    (named,) = host.evidence["synchronisations"]
    assert (named["call"], named["operator"], named["count"]) == ("cudaStreamSynchronize", "aten::item", 2 * M * P)
    assert named["drained_ns"] == 2 * M * P * GAP
    assert named["longest_op"] == "0F0"
    assert "of it follows calls that wait for the device: cudaStreamSynchronize in aten::item (64 in all" in host.detail
    first = verdict_lines(report).first
    assert first.startswith("Avoid calls in which the host waits for the device (aten::item): saves ")


def test_what_the_host_waits_for_in_its_own_communication_is_blocking() -> None:
    starved, blocked, dependent = (np.array(times) for times in ([(10, 20), (30, 50)], [(20, 22)], [(60, 70)]))
    idle = IdleTime(launch_starved=starved, blocking=blocked, dependency=dependent)
    waits = host_waits(comms_of(("host", 12, 12, 35), ("device", 36, 36, 45), ("host", 47, 49, 49)))
    assert waits.tolist() == [[12, 35]]
    idle_by_cause = with_host_waits(idle, waits)
    assert idle_by_cause.launch_starved.tolist() == [[10, 12], [35, 50]]
    assert idle_by_cause.blocking.tolist() == [[12, 22], [30, 35]]
    assert idle_by_cause.dependency.tolist() == [[60, 70]]


def comms_of(*rows: tuple[str, int, int, int]) -> Slice:
    """Communication by clock, start, end of the posting and end; what only posts waits for nothing."""
    clock, start, posted, end = zip(*rows, strict=True)
    columns = {"start_ns": start, "asked_ns": start, "posted_ns": posted, "end_ns": end}
    return Slice(
        {name: np.array(values) for name, values in columns.items()} | {"clock": np.array(clock, dtype=object)}
    )


def test_host_times_of_a_drifting_clock_still_partition_the_idle_time() -> None:
    run = replace(record(build("1f1b", 2, M), steps=3), events=starved_events)
    for shift in (0, 10**9 + 7):
        report = analyse(run.traces(shifts_ns={1: shift}, one_host=False)).report
        for rank in (rank for step in report.steps for rank in step.ranks):
            assert sum(asdict(rank.host).values()) == rank.device.idle_ns
            if rank.rank == 0:
                assert rank.host.launch_starved_ns == 2 * M * GAP


def test_the_rank_whose_host_is_late_is_named() -> None:
    """The others run ahead: only the ops of rank 2 have a gap before what had not been launched."""

    def events(run: PaperRun, rank: int, pipeline: Sequence[int], step: int = 0, at: int = 0) -> list[Event]:
        return (starved_events if rank == 2 else device_events)(run, rank, pipeline, step, at)

    report = analyse(replace(record(build("1f1b", P, M), steps=3), events=events).traces()).report
    (host,) = [
        found for found in report.findings if found.evidence["cause"] == "host" and "is_outside" not in found.evidence
    ]
    assert host.evidence["where"] == {"rank": 2}
    assert "rank 2" in host.title
    for step in report.steps:
        assert step.bubble.waterfall_ns is not None
        assert {cause.where["rank"] for cause in step.causes if cause.cause == "host" and cause.ns} == {2}
        assert step.ranks[2].host.launch_starved_ns >= 2 * M * GAP
        assert step.blame.by_kind["host"] >= 2 * M * GAP
        assert (
            sum(step.blame.by_kind.values()) == step.blame.total_ns == sum(rank.bubble_ns or 0 for rank in step.ranks)
        )


def test_steps_without_a_pipeline_tell_of_their_hosts_as_well() -> None:
    """In each step of 1,000 ns ten kernels of 60 ns, each launched 40 ns after the one before it has ended."""
    events, number = [], 0
    for step in range(6):
        at = START + 1000 * step
        events.append(marked(SpanMark(SpanKind.STEP, step), at, at + 1000))
        for begin in range(at, at + 1000, 100):
            number += 1
            call = Event(Category.RUNTIME, "cudaLaunchKernel", begin + 30, begin + 40, thread=1, correlation=number)
            events += [call, Event(Category.KERNEL, "gemm", begin + 40, begin + 100, 0, 7, correlation=number)]
    report = analyse([make_trace(events)]).report
    assert [step.ranks[0].host for step in report.steps] == [HostIdle(400, 0, 0)] * 6
    assert report.device[0].host == HostIdle(59 * 40, 0, 0)
    (host,) = report.findings
    assert (host.gain_ns, host.gain_low_ns, host.gain_high_ns) == (400, 400, 400)
    assert host.evidence["share"] == 0.4
    assert report.verdict.startswith("The devices wait for the host to launch. The typical step takes")
    assert "60% compute, 40% devices waiting for launches; the most to win back" in report.verdict
