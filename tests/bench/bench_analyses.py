"""Cost of the analyses of where time went, each within one whole analysis of tables, against all else, at more and more ops.

    python tests/bench/bench_analyses.py [--ops N]…

The tables are those of :mod:`tests.bench.bench_tables`. Each size runs in a process of its own, imports and writing of the JSON
included. Together the analyses may take half of what all else takes; a run of a few ops is not held to that.
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

import pptrace.analysis.steps
import pptrace.workflow.analyse
from tests.bench.bench_tables import OPS_PER_STEP, write_tables

ANALYSES = {
    "explanation": (pptrace.analysis.steps, ("explain_steps",)),
    "stragglers": (pptrace.workflow.analyse, ("study_steps",)),
    "links": (pptrace.workflow.analyse, ("comparable_steps", "traffic_of_ranks", "with_links")),
    "memory": (pptrace.workflow.analyse, ("report_memory",)),
    "series": (pptrace.workflow.analyse, ("series_of",)),
}
"""Analyses, and where the whole calls their functions."""
MOST_SHARE, FROM_OPS = 0.5, 100_000


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
        share = sum(seconds.values()) / rest
        is_beyond = num_ops >= FROM_OPS and share > MOST_SHARE
        is_good &= not is_beyond
        print(
            f"{num_ops:>12,} ops: {rest:.2f} s CPU without, {', '.join(f'{name} {s:.2f}' for name, s in seconds.items())}: "
            f"together {share:.0%} of the rest{f'   BEYOND {MOST_SHARE:.0%}' if is_beyond else ''}",
            flush=True,
        )
    return 0 if is_good else 1


def measured(folder: Path) -> dict[str, float]:
    """CPU seconds of each analysis, and of the whole process."""
    seconds = dict.fromkeys(ANALYSES, 0.0)
    for name, (module, functions) in ANALYSES.items():
        for function in functions:
            setattr(module, function, timed(getattr(module, function), name, seconds))
    pptrace.load([folder], cache=False).to_json(os.devnull)
    return {**seconds, "whole": time.process_time()}


def timed(function: Callable[..., Any], name: str, seconds: dict[str, float]) -> Callable[..., Any]:
    """The function, whose CPU time is added to ``seconds``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] += time.process_time() - begin

    return run


if __name__ == "__main__":
    sys.exit(main())
