"""Steps of a run without a pipeline: the partition of each rank's own STEP range, by hand."""

from __future__ import annotations

import json
from pathlib import Path

from pptrace.analysis.result import StepReport
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
        "dp",
        "all_reduce",
        1,
        100,
        200,
    )
    assert late.comms[0].wait_ns == 0
    assert [dict(rank.spans) for rank in second.ranks] == [{"OPTIMIZER": 150}, {}]
    assert [rank.comms for rank in second.ranks] == [(), ()]


def test_a_profile_without_a_pipeline_has_the_steps_of_torchs_profiler(tmp_path: Path) -> None:
    ranges = [("user_annotation", "ProfilerStep#4", 0, 100), ("user_annotation", "ProfilerStep#5", 100, 80)]
    operators = [("cpu_op", "aten::mm", 10, 50), ("cpu_op", "aten::mm", 110, 20)]
    events = [
        {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1}
        for cat, name, ts, dur in (*ranges, *operators)
    ]
    trace = {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}
    (tmp_path / "rank0.json").write_text(json.dumps(trace))
    steps = load([tmp_path / "rank0.json"], cache=False).report.steps
    assert [(step.step, step.span_ns, step.has_pipeline) for step in steps] == [(4, 100_000, False), (5, 80_000, False)]
    assert [step.ranks[0].compute_ns for step in steps] == [50_000, 20_000]
