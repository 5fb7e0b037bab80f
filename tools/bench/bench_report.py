"""From Kineto traces to the whole analysis, at more and more ops: reading and analysis apart, time and memory for each op.

    python tools/bench/bench_report.py [--style STYLE]… [--ops N]… [--microbatches N]

Synthetic runs of interleaved 1F1B on eight ranks: with the marks of the runtime, with the labels of torch.distributed.pipelining,
and with these, the kernels of ops and calls of NCCL (:mod:`tools.bench.kineto_runs`). Each size runs in a process of its own,
on one core, without the cache. The analysis is all but reading; its processor time for an op must stay below a limit from 45,000
ops on, and must not grow; where there are calls, the time to find each has a limit instead. Memory is the peak of the process,
imports included, and for each op what its events and tables add to the imports.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pptrace.ingest import open_inputs, read_each
from pptrace.memory import keep_freed_memory
from pptrace.model.traces import Trace
from pptrace.recognise.calls.find_calls import find_calls
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.workflow.analyse import analyse_ranks
from pptrace.workflow.rank_store import recognise_trace
from tools.bench.kineto_runs import STYLES, write_kineto_run

PP, CHUNKS = 8, 2
LIMIT_US, LIMIT_OF_CALL_US, LIMIT_FROM_OPS = 10.0, 3.0, 45_000
NUM_OPS = {"marks": (10_000, 100_000, 1_000_000), "labels": (10_000, 100_000, 1_000_000), "nccl": (10_000, 100_000)}
MOST_GROWTH = 1.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--style", action="append", choices=list(STYLES))
    parser.add_argument("--ops", type=int, action="append")
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.of:
        print(json.dumps(measured(options.of)))
        return 0
    failed = False
    for style in options.style or STYLES:
        least = 0.0
        for number in options.ops or NUM_OPS[style]:
            with tempfile.TemporaryDirectory() as folder:
                num_steps = max(round(number / (PP * CHUNKS * 2 * options.microbatches)), 1)
                write_kineto_run(Path(folder), style, PP, options.microbatches, num_steps, CHUNKS)
                command = [sys.executable, __file__, "--of", folder]
                result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            each = result["analysis_s"] / result["ops"]
            least = least or each
            line, is_within = verdict(style, result, each, each / least)
            failed |= not is_within
            print(line, flush=True)
    return int(failed)


def verdict(style: str, result: dict[str, Any], each: float, growth: float) -> tuple[str, bool]:
    """A line of the figures of one run, and whether they are within the limits."""
    ops = result["ops"]
    line = (
        f"{style}: {ops:,} ops, {result['messages']:,} ends of messages, {result['events']:,} events: reading "
        f"{result['reading_s'] / ops * 1e6:.1f} µs an op, analysis {each * 1e6:.1f} ({growth:.2f} × the smallest run's); "
        f"{result['peak_bytes'] / 1e6:,.0f} MB, {(result['peak_bytes'] - result['first_bytes']) / ops:,.0f} bytes an op"
    )
    calls = result["calls"]
    of_call_us = result["calls_s"] / max(calls, 1) * 1e6
    if calls:
        line += f"; {calls:,} calls, found in {of_call_us:.1f} µs each"
    is_slow = ops >= LIMIT_FROM_OPS and (of_call_us > LIMIT_OF_CALL_US if calls else each * 1e6 > LIMIT_US)
    beyond = [
        f"BEYOND {LIMIT_OF_CALL_US if calls else LIMIT_US:.0f} µs" * is_slow,
        f"BEYOND {MOST_GROWTH} × the smallest" * (growth > MOST_GROWTH),
    ]
    return "   ".join([line, *filter(None, beyond)]), not any(beyond)


def measured(folder: Path) -> dict[str, Any]:
    """Read and analyse a run on one core, with freed memory reused as by ``pptrace analyze``."""
    keep_freed_memory()
    recognition_s = calls_s = 0.0

    def recognised(trace: Trace) -> RecognisedRank:
        nonlocal recognition_s, calls_s
        begin = time.process_time()
        rank = recognise_trace(trace)
        end = time.process_time()
        find_calls(trace.events)  # once more, by itself
        recognition_s, calls_s = recognition_s + end - begin, calls_s + time.process_time() - end
        return rank

    first_bytes = peak_bytes()
    begin = time.process_time()
    ranks = list(read_each(open_inputs([folder]), recognised, 1, None, None).traces)
    num_calls = sum(len(rank.calls) for rank in ranks)
    num_events = sum(rank.info.num_events for rank in ranks)
    read = time.process_time()
    analysis = analyse_ranks(ranks, None, None, num_ranks=len(ranks))
    return {
        "ops": len(analysis.data.ops),
        "messages": len(analysis.data.comms),
        "events": num_events,
        "calls": num_calls,
        "calls_s": calls_s,
        "reading_s": read - begin - recognition_s - calls_s,
        "analysis_s": time.process_time() - read + recognition_s,
        "first_bytes": first_bytes,
        "peak_bytes": peak_bytes(),
    }


def peak_bytes() -> int:
    """Of this process; what ``getrusage`` says of a child begins with its parent's."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


if __name__ == "__main__":
    sys.exit(main())
