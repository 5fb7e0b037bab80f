"""Findings lead to where they can be seen."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest
from msgspec.structs import replace

from dashboards.evidence import evidence_of
from pptrace.analysis.report import Report
from pptrace.analysis.result import Finding, Severity
from pptrace.workflow.load import load
from tests.support.programs import SAMPLES

LATE = "late collective rank 2 step 3"


@pytest.fixture(scope="module")
def report() -> Report:
    return load([SAMPLES / "uneven_p4"]).report


def asked(finding: Finding, report: Report) -> dict[str, str]:
    address = urlsplit(evidence_of(finding, report) or "")
    assert address.path == "/timeline"
    return {name: values[0] for name, values in parse_qs(address.query).items()}


def loss_of(report: Report, cause: str, where: dict[str, object]) -> dict[int, int]:
    """The time that each step lost to a cause at a place, ns."""
    return {
        step.step: sum(own.ns for own in step.causes or () if own.cause == cause and own.where == where)
        for step in report.steps
    }


def test_an_uneven_stage_leads_to_its_ops_in_the_step_that_lost_most_or_the_shown_one(report: Report) -> None:
    finding = next(each for each in report.findings if each.evidence.get("cause") == "imbalance")
    query = asked(finding, report)
    stage = finding.evidence["where"]["stage"]
    assert query["rows"] == str(stage), "ranks and stages are alike here"
    losses = loss_of(report, "imbalance", {"stage": stage})
    most = max(losses, key=lambda step: losses[step])
    assert query["step"] == str(most)
    assert query["find"] == f"stage {stage} step {most}"
    assert query["critical"] == "1"
    other = next(step for step, ns in losses.items() if ns and step != most)
    assert f"step={other}&" in (evidence_of(finding, report, shown=other) or "")


@pytest.mark.parametrize(
    ("evidence", "marked"),
    [
        ({"cause": "communication", "where": {"axis": "dp"}}, "exposed transfer dp step 3"),
        ({"cause": "structural", "where": {}}, "fill, drain step 3"),
        ({"cause": "straggler", "where": {"rank": 1}, "reason": "late member", "waiting_ranks": [2]}, LATE),
        ({"cause": "unexplained", "where": {}, "reason": "late receives"}, "receives step 3"),
        ({"cause": "optimizer", "where": {"rank": 1}, "is_outside": True}, "OPTIMIZER rank 1 step 3"),
    ],
)
def test_a_finding_marks_what_it_speaks_of(report: Report, evidence: dict[str, object], marked: str) -> None:
    query = asked(Finding(Severity.WARNING, "", "", evidence=evidence | {"step": 3}), report)
    assert query["find"] == marked
    assert "select" not in query
    assert ("period" in query) == ("is_outside" in evidence), "up to the next step"


def test_ops_that_vary_without_a_place_lead_to_the_one_that_is_blamed_most(report: Report) -> None:
    query = asked(Finding(Severity.WARNING, "", "", evidence={"cause": "jitter", "where": {}, "step": 3}), report)
    step = next(step for step in report.steps if step.step == 3)
    op = step.blame.ops[0]
    assert query["select"] == f"{op.rank}.{op.microbatch}.3"


def test_a_finding_about_a_step_leads_to_it(report: Report) -> None:
    finding = Finding(Severity.WARNING, "Outliers", "", evidence={"cause": "jitter", "where": {}, "steps": [4, 3]})
    assert asked(finding, report)["step"] == "4"


def test_what_names_no_step_leads_to_the_typical_one_and_without_a_pipeline_nowhere(report: Report) -> None:
    finding = Finding(Severity.CRITICAL, "The run does not follow the plan", "")
    assert asked(finding, report) == {"step": str(report.typical_step.step)}
    assert evidence_of(finding, replace(report, steps=())) is None
