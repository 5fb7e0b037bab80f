"""Output of `pptrace simulate --json --ops` read again, pairs that overlap as well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pptrace.report.to_json import dump, report_object, simulation_object
from pptrace.schedule import registry
from pptrace.simulator import IDEAL, simulate
from pptrace.workflow.load import load


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe-v", "dualpipe"])
def test_a_simulation_and_its_report_are_read_back_as_they_were_written(name: str, tmp_path: Path) -> None:
    simulation = simulate(registry.build(name, 4, 12), IDEAL)
    written = simulation_object(simulation, with_ops=True)
    (tmp_path / "simulation.json").write_text(dump(written))
    report = load([tmp_path / "simulation.json"]).report
    (step,) = report_object(report, with_ops=True)["steps"]
    assert report.schedule.name == name
    assert step["bubble"]["ratio"] == pytest.approx(simulation.bubble_ratio)
    assert [rank["ops"] for rank in step["ranks"]] == [rank["ops"] for rank in json.loads(dump(written))["ranks"]]
    (tmp_path / "report.json").write_text(dump(report_object(report, with_ops=True)))
    (again,) = report_object(load([tmp_path / "report.json"]).report, with_ops=True)["steps"]
    assert [rank["ops"] for rank in again["ranks"]] == [rank["ops"] for rank in step["ranks"]]
