"""Idle time of ranks while a range says what their hosts do: loading of data, checkpoints, logging, garbage collection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pptrace.analysis.findings.find import find
from pptrace.analysis.findings.verdict import verdict_lines
from pptrace.analysis.recording import with_recording
from pptrace.analysis.report import RecordingReport, Report
from pptrace.analysis.result import Finding, Severity, StepReport
from pptrace.analysis.steps.step_series import series_of
from pptrace.model.device import HostIdle
from pptrace.model.report_table import Amount
from pptrace.report.summary_figures import overview
from pptrace.report.tables.ranks import ranks_table
from pptrace.workflow.load import load
from tests.analysis.test_plain_findings import MS, NO_SCHEDULE, findings_of, rank_of, step_of
from tests.analysis.test_verdict import report_of as report_by_hand
from tests.support.kineto import event_row, write_rows

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
KINETO = Path(__file__).parents[3] / "shared" / "data" / "kineto_tb_plugin" / "worker0.1623143089861.pt.trace.json.gz"
ROUND = 1_000
"""Length of a step, µs."""


def report_of(folder: Path, *rounds: Sequence[tuple[Any, ...]], steps: bool = True, device: bool = True) -> Report:
    """The report on steps of 1,000 µs, each with ranges and operators (name, begin, length in µs, and the thread, if it is not
    the one that trains) and work in the last 500 of them.

    On the device three kernels, each launched 10 µs before it starts; without one operators of the same times. With ``steps``
    ranges name them; without, a step with ranges takes 3,000 µs longer, all of it before its work.
    """
    at, events = 10_000, []
    for number, ranges in enumerate(rounds):
        if steps:
            events.append(event_row("user_annotation", f"ProfilerStep#{number}", at, ROUND))
        for name, begin, length, *thread in ranges:
            events.append(
                event_row("cpu_op" if "::" in name else "user_annotation", name, at + begin, length, None, *thread)
            )
        at += 0 if steps or not ranges else 3_000
        for index, (name, begin) in enumerate((("gemm", 500), ("elementwise_kernel", 750), ("reduce_kernel", 960))):
            length, call = (30 if begin == 960 else 200), 10 * number + index + 1
            node = "autograd::engine::evaluate_function: MulBackward0" if index == 1 else f"aten::{name}"
            events.append(event_row("cpu_op", node, at + begin - 12 * device, 11 if device else length))
            if device:
                events.append(event_row("cuda_runtime", "cudaLaunchKernel", at + begin - 10, 5, call))
                events.append(event_row("kernel", name, at + begin, length, call, device=0, stream=7))
        events.append(event_row("user_annotation", "Optimizer.step#SGD.step", at + 940, 15))
        at += ROUND
    path = write_rows(folder / "rank0.json", events, distributedInfo={"rank": 0, "world_size": 1})
    return load([path], cache=False).report


def test_a_device_waits_for_data_only_while_nothing_is_launched(tmp_path: Path) -> None:
    """The loader runs from 40 to 440, the device is idle from 0 to 500 of each step but the 10 µs of the last launch."""
    report = report_of(tmp_path, *[[(LOADER, 40, 400)]] * 4)
    rank = report.steps[1].ranks[0]
    assert rank.idle_spans == {"DATA": 400_000}
    starved = rank.host.launch_starved_ns
    assert starved > 500_000
    found, host = report.findings
    assert found.title == "Loading of data: 40.0% of the step is device idle time while hosts load data"
    assert (found.gain_ns, found.evidence["cause"], found.evidence["reason"]) == (400_000, "data", "loading of data")
    assert host.gain_ns == starved - 400_000
    assert report.verdict.startswith("The devices wait while hosts load data. ")
    assert "43% compute, 40% loading of data, 17% devices waiting for launches;" in report.verdict
    lines = verdict_lines(report)
    assert lines.first.startswith("Have the next batch ready before its step begins: more workers (num_workers)")
    assert "loading of data ms" in ranks_table(report.steps[1], Amount.WHOLE).columns


def test_what_is_loaded_while_the_device_computes_costs_nothing(tmp_path: Path) -> None:
    report = report_of(tmp_path, *[[(LOADER, 510, 180), (LOADER, 760, 150)]] * 4)
    assert [rank.idle_spans for step in report.steps for rank in step.ranks] == [{}] * 4
    assert "data" not in {finding.evidence["cause"] for finding in report.findings}


def test_of_ranges_around_one_moment_one_counts(tmp_path: Path) -> None:
    """A collection of 100 µs, with a checkpoint in it, inside the loading of 300; logging of 140 that begins in its last 100."""
    ranges = [(LOADER, 20, 300), ("gc.collect", 120, 100), ("save_checkpoint", 130, 60), ("logging", 220, 140)]
    (step, *_) = report_of(tmp_path, *[ranges] * 3).steps
    assert step.ranks[0].idle_spans == {"GC": 100_000, "DATA": 200_000, "LOGGING": 40_000}


def test_on_a_host_alone_it_is_a_part_of_the_time_between_operators(tmp_path: Path) -> None:
    report = report_of(tmp_path, *[[(LOADER, 40, 400), ("aten::sin", 50, 300)]] * 4, device=False)
    rank = report.steps[1].ranks[0]
    assert (rank.idle_spans, rank.between_operators_ns, rank.compute_ns) == ({"DATA": 400_000}, 570_000, 430_000)
    titles = [finding.title for finding in report.findings]
    assert titles == [
        "Loading of data: 40.0% of the step goes to hosts that load data and compute nothing else",
        "Host: 17.0% of the step is between operators (Python, input)",
    ]
    assert "40% loading of data, 17% between operators" in report.verdict


@pytest.mark.parametrize("device", [True, False])
def test_steps_that_nothing_marks_have_it_and_are_no_outliers_for_it(device: bool, tmp_path: Path) -> None:
    """Every fourth step waits 3 ms for data: their length has a reason, and the usual step has none of it."""
    rounds = [[(LOADER, 100, 2_900)] if number % 4 == 2 else [] for number in range(16)]
    report = report_of(tmp_path, *rounds, steps=False, device=device)
    steps = report.steps[: -1 if device else None]  # no work follows the last one
    lengths = [step.length_ns or 0 for step in steps]
    assert sorted(set(lengths)) == [1_000_000, 4_000_000]
    loaded = [(step.ranks[0].idle_spans or {}).get("DATA", 0) for step in steps]
    assert [ns == 2_900_000 for ns in loaded] == [length == 4_000_000 for length in lengths]
    causes = [finding.evidence["cause"] for finding in report.findings]
    assert (causes[0], "unexplained" in causes) == ("data", False)
    share = sum(loaded) / sum(step.length_ns or 0 for step in report.steps)
    assert report.findings[0].title.startswith(f"Loading of data: {share:.1%} of all steps ")


def test_steps_that_are_long_for_a_reason_are_no_outliers() -> None:
    def steps(kind: str) -> list[Any]:
        lengths = [100, 100, 104, 98, 102, 100, 101, 99, 100, 400]
        return [
            step_of(
                rank_of(between=20 + ms - 98, idle_spans={kind: (ms - 98) * MS}, bubble_ns=(ms - 30) * MS), number=at
            )
            for at, ms in enumerate(lengths)
        ]

    (found, *_) = findings_of(*steps("DATA"))
    assert found.evidence["cause"] == "data"
    assert found.detail.startswith("302.0 ms of step 9, 2.0 of the median one: ")


def test_an_evaluation_lasts_as_long_as_what_it_launched(tmp_path: Path) -> None:
    """The work of an evaluation by a host that runs ahead: launched from 480 to 540, it runs from 500 to 700."""
    report = report_of(tmp_path, *[[("evaluate", 480, 60)]] * 4)
    assert report.steps[1].ranks[0].spans["EVAL"] == 200_000


@pytest.mark.parametrize("host", [None, HostIdle(0, 0, 0)])
def test_evaluations_in_some_steps_are_named_with_what_they_take_of_all(host: HostIdle | None) -> None:
    ranks = [replace(rank_of(host=host, between=0), spans={"EVAL": (50 + at) * MS * (at % 4 == 3)}) for at in range(12)]
    (found,) = findings_of(*[step_of(rank, number=at) for at, rank in enumerate(ranks)])
    assert found.title == "Evaluation: 14.2% of all steps goes to passes that train nothing"
    assert found.detail == "61.0 ms of step 11, 0.0 of the median one: evaluate less often, or with fewer batches"
    assert (found.gain_ns, found.evidence["in_some_steps"]) == (171 * MS // 12, True)


def test_evaluations_in_steps_that_are_long_for_something_else_count() -> None:
    """Two of twelve steps evaluate, 20 and 60 ms; the second one takes 400 ms more."""
    evaluates, longer = {3: 20 * MS, 11: 60 * MS}, {11: 400 * MS}
    ranks = [replace(rank_of(between=0), spans={"EVAL": evaluates.get(at, 0)}) for at in range(12)]
    lengths = [100 * MS + longer.get(at, 0) for at in range(12)]
    steps = [replace(step_of(rank, number=at), span_ns=lengths[at]) for at, rank in enumerate(ranks)]
    found = find(steps, NO_SCHEDULE, series=series_of(steps))
    assert [(one.evidence["cause"], one.gain_ns) for one in found] == [
        ("evaluation", 80 * MS // 12),
        ("unexplained", 400 * MS // 12),
    ]


def test_what_some_steps_alone_compute_is_a_gain() -> None:
    """One of four steps takes 300 ms longer, and computes as much more: what steps take besides their compute is no limit."""
    ranks = [rank_of(compute_ns=(98 + 300 * (at == 3)) * MS) for at in range(4)]
    lengths = [(100 + 300 * (at == 3)) * MS for at in range(4)]
    steps = [replace(step_of(rank, number=at), span_ns=lengths[at]) for at, rank in enumerate(ranks)]
    found = Finding(Severity.WARNING, "", "", 75 * MS, {"steps": [3]})
    report = with_recording(report_by_hand(*steps, findings=(found,)), RecordingReport())
    assert report.findings == (found,)


def test_of_devices_the_rank_that_loads_most_is_named() -> None:
    def step(*loaded: int) -> StepReport:
        hosts = [{"host": HostIdle(ms * MS, 0, 0), "idle_spans": {"DATA": ms * MS}} for ms in loaded]
        return step_of(*(rank_of(number, **of_rank) for number, of_rank in enumerate(hosts)))

    (found,) = findings_of(*[step(4, 40, 4)] * 2)
    assert found.evidence["where"] == {"rank": 1}
    assert found.detail.startswith(
        "16.0 ms of step 0, 16.0 of the median one; 40.0 ms a step on rank 1, 4.0 on the others: "
    )
    (found,) = findings_of(*[step(30, 40)] * 2)
    assert found.evidence["where"] == {}


def test_a_rank_that_loads_longer_comes_last_for_that() -> None:
    spans = [{"idle_spans": {"DATA": ms * MS}} for ms in (5, 25)]
    (found,) = findings_of(*[step_of(rank_of(0, 8, 0, **spans[0]), rank_of(1, 28, 20, **spans[1]))] * 2)[:1]
    assert found.detail.endswith("; look at the loading of data of rank 1: 25.0 ms a step, of the others 5.0")


def test_ranks_whose_launches_are_not_known_hide_nothing_of_the_others() -> None:
    known = [rank_of(number, host=HostIdle(40 * MS, 0, 0), idle_spans={"DATA": 10 * MS}) for number in range(3)]
    data, host = sorted(findings_of(*[step_of(*known, rank_of(3))] * 2), key=lambda finding: finding.gain_ns or 0)
    assert (data.gain_ns, host.gain_ns) == (10 * MS, 30 * MS)
    assert host.detail.startswith("known of 3 of 4 ranks; ")
    assert findings_of(*[step_of(known[0], rank_of(1), rank_of(2))] * 2) == ()


@pytest.mark.skipif(not KINETO.is_file(), reason="the public real traces are not beside this checkout")
def test_a_public_trace_that_waits_for_its_loader_says_so() -> None:
    """``resnet50_num_workers_0`` of torch's profiler for TensorBoard, whose page says: high cost on input data loading."""
    report = load([KINETO], cache=False).report
    assert report.findings[0].evidence["cause"] == "data"
    assert 0.3 < report.findings[0].evidence["share"] < 0.36


def test_a_device_whose_host_runs_no_operator_for_long_waits_for_python(tmp_path: Path) -> None:
    """Every other step has 3 ms of something that no range of a known kind names; the usual gaps of 0.5 ms are launching."""
    rounds = [[("tokenize", 100, 2_900)] if number % 2 else [] for number in range(12)]
    report = report_of(tmp_path, *rounds, steps=False)
    steps = report.steps[:-1]  # no work follows the last one
    between = [step.ranks[0].between_operators_ns for step in steps]
    # From the last operator's end, 1 µs before its kernel, which takes 30, to the next step's first operator.
    assert set(between) == {0, 1_000 * (1 + 4_488 - 990)}
    inside = [step.ranks[0].paused_in for step in steps]
    assert inside == [{"tokenize": 2_900_000} if ns else {} for ns in between]
    found = next(finding for finding in report.findings if "reason" in finding.evidence)
    assert found.title == f"Host: {found.evidence['share']:.1%} of the step is between operators (in tokenize)"
    assert found.detail.startswith("the device is idle, and the host runs no operator for a millisecond or more; ")


def test_the_bars_of_ranks_show_what_hosts_did_apart_from_the_rest(tmp_path: Path) -> None:
    step = report_of(tmp_path, *[[(LOADER, 40, 300), ("logging", 360, 50)]] * 4).steps[1]
    lengths = {bar.name: bar.x[0] for bar in overview(step).data if bar.type == "bar"}
    assert lengths == pytest.approx(
        {
            "Compute": 0.43,
            "Exposed communication": 0.0,
            "Loading of data": 0.3,
            "Logging": 0.05,
            "Rest: other ranks, input, Python": 1 - 0.43 - 0.35,
        }
    )


@pytest.mark.parametrize(
    ("ranges", "found"),
    [
        ([("checkpoint", 40, 400)], {"CHECKPOINT": 400_000}),
        ([("checkpoint", 40, 400), ("aten::linear", 50, 10)], {}),  # around a part of a forward
        ([("autograd::engine::evaluate_function: CheckpointBackward", 30, 420), ("checkpoint", 40, 400)], {}),
        ([("checkpoint", 40, 100), ("checkpoint", 200, 100)], {}),  # as many in every step
        ([("save_checkpoint", 40, 100), ("save_checkpoint", 200, 100)], {"CHECKPOINT": 200_000}),
        ([("logging", 40, 400), ("Optimizer.step#SGD.step", 50, 10)], {}),  # around all of a step
        ([("get_batch", 40, 400, 5), *(("aten::sin", 41 + at, 1, 5) for at in range(9))], {}),
        ([("pp1:DATA step=1", 40, 400, 5)], {}),
        ([("pp1:DATA step=1", 40, 400)], {"DATA": 400_000}),
    ],
)
def test_a_range_says_what_the_thread_that_trains_does(
    ranges: Sequence[tuple[Any, ...]], found: dict[str, int], tmp_path: Path
) -> None:
    assert report_of(tmp_path, *[ranges] * 4).steps[1].ranks[0].idle_spans == found
