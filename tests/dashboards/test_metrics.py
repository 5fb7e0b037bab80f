"""The address of Prometheus: off unless it is wanted, and as protected as all others."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dashboards.app import create_app
from pptrace.workflow.load import load
from tests.dashboards.attacker import SECRET
from tests.support.live_run import STEP_NS, LiveFolder
from tests.support.programs import SAMPLES


def test_metrics_are_answered_where_they_are_wanted(run_p4: Path, tmp_path: Path) -> None:
    expected = load([SAMPLES / "1f1b_p2"]).report.steps[-1]
    answer = create_app([SAMPLES / "1f1b_p2"], has_metrics=True).server.test_client().get("/metrics")
    assert (answer.status_code, answer.content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    slowest = {sample.labels["step"]: sample for sample in families["pptrace_slowest_rank_compute_seconds"].samples}
    assert slowest["last"].labels == {"step": "last", "rank": "1", "stage": "1"}
    assert slowest["last"].value == max(rank.compute_ns or 0 for rank in expected.ranks) / 1e9
    nothing = create_app([tmp_path], has_metrics=True).server.test_client().get("/metrics")
    assert "pptrace_report_available 0.0" in nothing.text
    refused = create_app([run_p4]).server.test_client().get("/metrics")
    assert (refused.status_code, refused.mimetype) == (404, "text/plain")
    assert "started with --metrics" in refused.text


def test_a_run_that_goes_on_has_its_last_step_and_its_slow_rank(tmp_path: Path) -> None:
    run = LiveFolder(tmp_path)
    run.write_steps(20)
    run.write_steps(4, {1: 2.0})
    answer = create_app([tmp_path], has_metrics=True).server.test_client().get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert families["pptrace_live_step_number"].samples[0].value == 23
    assert families["pptrace_live_step_duration_seconds"].samples[0].value == pytest.approx(STEP_NS / 1e9, rel=0.01)
    (slow,) = families["pptrace_live_slow_rank_excess_ratio"].samples
    assert (slow.labels, slow.value) == ({"rank": "1", "than": "before"}, pytest.approx(1.0, rel=0.1))
    compute = {
        sample.labels["rank"]: sample.value
        for sample in families["pptrace_live_rank_part_seconds"].samples
        if sample.labels["part"] == "compute"
    }
    assert compute == {"0": pytest.approx(0.06, rel=0.05), "1": pytest.approx(0.12, rel=0.05)}


def test_metrics_need_the_secret_too(run_p4: Path) -> None:
    client = create_app([run_p4], secret=SECRET, has_metrics=True).server.test_client()
    assert client.get("/metrics").status_code == 401
    known = client.get("/metrics", headers={"Authorization": f"Bearer {SECRET}"})
    assert "pptrace_step_duration_seconds" in known.text
