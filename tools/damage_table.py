"""Damage of every kind in every GPU sample: whether it is named, and whether figures are right or null.

    python tools/damage_table.py [--write docs/damage.md]

One rank's trace of each sample is damaged, and figures of the damaged run are compared with those of the whole one.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pptrace.analysis.report import AuditEntry, Report  # noqa: E402
from pptrace.model.damage import Damage  # noqa: E402
from pptrace.workflow.load import load  # noqa: E402
from tests.support.damages import KINDS, OF_CLOCK, OF_DEVICE, OF_RUN, RANK, SHIFTS, Change, damaged  # noqa: E402

SAMPLES = sorted(path for path in (ROOT / "sample_traces").glob("gpu_*") if any(path.glob("rank*.json.gz")))
_RIGHT = 0.05
"""Part by which a figure may differ from that of the whole run: of as much as the damaged kernels are of it."""
_LEAST_NS = 100_000
_WAITS = 3
"""Times as much as the clocks may be off that a rank's waits in a step may be."""
_NOTHING = "nothing to damage"
_PAGE = """\
# Damaged recordings

Written by `{command}`: events of one rank of each sample on GPUs are
damaged on purpose, each kind of the [audit](inputs.md#the-audit) for itself, and figures of the damaged recording are compared
with those of the whole one: each rank's compute, exposed communication and bubble in every step, and the length of the steps.
*Right*: all that is known is within {right:.0%} (or 0.1 ms, or {waits} times what the report says the clocks may be off: waits of
several messages add up) of it. *Null*: so is that, and what the damage makes unknown is null.
Figures that differ are named, the one that differs most. *Nothing to damage*: the sample has no such events, as light recordings
have no operators.

"""


def figures(report: Report) -> dict[str, int | None]:
    """The figures of a report by their names, ns."""
    found: dict[str, int | None] = {}
    for step in report.steps:
        found[f"step {step.step}"] = step.length_ns
        for rank in step.ranks:
            for name in ("compute_ns", "exposed_comm_ns", "bubble_ns"):
                found[f"step {step.step} rank {rank.rank} {name}"] = getattr(rank, name)
    return found


def verdict_on(kind: Damage, whole: Report, report: Report) -> str:
    """A cell of the table."""
    named = _count(kind, report) > _count(kind, whole)
    return _verdict(whole, report, named=named)


def verdict_on_run(whole: Report, report: Report) -> str:
    """A cell of damage that may be of several kinds: named where any new kind names the rank."""
    new = {entry.kind for entry in _audit(report) if RANK in entry.ranks} - {entry.kind for entry in _audit(whole)}
    return _verdict(whole, report, named=bool(new))


def _verdict(whole: Report, report: Report, *, named: bool) -> str:
    before, after = figures(whole), figures(report)
    least_ns = max(_LEAST_NS, _WAITS * (report.clock.uncertainty_ns or 0))
    wrong, nulls = {}, 0
    for name, ns in before.items():
        found = after.get(name)
        if found is None:
            nulls += ns is not None
        elif ns is not None and abs(found - ns) > max(_RIGHT * abs(ns), least_ns):
            wrong[name] = found / ns - 1 if ns else float("inf")
    if wrong:
        name = max(wrong, key=lambda one: abs(wrong[one]))
        what = f"{name.removesuffix('_ns').replace('_', ' ')} {wrong[name]:+.0%}"
    else:
        what = "null" if nulls else "right"
    return what if named else f"not named, {what}"


def _count(kind: Damage, report: Report) -> int:
    """The number of events of a kind that the audit finds on the damaged rank."""
    return sum(entry.count for entry in _audit(report) if entry.kind == kind and RANK in entry.ranks)


def _audit(report: Report) -> tuple[AuditEntry, ...]:
    return () if report.recording is None else report.recording.audit


def report_on(path: Path, change: Change) -> Report | None:
    """The report on a sample with the damage that a change makes; None where it changes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        run = damaged(path, Path(folder), change)
        before = msgspec.json.decode(gzip.decompress((path / f"rank{RANK}.json.gz").read_bytes()))
        if msgspec.json.decode((run / f"rank{RANK}.json").read_bytes()) == before:
            return None
        return load([run], cache=False, as_recorded=True).report


def table() -> Iterator[str]:
    """The lines of the table, and one about all of it."""
    yield f"| kind | {' | '.join(path.name for path in SAMPLES)} |"
    yield f"|---|{'---|' * len(SAMPLES)}"
    whole = {path: load([path], cache=False, as_recorded=True).report for path in SAMPLES}
    cells = []
    for kind, (change, _) in KINDS.items():
        reports = {path: report_on(path, change) for path in SAMPLES}
        row = [verdict_on(kind, whole[path], report) if report else _NOTHING for path, report in reports.items()]
        cells += row
        yield f"| `{kind}` | {' | '.join(row)} |"
    for name, change in (OF_CLOCK | OF_DEVICE | SHIFTS | OF_RUN).items():
        reports = {path: report_on(path, change) for path in SAMPLES}
        row = [verdict_on_run(whole[path], report) if report else _NOTHING for path, report in reports.items()]
        cells += row
        yield f"| {name.replace('_', ' ')} | {' | '.join(row)} |"
    cells = [cell for cell in cells if cell != _NOTHING]
    good = sum(cell in ("right", "null") for cell in cells)
    named = sum(not cell.startswith("not named") for cell in cells)
    yield ""
    yield f"{named} of {len(cells)} are named, and figures of {good} are right or null."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="write the table there")
    options = parser.parse_args()
    text = "\n".join(table())
    print(text)
    if options.write is not None:
        command = "python tools/damage_table.py --write docs/damage.md"
        options.write.write_text(
            f"{_PAGE.format(command=command, right=_RIGHT, waits=_WAITS)}{text}\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
