"""Steps captured as CUDA graphs: public traces of one H200, on which a step takes 13.2 ms and keeps the device busy for 12.8."""

from __future__ import annotations

from pathlib import Path

import pytest

from pptrace.workflow.load import load


@pytest.fixture(scope="module")
def graphs() -> Path:
    folder = Path(__file__).resolve().parents[4] / "shared" / "data" / "gpu_graph"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    return folder


@pytest.mark.parametrize("name", ["plain_rank0.json.gz", "hooked_rank0.json.gz"])
def test_a_replayed_step_is_as_long_as_its_device_takes(name: str, graphs: Path) -> None:
    report = load([graphs / name], cache=False).report
    step = report.typical_step
    assert (step.length_ns or 0) / 1e6 == pytest.approx(13.2, rel=0.05)
    assert (step.ranks[0].compute_ns or 0) / 1e6 == pytest.approx(12.8, rel=0.05)
    assert "100% devices waiting for launches" not in report.verdict


def test_a_capture_is_no_step_and_a_line_says_so(graphs: Path) -> None:
    report = load([graphs / "hooked_rank0.json.gz"], cache=False).report
    assert any("holds the capture of a CUDA graph: left out" in line for line in report.warnings)
    assert any(line.startswith("nothing marks the steps: 6 steps from what repeats") for line in report.warnings)
