"""How long the whole analysis of runs of more and more ops takes: it must grow as they do. One process, one core.

    python tests/bench/bench_report.py [--microbatches N]… [--steps N]

Synthetic runs of interleaved 1F1B on eight ranks, written as the runtime's marks; time per op beside that of the smallest run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pptrace.workflow.load import load
from tests.dashboards.synthetic import write_run

MOST_GROWTH = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, action="append")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    least = 0.0
    for number in options.microbatches or [32, 128, 512]:
        with tempfile.TemporaryDirectory() as folder:
            write_run(
                Path(folder), "interleaved-1f1b", pp=8, num_microbatches=number, num_steps=options.steps, num_chunks=2
            )
            begin = time.perf_counter()
            analysis = load([Path(folder)], cache=False)
            seconds = time.perf_counter() - begin
        num_ops = len(analysis.data.ops)
        each = seconds / num_ops
        least = least or each
        verdict = "" if each / least <= MOST_GROWTH else f"   BEYOND {MOST_GROWTH} ×"
        print(
            f"p=8 m={number} v=2, {options.steps} steps: {num_ops:,} ops, {len(analysis.data.comms):,} ends of messages in "
            f"{seconds:6.2f} s; {each * 1e6:5.0f} µs an op, {each / least:4.2f} × the smallest run's{verdict}"
        )


if __name__ == "__main__":
    main()
