"""Part ``marks``: what the ranges cost a step, with and without them in turns (tools/bench/bench_marks.py)."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.programs import ROOT
from tools.gpu.part import Setting, main

BENCH = ROOT / "tools" / "bench" / "bench_marks.py"
SMALL = ("--mesh", "2x1", "--layers", "2", "--hidden", "32", "--seq", "16", "--microbatches", "2", "--launches", "1")
LARGE = ("--mesh", "2x1", "2x2", "--hidden", "512", "--seq", "256", "--launches", "1", "--device", "cuda")


def part(setting: Setting) -> None:
    target = setting.work / "marks.json"
    target.unlink(missing_ok=True)
    arguments = (*SMALL, "--rounds", "1", "--steps", "1") if setting.dry else (*LARGE, "--rounds", "6", "--steps", "3")
    with setting.checks.check("bench_marks.py") as figures:
        command = [sys.executable, str(BENCH), *arguments, "--json", str(target)]
        try:
            subprocess.run(command, cwd=ROOT, check=True, timeout=max(1.0, setting.left_s))
        finally:
            if target.exists():
                figures |= json.loads(target.read_text(encoding="utf-8"))
    for label, step in figures.get("steps", {}).items():
        with setting.checks.check(f"{label}: the ranges take less than 1 % of a step") as share:
            share["share"] = step["share"]
            assert setting.dry or step["share"] < 0.01, step  # a step of the dry run is mostly ranges


if __name__ == "__main__":
    main(part)
