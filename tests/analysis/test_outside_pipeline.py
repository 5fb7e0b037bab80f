"""Parts of a step outside its pipeline: closed forms on tables of ops, and real runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace

import pptrace
from pptrace.analysis.aligned import RankRows
from pptrace.analysis.findings.steps import outside_findings
from pptrace.analysis.report import Report
from pptrace.analysis.result import CommSummary, RankStep, StepReport
from pptrace.analysis.steps.outside_pipeline import _Timelines, outside_rows
from pptrace.analysis.whatif.measured_gains import OutsideTimes
from pptrace.analysis.whatif.result import Scenario
from pptrace.analysis.whole_run import Bubble, OutsidePart
from pptrace.errors import UsageError
from pptrace.model.mesh import MeshSizes
from pptrace.model.tables import OPS, Int64, empty_table
from pptrace.recognise.device.work import NO_DEVICE
from pptrace.slices import Slice, slice_of
from pptrace.workflow.load import load
from tests.support.programs import SAMPLES, torchrun

MS = 1_000_000
NOTHING = np.empty((0, 2), dtype=np.int64)
NO_OPS = slice_of(empty_table(OPS))
NO_BUBBLE = Bubble(None, None, None, None, None)


def outside(step: StepReport) -> dict[tuple[str, str], int]:
    assert step.outside is not None
    return {(part.part, "".join(f"{kind} {at}" for kind, at in part.where.items())): part.ns for part in step.outside}


def report_of(folder: Path, rows: list[tuple[object, ...]]) -> Report:
    """The report of a table of (rank, step, kind, start, end, stage, microbatch), ms."""
    columns = ["rank", "step", "kind", "start_us", "end_us", "stage", "microbatch"]
    table = pd.DataFrame(rows, columns=columns)
    table[["start_us", "end_us"]] *= 1000
    table.to_csv(folder / "ops.csv", index=False)
    return load([folder / "ops.csv"], cache=False).report


def pipeline(step: int, at: float) -> list[tuple[object, ...]]:
    """A pipeline of two ranks and one microbatch: F and B of 10 ms each, 40 in all."""
    return [
        (0, step, "F", at, at + 10, 0, 0),
        (1, step, "F", at + 10, at + 20, 1, 0),
        (1, step, "B", at + 20, at + 30, 1, 0),
        (0, step, "B", at + 30, at + 40, 0, 0),
    ]


def marked_steps(*late: int) -> list[tuple[object, ...]]:
    """Steps of 50 ms with a range around each, in which a checkpoint of so many ms more is written after the pipeline."""
    rows: list[tuple[object, ...]] = []
    at = 0.0
    for step, more in enumerate(late):
        rows += [(0, step, "STEP", at, at + 50 + more, None, None), *pipeline(step, at)]
        rows += [(0, step, "CHECKPOINT", at + 45, at + 45 + more, None, None)] * (more > 0)
        at += 50 + more
    return rows


def timelines_of(lacks_ranks: bool, of_rank: Mapping[int, pd.DataFrame]) -> _Timelines:
    """Of ranks that have this communication alone, which they ask for when it starts."""
    rows = {
        rank: outside_rows(
            RankRows(NO_OPS, NO_OPS, slice_of(comms.assign(asked_ns=comms.start_ns))), None, NOTHING, lacks_ranks
        )
        for rank, comms in of_rank.items()
    }
    return _Timelines(None, rows, lacks_ranks)


def test_what_follows_the_pipeline_is_named_on_the_rank_that_the_next_step_waits_for(tmp_path: Path) -> None:
    rows = []
    for step in range(3):
        at = 100.0 * step
        rows += pipeline(step, at)
        rows += [
            (0, step, "OPTIMIZER", at + 40, at + 65, None, None),
            (1, step, "OPTIMIZER", at + 30, at + 35, None, None),
        ]
        rows += [(0, step, "DATA", at + 70, at + 100, None, None)]
    first, *_, last = report_of(tmp_path, rows).steps
    assert (first.period_ns, first.span_ns, first.length_ns) == (100 * MS, 40 * MS, 100 * MS)
    assert outside(first) == {
        ("data", "rank 0"): 30 * MS,
        ("optimizer", "rank 0"): 25 * MS,
        ("other", "rank 0"): 5 * MS,
    }
    assert (last.period_ns, last.outside, last.length_ns) == (None, None, 40 * MS), "no range says when it ended"


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_the_last_marked_step_lasts_until_the_next_ones_first_op_would_come(num_steps: int, tmp_path: Path) -> None:
    """A range of 100 ms around each step: 30 ms of data, the pipeline of 40, an optimizer of 25, 5 that nothing names."""
    rows: list[tuple[object, ...]] = []
    for step in range(num_steps):
        at = 100.0 * step
        rows += [(0, step, "STEP", at, at + 100, None, None), (0, step, "DATA", at, at + 30, None, None)]
        rows += [*pipeline(step, at + 30), (0, step, "OPTIMIZER", at + 70, at + 95, None, None)]
    report = report_of(tmp_path, rows)
    for step_report in report.steps:
        assert step_report.period_ns == 100 * MS
        assert outside(step_report) == {
            ("data", "rank 0"): 30 * MS,
            ("optimizer", "rank 0"): 25 * MS,
            ("other", "rank 0"): 5 * MS,
        }
    assert report.verdict.startswith(f"The {'typical ' * (num_steps > 1)}step takes 100.0 ms")


def test_what_comes_before_one_step_alone_is_not_counted_again_after_the_last(tmp_path: Path) -> None:
    """A checkpoint of 300 ms at the begin of the last range is what the step before it took longer."""
    rows: list[tuple[object, ...]] = []
    for step in range(5):
        at = 50.0 * step
        late = 300 * (step == 4)
        rows += [(0, step, "STEP", at, at + 50 + late, None, None), *pipeline(step, at + 5 + late)]
        rows += [(0, step, "CHECKPOINT", at, at + late, None, None)] * (step == 4)
    assert [step.period_ns for step in report_of(tmp_path, rows).steps] == [50 * MS] * 3 + [350 * MS, 50 * MS]


def test_a_checkpoint_every_third_step_gains_what_the_mean_step_loses_and_is_no_outlier(tmp_path: Path) -> None:
    report = report_of(tmp_path, marked_steps(*[0, 0, 300] * 5))
    finding = report.findings[0]
    assert finding.gain_ns == 100 * MS
    assert not [other for other in report.findings if "steps" in other.evidence]
    assert report.verdict.startswith(
        "The typical step takes 50.0 ms, 150.0 on average with checkpoint in some steps (40.0 ms of it the pipeline's span)"
    )
    assert finding.title == "Outside the pipeline: 66.7% of all steps is checkpoint (rank 0)"
    assert "the most to win back is 100.0 ms a step of checkpoint (rank 0)" in report.verdict


def test_what_comes_every_other_step_is_named_in_a_run_of_few_steps(tmp_path: Path) -> None:
    """The typical step has none: no ideal makes its period shorter than its pipeline."""
    report = report_of(tmp_path, marked_steps(0, 100, 0, 100))
    part = "checkpoint"
    assert {finding.evidence["cause"]: finding.gain_ns for finding in report.findings}[part] == 50 * MS
    span, typical = 40 * MS, OutsideTimes(50 * MS, 10 * MS, {part: np.array([0, 100, 0, 100]) * MS})
    today = Scenario("today", "1f1b", 1, 1, None, (), span, span, span, 0, 0.0, 1, None, None, "")
    ideal = typical.without(part, today)
    assert (ideal.gain_ns, ideal.period_ns, ideal.period_low_ns) == (50 * MS, span, span)
    assert ideal.note.endswith("than the mean step, which the gain is of: ms is its pipeline")
    usual = OutsideTimes(50 * MS, 10 * MS, {part: np.array([5, 5]) * MS}).without(part, today)
    assert (usual.period_ns, usual.note) == (45 * MS, "outside the pipeline, whose span stays")


def test_shares_of_all_findings_are_of_the_time_from_step_to_step(tmp_path: Path) -> None:
    rows = [
        row
        for step in range(6)
        for row in (*pipeline(step, 100.0 * step), (0, step, "DATA", 100.0 * step + 50, 100.0 * step + 90, None, None))
    ]
    report = report_of(tmp_path, rows)
    shares = {finding.evidence["cause"]: finding.evidence["share"] for finding in report.findings}
    (structural,) = [finding for finding in report.findings if finding.evidence["cause"] == "structural"]
    assert shares["data"] == pytest.approx(0.4)
    assert structural.evidence["share"] == pytest.approx((structural.gain_ns or 0) / (100 * MS))


@pytest.mark.parametrize("has_replicas", [False, True])
def test_a_function_that_sums_gradients_without_replicas_is_no_gradient_sum(has_replicas: bool, tmp_path: Path) -> None:
    """The range of the function, of 20 ms, in which an all-reduce is seen or not."""
    rows, _ = rows_of_outside(has_replicas)
    assert set(rows["part"]) == ({"gradient_sync"} if has_replicas else {"compute"})


def test_a_message_within_a_function_that_sums_gradients_is_none_of_its_sums() -> None:
    """The norm's all-reduce is elsewhere, and tells that collectives are recorded."""
    rows, _ = rows_of_outside(False, ("send", "pp", 55), ("all_reduce", "pp", 90))
    assert "gradient_sync" not in set(rows["part"])


def rows_of_outside(has_replicas: bool, *calls: tuple[str, str, int]) -> tuple[Slice, Int64 | None]:
    """Rows outside a pipeline: a GRAD_SYNC of 20 ms, with an all-reduce of dp in it, or none anywhere near, or with calls
    (kind, axis, ms) of a millisecond.
    """
    spans = {
        "kind": np.array(["GRAD_SYNC"], dtype=object),
        "start_ns": np.array([50 * MS]),
        "end_ns": np.array([70 * MS]),
    }
    calls = calls or (("all_reduce", "dp", 55) if has_replicas else ("send", "pp", 10),)
    comms = {
        name: np.array(values, dtype=object)
        for name, values in zip(("kind", "axis"), list(zip(*calls, strict=True))[:2], strict=True)
    }
    at, each = np.array([ms * MS for *_, ms in calls]), np.ones(len(calls), dtype=np.int64)
    comms |= dict.fromkeys(("start_ns", "asked_ns"), at) | {
        "end_ns": at + MS,
        "match": -each,
        "group_size": 2 * each,
        "bytes": 8 * each,
    }
    none = {name: column[:0] for name, column in spans.items()}
    inside = np.array([[0, 40 * MS]])
    return outside_rows(RankRows(ops=Slice(none), spans=Slice(spans), comms=Slice(comms)), None, inside)


def test_findings_name_what_is_outside_with_its_rank_and_what_it_costs(tmp_path: Path) -> None:
    rows = []
    for step in range(6):
        at = 100.0 * step
        rows += [*pipeline(step, at), (0, step, "CHECKPOINT", at + 41, at + 99, None, None)]
    report = report_of(tmp_path, rows)
    (finding,) = [finding for finding in report.findings if "is_outside" in finding.evidence]
    assert (finding.evidence["cause"], finding.evidence["where"], finding.gain_ns) == (
        "checkpoint",
        {"rank": 0},
        58 * MS,
    )
    assert finding.title == "Outside the pipeline: 58.0% of the step is checkpoint (rank 0)"
    assert "The typical step takes 100.0 ms (40.0 ms of it the pipeline's span)" in report.verdict
    assert "58% checkpoint (rank 0)" in report.verdict
    assert "the most to win back is 58.0 ms a step of checkpoint (rank 0)" in report.verdict


def step_of_optimizer(*sent: tuple[str, str, int | None]) -> StepReport:
    """A step of 140 ns, 40 of them an optimizer; communication as (axis, kind, bytes)."""
    comms = tuple(CommSummary(axis, kind, 1, num_bytes, *[None] * 7) for axis, kind, num_bytes in sent)
    rank = RankStep(0, 0, 100, 90, 0, 10, {}, comms, {}, NO_DEVICE, None, ())
    return StepReport(
        **{"step": 0, "start_ns": 0, "end_ns": 140, "period_ns": 140, "span_ns": 100},
        bubble=NO_BUBBLE,
        ranks=(rank,),
        outside=(OutsidePart("optimizer", {"rank": 0}, 40),),
    )


@pytest.mark.parametrize(
    ("dp", "sent", "is_spread_further"),
    [
        (1, [], False),
        (None, [("world", "all_reduce", 4)], False),
        (None, [("dp", "all_reduce", 4000)], True),
        (2, [], True),
        (2, [("dp", "all_reduce", 4000), ("dp", "all_gather", 8)], True),
        (2, [("dp", "all_reduce", 4000), ("dp", "all_gather", 2000)], False),
        (2, [("dp", "reduce_scatter", None), ("dp", "all_gather", None)], False),
        (2, [("dp-cp", "reduce_scatter", 4000)], False),
    ],
)
def test_state_of_an_optimizer_is_to_be_spread_over_replicas_only_where_they_have_it_whole(
    dp: int | None, sent: list[tuple[str, str, int | None]], is_spread_further: bool
) -> None:
    (finding,) = outside_findings([step_of_optimizer(*sent)], MeshSizes(2, dp=dp))
    advice = "a fused optimizer; its state spread over the replicas (ZeRO, --use-distributed-optimizer)"
    assert finding.detail.partition(": ")[2] == (advice if is_spread_further else "a fused optimizer")


def test_a_part_that_the_typical_step_has_on_another_rank_than_most_steps_names_none() -> None:
    def step(number: int, rank: int, ns: int) -> StepReport:
        outside = (OutsidePart("optimizer", {"rank": rank}, ns),)
        return replace(step_of_optimizer(), step=number, period_ns=100 + ns, outside=outside)

    (finding,) = outside_findings([step(0, 1, 30), step(1, 0, 35), step(2, 1, 80)])
    assert finding.evidence["where"] == {}
    assert finding.title.endswith(" is optimizer")
    (finding,) = outside_findings([step(0, 0, 30), step(1, 1, 35), step(2, 1, 80)])
    assert finding.evidence["where"] == {"rank": 1}


def test_a_table_that_has_nothing_between_pipelines_says_nothing_of_it(tmp_path: Path) -> None:
    report = report_of(tmp_path, [row for step in range(6) for row in pipeline(step, 100.0 * step)])
    assert outside(report.steps[0]) == {("other", "rank 0"): 60 * MS}
    assert not [finding for finding in report.findings if "is_outside" in finding.evidence]


def test_a_step_that_begins_before_the_one_before_has_ended_overlaps_it(tmp_path: Path) -> None:
    report = report_of(tmp_path, [row for step in range(3) for row in pipeline(step, 35.0 * step)])
    assert outside(report.steps[0]) == {("overlap", ""): -5 * MS}


LOADER = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size, folder = dist.get_rank(), dist.get_world_size(), sys.argv[1]


class Data(Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        time.sleep(0.02 if rank == 2 else 0.0)
        return torch.randn(16, 32)


stage = PipelineStage(nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True), rank, size, torch.device("cpu"))
schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
optimizer = torch.optim.SGD(stage.submod.parameters())
profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
for step, batch in enumerate(DataLoader(Data(), batch_size=4)):
    if step == 4:
        profiler.start()
    if step == 12:
        break
    dist.barrier()
    optimizer.zero_grad()
    schedule.step(batch) if rank == 0 else schedule.step(target=batch)
    optimizer.step()
profiler.stop()
profiler.export_chrome_trace(f"{folder}/rank{rank}.json")
dist.destroy_process_group()
"""


def test_a_slow_loader_of_one_rank_before_a_barrier_is_that_ranks(tmp_path: Path) -> None:
    """A plain run of torch: rank 2 sleeps for 80 ms while it loads, and all others wait for it in a barrier."""
    (tmp_path / "train.py").write_text(LOADER)
    run = tmp_path / "run"
    run.mkdir()
    ended = torchrun(3, tmp_path / "train.py", run)
    assert ended.code == 0, ended.err
    report = load([run], as_recorded=True).report
    (finding,) = [found for found in report.findings if found.evidence["cause"] == "data"]
    assert finding.evidence["where"] == {"rank": 2}
    assert "loading of data (rank 2)" in report.verdict
    events = json.loads((run / "rank0.json").read_text())["traceEvents"]
    barriers = sorted(event["ts"] for event in events if event.get("name") == "c10d::barrier")
    between = [second - first for first, second in pairwise(barriers)]
    step = report.typical_step
    assert (step.period_ns or 0) / 1000 == pytest.approx(median(between), rel=0.2)
    assert 0.5 * 80 * MS < (finding.gain_ns or 0) < 1.2 * 80 * MS


def test_what_is_free_is_what_a_script_of_ten_lines_finds() -> None:
    """Of each rank, step and axis but pp: transfers behind its last op, until its pipeline's window ends, without compute."""
    run = pptrace.load(SAMPLES / "mesh_pp2_tp2_cp2_dp2", as_recorded=True)
    ops, comms = run.ops[run.ops.kind.isin(["F", "B"])], run.comms[run.comms.axis != "pp"]
    total = 0
    for window in run.analysis.windows:
        for rank in window.ranks:
            last = ops[(ops["rank"] == rank) & (ops.step == window.step)].end_ns.max()
            rows = comms[(comms["rank"] == rank) & (comms.step == window.step) & (comms["match"] >= 0)]
            free = (rows.transfer_end_ns.clip(upper=window.end_ns) - rows.transfer_start_ns.clip(lower=last)).clip(
                lower=0
            )
            (entry,) = [
                of for step in run.report.steps if step.step == window.step for of in step.ranks if of.rank == rank
            ]
            assert {comm.free_ns for comm in entry.comms if comm.axis == "pp"} <= {0}
            assert sum(comm.free_ns or 0 for comm in entry.comms) == pytest.approx(free.sum(), abs=2)
            total += int(free.sum())
    assert total > 10 * MS


def test_an_ideal_outside_the_pipeline_gains_its_mean_and_leaves_the_span() -> None:
    run = pptrace.load(SAMPLES / "uneven_p4", as_recorded=True)
    mean = np.mean([outside(step).get(("optimizer", "rank 0"), 0) for step in run.report.steps])
    result = run.whatif(ideals="outside=optimizer").result
    (scenario,) = result.scenarios
    assert scenario.gain_ns == int(mean)
    assert scenario.period_ns == scenario.length_ns == (result.measured_period_ns or 0) - int(mean)
    assert scenario.length_low_ns <= scenario.length_ns <= scenario.length_high_ns
    assert scenario.low_ns == scenario.span_ns == scenario.high_ns == result.measured_span_ns
    assert scenario.gain_share == scenario.gain_ns / result.measured_ns
    with pytest.raises(UsageError, match="outside its pipeline this run has data, optimizer, other"):
        run.whatif(ideals="outside=barrier")


def test_exposed_communication_without_a_pipeline_is_a_finding_by_axis(tmp_path: Path) -> None:
    rows = [
        (rank, step, kind, 100 * step + start, 100 * step + end)
        for step in range(6)
        for rank in (0, 1)
        for kind, start, end in (("STEP", 0, 100), ("all_reduce", 40, 70))
    ]
    table = pd.DataFrame(rows, columns=["rank", "step", "kind", "start_us", "end_us"]).assign(axis="", dp_rank=0)
    table.loc[table.kind == "all_reduce", "axis"] = "dp"
    table.dp_rank = table["rank"]
    table.to_csv(tmp_path / "ops.csv", index=False)
    report = load([tmp_path / "ops.csv"], cache=False).report
    (finding,) = [found for found in report.findings if found.evidence["cause"] == "communication"]
    assert (finding.gain_ns, finding.evidence["where"], finding.evidence["share"]) == (30_000, {"axis": "dp"}, 0.3)
    assert finding.detail.startswith("by axis: dp 100%")


def test_two_runs_that_differ_outside_their_pipelines_differ_by_their_periods(tmp_path: Path) -> None:
    """Of the same pipelines an optimizer takes 10 ms in one and 30 in the other: marks of the steps tell when they end."""
    runs = []
    for name, longer in (("a", 10), ("b", 30)):
        rows = []
        for step in range(10):
            at, length = (50.0 + longer) * step, 50 + longer
            rows += [*pipeline(step, at), (0, step, "OPTIMIZER", at + 40, at + 40 + longer, None, None)]
            rows += [(rank, step, "STEP", at, at + length, None, None) for rank in (0, 1)]
        (tmp_path / name).mkdir()
        report_of(tmp_path / name, rows)
        runs.append(tmp_path / name / "ops.csv")
    both = pptrace.compare(*runs)
    assert (both.verdict, both.span.a_ns, both.span.b_ns) == ("slower", 60 * MS, 80 * MS)
    parts = {(part.name, str(part.where.get("cause"))): part for part in both.result.parts}
    optimizer = parts["cause", "outside optimizer"]
    assert (optimizer.change_ns, optimizer.significant) == (20 * MS, True)


@pytest.mark.parametrize(
    ("members", "num_ranks", "part", "words"),
    [
        (2, 2, "unrecorded_ranks", "waiting for ranks that are not recorded (axis dp): no gain"),
        (2, 1, "unknown_rank", "waiting for a rank that is not known (axis dp): no gain"),
        (1, 1, "barrier", "barrier (axis dp)"),
    ],
)
def test_waiting_for_a_rank_without_a_trace_is_no_gain(members: int, num_ranks: int, part: str, words: str) -> None:
    """A barrier of which one member has no row is that member's time: only a barrier of its rank alone could be left out."""
    start, late = np.arange(3, dtype=np.int64) * 100, 40
    comms = pd.DataFrame(
        {"kind": "barrier", "axis": "dp", "bytes": 0, "group_size": members, "match": -1}, index=range(3)
    )
    timelines = timelines_of(num_ranks > 1, {0: comms.assign(start_ns=start, end_ns=start + late)})
    assert dict(timelines.walk(0, 240, 200)) == {(part, (("axis", "dp"),)): 40}
    step = StepReport(
        **{"step": 0, "start_ns": 0, "end_ns": 140, "period_ns": 140, "span_ns": 100},
        bubble=NO_BUBBLE,
        ranks=(),
        outside=(OutsidePart(part, {"axis": "dp"}, 40),),
    )
    (finding,) = outside_findings([step])
    assert words.split(":")[0] in finding.title
    assert (finding.gain_ns is None) == ("no gain" in words)
    if finding.gain_ns is None:
        assert "what is won without it" in finding.detail


@pytest.mark.parametrize(
    ("kind", "match", "lacks_ranks", "waits"),
    [("recv", -1, True, True), ("recv", -1, False, False), ("recv", 7, True, False), ("send", -1, True, False)],
)
def test_the_first_input_of_a_step_from_a_rank_without_a_trace_is_waited_for(
    kind: str, match: int, lacks_ranks: bool, waits: bool
) -> None:
    """A rank in the middle of a pipeline, recorded alone: between its steps the others fill and drain theirs."""
    comms = pd.DataFrame({"kind": [kind], "axis": "pp", "bytes": 8, "group_size": 2, "match": match})
    timelines = timelines_of(lacks_ranks, {0: comms.assign(start_ns=210, end_ns=240)})
    rank = (("rank", 0),)
    expected = {("unrecorded_ranks", rank): 30, ("other", rank): 10} if waits else {("other", rank): 40}
    assert dict(timelines.walk(0, 240, 200)) == expected


def test_transfers_of_collectives_with_members_that_have_no_trace_are_as_long_as_the_shortest_of_them() -> None:
    comms = pd.DataFrame({"kind": "all_reduce", "axis": "dp", "bytes": 8, "group_size": 2, "match": -1}, index=range(3))
    timelines = timelines_of(True, {0: comms.assign(start_ns=[0, 100, 200], end_ns=[30, 110, 250])})
    where = (("axis", "dp"),)
    assert dict(timelines.walk(0, 250, 200)) == {("unrecorded_ranks", where): 40, ("gradient_sync", where): 10}


def test_members_that_all_have_a_trace_are_waited_for_by_name_where_other_ranks_have_none() -> None:
    """Of a barrier of two recorded ranks of many, rank 1 came last: what it did before is the step's time."""
    comms = pd.DataFrame({"kind": ["barrier"], "axis": "dp", "bytes": 0, "group_size": 2, "match": 5, "end_ns": 64})
    walked = timelines_of(True, {rank: comms.assign(start_ns=60 * rank) for rank in (0, 1)}).walk(0, 64, 0)
    assert dict(walked) == {("barrier", (("axis", "dp"),)): 4, ("other", (("rank", 1),)): 60}


def test_a_step_that_is_reported_alone_is_as_long_as_in_the_report_of_all(tmp_path: Path) -> None:
    """Steps of 100 and of 70 ms take turns."""
    of_all = report_of(
        tmp_path, [row for step, at in enumerate((0, 100, 170, 270)) for row in pipeline(step, at)]
    ).steps
    for step in of_all:
        (alone,) = load([tmp_path / "ops.csv"], step=step.step, cache=False).report.steps
        assert (alone.period_ns, alone.outside) == (step.period_ns, step.outside)
