"""Writes the tables of docs/schedules.md: the catalogue as the registry has it, and every schedule of it as measured.

    python tools/schedule_table.py [--schedules 1f1b zbv …] [--bubble-ms 1200] [--prefetch 2] [--write docs/schedules.md]
    python tools/schedule_table.py --catalogue [--write docs/schedules.md]

Each plan runs on four processes whose ops sleep, and is read back from its traces. They sleep so long that the ideal
bubble is the same number of milliseconds in every plan: what the runtime itself needs between two ops then weighs the
same. Without ``--write`` the tables are printed; with it, they replace what stands between their markers in the file.
``--catalogue`` measures nothing and leaves the measured table as it is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # worker processes import the same modules by the same names
    sys.path.insert(0, str(ROOT))

from pptrace.errors import UsageError  # noqa: E402
from pptrace.schedule.registry import SCHEDULES  # noqa: E402
from tests.support.pool import Pool  # noqa: E402
from tests.support.sleeping import Measured, SleepingRun, forward_for, measure  # noqa: E402
from tools.marked_tables import MarkedTable  # noqa: E402

BEGIN = "<!-- schedules measured by `make table` -->"
END = "<!-- end of the measured schedules -->"
CATALOGUE_BEGIN = "<!-- catalogue written by `make table` -->"
CATALOGUE_END = "<!-- end of the catalogue -->"
RANKS, MICROBATCHES = 4, 8
CATALOGUE_HEADER = ("name", "what it is", "ideal bubble ratio", "chunks in flight on rank r", "source")
HEADER = (
    "schedule",
    "p",
    "m",
    "v",
    "ideal bubble",
    "simulated bubble",
    "measured bubble",
    "measured / simulated bubble − 1",
    "measured / simulated step − 1",
    "in flight planned",
    "in flight measured",
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        catalogue = MarkedTable(options.write, CATALOGUE_BEGIN, CATALOGUE_END)
        measured = MarkedTable(options.write, BEGIN, END)
        catalogue.require_markers()
        measured.require_markers()
        catalogue.write(catalogue_table())
        if not options.catalogue:
            measured.write(to_markdown(_measure_all(options)))
    except (UsageError, OSError) as err:
        print(f"schedule_table: {err}", file=sys.stderr)
        return 2
    return 0


def _measure_all(options: argparse.Namespace) -> list[Measured]:
    rows = []
    with Pool(RANKS) as pool, tempfile.TemporaryDirectory() as folder:
        for name in options.schedules:
            traces = Path(folder) / name
            traces.mkdir()
            run = SleepingRun(name, RANKS, MICROBATCHES, None, 0.0, options.steps, options.prefetch)
            run = replace(run, forward_s=forward_for(run.plan, options.bubble_ms / 1e3))
            rows.append(measure(pool, run, traces))
            print(_line(_cells(rows[-1])), file=sys.stderr, flush=True)
    return rows


def catalogue_table() -> str:
    """The registry as a table, one line per schedule."""
    rows = (
        (f"`{entry.name}`", entry.summary, entry.bubble_text, entry.in_flight_text, entry.source)
        for entry in SCHEDULES.values()
    )
    return "\n".join((_line(CATALOGUE_HEADER), _line("---" for _ in CATALOGUE_HEADER), *map(_line, rows)))


def to_markdown(rows: Iterable[Measured]) -> str:
    """The table, one line per run."""
    return "\n".join((_line(HEADER), _line("---" for _ in HEADER), *(_line(_cells(row)) for row in rows)))


def _cells(row: Measured) -> tuple[str, ...]:
    plan = row.plan
    return (
        f"`{row.run.schedule}`",
        str(plan.pp),
        str(plan.num_microbatches),
        str(plan.num_chunks),
        f"{row.ideal:.4f}",
        f"{row.simulated:.4f}",
        f"{row.measured:.4f}",
        f"{row.bubble_error:+.1%}",
        f"{row.span_error:+.1%}",
        str(row.in_flight_planned),
        str(row.in_flight_measured),
    )


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="schedule_table.py", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), metavar="NAME")
    parser.add_argument(
        "--bubble-ms", type=float, default=1200, help="the ideal bubble of each plan; I and W sleep as F"
    )
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each schedule")
    parser.add_argument("--prefetch", type=int, default=2, help="compute actions that a receive is posted ahead")
    parser.add_argument("--catalogue", action="store_true", help="the catalogue alone: measure nothing")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the file with the markers; left out: print")
    return parser


if __name__ == "__main__":
    sys.exit(main())
