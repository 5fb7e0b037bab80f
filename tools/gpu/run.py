"""Does all that a machine with a GPU can show, within ten minutes: ``make gpu``.

    python tools/gpu/run.py [--parts record schedules …] [--budget 570] [--dry-run] [--plan] [-o DIR]

The parts run in order of importance, each in processes of its own and within its limit; one that hangs is killed with all that it
started. After each part the results are written to DIR (left out: $OUT, else pptrace_runs/gpu): summary.json, summary.txt,
samples.tar.gz and logs.tar.gz. Exit status: 0, or 1 if a part failed, or 2 for a wrong option. ``--dry-run`` does every part on
CPUs, as small as can be. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.gpu.checks import Outcome, read_checks  # noqa: E402
from tools.gpu.parts import PARTS, Part  # noqa: E402
from tools.gpu.processes import adopt_orphans, run  # noqa: E402
from tools.gpu.summary import PartResult, Summary, outcome_of, to_text, write  # noqa: E402

BUDGET_S, DRY_BUDGET_S = 570.0, 1800.0
RESERVE_S = 10.0
"""Time kept of the budget to end a part that hangs and to write the results, s."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    parts = [part for part in PARTS if part.name in (options.parts or [part.name])]
    budget_s = options.budget or (DRY_BUDGET_S if options.dry_run else BUDGET_S)
    if options.plan:
        for part in parts:
            print(f"{part.name:12} {part.limit_s:4.0f} s  {part.about}")
        return 0
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _interrupt)
    adopt_orphans()
    summary = run_parts(parts, budget_s, options.output, options.work, dry=options.dry_run)
    print(f"\n{to_text(summary)}\nresults in {options.output}")
    return int(summary.outcome is Outcome.FAILED)


def _interrupt(signum: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(f"signal {signum}")


def run_parts(parts: Sequence[Part], budget_s: float, output: Path, work: Path, *, dry: bool) -> Summary:
    """Run them within the budget; the results so far are written after each."""
    started = time.monotonic()
    shutil.rmtree(work, ignore_errors=True)
    (work / "logs").mkdir(parents=True)
    results: list[PartResult] = []
    for part in parts:
        left_s = budget_s - RESERVE_S - (time.monotonic() - started)
        print(f"{part.name}: {part.about} …", flush=True)
        interrupted = False
        try:
            results.append(run_part(part, left_s, work, dry=dry))
        except KeyboardInterrupt:
            interrupted = True
            results.append(_result(part, None, work, 0.0, 0.0, "interrupted"))
        print(f"  {results[-1].outcome} after {results[-1].seconds:.0f} s {results[-1].note}", flush=True)
        summary = Summary(dry, round(time.monotonic() - started, 1), budget_s, tuple(results))
        write(summary, output, work)
        if interrupted:
            break
    return summary


def run_part(part: Part, left_s: float, work: Path, *, dry: bool) -> PartResult:
    """Run one part within its own limit and what is left of the budget."""
    least_s = 1.0 if dry else part.least_s
    if left_s < least_s:
        note = f"{max(left_s, 0):.0f} s of the budget were left and it needs {least_s:.0f}; run it alone: --parts {part.name}"
        return PartResult(part.name, part.about, Outcome.SKIPPED, 0.0, 0.0, note, ())
    limit_s = left_s if dry else min(part.limit_s, left_s)
    command = part.command(work, _checks_of(part, work), limit_s, dry=dry)
    ended = run(command, work / "logs" / f"{part.name}.log", limit_s, _environ(), ROOT)
    note = ""
    if ended.code is None:
        note = f"it was ended at its limit of {limit_s:.0f} s; logs/{part.name}.log has the stacks"
    elif ended.code not in (0, 1) or (ended.code and not read_checks(_checks_of(part, work))):
        note = f"it ended with code {ended.code}; logs/{part.name}.log says why"
    return _result(part, ended.code, work, ended.seconds, limit_s, note)


def _result(part: Part, code: int | None, work: Path, seconds: float, limit_s: float, note: str) -> PartResult:
    checks = tuple(read_checks(_checks_of(part, work)))
    outcome = outcome_of(code, checks)
    return PartResult(part.name, part.about, outcome, seconds, round(limit_s, 1), note, checks)


def _checks_of(part: Part, work: Path) -> Path:
    return work / "logs" / f"{part.name}.checks.jsonl"


def _environ() -> dict[str, str]:
    """Ranks meet on loopback; their output comes at once; no worker of pytest is taken for this one's."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    path = os.pathsep.join(filter(None, (str(ROOT), own.get("PYTHONPATH"))))
    return {**own, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo", "NO_COLOR": "1"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run.py", description="all that a machine with a GPU can show")
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, metavar="PART", help=f"only these of {', '.join(names)}")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help=f"for everything; left out: {BUDGET_S:.0f}")
    parser.add_argument("--dry-run", action="store_true", help="every part on CPUs, as small as can be")
    parser.add_argument("--plan", action="store_true", help="print the parts and their limits, and run none")
    default = Path(os.environ.get("OUT") or ROOT / "pptrace_runs" / "gpu")
    parser.add_argument("-o", "--output", type=Path, default=default, help="where the results go")
    work = ROOT / "pptrace_runs" / "gpu-work"
    parser.add_argument("--work", type=Path, default=work, help="emptied and used for traces and logs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
