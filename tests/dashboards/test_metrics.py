"""The address of Prometheus: off unless it is wanted, and as protected as all others."""

from __future__ import annotations

import json
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from dashboards.app import create_app
from tests.support.programs import SAMPLES


def test_metrics_are_answered_where_they_are_wanted(run_p4: Path, tmp_path: Path) -> None:
    expected = json.loads((SAMPLES / "1f1b_p2" / "expected.json").read_text())["steps"][-1]
    answer = create_app([SAMPLES / "1f1b_p2"], has_metrics=True).server.test_client().get("/metrics")
    assert (answer.status_code, answer.content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    slowest = {sample.labels["step"]: sample for sample in families["pptrace_slowest_rank_compute_seconds"].samples}
    assert slowest["last"].labels == {"step": "last", "rank": "1", "stage": "1"}
    assert slowest["last"].value == max(rank["compute_ns"] for rank in expected["ranks"]) / 1e9
    nothing = create_app([tmp_path], has_metrics=True).server.test_client().get("/metrics")
    assert "pptrace_report_available 0.0" in nothing.text
    assert create_app([run_p4]).server.test_client().get("/metrics").mimetype == "text/html", "the app's start page"


def test_metrics_need_the_secret_too(run_p4: Path) -> None:
    client = create_app([run_p4], secret="only-who-knows-this", has_metrics=True).server.test_client()
    assert client.get("/metrics").status_code == 401
    known = client.get("/metrics", headers={"Authorization": "Bearer only-who-knows-this"})
    assert "pptrace_step_duration_seconds" in known.text
