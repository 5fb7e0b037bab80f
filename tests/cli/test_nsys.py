"""Nsight Systems on the command line: ``pptrace analyze`` of its exports and ``pptrace run --profiler nsys``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from instrument.launch.nsys import profile_command
from instrument.launch.options import RunOptions
from instrument.launch.recording.nsys_profiler import NsysProfiler
from instrument.launch.window import parse_steps
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from tests.ingest.nsight_files import GENERATIONS, SECRETS, SESSION, Generation, Process, Report, write_report
from tests.support.extent import by_turns
from tests.support.forked import start_python
from tests.support.programs import pptrace, pptrace_here
from tests.support.synthetic import record

FAKE = Path(__file__).with_name("fake_nsys.py")
TRAINING = """
import sys, time
from instrument import session
for step in session.current().steps(int(sys.argv[1])):
    print("did", step)
    time.sleep(float(sys.argv[2]))
"""


def actions(plan: Plan, rank: int) -> list[tuple[str, int, int]]:
    return [
        (str(a.kind), a.stage, a.microbatch if a.microbatch is not None else -1) for a in plan.compute_actions(rank)
    ]


def report_of(*paths: Path) -> dict[str, Any]:
    ended = pptrace_here("analyze", *paths, "--json", "-", "--ops")
    assert (ended.code, ended.err) == (0, "")
    return json.loads(ended.out)


@pytest.mark.parametrize(
    ("shape", "generation"),
    by_turns([("1f1b", 4, 8, 1), ("interleaved-1f1b", 2, 4, 2), ("zb-h1", 3, 6, 1), ("zbv", 2, 4, 2)], GENERATIONS),
)
def test_a_simulated_plan_written_as_an_export_is_recognised_as_the_same_plan(
    shape: tuple[str, int, int, int], generation: Generation, tmp_path: Path
) -> None:
    name, pp, microbatches, chunks = shape
    plan = build(name, pp=pp, num_microbatches=microbatches, num_chunks=chunks)
    recording = record(plan, lambda action: 400, 100, device=True)
    processes = [Process(100 + rank, recording.events_of(rank)) for rank in range(pp)]
    report = report_of(write_report(Report(processes, generation), tmp_path / "node.sqlite"))
    assert [info["format"] for info in report["inputs"]] == ["nsys-sqlite"] * pp
    assert (report["framework"], report["mesh"]["pp"]) == ("pptrace", pp)
    schedule = report["schedule"]
    assert (schedule["name"], schedule["num_microbatches"], schedule["num_chunks"]) == (name, microbatches, chunks)
    assert (schedule["source"], schedule["mismatches"]) == ("recognised", [])
    (step,) = report["steps"]
    for entry in step["ranks"]:
        rows = [(op["kind"], op["stage"], op["microbatch"]) for op in entry["ops"]]
        assert rows == actions(plan, entry["rank"])


def test_no_output_repeats_what_an_export_tells_of_machines_and_people(tmp_path: Path) -> None:
    plan = build("1f1b", pp=2, num_microbatches=4)
    recording = record(plan, lambda action: 400, 100, device=True)
    for node in range(2):
        names = ("python3", f"MPI Rank {node}")
        report = Report([Process(9, recording.events_of(node), names)], session=SESSION - node)
        write_report(report, tmp_path / f"node{node}.sqlite")
    files = [tmp_path / "report.json", tmp_path / "report.html", tmp_path / "trace.json"]
    outputs = ["--json", files[0], "--html", files[1], "--perfetto", files[2], "--csv", tmp_path / "tables", "--ops"]
    ended = pptrace_here("analyze", tmp_path / "node0.sqlite", tmp_path / "node1.sqlite", *outputs)
    assert ended.code == 0, ended.err
    written = [*files, *(tmp_path / "tables").iterdir()]
    texts = [ended.out, ended.err, *(path.read_text() for path in written)]
    assert len(written) > len(files)
    assert "nsys-sqlite" in texts[2]
    assert not [secret for secret in SECRETS for text in texts if secret in text]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for nsys first on the PATH; the file that gets its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "nsys"
    program.write_text(f"#!{sys.executable}\nimport runpy\nrunpy.run_path({str(FAKE)!r}, run_name='__main__')\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_NSYS_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_NSYS_PLAN", "1f1b")
    (tmp_path / "train.py").write_text(TRAINING)
    return tmp_path / "log"


def test_a_run_under_nsys_is_one_file_with_all_ranks_and_is_analysed(fake: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = ("-n", "2", "-o", run_dir, "--profiler", "nsys", "--steps", "1:3")
    ended = pptrace("run", *options, "train.py", "4", "0", cwd=tmp_path, forked=True)
    assert ended.code == 0, ended.err
    assert "[rank 1] did 3" in ended.out
    assert "2 ranks (pp 2) · 1f1b, 4 microbatches" in ended.out
    assert f"pptrace: 1 trace in {run_dir}" in ended.err
    (arguments,) = [json.loads(line) for line in fake.read_text().splitlines()]
    assert arguments[0] == "profile"
    assert {"--sample=none", "--export=sqlite", f"--output={run_dir / 'node0'}"} <= set(arguments)
    assert sorted(path.name for path in run_dir.iterdir()) == ["node0.sqlite", "run.json"]
    facts = json.loads((run_dir / "run.json").read_text())
    assert (facts["profiler"], facts["status"]) == ("nsys", "ok")
    assert [(entry["rank"], entry["trace"]) for entry in facts["ranks"]] == [(0, "node0.sqlite"), (1, "node0.sqlite")]
    alone = report_of((run_dir / "node0.sqlite").rename(tmp_path / "moved.sqlite"))
    assert [info["rank"] for info in alone["inputs"]] == [0, 1]
    assert [info["warnings"] for info in alone["inputs"]] == [[], []]  # each process says itself which rank it is


def test_a_failure_under_nsys_is_the_run_s_and_its_report_is_kept(fake: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING + "raise ValueError('no more data')\n")
    run_dir = tmp_path / "run"
    options = ("-n", "1", "-o", run_dir, "--profiler", "nsys", "--steps", "all")
    ended = pptrace("run", *options, "train.py", "2", "0", cwd=tmp_path, forked=True)
    assert ended.code == 1
    assert "no more data" in ended.err
    facts = json.loads((run_dir / "run.json").read_text())
    assert facts["status"] == "failed"
    assert "node0.sqlite" in {entry["trace"] for entry in facts["ranks"]}


def test_where_nsys_leaves_no_report_that_is_said(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NSYS_PLAN", "")
    options = ("-o", tmp_path / "run", "--profiler", "nsys", "--steps", "0:1")
    ended = pptrace("run", *options, "train.py", "2", "0", cwd=tmp_path, forked=True)
    assert ended.code == 0
    assert "rank 0: nsys wrote no report; its own lines say why" in ended.err
    assert "no trace was recorded" in ended.err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["ranks"][0]["trace"] is None


def test_an_nsys_without_an_importer_leaves_a_report_all_the_same(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NSYS_FORM", ".qdstrm")
    run = ("run", "--profiler", "nsys", "--steps", "0:1", "-o")
    without = pptrace(*run, tmp_path / "without", "train.py", "1", "0", cwd=tmp_path, forked=True)
    assert without.code == 0
    assert "node0.qdstrm: a recording that nsys could not import, and there is no QdstrmImporter" in without.err
    assert (tmp_path / "without" / "node0.qdstrm").is_file()
    importer = tmp_path / "bin" / "QdstrmImporter"
    importer.write_text('#!/bin/sh\ncp "$3" "$5"\n')
    importer.chmod(0o755)
    ended = pptrace(*run, tmp_path / "run", "train.py", "1", "0", cwd=tmp_path, forked=True)
    assert ended.code == 0, ended.err
    assert "framework pptrace" in ended.out
    files = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert files == ["node0.nsys-rep", "node0.sqlite", "run.json"]


def test_a_run_of_which_nsys_recorded_no_range_ends_in_one_line_with_the_remedy(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NSYS_PLAN", "none")
    options = ("-o", tmp_path / "run", "--profiler", "nsys", "--steps", "0:1")
    ended = pptrace("run", *options, "train.py", "1", "0", cwd=tmp_path, forked=True)
    assert ended.code == 0
    (line,) = [line for line in ended.err.splitlines() if "could not be analysed" in line]
    assert "a run of pptrace of which nsys recorded no range; " in line
    assert "'nvtx<0.2.12'" in line
    assert "unlabelled" not in ended.out


def test_an_nsys_that_does_not_start_the_ranks_is_one_line(fake: Path, tmp_path: Path) -> None:
    (tmp_path / "bin" / "nsys").write_text("#!/bin/sh\necho unknown option >&2\nexit 3\n")
    options = ("-o", tmp_path / "run", "--profiler", "nsys")
    ended = pptrace("run", *options, "train.py", "2", "0", cwd=tmp_path, forked=True)
    assert ended.code == 1
    last = ended.err.splitlines()[-1]
    assert "'nsys profile' ended with code 3 before it started the script" in last
    assert ended.err.count("trying again") == 2
    assert "Traceback" not in ended.err


def test_an_nsys_that_fails_at_its_start_is_started_again(fake: Path, tmp_path: Path) -> None:
    program, failed = tmp_path / "bin" / "nsys", tmp_path / "failed"
    shebang, *works = program.read_text().splitlines(keepends=True)
    fails_once = f"import pathlib, sys\nfailed = pathlib.Path({str(failed)!r})\nif not failed.exists():\n"
    fails_once += "    failed.touch()\n    sys.exit('sem_open')\n"
    program.write_text("".join([shebang, fails_once, *works]))
    options = ("-o", tmp_path / "run", "--profiler", "nsys")
    ended = pptrace("run", *options, "train.py", "2", "0", cwd=tmp_path, forked=True)
    assert (ended.code, ended.out.count("did 0")) == (0, 1), ended.err
    assert "ended with code 1 before it started the script; trying again" in ended.err
    assert (tmp_path / "run" / "node0.sqlite").is_file()


def test_ctrl_c_ends_the_ranks_and_nsys_still_writes(fake: Path, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("pptrace")
    command = [str(program), "run", "-o", "run", "--profiler", "nsys", "--steps", "all", "train.py", "1000", "0.05"]
    with start_python(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert first == "did 0\n", errors
    assert process.returncode == 130, errors
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (facts["status"], facts["ranks"][0]["trace"]) == ("interrupted", "node0.sqlite")


def test_the_capture_is_limited_to_the_steps_where_cuda_can_tell_nsys(tmp_path: Path) -> None:
    options = RunOptions(("train.py",), tmp_path, window=parse_steps("2:5"), profiler="nsys")
    window = {"--capture-range=cudaProfilerApi", "--capture-range-end=stop"}
    assert window <= set(profile_command("nsys", options, tmp_path, has_cuda=True))
    assert not window & set(profile_command("nsys", options, tmp_path, has_cuda=False))
    assert "--cuda-graph-trace=node" in profile_command("nsys", options, tmp_path, has_cuda=True)
    assert "--cuda-memory-usage=true" not in profile_command("nsys", options, tmp_path, has_cuda=True)
    with_memory = replace(options, memory=True)
    assert "--cuda-memory-usage=true" in profile_command("nsys", with_memory, tmp_path, has_cuda=True)
    assert "--cuda-memory-usage=true" not in profile_command("nsys", with_memory, tmp_path, has_cuda=False)
    whole = RunOptions(("train.py",), tmp_path, window=parse_steps("all"), profiler="nsys")
    assert not window & set(profile_command("nsys", whole, tmp_path, has_cuda=True))


def test_the_last_rank_to_leave_the_steps_ends_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr("torch.cuda.profiler.start", lambda: calls.append("start"))
    monkeypatch.setattr("torch.cuda.profiler.stop", lambda: calls.append("stop"))
    ranks = [NsysProfiler(tmp_path / f"{rank}.json", tmp_path, rank, 3) for rank in range(3)]
    for profiler in ranks:
        profiler.start()
    assert calls == ["synchronize", "start"] * 3
    calls.clear()
    ranks[2].stop({"rank": 2})
    ranks[0].discard()
    assert calls == ["synchronize"]
    ranks[1].stop({"rank": 1}, blocked=True)
    assert calls == ["synchronize", "stop"]
    assert json.loads(ranks[1].path.read_text()) == {"pid": os.getpid(), "facts": {"rank": 1}}
    assert not ranks[0].path.exists()
