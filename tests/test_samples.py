"""The sample traces are what their expectations, made by an independent program, say they are."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pptrace import hang as hang_of
from pptrace import load as load_run
from pptrace.analysis.result import Severity
from pptrace.workflow.load import load
from tests.analysis.test_oracle import assert_same
from tests.support.device_oracle import Counted, Op
from tests.support.device_oracle import expectation as device_expectation
from tests.support.extent import ALL
from tests.support.oracle import partition
from tests.support.programs import SAMPLES
from tools.gpu.comparison import differences, ops_of

CASES = sorted(path.parent for path in SAMPLES.glob("*/run.json"))


def expected_of(case: Path) -> dict[str, Any]:
    return json.loads((case / "expected.json").read_text(encoding="utf-8"))


HEAD = "head and loss"
ON_GPU = [case for case in CASES if "ranks" in expected_of(case)]
ON_HOST = [case for case in CASES if case not in ON_GPU]


def test_there_are_samples() -> None:
    assert {case.name for case in CASES} >= {
        *("1f1b_p2", "1f1b_p4", "mesh_pp2_tp2_cp2_dp2", "faults_pp2_dp2", "experts_pp2_ep2", "hang_p4"),
        *("gpu_1f1b_p4", "gpu_zbv_p2", "gpu_1f1b_p2_tp2"),
        *("gpu_nccl_torch_1f1b_p4", "gpu_nccl_1f1b_p4", "gpu_nccl_graphs_1f1b_p2", "gpu_nccl_experts_pp2_ep2"),
    }


@pytest.mark.parametrize("case", CASES if ALL else CASES[::4], ids=lambda case: case.name)
def test_the_expectation_is_still_what_the_oracle_reads(case: Path) -> None:
    expected = expected_of(case)
    for injected in ("findings", "hang"):
        expected.pop(injected, None)
    assert expected == (device_expectation(case) if case in ON_GPU else partition(case))


@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.name)
def test_pptrace_finds_the_device_time_and_ops_of_a_gpu_to_the_nanosecond(case: Path) -> None:
    report = load([case], as_recorded=True).report
    for rank, expected in enumerate(expected_of(case)["ranks"]):
        assert_same(report.device[rank], Counted(**expected["device"]))
        ops = [Op(step, name, start, end, True) for step, name, start, end in expected["ops"]]
        assert differences(list(ops_of(report, rank)), ops) == []


@pytest.mark.parametrize("case", ON_HOST, ids=lambda case: case.name)
def test_pptrace_finds_what_is_expected_to_the_nanosecond(case: Path) -> None:
    expected = expected_of(case)
    report = load([case], as_recorded=True).report
    rows = [
        {
            "step": step.step,
            "span_ns": step.span_ns,
            "ranks": [
                {
                    "rank": rank.rank,
                    "compute_ns": rank.compute_ns,
                    "exposed_comm_ns": rank.exposed_comm_ns,
                    "bubble_ns": rank.bubble_ns,
                    "ops": [f"{op.stage}{op.kind}{op.microbatch}" for op in rank.ops],
                }
                for rank in step.ranks
            ],
        }
        for step in report.steps
    ]
    assert rows == expected["steps"]
    named = [finding for finding in report.findings if finding.severity is not Severity.INFO]
    for injected in expected.get("findings", ()):  # sample_traces/make.py says which faults
        assert any(injected.items() <= finding.evidence.items() for finding in named), injected


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hang_is_found_in_the_sample_that_has_one_and_in_no_other(case: Path) -> None:
    hang = hang_of([case]).result.hang
    expected = expected_of(case).get("hang")
    if hang is None:
        assert expected is None
        return
    waits = [[edge["rank"], edge["waits_for"]] for edge in hang["edges"]]
    assert {"verdict": hang["verdict"], "ranks": hang["ranks"], "waits": waits} == expected


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_samples_are_small_and_name_no_machine(case: Path) -> None:
    for file in case.glob("rank*.json.gz"):
        assert file.stat().st_size < 1_000_000
        text = gzip.decompress(file.read_bytes())
        assert not re.search(rb'"/(home|root|work|tmp)[/"]', text)


def test_a_head_of_a_large_vocabulary_is_named_and_moved_away_from() -> None:
    """Its stage takes longer for the head; a split without layers there gains, for which Megatron's layout is given."""
    run = load_run(SAMPLES / "head_p4")
    stages = run.report.stages
    of_last = {one.kind: one.parts[0].name for one in stages.differences if one.stage == 3}
    assert of_last == {"F": HEAD, "B": HEAD}
    (finding,) = (one for one in run.report.findings if one.evidence.get("where") == {"stage": 3})
    assert f"{HEAD} +" in finding.detail
    predictions = run.whatif(split="Et*3|t*3|t*2|L")
    assert predictions.study.best_split == (3, 3, 2, 0), (
        "predicted shorter than 2,3,3,0, of which the heaviest stage is lighter"
    )
    (scenario,) = (one for one in predictions.result.scenarios if one.split == (3, 3, 2, 0))
    assert scenario.gain_ns > 0.15 * predictions.result.measured_period_ns
    assert scenario.paste["Megatron-LM"] == '--pipeline-model-parallel-layout "Et*3|t*3|tt|L"'


def test_a_run_of_torch_over_nccl_is_recognised_whole() -> None:
    """Every message of 8 × 256 floats, with both ends; that the ranks share a GPU is named, and what it costs."""
    analysis = load([SAMPLES / "gpu_nccl_torch_1f1b_p4"], as_recorded=True)
    report, comms = analysis.report, analysis.data.comms
    assert (report.framework, report.schedule.name) == ("torch.distributed.pipelining", "1f1b")
    assert report.schedule.mismatches == ()
    of_steps = comms[comms["step"] >= 0]
    assert len(of_steps) == 3 * 8 * 3 * 2 * 2  # steps, microbatches, links, directions, ends
    assert set(of_steps["bytes"]) == {8 * 256 * 4}
    assert (of_steps.groupby("match")["rank"].nunique() == 2).all()
    assert [line for line in report.warnings if line.startswith("ranks 0 to 3 share a GPU")]
    named = [finding for finding in report.findings if finding.severity is not Severity.INFO]
    assert named[0].title.startswith("Late receives: ")
