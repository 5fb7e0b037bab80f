"""The what-if study and its reasons at more and more ops: CPU time for each op, on its own.

    python tests/bench/bench_stragglers.py [--ops N]…

The costs are those of random steps of 1F1B (8 stages, 64 microbatches, 16 replicas), as the analysis has them after reading.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pptrace.analysis.stragglers.links import slow_link
from pptrace.analysis.stragglers.pauses import host_pauses
from pptrace.analysis.stragglers.sequences import long_sequences
from pptrace.analysis.stragglers.slowdowns import slowdowns
from pptrace.analysis.stragglers.study import study_steps
from pptrace.schedule.registry import build
from tests.support.measured import measured_costs

PP, MICROBATCHES, DP = 8, 64, 16
OP_NS, MESSAGE_NS = 1_000_000, 20_000


def cpu_s(work: Callable[..., object], *arguments: object) -> float:
    begin = time.process_time()
    work(*arguments)
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", type=float, action="append", help="about so many ops (default: 10⁴ to 10⁷)")
    table = build("1f1b", PP, MICROBATCHES).table
    rng = np.random.default_rng(0)
    for wanted in parser.parse_args().ops or [10**4, 10**5, 10**6, 10**7]:
        num_steps = max(round(wanted / (DP * len(table))), 1)
        shape = (num_steps, DP)
        durations = rng.integers(OP_NS, OP_NS + OP_NS // 20, (*shape, len(table)))
        transfers = rng.integers(MESSAGE_NS, 2 * MESSAGE_NS, (*shape, table.num_messages))
        plans = [measured_costs(table, durations, transfers)]
        parts = {
            "slowdowns": cpu_s(slowdowns, plans),
            "long sequences": cpu_s(long_sequences, plans),
            "slow link": cpu_s(slow_link, plans),
            "pauses": cpu_s(host_pauses, plans),
        }
        whole, num_ops = cpu_s(study_steps, plans), durations.size
        listed = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
        print(
            f"{num_ops:>12,} ops: {whole:6.2f} s CPU, {whole / num_ops * 1e6:5.2f} µs an op (of all steps: {listed})",
            flush=True,
        )


if __name__ == "__main__":
    main()
