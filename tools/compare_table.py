"""Writes the table of docs/compare.md: how often `pptrace compare` finds a change that is there, and one that is not.

    python tools/compare_table.py [--pairs 100] [--steps 50] [--write docs/compare.md]
    python tools/compare_table.py --sleeping 20 [--runs 1] [--write docs/compare.md]

Each pair is two runs of one program, and a third whose ops take 2 % longer. Without ``--sleeping`` they are tables of ops, 1F1B
on four ranks with eight microbatches, read as a user's files are; with it, processes whose ops sleep, read from their traces.
Steps that correlate have three times as many pairs, since there chance makes most of a hundred. Where runs deviate as a whole,
each of the three is five runs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from pptrace.analysis.compare.compare import compare_sides  # noqa: E402
from pptrace.analysis.compare.result import ChangeVerdict  # noqa: E402
from pptrace.analysis.compare.side import ComparedRun  # noqa: E402
from pptrace.errors import UsageError  # noqa: E402
from pptrace.workflow.compare import read_compared  # noqa: E402
from tests.support.noisy_runs import Noise, NoisyRun  # noqa: E402
from tools.marked_tables import MarkedTable  # noqa: E402

BEGIN, END = "<!-- alarms measured by `compare_table.py` -->", "<!-- end of the measured alarms -->"
SLEEPING_BEGIN, SLEEPING_END = (
    "<!-- sleeping runs measured by `compare_table.py --sleeping` -->",
    "<!-- end of the sleeping runs -->",
)
CHANGE = 0.02
NOISES: Mapping[str, Noise] = {
    "each op by itself, 3 %": Noise(),
    "each op by itself, 5 %": Noise(ops=0.05),
    "ops 3 %, and steps 1 % with correlation 0.5": Noise(steps=0.01, correlation=0.5),
    "ops 3 %, and steps 1 % with correlation 0.7": Noise(steps=0.01, correlation=0.7),
    "ops 3 %, and steps 0.5 % with correlation 0.9": Noise(steps=0.005, correlation=0.9),
    "ops 3 %, and steps that drift by 2 %": Noise(drift=0.02),
    "ops 3 %, one op in 500 takes three times as long": Noise(long_ops=0.002),
    "ops 3 %, and the first steps are up to 50 % slower": Noise(warm_up=0.5),
    "ops 3 %, and runs 0.5 %; five runs of each": Noise(runs=0.005),
    "ops 3 %, and runs 1.5 %; five runs of each": Noise(runs=0.015),
}
RUNS = 5
"""Runs of each program where runs deviate as a whole."""
HEADER = ("ops vary", "steps", "pairs", "alarms without a change", "… in any part", "2 % slower found", "… in a part")


Side = Sequence[ComparedRun]


@dataclass(frozen=True, slots=True)
class Alarms:
    """Counts of pairs: verdicts and parts that differ, without and with a change."""

    pairs: int = 0
    alarms: int = 0
    part_alarms: int = 0
    found: int = 0
    parts_found: int = 0

    def with_pair(self, a: Side, other: Side, slower: Side) -> Alarms:
        """Add the comparisons of A with a run, or runs, like it, and with slower ones."""
        same, changed = compare_sides(a, other), compare_sides(a, slower)
        return Alarms(
            self.pairs + 1,
            self.alarms + (same.verdict is not ChangeVerdict.NO_DIFFERENCE),
            self.part_alarms + any(part.significant for part in same.parts),
            self.found + (changed.verdict is ChangeVerdict.SLOWER),
            self.parts_found + any(part.significant and part.change_ns > 0 for part in changed.parts),
        )


def alarms_of(run: NoisyRun, pairs: int, folder: Path) -> Alarms:
    """The alarms of pairs of tables of ops, all of different seeds."""
    counts = Alarms()
    slower = replace(run, slower=CHANGE)
    num_runs = RUNS if run.noise.runs else 1
    seeds = count()

    def read(like: NoisyRun) -> ComparedRun:
        return read_compared(like.write(folder / "run.csv", next(seeds)), cache=False)

    for _ in range(pairs):
        counts = counts.with_pair(*([read(like) for _ in range(num_runs)] for like in (run, run, slower)))
    return counts


def sleeping_alarms(pairs: int, num_runs: int, folder: Path) -> Alarms:
    """The same of processes whose ops sleep: F 10 ms and B 20 ms, 1F1B on two ranks with four microbatches, the runs in turns."""
    from tests.support.pool import Pool
    from tests.support.sleeping import SleepingRun, sleep_through

    run = SleepingRun("1f1b", 2, 4, None, 0.010, 50, 2)
    slower = replace(run, forward_s=run.forward_s * (1 + CHANGE))
    counts = Alarms()
    with Pool(run.pp) as pool:
        for pair in range(pairs):
            sides: dict[str, list[ComparedRun]] = {"a": [], "b": [], "slower": []}
            for turn in range(num_runs):
                for name, side in sides.items():
                    traces = folder / f"{pair}{name}{turn}"
                    traces.mkdir()
                    like = slower if name == "slower" else run
                    pool.run(sleep_through, like, str(traces), world=run.pp, timeout_s=300)
                    side.append(read_compared(traces, cache=False))
            counts = counts.with_pair(*sides.values())
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    begin, end = (SLEEPING_BEGIN, SLEEPING_END) if options.sleeping else (BEGIN, END)
    table = MarkedTable(options.write, begin, end)
    try:
        table.require_markers()
        with tempfile.TemporaryDirectory() as folder:
            rows = _sleeping_rows if options.sleeping else _rows
            table.write("\n".join(_table(rows(options, Path(folder)))))
    except (UsageError, OSError) as err:
        print(f"compare_table: {err}", file=sys.stderr)
        return 2
    return 0


def _rows(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, ...]]:
    for name, noise in NOISES.items():
        run = NoisyRun(noise, steps=options.steps)
        yield _row(name, options.steps, alarms_of(run, pairs_of(noise, options.pairs), folder))


def pairs_of(noise: Noise, pairs: int) -> int:
    """The number of pairs: of correlated steps three times as many."""
    return pairs * (3 if noise.correlation else 1)


def _sleeping_rows(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, ...]]:
    yield _row("sleeping processes", 50, sleeping_alarms(options.sleeping, options.runs, folder))


def _row(name: str, steps: int, counts: Alarms) -> tuple[str, ...]:
    numbers = (steps, counts.pairs, counts.alarms, counts.part_alarms, counts.found, counts.parts_found)
    return (name, *map(str, numbers))


def _table(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    line: Callable[[Iterable[str]], str] = lambda cells: f"| {' | '.join(cells)} |"  # noqa: E731
    yield line(HEADER)
    yield line("---" for _ in HEADER)
    for row in rows:
        print(line(row), file=sys.stderr, flush=True)
        yield line(row)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="compare_table.py", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100, help="pairs of tables for each kind of noise")
    parser.add_argument("--steps", type=int, default=50, help="steps of each run")
    parser.add_argument("--sleeping", type=int, default=0, metavar="PAIRS", help="pairs of sleeping runs instead")
    parser.add_argument("--runs", type=int, default=1, help="sleeping runs of each program of a pair")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the file with the markers; left out: print")
    return parser


if __name__ == "__main__":
    sys.exit(main())
