"""Several tables of ops that name the same rank: more steps of one run, or another run."""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol, Self, TypeVar

import pandas as pd

from pptrace.errors import TraceError
from pptrace.model.tables import InputFormat, TraceInfo


class HasOps(Protocol):
    """What was kept of one trace, with the ops that its format named, if it named any."""

    @property
    def info(self) -> TraceInfo: ...

    @property
    def ops(self) -> pd.DataFrame | None: ...

    def with_more(self, later: Self) -> Self:
        """This rank with the rows of another table of it as well."""


Part = TypeVar("Part", bound=HasOps)


def joined(first: Part, second: Part) -> Part | None:
    """One rank of the steps of two tables that name it; None where not both are tables of ops.

    Raises:
        TraceError: the tables are of different runs, or not on one clock: they hold the same step, or steps at the same time.
    """
    ops, more = _steps(first), _steps(second)
    if ops is None or more is None:
        return None
    rank, paths = first.info.rank, f"{second.info.path}: is of another run than {first.info.path}"
    if both := sorted(set(ops.index) & set(more.index)):
        raise TraceError(
            f"{paths} (both hold step {both[0]} of rank {rank}); expected the tables of one run; analyse them one run at a time"
        )
    spans = sorted([*_spans(ops, 0), *_spans(more, 1)])
    if any(begin < end and file != other for (_, end, file), (begin, _, other) in pairwise(spans)):
        raise TraceError(
            f"{paths}, or on another clock (their steps on rank {rank} run at the same time); expected tables on one clock; "
            "give their times from the same zero"
        )
    return first.with_more(second)


def _steps(part: HasOps) -> pd.DataFrame | None:
    """Index step; the first start and the last end of its ops. None where no table of ops tells them."""
    if part.info.format is not InputFormat.OPLOG or part.ops is None or part.ops.empty:
        return None
    return part.ops[part.ops["step"] >= 0].groupby("step").agg({"start_ns": "min", "end_ns": "max"})


def _spans(steps: pd.DataFrame, file: int) -> list[tuple[int, int, int]]:
    return [(int(start), int(end), file) for start, end in zip(steps["start_ns"], steps["end_ns"], strict=True)]
