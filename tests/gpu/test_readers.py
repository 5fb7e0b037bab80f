"""The comparison of recorded runs, with traces of a GPU that are made on paper: what is right passes, what is wrong does not."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from pptrace.workflow.load import load
from tests.roundtrip.files import write_kineto
from tests.roundtrip.styles import Marks
from tests.roundtrip.test_roundtrip import paper
from tests.support.device_oracle import Op, expectation, kineto_ops
from tests.support.kineto import event_row, write_rows
from tools.gpu import recorded
from tools.gpu.comparison import differences


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


def test_an_op_has_the_time_of_the_computing_kernels_launched_inside_its_range(tmp_path: Path) -> None:
    mark = "pp1:{} chunk=0 phase=steady step=3"
    events = [
        event_row("user_annotation", mark.format("0F0"), 10, 5),
        event_row("user_annotation", mark.format("0B0"), 20, 5),
        event_row("user_annotation", mark.format("0W0"), 40, 5),
        event_row("cuda_runtime", "cudaLaunchKernel", 11, 1, 1),
        event_row("cuda_driver", "cuLaunchKernelEx", 14.999, 1, 2),  # within the range by a nanosecond
        event_row("cuda_runtime", "cudaLaunchKernel", 15, 1, 3),  # between both
        event_row("cuda_runtime", "cudaLaunchKernel", 20, 1, 4),
        event_row("cuda_runtime", "cudaLaunchKernel", 21, 1, 5),
        event_row("kernel", "gemm", 100, 10, 1),
        event_row("kernel", "norm", 120, 10, 2),
        event_row("kernel", "elsewhere", 130, 10, 3),
        event_row("kernel", "gemm", 150, 10, 4),
        event_row("kernel", "ncclDevKernel_AllReduce", 160, 50, 5),
    ]
    assert kineto_ops(write_rows(tmp_path / "rank0.json.gz", events)) == [
        Op(3, "0F0", 100_000, 130_000, True),
        Op(3, "0B0", 150_000, 160_000, True),
        Op(3, "0W0", 40_000, 45_000, False),  # launched nothing
    ]


def test_an_op_has_all_kernels_of_a_graph_that_it_launched(tmp_path: Path) -> None:
    events = [
        event_row("user_annotation", "pp1:0F0 chunk=0 phase=steady step=3", 10, 5),
        event_row("cuda_runtime", "cudaGraphLaunch", 11, 1, 1),
        *(event_row("kernel", "gemm", start, 10, 1) for start in (100, 140, 120)),
    ]
    assert kineto_ops(write_rows(tmp_path / "rank0.json.gz", events)) == [Op(3, "0F0", 100_000, 150_000, True)]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved-1f1b"])
@pytest.mark.usefixtures("with_gpu")
def test_a_report_of_a_gpu_trace_is_what_the_reader_of_kernels_says(tmp_path: Path, schedule: str) -> None:
    run = paper(schedule)
    folder = write_kineto(Marks(), run, 2, tmp_path / "run")
    report = load([folder]).report
    recorded._check_device(report, folder)
    assert recorded._check_ops(report, folder) == {
        "ops": 2 * sum(len(run.computes(rank)) for rank in range(run.plan.pp)),
        "without_kernels": 0,
    }
    ranks = expectation(folder)["ranks"]
    assert [len(rank["ops"]) for rank in ranks] == [2 * len(run.computes(rank)) for rank in range(run.plan.pp)]


@pytest.mark.usefixtures("with_gpu")
def test_another_time_of_one_kernel_is_seen(tmp_path: Path) -> None:
    folder = write_kineto(Marks(), paper("1f1b"), 1, tmp_path / "run")
    report = load([folder]).report
    path = folder / "rank1.json.gz"
    content = json.loads(gzip.decompress(path.read_bytes()))
    kernel = next(e for e in content["traceEvents"] if e["cat"] == "kernel" and "nccl" not in e["name"])
    kernel["dur"] = round(kernel["dur"] + 5, 3)  # past the end of its op
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    with pytest.raises(AssertionError):
        recorded._check_device(report, folder)
    with pytest.raises(AssertionError, match=r"rank 1: .* ops differ"):
        recorded._check_ops(report, folder)


@pytest.mark.usefixtures("with_gpu")
def test_an_op_longer_than_its_events_is_seen(tmp_path: Path) -> None:
    run = paper("1f1b")
    report = load([write_kineto(Marks(), run, 1, tmp_path / "run")]).report
    times = tmp_path / "times"
    times.mkdir()
    for rank in range(run.plan.pp):
        ops = [(0, str(done.action), (done.end - done.start) / 1e6) for done in run.computes(rank)]
        (times / f"rank{rank}.json").write_text(json.dumps({"device": "cuda", "ops": ops}))
    assert recorded._check_events(report, times)["median_share_of_events"] == 1.0
    step = report.steps[0]
    first = step.ranks[1].ops[0]
    longer = replace(first, end_ns=first.end_ns + 2 * recorded.SLACK_NS)
    rank = replace(step.ranks[1], ops=(longer, *step.ranks[1].ops[1:]))
    wrong = replace(report, steps=(replace(step, ranks=(step.ranks[0], rank, *step.ranks[2:])),))
    with pytest.raises(AssertionError, match=r"1 of \d+ ops are longer than their events"):
        recorded._check_events(wrong, times)


def test_ops_are_compared_from_the_first_op_on() -> None:
    expected = [Op(0, "0F0", 100, 110, True), Op(0, "0B0", 120, 140, True)]
    moved = [dataclasses.replace(op, start_ns=op.start_ns + 7, end_ns=op.end_ns + 7) for op in expected]
    assert differences(moved, expected) == []
    assert differences([moved[0], expected[1]], expected) == [(expected[1], expected[1])]
    assert differences(moved[:1], expected) == [(None, expected[1])]
    assert differences(moved, expected[:1]) == [(moved[1], None)]
