"""Reports of ranks that cannot be compared, or are not there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from pptrace.analysis.notes import explain_nulls
from pptrace.analysis.report import Report
from pptrace.analysis.result import StepReport
from pptrace.analysis.steps.steps import PlannedStep, report_steps
from pptrace.clock import Clock, ClockMethod
from pptrace.model.traces import Category
from pptrace.schedule.registry import build
from pptrace.simulator import IDEAL, simulate
from pptrace.workflow.load import load
from tests.support.analysed import analyse, recognise
from tests.support.synthetic import MAIN_THREAD, START, Event, make_trace, record

PLAN = build("1f1b", 2, 3, 1)
RECORDING = record(PLAN)


def assert_nothing_that_compares_ranks(step: StepReport) -> None:
    assert (step.span_ns, step.bubble.ratio, step.bubble.share, step.bubble.waterfall_ns) == (None, None, None, None)
    for rank in step.ranks:
        assert (rank.bubble_ns, rank.exposed_comm_ns) == (None, None)
        assert all(phase.bubble_ns is None for phase in rank.phases.values())
        assert rank.comms
        for comm in rank.comms:
            assert (comm.wait_ns, comm.hidden_ns, comm.exposed_ns, comm.overlap_ratio) == (None, None, None, None)
            assert (comm.algbw_gbps, comm.busbw_gbps) == (None, None)


def test_absent_ranks_are_counted_and_not_listed_however_many_a_file_claims() -> None:
    run = recognise(RECORDING.traces())
    huge = replace(run, mesh=replace(run.mesh, num_ranks=10**12))
    begin = time.monotonic()
    lines = tuple(explain_nulls(huge, Clock(ClockMethod.SINGLE_RANK, {}, 0), ()))
    assert time.monotonic() - begin < 1
    beginning = "no trace of rank 2, 3, 4, 5, 6, 7, 8, 9 and 999999999990 more (of 1000000000000)"
    assert any(line.startswith(beginning) for line in lines)


def report_with(call: str, one_host: bool = True) -> Report:
    """Of a run recorded on its hosts alone, each rank with one more range."""
    traces = [
        make_trace(
            [*RECORDING.events_of(rank), Event(Category.ANNOTATION, call, START, START + 1, thread=MAIN_THREAD)],
            rank,
            RECORDING.job.metadata(rank, "node-a" if one_host else f"node-{rank}"),
        )
        for rank in range(2)
    ]
    return analyse(traces).report


@pytest.mark.parametrize("one_host", [True, False])
def test_of_a_device_that_was_not_recorded_nothing_is_told_by_its_launches(one_host: bool) -> None:
    report = report_with("nccl:send 0->1", one_host)
    (step,) = report.steps
    assert_nothing_that_compares_ranks(step)
    assert [rank.compute_ns for rank in step.ranks] == [None, None]
    assert {comm.total_ns for rank in step.ranks for comm in rank.comms} == {None}
    assert {finding.evidence.get("cause") for finding in report.findings} <= {None}
    (line,) = [line for line in report.warnings if "not known" in line and not line.startswith("not known: ")]
    assert line.startswith("no device events, though the run computes on devices (nccl:send 0->1)")
    assert line.endswith("record with activities=[CPU, CUDA]")


def test_a_run_on_cpus_is_told_by_its_host_ranges() -> None:
    plain, gloo = analyse(RECORDING.traces()).report, report_with("gloo:barrier")
    assert gloo.steps[0].bubble.ratio == pytest.approx(
        plain.steps[0].bubble.ratio, rel=0.01
    )  # 1 ns of an op is the barrier
    assert gloo.steps[0].bubble.ratio is not None


def test_a_rank_whose_device_was_not_recorded_hides_only_what_depends_on_it() -> None:
    recording = record(build("1f1b", 2, 3, 1), device=True)
    traces = recording.traces()
    on_host = [event for event in recording.events_of(1) if event.category < Category.HOST_LIMIT]
    traces[1] = make_trace(on_host, 1, recording.job.metadata(1))
    report = analyse(traces).report
    assert_nothing_that_compares_ranks(report.steps[0])
    assert [rank.compute_ns is None for rank in report.steps[0].ranks] == [False, True]
    assert any(line.startswith("no device events of rank 1, though") for line in report.warnings)


@pytest.mark.parametrize(("part", "known"), [(0.0, True), (0.4, True), (0.6, False)])
def test_clocks_that_may_be_off_by_more_than_half_a_step_compare_nothing(part: float, known: bool) -> None:
    analysis = analyse(RECORDING.traces())
    (whole,) = analysis.report.steps
    clock = replace(analysis.data.clock, uncertainty_ns=round(part * whole.span_ns))
    (step,), _ = report_steps([PlannedStep(analysis.windows, PLAN)], replace(analysis.data, clock=clock), analysis.mesh)
    if known:
        assert (step.span_ns, step.bubble.ratio) == (whole.span_ns, whole.bubble.ratio)
    else:
        assert_nothing_that_compares_ranks(step)
        assert [rank.compute_ns for rank in step.ranks] == [rank.compute_ns for rank in whole.ranks]


def test_collectives_whose_other_members_have_no_trace_are_named_where_their_waiting_is_null(tmp_path: Path) -> None:
    rows = ["0,0,F,0,0,1000,,,", "0,0,all_reduce,,500,1500,dp,1000000,2", "0,0,B,0,2000,4000,,,"]
    table = tmp_path / "ops.csv"
    table.write_text(
        "\n".join(["rank,step,kind,microbatch,start_us,end_us,axis,bytes,group_size", *rows]), encoding="utf-8"
    )
    report = load([table]).report
    (comm,) = report.steps[0].ranks[0].comms
    assert (comm.wait_ns, comm.hidden_ns, comm.exposed_ns, comm.overlap_ratio) == (None, None, None, None)
    assert any("how much of dp all_reduce waits, is hidden or is exposed" in line for line in report.warnings)
    assert not any("waits, is hidden" in line for line in analyse(RECORDING.traces()).report.warnings)


def test_without_messages_and_with_a_rank_missing_ranks_on_no_common_clock_may_transfer_all_the_time(
    tmp_path: Path,
) -> None:
    """Tables of ranks 0, 2 and 3 of four, with microbatches of their own: nothing relates their clocks, no bubble is certain."""
    ops = simulate(build("1f1b", 4, 4), IDEAL).ops()
    for rank in (0, 2, 3):
        own = ops["microbatch"] + 4 * rank
        ops.assign(microbatch=own)[ops["rank"] == rank].to_csv(tmp_path / f"rank{rank}.ops.csv", index=False)
    report = load([tmp_path], cache=False).report
    (step,) = report.steps
    assert report.clock.method == "none"
    assert [rank.rank for rank in step.ranks] == [0, 2, 3]
    for rank in step.ranks:
        assert rank.bubble_low_ns == 0
        assert rank.bubble_high_ns == rank.not_compute_ns


@pytest.mark.parametrize("moved_ns", [0, 3_000_000, -40_000_000_000])
def test_the_order_of_ops_relates_ranks_though_one_between_them_has_no_trace(tmp_path: Path, moved_ns: int) -> None:
    """Rank 2's clock is another one: what the steps take is as it was, as far as the clocks are known."""
    ops = simulate(build("1f1b", 4, 4), IDEAL).ops()
    span = int(ops["end_ns"].max() - ops["start_ns"].min())
    for rank in (0, 2, 3):
        shift = moved_ns * (rank == 2)
        times = {name: ops[name] + shift for name in ("start_ns", "end_ns")}
        ops.assign(**times)[ops["rank"] == rank].to_csv(tmp_path / f"rank{rank}.ops.csv", index=False)
    report = load([tmp_path], cache=False).report
    (step,) = report.steps
    assert report.clock.method == "op-order"
    assert report.clock.uncertainty_ns is not None
    assert abs(report.clock.offsets_ns["2"] + moved_ns) <= report.clock.uncertainty_ns < span / 2
    assert step.span_ns == span, "rank 0's own times, which begin first and end last"
