"""Findings lead to where they can be seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from dashboards.evidence import evidence_of
from pptrace.analysis.result import Finding, Report, Severity
from pptrace.workflow.load import load

SAMPLE = Path(__file__).resolve().parents[2] / "sample_traces" / "uneven_p4"


@pytest.fixture(scope="module")
def report() -> Report:
    return load([SAMPLE]).report


def asked(finding: Finding, report: Report) -> dict[str, str]:
    address = urlsplit(evidence_of(finding, report) or "")
    assert address.path == "/timeline"
    return {name: values[0] for name, values in parse_qs(address.query).items()}


def test_an_uneven_stage_leads_to_its_rank_in_the_step_that_lost_most(report: Report) -> None:
    finding = next(each for each in report.findings if each.evidence.get("cause") == "imbalance")
    query = asked(finding, report)
    stage = finding.evidence["where"]["stage"]
    assert query["rows"] == str(stage), "ranks and stages are alike here"
    losses = {
        step.step: sum(
            cause.ns for cause in step.causes or () if cause.cause == "imbalance" and cause.where == {"stage": stage}
        )
        for step in report.steps
    }
    assert int(query["step"]) == max(losses, key=lambda step: losses[step])
    rank, _, step = map(int, query["select"].split("."))
    assert (rank, step) == (stage, int(query["step"]))
    assert query["critical"] == "1"


def test_a_finding_about_a_step_leads_to_it(report: Report) -> None:
    finding = Finding(Severity.WARNING, "Outliers", "", evidence={"cause": "jitter", "where": {}, "steps": [4, 3]})
    assert asked(finding, report)["step"] == "4"


def test_what_names_no_step_leads_to_the_typical_one_and_without_a_pipeline_nowhere(report: Report) -> None:
    finding = Finding(Severity.CRITICAL, "The run does not follow the plan", "")
    assert report.typical_step is not None
    assert asked(finding, report) == {"step": str(report.typical_step.step)}
    assert evidence_of(finding, replace(report, steps=())) is None
