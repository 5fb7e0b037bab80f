"""NVTX-only captures of Megatron-LM: ops between labelled messages, labelled ops, phases and steps, against what really ran."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pptrace.ingest import open_inputs
from pptrace.recognise.labels import read_label
from pptrace.recognise.ops.from_labels import ops_between_messages
from pptrace.recognise.ops.label_columns import Range, Ranges
from pptrace.workflow.analyse import Analysis
from tests.ingest.nsight_files import MIDDLE, Process, Report, write_report
from tests.recognise.ops.megatron_host import GLUE, Done, Rank, interleaved, one_f_one_b, run
from tests.support.analysed import analyse
from tests.support.read import read_traces


def analysed(ranks: Sequence[Rank], path: Path) -> Analysis:
    processes = [Process(100 + number, rank.events) for number, rank in enumerate(ranks)]
    return analyse(read_traces(open_inputs([write_report(Report(processes, MIDDLE), path)]), 1).traces)


def ops_of(report: Analysis, rank: int) -> list[Done]:
    ops = report.data.ops
    own = ops[(ops["rank"] == rank) & ops["kind"].isin(("F", "B"))].sort_values("start_ns")
    return list(own[["kind", "stage", "microbatch", "start_ns", "end_ns", "step"]].itertuples(index=False, name=None))


def check_ops(report: Analysis, ranks: Sequence[Rank], slack: int, together: int = 0) -> None:
    """Every op with its kind, stage, microbatch and step; edges within ``slack``, between a forward and the backward right
    after it within ``together``.
    """
    for number, rank in enumerate(ranks):
        ops = ops_of(report, number)
        assert [(*op[:3], op[5]) for op in ops] == [(*op[:3], op[5]) for op in rank.done]
        for index, (have, real) in enumerate(zip(ops, rank.done, strict=True)):
            neighbours = rank.done[max(index - 1, 0) : index + 2]
            paired = any(abs(other[3] - real[4]) <= GLUE or abs(other[4] - real[3]) <= GLUE for other in neighbours)
            allowed = together if paired else slack
            assert abs(have[3] - real[3]) <= allowed
            assert abs(have[4] - real[4]) <= allowed


@pytest.mark.parametrize(
    ("pp", "microbatches", "optimizer"), [(2, 4, True), (3, 6, False), (4, 8, True), (4, 3, False)]
)
def test_ops_between_megatron_s_messages_are_those_that_ran(
    pp: int, microbatches: int, optimizer: bool, tmp_path: Path
) -> None:
    ranks = run([list(one_f_one_b(pp, rank, microbatches)) for rank in range(pp)], 3, optimizer=optimizer)
    report = analysed(ranks, tmp_path / "a.sqlite")
    assert (report.report.framework, report.report.mesh.pp, report.report.schedule.name) == ("megatron-lm", pp, "1f1b")
    assert not report.report.schedule.mismatches
    check_ops(report, ranks, slack=GLUE)
    messages = report.data.comms
    assert (
        len(messages) == 3 * 2 * 2 * (pp - 1) * microbatches
    )  # those that stages call with nobody to talk to moved nothing
    assert (messages["match"] >= 0).all()
    assert any("on the host's clock" in line for line in report.report.warnings)


@pytest.mark.parametrize("optimizer", [True, False])
def test_labelled_forward_and_backward_steps_are_the_ops_to_the_nanosecond(optimizer: bool, tmp_path: Path) -> None:
    ranks = run([list(one_f_one_b(3, rank, 5)) for rank in range(3)], 2, optimizer=optimizer, labels=True)
    analysis = analysed(ranks, tmp_path / "a.sqlite")
    report = analysis.report
    assert (report.framework, report.schedule.name, len(report.steps)) == ("megatron-lm", "1f1b", 2)
    check_ops(analysis, ranks, slack=0)
    line = "no label ends a step: each is assumed to end where all ranks have run as many backwards as forwards"
    assert (line in report.warnings) is not optimizer


@pytest.mark.parametrize(
    ("pp", "microbatches", "chunks", "optimizer"),
    [(2, 4, 2, True), (4, 8, 2, False), (2, 4, 3, True), (2, 4, 2, False)],
)
def test_the_interleaved_schedule_is_told_by_its_messages_and_phases(
    pp: int, microbatches: int, chunks: int, optimizer: bool, tmp_path: Path
) -> None:
    programs = [list(interleaved(pp, rank, microbatches, chunks)) for rank in range(pp)]
    ranks = run(programs, 2, optimizer=optimizer)
    report = analysed(ranks, tmp_path / "a.sqlite")
    assert (report.report.schedule.name, report.report.mesh.vpp) == ("interleaved-1f1b", chunks)
    assert not report.report.schedule.mismatches
    check_ops(report, ranks, slack=GLUE, together=40)
    assert any("estimated by the forwards and backwards that lie alone" in line for line in report.report.warnings)


def test_phases_without_messages_are_said_and_no_op_is_made_up(tmp_path: Path) -> None:
    ranks = run([list(interleaved(2, rank, 4, 2)) for rank in range(2)], 2)
    for rank in ranks:
        rank.events = [event for event in rank.events if "p2p" not in event.name]
    report = analysed(ranks, tmp_path / "a.sqlite")
    assert (report.report.framework, len(report.data.ops)) == ("megatron-lm", 0)
    assert any("labels name the phases of steps (means: warmup 0.0" in line for line in report.report.warnings)


def test_a_rank_whose_messages_tell_other_ops_than_the_rest_leaves_all_of_them_null(tmp_path: Path) -> None:
    ranks = run([list(one_f_one_b(3, rank, 6)) for rank in range(3)], 3)
    functions = [event for event in ranks[1].events if event.name.endswith(".send_forward")]
    ranks[1].events.remove(functions[0])  # as where the profiler lost one
    report = analysed(ranks, tmp_path / "a.sqlite")
    assert not report.data.ops["kind"].isin(("F", "B")).any()
    assert report.report.framework == "megatron-lm"
    assert any(
        "the ranks do not have equally many ops between their labelled messages" in w for w in report.report.warnings
    )


def found_between(*named: tuple[str, int, int]) -> tuple[list[str], tuple[str, ...]]:
    ranges = []
    for name, start, end in named:
        label = read_label(name)
        assert label is not None, name
        ranges.append(Range(label, start, end, thread=1))
    found = ops_between_messages(Ranges.of(ranges))
    ops, evidence = found
    return [f"{op.kind} {op.start_ns} {op.end_ns}" for op in ops], evidence


def test_a_gap_that_nothing_tells_apart_is_null_with_the_reason() -> None:
    timers = [("forward-recv", 0, 5), ("backward-send-forward-recv", 40, 45), ("backward-send", 80, 85)]
    ops, (line,) = found_between(*timers)  # a last stage whose timers run for real messages only
    assert ops == []
    assert line.startswith(
        "between the labelled messages lie 0 forwards and 2 backwards, which cannot be all of what ran"
    )


def test_an_optimizer_between_two_messages_is_no_op() -> None:
    first = [("forward-recv", 0, 5), ("forward-send-backward-recv", 40, 45), ("backward-send", 80, 85)]
    second = [(name, start + 100, end + 100) for name, start, end in first]
    ops, _ = found_between(*first, ("optimizer", 90, 95), *second)
    assert ops == ["F 5 40", "B 45 80", "F 105 140", "B 145 180"]
