"""Steps of a run without a pipeline: the partition of each rank's own STEP range, by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pptrace.analysis.report import Report
from pptrace.analysis.result import StepReport
from pptrace.model.report_table import Amount
from pptrace.report.tables.ranks import ranks_table
from pptrace.report.tables.step_series import steps_table
from pptrace.workflow.load import load

ROWS = """rank,dp_rank,step,kind,axis,group_size,match,clock,start_ns,end_ns
0,0,0,STEP,,,,host,1000,2000
1,1,0,STEP,,,,host,1010,1900
0,0,0,all_reduce,dp,2,0,device,1500,1800
1,1,0,all_reduce,dp,2,0,device,1600,1800
0,0,1,STEP,,,,host,2000,2500
1,1,1,STEP,,,,host,1950,2600
0,0,1,OPTIMIZER,,,,host,2300,2450
"""


Profile = dict[str, object]


def profile_of(
    rows: Iterable[tuple[object, ...]], rank: int = 0, world: int = 1, job: Profile | None = None, **more: object
) -> Profile:
    """A profile as torch writes it, of rows of (category, name, start, duration, thread, args), µs, where the last may lack."""
    names = ("cat", "name", "ts", "dur", "tid", "args")
    events = [{"ph": "X", "pid": 1, "tid": 1} | dict(zip(names, row, strict=False)) for row in rows]
    distributed = {"rank": rank, "world_size": world, "backend": "gloo", **(job or {})}
    return {"schemaVersion": 1, "distributedInfo": distributed, **more, "traceEvents": events}


def report_of(folder: Path, *profiles: Profile) -> Report:
    paths = [folder / f"rank{rank}.json" for rank in range(len(profiles))]
    for path, profile in zip(paths, profiles, strict=True):
        path.write_text(json.dumps(profile))
    return load(paths, cache=False).report


def steps_of(folder: Path) -> tuple[StepReport, ...]:
    (folder / "ops.csv").write_text(ROWS)
    return load([folder / "ops.csv"], cache=False).report.steps


def test_a_step_spans_from_the_first_rank_to_the_last_and_is_as_long_as_the_longest(tmp_path: Path) -> None:
    first, second = steps_of(tmp_path)
    assert (first.step, first.start_ns, first.end_ns, first.span_ns) == (0, 1000, 2000, 1000)
    assert (second.step, second.start_ns, second.end_ns, second.span_ns) == (1, 1950, 2600, 650)
    assert [(step.bubble.ratio, step.bubble.ideal_ratio) for step in (first, second)] == [(None, None)] * 2
    assert [rank.rank for rank in first.ranks] == [0, 1]


def test_the_window_of_each_rank_is_its_own_and_waiting_for_the_other_is_bubble(tmp_path: Path) -> None:
    first, second = steps_of(tmp_path)
    early, late = first.ranks
    assert (early.window_ns, early.compute_ns, early.exposed_comm_ns, early.bubble_ns) == (1000, 0, 200, 800)
    assert (late.window_ns, late.compute_ns, late.exposed_comm_ns, late.bubble_ns) == (890, 0, 200, 690)
    (summary,) = early.comms
    assert (summary.axis, summary.kind, summary.count, summary.wait_ns, summary.exposed_ns) == (
        *("dp", "all_reduce", 1, 100, 200),
    )
    assert late.comms[0].wait_ns == 0
    assert [dict(rank.spans) for rank in second.ranks] == [{"OPTIMIZER": 150}, {}]
    assert [rank.comms for rank in second.ranks] == [(), ()]


def test_a_profile_without_a_pipeline_has_the_steps_of_torchs_profiler(tmp_path: Path) -> None:
    ranges = [("user_annotation", "ProfilerStep#4", 0, 100), ("user_annotation", "ProfilerStep#5", 100, 80)]
    operators = [("cpu_op", "aten::mm", 10, 50), ("cpu_op", "aten::mm", 110, 20)]
    steps = report_of(tmp_path, profile_of([*ranges, *operators])).steps
    assert [(step.step, step.span_ns, step.has_pipeline) for step in steps] == [(4, 100_000, False), (5, 80_000, False)]
    assert [step.ranks[0].compute_ns for step in steps] == [50_000, 20_000]


def test_the_table_of_steps_has_the_length_that_the_verdict_names_and_the_window_beside_it(tmp_path: Path) -> None:
    ranges = [("user_annotation", f"ProfilerStep#{step}", 100_000 * step, 90_000) for step in range(4)]
    operators = [("cpu_op", "aten::mm", 100_000 * step + 10, 50_000) for step in range(4)]
    report = report_of(tmp_path, profile_of([*ranges, *operators]))
    step = report.typical_step
    assert report.verdict.startswith("The typical step takes 100.0 ms")
    table = steps_table(report, step, Amount.WHOLE)
    (row,) = [row for row in table.rows if row[0] == str(step.step)]
    assert table.columns[1:4] == ("step ms", "window ms", "compute ms")
    assert row[1:4] == ("100.00", "90.00", "50.00")
    assert any("from its start to the start of the next one" in note for note in table.notes)
    ranks = ranks_table(step, Amount.WHOLE)
    assert (ranks.columns[1], ranks.rows[0][1]) == ("window ms", "90.00")


def test_steps_of_ranks_whose_clocks_nothing_relates_are_as_long_as_each_rank_says(tmp_path: Path) -> None:
    """Rank 1's clock is 5 s ahead, and no call of both tells by how much."""
    profiles = []
    for rank, ahead in enumerate((0, 5_000_000)):
        rows = [
            ("user_annotation", f"ProfilerStep#{step}", ahead + 1000 + 500 * step, 480 + 10 * rank, 1)
            for step in range(3)
        ]
        rows += [("cpu_op", "aten::mm", ahead + start + 100, 200, 1) for *_, start, _, _ in rows]
        profiles.append(profile_of(rows, rank, 2, deviceProperties=[], host_name=f"node{rank}"))
    steps = report_of(tmp_path, *profiles).steps
    assert [step.period_ns for step in steps] == [500_000, 500_000, 490_000]


def test_ranks_that_pass_tensors_around_a_ring_compute_as_their_operators_do(tmp_path: Path) -> None:
    """Messages between a forward and a backward look like a pipeline's until it is seen that each rank sends to its next."""
    report = report_of(tmp_path, *map(_around_a_ring, (0, 1)))
    assert [(step.has_pipeline, step.span_ns) for step in report.steps] == [(False, 500_000)] * 3
    assert [rank.compute_ns for step in report.steps for rank in step.ranks] == [200_000] * 6


def _around_a_ring(rank: int) -> Profile:
    """Three steps of 500 µs: a forward of 100, a message each way of 100, a backward of 100."""
    rows: list[tuple[object, ...]] = []
    for step in range(3):
        at, call = 1_000 + 600 * step, f"group=0 seq={step} bytes=4096 peer={1 - rank}"
        forward, backward = ({"Sequence number": step, "Fwd thread id": thread} for thread in (0, 1))
        rows += [
            ("user_annotation", f"pp1:STEP step={step}", at, 500),
            ("cpu_op", "aten::addmm", at + 10, 100, 1, forward),
            ("user_annotation", f"pp1:call step={step} kind=send {call} handle=0", at + 120, 100),
            ("cpu_op", "c10d::send", at + 130, 80),
            ("user_annotation", f"pp1:call step={step} kind=recv {call} handle=1", at + 230, 100),
            ("cpu_op", "c10d::recv_", at + 240, 80),
            ("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", at + 350, 100, 1, backward),
        ]
    group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}
    facts = {"schema": "pptrace.trace/1", "rank": rank, "world_size": 2, "backend": "gloo", "host": "one"}
    return profile_of(rows, rank, 2, {"pg_config": [group]}, pptrace=facts)


def test_time_between_operators_is_apart_from_waiting_for_the_rank_that_comes_last(tmp_path: Path) -> None:
    """Rank 1 sleeps for 300 of 1,000 µs, for which rank 0 waits in the all-reduce."""
    report = report_of(tmp_path, *map(_with_late_rank, (0, 1)))
    early, late = report.steps[2].ranks
    assert (early.compute_ns, early.exposed_comm_ns, early.bubble_ns) == (310_000, 200_000, 490_000)
    assert (early.between_operators_ns, early.late_ns) == (190_000, 0)
    assert (late.compute_ns, late.exposed_comm_ns, late.bubble_ns) == (310_000, 200_000, 490_000)
    assert (late.between_operators_ns, late.late_ns, late.late_in_transfer_ns) == (
        490_000,
        290_000,
        0,
    )  # rank 0 asks at 410
    first, *_ = report.findings
    assert (first.evidence["where"], first.gain_ns) == ({"rank": 1}, 290_000)
    assert report.verdict == (
        "The typical step takes 1.0 ms: 31% compute, 34% between operators (Python, input), 20% exposed communication, "
        "15% waiting for other ranks; the most to win back is 0.29 ms a step of waiting for the last to the collectives (rank 1)."
    )
    table = ranks_table(report.steps[2], Amount.WHOLE)
    place = table.columns.index("between operators ms")
    assert [row[place] for row in table.rows] == ["0.19", "0.49"]


def _with_late_rank(rank: int) -> Profile:
    """Six steps of 1 ms: 310 µs of compute, an all-reduce whose transfer takes 200, 190 between, and 300 more on rank 1."""
    call = {"Collective name": "allreduce", "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2}
    rows: list[tuple[object, ...]] = []
    for step in range(6):
        begin, posted, end = 1_000 * step, 1_000 * step + 400 + 300 * rank, 1_000 * step + 900
        rows += [
            ("user_annotation", f"ProfilerStep#{step}", begin, 1_000),
            ("cpu_op", "aten::mm", posted - 300, 300),
            ("cpu_op", "c10d::allreduce_", posted, 10),
            ("cpu_op", "record_param_comms", posted, 10, 1, call | {"In msg nelems": 9, "dtype": "Float", "Seq": step}),
            ("user_annotation", "gloo:all_reduce", posted + 5, end - posted - 5, 2),
            ("cpu_op", "aten::add_", end, 10),
        ]
    return profile_of(rows, rank, 2, host_name="node")


def test_without_operators_or_kernels_compute_is_not_known_and_waiting_is(tmp_path: Path) -> None:
    profiles = [_with_late_rank(rank) for rank in (0, 1)]
    for profile in profiles:
        profile["traceEvents"] = [event for event in profile["traceEvents"] if not event["name"].startswith("aten::")]
    report = report_of(tmp_path, *profiles)
    for rank in report.steps[2].ranks:
        assert (rank.compute_ns, rank.exposed_comm_ns, rank.bubble_ns) == (None, None, None)
        (comm,) = rank.comms
        assert (comm.hidden_ns, comm.exposed_ns, comm.overlap_ratio) == (None, None, None)
        assert comm.wait_ns == (300_000 if rank.rank == 0 else 0)
    assert "what it was spent on is not known" in report.verdict
    assert any(line.startswith("compute of ranks 0 and 1 is not known") for line in report.warnings)
