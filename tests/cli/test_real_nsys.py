"""``pptrace run --profiler nsys`` with the Nsight Systems that is installed here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pptrace.cli import doctor
from tests.support.programs import pptrace, pptrace_here

TRAINING = """
import os, time
import nvtx, torch, torch.distributed as dist
from instrument import session
from instrument.recorder import Recorder
from pptrace.schedule.registry import build
dist.init_process_group("gloo")
rank, plan, recorder = dist.get_rank(), build("1f1b", pp=2, num_microbatches=3), Recorder()
for step in session.current().steps(3):
    for action in plan.compute_actions(rank):
        with recorder.op(action, step):
            time.sleep(0.002)
    dist.barrier()
dist.destroy_process_group()
"""

pytestmark = [pytest.mark.processes, pytest.mark.skipif(shutil.which("nsys") is None, reason="no nsys on PATH")]


def test_the_installed_nsys_records_every_op_of_a_run_and_the_run_ends_with_a_report(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    run_dir = tmp_path / "run"
    options = ("-n", "2", "-o", run_dir, "--profiler", "nsys", "--steps", "all")
    ended = pptrace("run", *options, "train.py", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "framework pptrace · 2 ranks (pp 2) · 1f1b, 3 microbatches" in ended.out
    assert not list(run_dir.glob("*.qdstrm"))
    again = pptrace_here("analyze", run_dir, "--json", "-", "--ops")
    report = json.loads(again.out)
    kinds = [[op["kind"] for op in entry["ops"]] for step in report["steps"] for entry in step["ranks"]]
    assert kinds == [list("FFBFBB"), list("FBFBFB")] * 3
    assert [info["rank"] for info in report["inputs"]] == [0, 1]


def test_doctor_sees_a_range_through_the_installed_nsys() -> None:
    trial = doctor._try_nsys()
    assert trial.works, trial.detail
