"""Cost of recording the peak memory of a step: what `pptrace run` adds to each step for it, set against a step of 100 ms.

    python tools/bench/bench_step_memory.py [--steps 2000] [--resident 1024] [--limit 0.001] [--json FILE]

Each step is begun and ended as the launcher does it, in a process with ``--resident`` MiB of touched memory, since the kernel
might take longer for larger processes; where there is a GPU its allocator's statistics are read and reset as well. The median
over the steps may be at most ``--limit`` of 100 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from instrument.launch.recording.step_memory import StepMemory

STEP_NS = 100_000_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--resident", type=int, default=1024, metavar="MIB")
    parser.add_argument("--limit", type=float, default=0.001, metavar="SHARE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    held = torch.ones(options.resident * 2**20, dtype=torch.uint8)
    on_device = torch.ones(2**20, device="cuda") if torch.cuda.is_available() else None
    times_ns = measure(options.steps)
    median, p99 = statistics.median(times_ns), sorted(times_ns)[len(times_ns) * 99 // 100]
    share = median / STEP_NS
    what = "process" if on_device is None else "process and device"
    print(
        f"{what}, {held.nbytes >> 20} MiB touched: {median / 1e3:.1f} µs a step (p99 {p99 / 1e3:.1f}), {share:.4%} of 100 ms"
    )
    if options.json is not None:
        options.json.write_text(json.dumps({"median_ns": median, "p99_ns": p99, "share": share}) + "\n")
    return int(share > options.limit)


def measure(steps: int) -> list[int]:
    """Time that the beginning and the end of each step take together, ns."""
    memory = StepMemory()
    times_ns = []
    for step in range(steps):
        begin = time.perf_counter_ns()
        memory.begin(step)
        memory.end(keep=True)
        times_ns.append(time.perf_counter_ns() - begin)
    assert memory.process.reason is None, memory.process.reason
    return times_ns


if __name__ == "__main__":
    sys.exit(main())
