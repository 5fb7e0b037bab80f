"""Cost of the analyses of where time went, each within one whole analysis of tables, against all else, at more and more ops.

    python tools/bench/bench_analyses.py [--ops N]…

The tables are those of :mod:`tools.bench.bench_tables`. Each size runs in a process of its own, imports and writing of the JSON
included. Before there were any of them a whole analysis took 40 µs an op; together they may add half of that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pptrace.analysis.explain.explain
import pptrace.analysis.steps.steps
import pptrace.workflow.analyse
from tools.bench.bench_tables import OPS_PER_STEP, write_tables

ANALYSES: dict[str, tuple[tuple[Any, str], ...]] = {
    "explanation": (
        (pptrace.analysis.explain.explain, "_explain_together"),
        (pptrace.analysis.steps.steps, "graph_of_run"),
    ),
    "stragglers": ((pptrace.workflow.analyse, "study_steps"),),
    "questions": tuple((pptrace.workflow.analyse, name) for name in ("steps_of_ranks", "ask_ranks", "with_answers")),
    "series": ((pptrace.workflow.analyse, "series_of"),),
}
"""Analyses, and where the whole calls their functions."""
MOST_US, FROM_OPS = 20.0, 100_000
"""Most processor time of all of them for an op, µs, in runs of at least so many ops."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", type=float, action="append", help="about so many ops (default: 16,384 to 10 million)")
    parser.add_argument("--of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.of:
        print(json.dumps(measured(options.of)))
        return 0
    is_good = True
    for wanted in options.ops or [2**14, 2**17, 2**20, 10**7]:
        with tempfile.TemporaryDirectory() as folder:
            num_ops = write_tables(Path(folder), max(round(wanted / OPS_PER_STEP), 1), messages=True)
            command = [sys.executable, __file__, "--of", folder]
            seconds = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rest = seconds.pop("whole") - sum(seconds.values())
        each_us = sum(seconds.values()) / num_ops * 1e6
        is_beyond = num_ops >= FROM_OPS and each_us > MOST_US
        is_good &= not is_beyond
        print(
            f"{num_ops:>12,} ops: {rest:.2f} s CPU without, {', '.join(f'{name} {s:.2f}' for name, s in seconds.items())}: "
            f"together {each_us:.1f} µs an op, {sum(seconds.values()) / rest:.0%} of the rest"
            f"{f'   BEYOND {MOST_US:.0f} µs' if is_beyond else ''}",
            flush=True,
        )
    return 0 if is_good else 1


def measured(folder: Path) -> dict[str, float]:
    """CPU seconds of each analysis, and of the whole process."""
    seconds = dict.fromkeys(ANALYSES, 0.0)
    running: set[str] = set()
    for name, functions in ANALYSES.items():
        for owner, function in functions:
            setattr(owner, function, timed(getattr(owner, function), name, seconds, running))
    pptrace.load([folder], cache=False, jobs=1).to_json(os.devnull)
    return {**seconds, "whole": time.process_time()}


def timed(function: Callable[..., Any], name: str, seconds: dict[str, float], running: set[str]) -> Callable[..., Any]:
    """The function, whose CPU time is added to ``seconds``, once where another one of its analysis calls it (``running``)."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if name in running:
            return function(*args, **kwargs)
        running.add(name)
        begin = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            running.discard(name)
            seconds[name] += time.process_time() - begin

    return run


if __name__ == "__main__":
    sys.exit(main())
