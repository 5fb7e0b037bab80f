"""Growth of time and memory of `pptrace analyze` with a run: the table of docs/benchmarks.md.

    python tools/bench/growth_table.py [--of KIND]… [--largest OPS] [--write docs/benchmarks.md]

From 10,000 ops on, ten times as many in each row, up to the largest size of each kind of input:

    tables               Parquet with a send and a receive for each message (:mod:`tools.bench.bench_tables`)
    tables-no-messages   the same without messages
    labels, marks        Kineto traces of eight ranks (:mod:`tools.bench.kineto_runs`)

Each size is one command in a process of its own, imports included, without the cache, JSON written to the null device. Memory is
the most that all its processes had together. Without ``--write`` the table is printed; with it, it replaces what stands between
its markers in the file.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.bench.bench_tables import OPS_PER_STEP, measure, write_tables  # noqa: E402
from tools.bench.kineto_runs import write_kineto_run  # noqa: E402
from tools.marked_tables import MarkedTable  # noqa: E402

BEGIN = "<!-- growth measured by `growth_table.py` -->"
END = "<!-- end of the measured growth -->"
PP, MICROBATCHES, CHUNKS = 8, 64, 2
ON_PAPER = 10**8


@dataclass(frozen=True, slots=True)
class Measured:
    """One analysis: ops, wall and processor seconds, and the most bytes of all processes together."""

    kind: str
    ops: int
    seconds: float
    cpu_s: float
    peak_bytes: int


def write_kineto(folder: Path, ops: int, style: str) -> int:
    of_step = PP * CHUNKS * 2 * MICROBATCHES
    num_steps = max(round(ops / of_step), 1)
    write_kineto_run(folder, style, PP, MICROBATCHES, num_steps, CHUNKS)
    return num_steps * of_step


def write_run_of_tables(folder: Path, ops: int, messages: bool) -> int:
    """At most as many ops as wanted, or one step: fewer data-parallel replicas where one step has more."""
    of_replica = OPS_PER_STEP // 16
    dp = min(16, max(round(ops / of_replica), 1))
    return write_tables(folder, max(round(ops / (of_replica * dp)), 1), messages=messages, dp=dp)


KINDS: dict[str, tuple[int, Callable[[Path, int], int]]] = {
    "tables": (10**7, lambda folder, ops: write_run_of_tables(folder, ops, messages=True)),
    "tables-no-messages": (10**7, lambda folder, ops: write_run_of_tables(folder, ops, messages=False)),
    "labels": (10**6, lambda folder, ops: write_kineto(folder, ops, "labels")),
    "marks": (10**6, lambda folder, ops: write_kineto(folder, ops, "marks")),
}
"""The largest size of each kind of input, and what writes so many ops of it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", action="append", choices=list(KINDS), help="some kinds; left out, all")
    parser.add_argument("--largest", type=float, default=math.inf, metavar="OPS", help="leave larger sizes out")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the file with the markers; left out: print")
    options = parser.parse_args()
    table = MarkedTable(options.write, BEGIN, END)
    table.require_markers()
    rows = []
    for kind in options.of or KINDS:
        for row in measured_sizes(kind, options.largest):
            print(_line(_cells(row)), file=sys.stderr, flush=True)
            rows.append(row)
    table.write(to_markdown(rows))
    return 0


def measured_sizes(kind: str, largest: float) -> Iterator[Measured]:
    most, write = KINDS[kind]
    size = 10**4
    while size <= min(most, largest):
        with tempfile.TemporaryDirectory() as folder:
            num_ops = write(Path(folder), size)
            yield Measured(kind, num_ops, *measure(Path(folder)))
        size *= 10


def to_markdown(rows: list[Measured]) -> str:
    header = ("input", "ops", "s", "processor s", "processor µs an op", "MiB", "bytes an op")
    lines = [_line(header), "|---|" + "---:|" * (len(header) - 1)]
    for kind in dict.fromkeys(row.kind for row in rows):
        of_kind = [row for row in rows if row.kind == kind]
        lines += [_line(_cells(row)) for row in of_kind]
        lines += [_line(_on_paper(*pair)) for pair in list(pairwise(of_kind))[-1:]]
    return "\n".join(lines)


def _cells(row: Measured) -> tuple[str, ...]:
    return (
        row.kind,
        f"{row.ops:,}",
        f"{row.seconds:.2f}",
        f"{row.cpu_s:.2f}",
        f"{row.cpu_s / row.ops * 1e6:.2f}",
        f"{row.peak_bytes / 2**20:,.0f}",
        f"{row.peak_bytes / row.ops:,.0f}",
    )


def _on_paper(smaller: Measured, larger: Measured) -> tuple[str, ...]:
    """A run of 10⁸ ops, if every further op costs what it did between the two largest sizes."""
    further = larger.ops - smaller.ops

    def at(name: str) -> float:
        first, last = getattr(smaller, name), getattr(larger, name)
        return float(last + (last - first) / further * (ON_PAPER - larger.ops))

    row = Measured(f"{larger.kind}, on paper", ON_PAPER, at("seconds"), at("cpu_s"), round(at("peak_bytes")))
    return _cells(row)


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
