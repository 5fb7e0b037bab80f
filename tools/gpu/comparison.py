"""Ops of a report beside those that another reader counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pptrace.analysis.report import Report
from tests.support.device_oracle import Op


def ops_of(report: Report, rank: int) -> Iterator[Op]:
    """The ops of a rank, step by step."""
    for step in report.steps:
        for entry in step.ranks:
            for op in entry.ops if entry.rank == rank else ():
                yield Op(step.step, f"{op.stage}{op.kind}{op.microbatch}", op.start_ns, op.end_ns, True)


def differences(result: Sequence[Op], expected: Sequence[Op]) -> list[tuple[Op | None, Op | None]]:
    """Ops that do not occur with the same times on both sides, where both count time from their first op of the same name."""
    sides = [{(op.step, op.name): op for op in side} for side in (result, expected)]
    common = next((key for key in sides[1] if key in sides[0]), None)
    shift = 0 if common is None else sides[0][common].start_ns - sides[1][common].start_ns
    differing: list[tuple[Op | None, Op | None]] = []
    for key in dict.fromkeys([*sides[1], *sides[0]]):
        ours, theirs = sides[0].get(key), sides[1].get(key)
        if (
            ours is None
            or theirs is None
            or (ours.start_ns, ours.end_ns) != (theirs.start_ns + shift, theirs.end_ns + shift)
        ):
            differing.append((ours, theirs))
    return differing
