"""Parts ``nccl`` and ``hangs``: real NCCL between ranks that share one GPU.

python -m tools.gpu.nccl nccl …     runs of ours, and scripts of others: torch.distributed.pipelining, DDP
python -m tools.gpu.nccl hangs …    faults that make a run hang, and the verdict on each
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from pptrace.workflow.load import load
from tests.support.programs import EXAMPLE, ROOT, Ended, pptrace
from tools.gpu.part import Setting, run_part
from tools.gpu.recorded import GRACE_S, Recorded, record_and_compare, text_of

SCRIPTS = ROOT / "tools" / "gpu" / "scripts"
BACKEND = ("--backend", "nccl-shared")
_MODEL = ("--layers", "8", "--hidden", "512", "--heads", "8", "--seq", "256", "--microbatches", "8", "--steps", "6")
RUNS: Mapping[str, Recorded] = MappingProxyType(
    {
        "nccl 1f1b pp4": Recorded("1f1b", 4, (*_MODEL, *BACKEND)),
        "nccl zbv pp2 tp2 sp overlap": Recorded(
            "zbv",
            4,
            (*_MODEL, "--pp", "2", "--tp", "2", "--sequence-parallel", "--overlap", "--schedule", "zbv", *BACKEND),
        ),
        "nccl interleaved pp2 dp2 zero 1": Recorded(
            "interleaved-1f1b",
            4,
            (*_MODEL, "--pp", "2", "--dp", "2", "--zero", "1", "--schedule", "interleaved-1f1b", *BACKEND),
        ),
        "nccl experts pp2 ep2": Recorded(
            "1f1b", 4, (*_MODEL, "--pp", "2", "--dp", "2", "--ep", "2", "--experts", "4", "--top-k", "2", *BACKEND)
        ),
    }
)
PIPELINING: Mapping[str, str] = MappingProxyType(
    {"Schedule1F1B": "1f1b", "ScheduleInterleaved1F1B": "interleaved-1f1b", "ScheduleZBVZeroBubble": "zbv"}
)
"""torch's class → the schedule that the report names."""
HANGS: Mapping[str, tuple[str, list[int]]] = MappingProxyType(
    {
        "none": ("", []),
        "sleep": ("late", [1]),
        "kill": ("missing", [1]),
        "stop": ("late", [1]),
        "skip": ("mismatch", [1]),
        "cross": ("cycle", [0, 1]),
    }
)
"""Fault → the verdict and the ranks to blame."""
SMALL_HANGS = ("none", "kill")
"""Of the dry run."""
HANG_S = 4.0
_LOSS = re.compile(r"loss +([\d.]+)")


def nccl(setting: Setting) -> None:
    with setting.checks.check("the same losses over NCCL as through host memory") as figures:
        figures |= _compare_losses(setting)
    for name in [*PIPELINING][: 1 if setting.dry else None]:
        with setting.checks.check(f"torch.distributed.pipelining {name}") as figures:
            figures |= _pipelining(setting, name)
    with setting.checks.check("DDP") as figures:
        figures |= _replicas(setting)
    if not setting.dry:
        record_and_compare(setting, RUNS)


def hangs(setting: Setting) -> None:
    for fault, (verdict, ranks) in HANGS.items():
        if setting.left_s <= 0:
            setting.skip_rest([fault])
        elif not setting.dry or fault in SMALL_HANGS:
            with setting.checks.check(fault) as figures:
                figures |= _hang(setting, fault, verdict, ranks)


def _run(
    setting: Setting, folder: Path, num_ranks: int, *arguments: str | Path, options: tuple[str, ...] = ()
) -> Ended:
    shutil.rmtree(folder, ignore_errors=True)
    limit = f"{max(1.0, min(60.0, setting.left_s - GRACE_S)):.0f}"
    command = ("run", "-n", str(num_ranks), "--timeout", limit, "--no-analyze", *options, "-o", folder)
    return pptrace(*command, *arguments, timeout_s=max(1.0, setting.left_s))


def _compare_losses(setting: Setting) -> dict[str, Any]:
    size = ("--layers", "4", "--hidden", "64", "--seq", "32", "--microbatches", "4", "--steps", "4")
    backends = ("gloo",) if setting.dry else ("host-staged", "nccl-shared")
    losses = {}
    for backend in backends:
        ended = _run(
            setting,
            setting.work / "nccl" / f"losses-{backend}",
            2,
            *(EXAMPLE, *size, "--backend", backend),
            options=("--profiler", "none"),
        )
        assert ended.code == 0, text_of(ended)
        losses[backend] = [float(loss) for loss in _LOSS.findall(ended.out)]
    first, *others = losses.values()
    assert len(first) == 4, losses
    assert all(abs(a - b) < 1e-4 for other in others for a, b in zip(first, other, strict=True)), losses
    return losses


def _pipelining(setting: Setting, name: str) -> dict[str, Any]:
    folder = setting.work / "nccl" / name
    ended = _run(setting, folder, 2 if setting.dry else 4, SCRIPTS / "pipelining.py", name)
    assert ended.code == 0, text_of(ended)
    analysis = load([folder])
    report = analysis.report
    steps = [step for step in report.steps if step.bubble is not None]
    figures = {
        "framework": report.framework,
        "schedule": report.schedule.name,
        "mismatches": list(report.schedule.mismatches),
        "bubble_ratios": [step.bubble.ratio for step in steps if step.bubble],
        "comms": len(analysis.data.comms),
        "warnings": list(report.warnings),
    }
    assert (report.schedule.name, list(report.schedule.mismatches)) == (PIPELINING[name], []), figures
    assert report.steps, figures
    return figures


def _replicas(setting: Setting) -> dict[str, Any]:
    folder = setting.work / "nccl" / "replicas"
    ended = _run(setting, folder, 2, SCRIPTS / "replicas.py")
    assert ended.code == 0, text_of(ended)
    report = load([folder]).report
    figures = {"steps": len(report.steps), "ranks": report.mesh.num_ranks, "warnings": list(report.warnings)}
    assert report.mesh.num_ranks == 2, figures
    return figures


def _hang(setting: Setting, fault: str, verdict: str, ranks: list[int]) -> dict[str, Any]:
    folder = setting.work / "nccl" / f"hang-{fault}"
    options = ("--profiler", "none", "--hang-timeout", str(HANG_S))
    ended = _run(setting, folder, 2, SCRIPTS / "hanging.py", fault, options=options)
    hang = json.loads((folder / "run.json").read_text(encoding="utf-8"))["hang"]
    lines = [line for line in ended.err.splitlines() if line.startswith("pptrace: ")]
    figures = {
        "code": ended.code,
        "hang": hang,
        "lines": lines[:6],
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }
    if not verdict:
        assert (ended.code, hang) == (0, None), (figures, text_of(ended)[-3000:])
    else:
        assert hang is not None, (figures, text_of(ended)[-3000:])
        assert (hang["verdict"], hang["ranks"]) == (verdict, ranks), (figures, text_of(ended)[-3000:])
    return figures


PARTS = {"nccl": nccl, "hangs": hangs}

if __name__ == "__main__":
    sys.exit(run_part(PARTS[sys.argv[1]], sys.argv[2:]))
