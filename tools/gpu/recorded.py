"""Parts ``record`` and ``nsys``: a run of several ranks is recorded and analysed, and its report held against other readings.

    python -m tools.gpu.recorded record …     torch's profiler; every op also lies between two CUDA events of its own
    python -m tools.gpu.recorded nsys …       Nsight Systems

The other readings are those of tests/support/device_oracle.py (and on CPUs of tests/support/oracle.py), which share no code
with pptrace.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from pptrace.analysis.report import Report
from pptrace.workflow.load import load
from tests.analysis.test_oracle import assert_same
from tests.support.device_oracle import count, kineto_ops, kineto_pieces, nsight_pieces
from tests.support.oracle import partition
from tests.support.programs import EXAMPLE, ROOT, Ended, pptrace
from tools.gpu.checks import Skip
from tools.gpu.comparison import differences, ops_of
from tools.gpu.part import Setting, run_part

TIMED = ROOT / "tools" / "gpu" / "cuda_events.py"
GRACE_S = 15.0
"""Time that ``pptrace run`` needs to end the ranks and keep their traces, once its time is up, s."""
_STEP_TIME = re.compile(r"loss +[\d.]+ +([\d.]+) ms")
SLACK_NS, SLACK = 50_000, 1.02
"""Tolerances by which an op may seem longer than its CUDA events: their resolution, and the recording of the second one."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One run: ``schedule`` is what the report should say of it."""

    schedule: str
    ranks: int
    arguments: tuple[str, ...]


_LARGE = ("--layers", "8", "--hidden", "1024", "--heads", "16", "--seq", "512", "--microbatches", "8", "--steps", "6")
RUNS: Mapping[str, Recorded] = MappingProxyType(
    {
        "1f1b pp4": Recorded("1f1b", 4, _LARGE),
        "zbv pp2 tp2 sp overlap": Recorded(
            "zbv", 4, (*_LARGE, "--pp", "2", "--tp", "2", "--sequence-parallel", "--overlap", "--schedule", "zbv")
        ),
        "interleaved pp2 dp2 zero 1 bfloat16": Recorded(
            "interleaved-1f1b",
            4,
            (*_LARGE, "--pp", "2", "--dp", "2", "--zero", "1", "--dtype", "bfloat16", "--schedule", "interleaved-1f1b"),
        ),
        "1f1b pp4 graphs": Recorded("1f1b", 4, (*_LARGE, "--cuda-graphs")),
    }
)
_SMALL = ("--layers", "2", "--hidden", "32", "--seq", "32", "--microbatches", "4", "--steps", "5")
SMALL_RUNS: Mapping[str, Recorded] = MappingProxyType({"1f1b pp2": Recorded("1f1b", 2, _SMALL)})


def record(setting: Setting) -> None:
    record_and_compare(setting, SMALL_RUNS if setting.dry else RUNS)


def record_and_compare(setting: Setting, runs: Mapping[str, Recorded]) -> None:
    """Record each run and hold its report against the other readings, while there is time."""
    for name, recorded in runs.items():
        if setting.left_s <= 0:
            setting.skip_rest([name])
            continue
        folder = setting.work / "record" / name.replace(" ", "-")
        with setting.checks.check(f"{name}: run") as figures:
            figures["steps_ms"] = _record(setting, recorded, folder)
        if any(folder.glob("rank*.json.gz")):
            _compare(setting, name, recorded, folder)


def _record(setting: Setting, recorded: Recorded, folder: Path) -> list[float]:
    """Record a run; the times of its steps, as the script printed them."""
    shutil.rmtree(folder, ignore_errors=True)
    ended = _run(setting, recorded, folder, TIMED, environ={"PPTRACE_OP_TIMES": str(folder / "op_times")})
    traces = list(folder.glob("rank*.json.gz"))
    assert len(traces) == recorded.ranks, f"{len(traces)} traces of {recorded.ranks} ranks\n{text_of(ended)}"
    return [float(milliseconds) for milliseconds in _STEP_TIME.findall(ended.out)]


def _run(
    setting: Setting,
    recorded: Recorded,
    folder: Path,
    script: Path,
    *options: str,
    environ: Mapping[str, str] | None = None,
) -> Ended:
    """``pptrace run`` of two steps within what is left to the part."""
    limit = f"{max(1.0, setting.left_s - GRACE_S):.0f}"
    command = ("run", "-n", str(recorded.ranks), "--steps", "3:5", "--timeout", limit, "--no-analyze")
    arguments = (*options, "-o", folder, script, *recorded.arguments)
    ended = pptrace(*command, *arguments, timeout_s=setting.left_s, environ=environ)
    assert ended.code == 0, text_of(ended)
    return ended


def text_of(ended: Ended) -> str:
    """Output of a command."""
    return f"{ended.out}\n{ended.err}"


def _compare(setting: Setting, name: str, recorded: Recorded, folder: Path) -> None:
    check = setting.checks.check
    with check(f"{name}: pptrace analyze") as figures:
        figures |= _analyze(setting, folder)
    report = load([folder]).report
    with check(f"{name}: the plan is recognised"):
        assert report.framework == "pptrace", report.framework
        assert report.schedule.name == recorded.schedule, report.schedule
        assert not report.schedule.mismatches, report.schedule.mismatches
        assert report.mesh.num_ranks == recorded.ranks, report.mesh
        assert report.clock.method == "same-host", report.clock
    with check(f"{name}: device time is the independent reader's"):
        _check_device(report, folder)
    with check(f"{name}: ops are the independent reader's") as figures:
        figures |= _check_ops(report, folder)
    with check(f"{name}: ops lie within CUDA events of their own") as figures:
        figures |= _check_events(report, folder / "op_times")


def _analyze(setting: Setting, folder: Path) -> dict[str, Any]:
    """The commands as a user gives them; the report's figures of each step."""
    target = folder / "report.json"
    options = ("--no-cache", "--json", target, "--html", folder / "report.html")
    ended = pptrace("analyze", folder, *options, timeout_s=max(1.0, setting.left_s))
    assert ended.code == 0, text_of(ended)
    content = json.loads(target.read_text(encoding="utf-8"))
    (folder / "report.txt").write_text(text_of(ended), encoding="utf-8")
    steps = [
        {"step": step["step"], "span_ms": _ms(step["span_ns"]), "bubble_ratio": step["bubble"]["ratio"]}
        for step in content["steps"]
    ]
    return {"steps": steps, "warnings": content["warnings"]}


def _ms(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else round(nanoseconds / 1e6, 3)


def _check_device(report: Report, folder: Path) -> None:
    pieces = {rank: kineto_pieces(folder / f"rank{rank}.json.gz") for rank in range(report.mesh.num_ranks)}
    if not torch.cuda.is_available():
        assert not any(pieces.values())
        raise Skip("no GPU: no device events")
    assert all(pieces.values()), f"no device events of ranks {[rank for rank, result in pieces.items() if not result]}"
    for device in report.device:
        assert_same(device, count(pieces[device.rank]))
    assert len(report.device) == len(pieces)


def _check_ops(report: Report, folder: Path) -> dict[str, Any]:
    """Every op of the report has the time that a reader of kernels (of marks, on CPUs) gives it, to the nanosecond."""
    if not torch.cuda.is_available():
        expected = [
            (step["step"], step["span_ns"], [(rank["compute_ns"], rank["ops"]) for rank in step["ranks"]])
            for step in partition(folder)["steps"]
        ]
        rows = [
            (
                step.step,
                step.span_ns,
                [(rank.compute_ns, [f"{op.stage}{op.kind}{op.microbatch}" for op in rank.ops]) for rank in step.ranks],
            )
            for step in report.steps
        ]
        assert rows == expected, f"the report has {rows}, and the reader {expected}"
        return {"ops": sum(len(ops) for _, _, ranks in expected for _, ops in ranks)}
    num_ops = on_host = 0
    for rank in range(report.mesh.num_ranks):
        expected_ops = kineto_ops(folder / f"rank{rank}.json.gz")
        differing = differences(list(ops_of(report, rank)), expected_ops)
        assert not differing, f"rank {rank}: {len(differing)} ops differ, first: {differing[:3]}"
        num_ops += len(expected_ops)
        on_host += sum(not op.on_device for op in expected_ops)
    assert num_ops
    return {"ops": num_ops, "without_kernels": on_host}


def _check_events(report: Report, op_times: Path) -> dict[str, Any]:
    """No op of the report is longer than the time between the two events around it."""
    shares, outside = [], []
    for rank in range(report.mesh.num_ranks):
        content = json.loads((op_times / f"rank{rank}.json").read_text(encoding="utf-8"))
        around = {(step, name): int(milliseconds * 1e6) for step, name, milliseconds in content["ops"]}
        for op in ops_of(report, rank):
            event_ns, op_ns = around[op.step, op.name], op.end_ns - op.start_ns
            shares.append(op_ns / max(event_ns, 1))
            if op_ns > SLACK * event_ns + SLACK_NS:
                outside.append((rank, op.step, op.name, op_ns, event_ns))
    assert shares, "the report has no ops"
    assert not outside, f"{len(outside)} of {len(shares)} ops are longer than their events: {outside[:3]}"
    return {"ops": len(shares), "median_share_of_events": round(statistics.median(shares), 4)}


def nsys(setting: Setting) -> None:
    check = setting.checks.check
    recorded = SMALL_RUNS["1f1b pp2"] if setting.dry else RUNS["1f1b pp4"]
    folder = setting.work / "nsys"
    with check("run") as figures:
        if shutil.which("nsys") is None:
            raise Skip("no nsys on PATH")
        shutil.rmtree(folder, ignore_errors=True)
        ended = _run(setting, recorded, folder, EXAMPLE, "--profiler", "nsys")
        assert list(folder.glob("*.sqlite")), text_of(ended)
        figures["bytes"] = sum(path.stat().st_size for path in folder.glob("*.sqlite"))
    if not list(folder.glob("*.sqlite")):
        return
    with check("pptrace analyze") as figures:
        figures |= _analyze(setting, folder)
    with check("device time is the independent reader's"):
        if not torch.cuda.is_available():
            raise Skip("no GPU: no device events")
        _check_nsight(load([folder]).report, folder)


def _check_nsight(report: Report, folder: Path) -> None:
    (export,) = folder.glob("*.sqlite")
    expected = sorted((count(pieces) for pieces in nsight_pieces(export)), key=lambda counted: counted.busy_ns)
    result = sorted(report.device, key=lambda entry: entry.breakdown.busy_ns or 0)
    assert len(result) == len(expected), f"{len(result)} ranks, {len(expected)} processes with device work"
    for device, counted in zip(result, expected, strict=True):
        assert_same(device, counted)


PARTS = {"record": record, "nsys": nsys}

if __name__ == "__main__":
    sys.exit(run_part(PARTS[sys.argv[1]], sys.argv[2:]))
