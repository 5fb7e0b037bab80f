"""Latency and bandwidth of a real link, from the script of docs/whatif.md, and what ``pptrace whatif --links`` makes of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import dedent

import pytest

from pptrace.workflow.load import load
from tests.support.programs import ROOT, SAMPLES, pptrace, pptrace_here

pytestmark = pytest.mark.processes


def test_a_run_with_messages_of_several_sizes_tells_latencies_for_another(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "whatif.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^  ```python\n(.*?)^  ```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "links.py").write_text(dedent(block))
    for attempt in range(8):  # a busy machine bends one of the two lines, or both, again and again
        run = tmp_path / f"run{attempt}"
        ended = pptrace("run", "-n", "2", "--no-analyze", "-o", run, tmp_path / "links.py", forked=True)
        assert ended.code == 0, ended.err
        fitted = [link for link in load([run]).report.links if link.latency_ns is not None]
        if fitted:
            break
    assert fitted
    for link in fitted:
        assert 0.01 < link.bandwidth_gbps < 1000
        assert link.latency_ns < 50_000_000
    ended = pptrace_here("whatif", str(SAMPLES / "1f1b_p2"), "--link-speed", "2", "--links", str(run), "--json", "-")
    assert ended.code == 0, ended.err
    (scenario,) = json.loads(ended.out)["scenarios"]
    assert scenario["name"] == "links 2 times as fast"


def test_a_run_without_messages_has_no_latencies(tmp_path: Path) -> None:
    (tmp_path / "ops.csv").write_text("rank,step,kind,start_us,end_us\n0,0,STEP,0,900\n")
    ended = pptrace_here("whatif", str(SAMPLES / "1f1b_p2"), "--links", str(tmp_path / "ops.csv"))
    assert ended.code == 2
    assert "that run has no messages between two ranks" in ended.err
