"""The parts of the GPU run, the most important first, and the seconds that each may take."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"


@dataclass(frozen=True, slots=True)
class Part:
    """One part: ``about`` for people, ``module`` is run with ``words`` before the options of every part.

    ``limit_s`` is the most that it may take, ``least_s`` what it needs to be worth its start.
    """

    name: str
    about: str
    module: str
    words: tuple[str, ...]
    limit_s: float
    least_s: float

    def command(self, work: Path, checks: Path, limit_s: float, *, dry: bool) -> list[str]:
        options = ["--work", str(work), "--checks", str(checks), "--limit", f"{limit_s:.1f}"]
        return [sys.executable, "-m", self.module, *self.words, *options, *(["--dry-run"] if dry else [])]


PARTS = (
    Part("environment", "what is there, and whether the GPU computes", "tools.gpu.environment", (), 60, 10),
    Part("record", "recorded runs against an independent reader", "tools.gpu.recorded", ("record",), 150, 30),
    Part(
        "nccl", "NCCL between ranks on one GPU: runs of ours, scripts of others", "tools.gpu.nccl", ("nccl",), 200, 30
    ),
    Part("hangs", "verdicts on runs over NCCL that hang", "tools.gpu.nccl", ("hangs",), 120, 20),
    Part("schedules", "every schedule trains as one process does", "tools.gpu.exact", ("schedules",), 120, 20),
    Part("meshes", "tp, sp, cp, zero and overlap train as one process does", "tools.gpu.exact", ("meshes",), 150, 20),
    Part("experts", "experts train as one process does", "tools.gpu.exact", ("experts",), 90, 20),
    Part("nccl-exact", "schedules, meshes and experts over NCCL", "tools.gpu.exact", ("nccl-exact",), 180, 30),
    Part("tests", "the tests that need a GPU", "tools.gpu.marked_tests", (), 120, 20),
    Part("samples", "recordings small enough to keep", "tools.gpu.samples", (), 90, 25),
    Part("marks", "what the ranges cost a step", "tools.gpu.marks", (), 75, 20),
    Part("nsys", "a run under Nsight Systems against an independent reader", "tools.gpu.recorded", ("nsys",), 90, 30),
    Part("examples", "the example with other options", "tools.gpu.examples", (), 150, 25),
)


def gpu_test_files() -> list[Path]:
    """The files of tests that have one marked ``gpu``: others may need packages that such a machine lacks."""
    return sorted(
        path
        for path in TESTS.rglob("test_*.py")
        if "mark.gpu" in path.read_text(encoding="utf-8") and path.parent != TESTS / "gpu"
    )
