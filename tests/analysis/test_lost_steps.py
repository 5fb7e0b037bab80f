"""Kernels that were launched and are not in a trace: their steps are left out, with the reason, and the others explained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest
from msgspec import structs

from pptrace.analysis.lost_steps import lines_of_lost_work, lost_steps
from pptrace.model.device import LostKernels
from pptrace.model.traces import Category
from pptrace.recognise.device.work import device_rows, device_work, is_much, kernel_launches, lost_kernels
from pptrace.recognise.rank import recognise_rank
from pptrace.report.recording import recording_line
from pptrace.workflow.analyse import Analysis
from pptrace.workflow.load import load
from tests.support import damages as tampered
from tests.support.extent import ALL
from tests.support.kineto import write_changed
from tests.support.programs import SAMPLES
from tests.support.synthetic import Event, make_trace

PLAIN, OURS = SAMPLES / "gpu_nccl_torch_1f1b_p4", SAMPLES / "gpu_1f1b_p4"
Kept = Callable[[int, list[dict[str, Any]]], list[dict[str, Any]]]


def launch(name: str, at: int, correlation: int) -> Event:
    return Event(Category.RUNTIME, name, at, at + 1, correlation=correlation)


def kernel(at: int, correlation: int) -> Event:
    return Event(Category.KERNEL, "gemm", at, at + 5, 0, 7, correlation=correlation)


EVENTS = [
    launch("cudaLaunchKernel", 0, 1),
    launch("cudaLaunchKernelExC", 2, 2),
    launch("cuLaunchKernel", 4, 3),
    launch("hipModuleLaunchKernel", 6, 4),
    launch("cudaGraphLaunch", 8, 5),
    launch("cudaLaunchHostFunc", 9, 6),
    launch("cudaMemsetAsync", 10, 7),
    kernel(20, 1),
    kernel(30, 3),
]


def test_launches_of_kernels_without_a_kernel_are_counted() -> None:
    events = make_trace(EVENTS).events
    calls, lost = kernel_launches(events, device_rows(events))
    assert [events.names[index] for index in events.name_id[calls]] == [
        "cudaLaunchKernel",
        "cudaLaunchKernelExC",
        "cuLaunchKernel",
        "hipModuleLaunchKernel",
    ]
    assert events.start_ns[lost].tolist() == [2, 6]
    found = lost_kernels(events.start_ns[lost], 4, device_work(events))
    assert (found.start_ns.tolist(), found.end_ns.tolist(), found.num_launches) == (
        [25, 35],
        [30, np.iinfo(np.int64).max],
        4,
    )
    assert recognise_rank(make_trace(EVENTS)).work.lost.start_ns.tolist() == [25, 35]


def test_launches_into_a_graph_are_no_loss() -> None:
    capture = [launch("cudaStreamBeginCapture", 1, 90), launch("cudaStreamEndCapture", 11, 91)]
    assert recognise_rank(make_trace([*EVENTS, *capture])).work.lost.start_ns.tolist() == []
    anonymous = [replace(event, correlation=-1) if event.category == Category.KERNEL else event for event in EVENTS]
    lost = recognise_rank(make_trace(anonymous)).work.lost
    assert (lost.num_missing, lost.num_unrelated) == (0, 2), "which call launched them is not known"
    assert (
        recognise_rank(
            make_trace([event for event in EVENTS if event.category != Category.KERNEL])
        ).work.lost.start_ns.tolist()
        == []
    )


@pytest.mark.parametrize(
    ("lost", "launched", "much"), [(0, 10, False), (1, 10_000, False), (1, 500, True), (10, 10**6, True)]
)
def test_little_is_lost_where_figures_hardly_change(lost: int, launched: int, much: bool) -> None:
    assert is_much(LostKernels(np.zeros(lost, dtype=np.int64), np.zeros(lost, dtype=np.int64), launched)) == much


def test_the_steps_of_a_rank_in_which_kernels_are_missing_are_named() -> None:
    work = device_work(make_trace(EVENTS).events)
    losing = {
        rank: structs.replace(work, lost=LostKernels(np.array([25, 35]), np.array([26, 36]), 4)) for rank in (0, 1)
    }
    losing[2] = structs.replace(work, lost=LostKernels(np.array([25]), np.array([26]), 10**6))
    rows = [(rank, step, 20 * step, 20 * step + 15) for rank in (0, 1, 2) for step in range(4)]
    ops = pd.DataFrame(rows, columns=["rank", "step", "start_ns", "end_ns"]).assign(clock="device", kind="F")
    ops.loc[ops["rank"] == 1, "step"] += 1
    steps = lost_steps(ops, losing)
    assert steps == {0: frozenset({1}), 1: frozenset({2})}
    early = ops["start_ns"].where(ops["step"] != 3, 0)
    assert lost_steps(ops.assign(start_ns=early), losing)[0] == frozenset(range(4)), "not in their order"
    assert lost_steps(ops.assign(clock=ops["clock"].where(ops["step"] < 3, "host")), losing)[0] == frozenset({1, 3})
    lines = list(lines_of_lost_work(losing, steps))
    assert [line.partition(":")[0] for line in lines[:2]] == ["rank 0", "rank 1"]
    assert "2 of 4 launched kernels are not in the trace" in lines[0]
    assert "not known in step 1;" in lines[0]
    assert lines[2] == (
        "rank 2: 1 launched kernel is not in the traces, outside of all steps, or fewer than one in a thousand"
    )


def damaged(folder: Path, source: Path, kept: Kept) -> Analysis:
    """A sample of which some kernels are not in the files."""

    def change(rank: int, content: dict[str, Any]) -> None:
        events = content["traceEvents"]
        kernels = sorted((each for each in events if each.get("cat") == "kernel"), key=lambda each: float(each["ts"]))
        left = {id(each) for each in kept(rank, kernels)}
        content["traceEvents"] = [each for each in events if each.get("cat") != "kernel" or id(each) in left]

    return load([write_changed(source, folder, change)])


def without_first(rank: int, kernels: list[dict[str, Any]], of_rank: int, share: float) -> list[dict[str, Any]]:
    return kernels[int(share * len(kernels)) :] if rank == of_rank else kernels


def test_a_step_without_some_kernels_of_one_rank_is_left_out_and_the_others_are_as_they_were(tmp_path: Path) -> None:
    analysis = damaged(tmp_path, PLAIN, partial(without_first, of_rank=2, share=0.3))
    report, undamaged = analysis.report, load([PLAIN]).report
    first, *rest = report.steps
    assert (first.step, first.span_ns, first.parts) == (2, None, None)
    (hit,) = [rank for rank in first.ranks if rank.rank == 2]
    assert (hit.compute_ns, hit.bubble_ns, hit.host, hit.not_compute_ns) == (None, None, None, None)
    assert all(rank.compute_ns is not None for rank in first.ranks if rank.rank != 2)
    for step, expected in zip(rest, undamaged.steps[1:], strict=True):
        assert (step.step, step.span_ns, step.parts) == (expected.step, expected.span_ns, expected.parts)
    assert report.clock.method == undamaged.clock.method
    assert report.clock.uncertainty_ns == undamaged.clock.uncertainty_ns
    (line,) = [line for line in report.warnings if "launched kernels are not in the trace" in line]
    assert line.startswith("rank 2: ")
    assert "not known in step 2;" in line
    assert [device.breakdown.busy_ns is None for device in report.device] == [False, False, True, False]


@pytest.mark.parametrize(("share", "known"), [(0.95, [2, 3]), (0.6, [2])] if ALL else [(0.6, [2])])
def test_without_the_last_kernels_of_a_rank_no_other_step_moves(share: float, known: list[int], tmp_path: Path) -> None:
    report = damaged(
        tmp_path, PLAIN, lambda rank, kernels: kernels[: int(share * len(kernels))] if rank == 1 else kernels
    ).report
    undamaged = {step.step: step.span_ns for step in load([PLAIN]).report.steps}
    assert [step.step for step in report.steps if step.span_ns is not None] == known
    assert all(step.span_ns in (None, undamaged[step.step]) for step in report.steps)
    assert all(step.period_ns is None or step.period_ns > 0 for step in report.steps)


@pytest.mark.parametrize("source", [PLAIN, OURS] if ALL else [PLAIN])
def test_with_kernels_missing_everywhere_nothing_is_known_but_clocks_of_one_host_stay(
    source: Path, tmp_path: Path
) -> None:
    report = damaged(
        tmp_path, source, lambda rank, kernels: [one for n, one in enumerate(kernels) if (n + rank) % 3]
    ).report
    undamaged = load([source]).report
    assert all(rank.compute_ns is None for step in report.steps for rank in step.ranks)
    assert all(step.span_ns is None and step.parts is None for step in report.steps)
    assert not report.findings
    assert report.clock.method == undamaged.clock.method
    assert "ops or kernels are missing in the traces" in report.verdict
    assert report.recording.predicted_step_ns is None
    assert report.recording.reason == "kernels are missing in the traces"


def test_a_rank_of_which_copies_alone_were_recorded_lost_all_its_kernels(tmp_path: Path) -> None:
    report = damaged(tmp_path, OURS, lambda rank, kernels: [] if rank == 2 else kernels).report
    (step,) = report.steps
    assert (step.span_ns, {rank.rank: rank.compute_ns for rank in step.ranks}[2]) == (None, None)
    assert [(entry.kind, entry.ranks) for entry in report.recording.audit if entry.kind == "lost_kernels"] == [
        ("lost_kernels", (2,))
    ]


def test_without_the_kernels_that_compute_no_step_of_the_rank_is_known(
    tmp_path: Path,
) -> None:
    """Its hosts are steps ahead of their device, so that times of launching would make steps of other lengths."""
    whole = load([PLAIN], as_recorded=True).report
    report = damaged(
        tmp_path, PLAIN, lambda rank, kernels: [one for one in kernels if rank != 1 or "nccl" in one["name"]]
    ).report
    for step, before in zip(report.steps, whole.steps, strict=True):
        assert step.span_ns is None
        for rank, undamaged in zip(step.ranks, before.ranks, strict=True):
            if rank.rank == 1:
                assert (rank.compute_ns, rank.bubble_ns) == (None, None)
            else:  # what lies between its last op and the end of the step of all is in no window of its own
                assert rank.compute_ns == pytest.approx(undamaged.compute_ns, abs=50_000)


def test_a_rank_without_device_events_tells_no_length_of_a_step(tmp_path: Path) -> None:
    """Its host and its device took 20 ms and 35 ms in this run."""
    source = SAMPLES / "gpu_nccl_1f1b_p4"
    recording = damaged(tmp_path, source, lambda rank, kernels: [] if rank == 2 else kernels).report.recording
    assert (recording.recorded_step_ns, recording.predicted_step_ns, recording.figures) == (None, None, "recorded")
    assert recording.reason == "kernels are missing in the traces"


def test_of_a_run_that_lost_kernels_the_unrecorded_steps_tell_whether_hosts_were_as_they_are(tmp_path: Path) -> None:
    """A run of which nothing is replayed: its hosts are those of the recording where recorded steps take longer than others."""
    lost = partial(without_first, of_rank=2, share=0.3)
    length = damaged(tmp_path, PLAIN, lost).report.typical_step.length_ns
    for slowdown in (2.0, 1.0):
        unrecorded = round(length / slowdown)
        start = [1 + step * length for step in range(8)]
        end = [begin + unrecorded for begin in start]
        times = {"first_step": 0, "start_ns": start, "end_ns": end, "device_ns": None, "recorded": [6, 8]}
        ranks = [{"rank": rank, "trace": f"rank{rank}.json", "step_times": times} for rank in range(4)]
        content = msgspec.json.encode({"schema": "pptrace.run/1", "world_size": 4, "ranks": ranks})
        (tmp_path / "run.json").write_bytes(content)
        report = load([tmp_path]).report
        recording = report.recording
        assert (recording.recorded_step_ns, recording.unrecorded_step_ns) == (length, unrecorded)
        assert recording.slowdown == pytest.approx(slowdown, rel=1e-6)
        assert recording.predicted_step_ns is None
        reasons = [entry.reason for entry in report.missing_evidence if entry.findings == ("host",)]
        assert len(reasons) == (slowdown > 1.1)
        assert all(reason.startswith("recorded steps take 2.00 times as long") for reason in reasons)
        assert f"ms a step while recorded, {unrecorded / 1e6:.2f} measured without" in recording_line(recording)


def test_no_undamaged_sample_loses_anything() -> None:
    for path in (PLAIN, OURS, SAMPLES / "gpu_zbv_p2"):
        assert all(not len(work.lost) for work in load([path]).data.work.values()), path


def steps_with(begin_ns: int, rows: list[tuple[int, int, int, str]]) -> frozenset[int]:
    """The steps of rank 0 with work lost from a moment on, of ops (step, start, end, clock)."""
    ops = pd.DataFrame(rows, columns=["step", "start_ns", "end_ns", "clock"]).assign(rank=0, kind="F")
    lost = LostKernels(np.array([begin_ns]), np.array([begin_ns + 1]), 4)
    return lost_steps(ops, {0: structs.replace(device_work(make_trace(EVENTS).events), lost=lost)}).get(0, frozenset())


def test_steps_out_of_order_and_ops_that_ran_on_no_device_are_hit_and_what_was_cut_off_is_not() -> None:
    in_order = [(step, 100 * step, 100 * step + 80, "device") for step in range(3)]
    assert steps_with(110, in_order) == frozenset({1})
    assert steps_with(110, [*in_order, (2, 210, 220, "host")]) == frozenset({1, 2})
    assert steps_with(285, in_order) == frozenset({2}), "the last step goes on for a tenth"
    assert steps_with(295, in_order) == frozenset(), "a step that was cut off"
    swapped = [(0, 150, 155, "device"), (1, 100, 130, "device"), (2, 200, 280, "device")]
    assert steps_with(210, swapped) == frozenset({0, 1, 2})


def test_where_steps_are_ranges_of_the_host_those_with_lost_work_are_hit() -> None:
    """The loading of data for a step runs in the one before."""
    rows = [(step, "STEP", 100 * step, 100 * step + 99) for step in range(3)] + [(2, "DATA", 5, 9)]
    ops = pd.DataFrame(rows, columns=["step", "kind", "start_ns", "end_ns"]).assign(rank=0, clock="host")
    work = structs.replace(
        device_work(make_trace(EVENTS).events), lost=LostKernels(np.array([210]), np.array([220]), 4)
    )
    assert lost_steps(ops, {0: work}) == {0: frozenset({2})}


def test_an_op_without_work_before_work_that_no_call_launched_makes_its_step_unknown() -> None:
    """Launches of work that ran in the first step may have been before the recording."""
    launched = [kernel(at, correlation) for at, correlation in ((120, 1), (150, 2), (220, 3))]
    work = device_work(make_trace([launch("cudaLaunchKernel", 100, 1), *launched]).events)
    assert work.launch_ns.tolist() == [100, -1, -1]
    columns = ["step", "kind", "start_ns", "end_ns", "clock"]
    rows = [
        (0, "F", 130, 140, "host"),
        (0, "B", 160, 170, "device"),
        (1, "F", 225, 230, "host"),
        (1, "B", 260, 270, "device"),
    ]
    ops = pd.DataFrame(rows, columns=columns).assign(rank=0)
    steps = lost_steps(ops, {0: work})
    assert steps == {0: frozenset({0})}, "no work follows that of step 1"
    (line,) = lines_of_lost_work({0: work}, steps)
    assert line.startswith("rank 0: ops of step 0 have no work on the device")
    assert lost_steps(ops.assign(clock="device"), {0: work}) == {}
    assert lost_steps(ops.assign(clock="host"), {0: work}) == {}, (
        "of a rank whose ops have no device work nothing is known"
    )


def test_a_first_op_whose_launches_were_not_recorded_makes_no_step_longer(tmp_path: Path) -> None:
    whole, report = (
        load([path], cache=False, as_recorded=True).report
        for path in (PLAIN, tampered.damaged(PLAIN, tmp_path, tampered.before_recording))
    )
    assert [step.length_ns for step in report.steps] == [None, *(step.length_ns for step in whole.steps[1:])]
    assert [rank.compute_ns for rank in report.steps[0].ranks][1] is None


def test_kernels_of_which_only_the_launch_is_unknown_are_not_said_to_be_missing() -> None:
    none, at = np.zeros(0, dtype=np.int64), np.array([5, 6])
    work = structs.replace(device_work(make_trace([]).events), lost=LostKernels(none, none, 0).with_unrelated(at, at))
    (line,) = lines_of_lost_work({3: work}, {})
    assert line == "rank 3: what launched 2 kernels is not known, outside of all steps, or fewer than one in a thousand"
