"""Start of the command line: a small trace analysed whole, over ``import pandas`` alone.

    python tools/bench/bench_start.py [--rounds N]

Each is a process of its own, and the two take turns. Times are of the processor, user and system, so that others on the machine
count for little; the least of all rounds. Byte code is kept, as after any first run. The program ends with 1 where the ratio is
beyond its limit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = "sample_traces/1f1b_p4"
SIDES = {
    "import pandas": ["-c", "import pandas"],
    f"pptrace analyze {SAMPLE}": ["-m", "pptrace", "analyze", "--no-cache", SAMPLE],
}
MOST = 2.5
"""Times ``import pandas``."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for arguments in SIDES.values():
        run(arguments)  # compiles what has no byte code yet
    rounds = [[run(arguments) for arguments in SIDES.values()] for _ in range(options.rounds)]
    least = [min(processor_s for processor_s, _ in times) for times in zip(*rounds, strict=True)]
    wall = [min(wall_s for _, wall_s in times) for times in zip(*rounds, strict=True)]
    for what, processor_s, wall_s in zip(SIDES, least, wall, strict=True):
        print(f"  {what:40s} {processor_s:6.3f} s of processor time, {wall_s:6.3f} s of wall time")
    ratio = least[1] / least[0]
    print(
        f"  {'ratio':40s} {ratio:6.2f}   {'within' if ratio <= MOST else 'BEYOND'} {MOST}; wall {wall[1] / wall[0]:.2f}"
    )
    return 0 if ratio <= MOST else 1


def run(arguments: list[str]) -> tuple[float, float]:
    """(processor time, wall time) of a program in Python, s."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, env=environment | {"PYTHONPATH": str(ROOT)}
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, wall_s


if __name__ == "__main__":
    sys.exit(main())
