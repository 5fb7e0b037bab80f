"""The answers that ByteDance's study published for its trace of a production job, compared with ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pptrace.analysis.report import Report
from pptrace.workflow.load import load

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "bytedance_straggler"
KINDS = {
    "F": "forward-compute",
    "B": "backward-compute",
    "RECV_F": "forward-pp-comm",
    "RECV_B": "backward-pp-comm",
    "GC": "gc",
    "OPTIMIZER": "optimizer",
    "OPTIMIZER (all ranks)": "optimizer-clip-main-grad",
    "dp all_gather": "params-all-gather",
    "dp reduce_scatter": "grads-reduce-scatter",
    "embd all_reduce": "embedding-grads-all-reduce",
    "tp all_reduce": "layernorm-grads-all-reduce",
}
"""Kinds by the study's names."""


@pytest.fixture(scope="module")
def report() -> Report:
    if not DATA.is_dir():
        pytest.skip("no folder of public traces next to the checkout: shared/data/bytedance_straggler")
    return load([DATA / "trace-ST.parquet"]).report


def published(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}-ST.json").read_text(encoding="utf-8"))


def test_slowdown_and_shares_are_the_published_ones(report: Report) -> None:
    ours = report.stragglers
    assert (ours.num_steps, ours.covers) == (32, "step")
    assert ours.slowdown == pytest.approx(published("result")["blocking_slowdown"], rel=1e-6)
    assert ours.m_w == pytest.approx(published("mw")["Mw"], rel=1e-6)
    assert ours.m_s == pytest.approx(published("ms")["Ms"], rel=1e-6)


def test_slowdowns_of_stages_workers_and_kinds_are_the_published_ones(report: Report) -> None:
    ours, theirs = report.stragglers, published("result")
    stages, replicas = theirs["blocking_decompose_by_stage"], theirs["blocking_decompose_by_dp_rank"]
    assert {str(entry.stage): entry.slowdown for entry in ours.stages} == pytest.approx(stages, rel=1e-6)
    workers = {entry.rank: min(stages[str(entry.rank // 2)], replicas[str(entry.rank % 2)]) for entry in ours.workers}
    assert {entry.rank: entry.slowdown for entry in ours.workers} == pytest.approx(workers, rel=1e-6)
    kinds = {KINDS[entry.kind]: entry.slowdown for entry in ours.op_kinds}
    assert kinds == pytest.approx(theirs["blocking_decompose_by_optype"], rel=1e-6)


def test_the_long_last_stage_is_the_finding_and_no_worker_is(report: Report) -> None:
    *findings, _ = report.findings
    assert [(finding.evidence["cause"], finding.evidence["where"]) for finding in findings] == [
        ("imbalance", {"stage": 3}),
        ("gradient_sync", {"axis": "dp"}),
    ]
