"""Several tables of ops that name the same rank: more steps of one run, or another run."""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol, Self, TypeVar

import pandas as pd

from pptrace.errors import TraceError
from pptrace.model.traces import InputFormat, TraceInfo


class HasOps(Protocol):
    """The result of reading one trace, with its ops where its format lists ops."""

    @property
    def info(self) -> TraceInfo: ...

    @property
    def ops(self) -> pd.DataFrame | None: ...

    def with_more(self, later: Self) -> Self:
        """This rank with the rows of a further table of the same rank."""


Table = TypeVar("Table", bound=HasOps)


def join_tables(first: Table, second: Table) -> Table | None:
    """Join two op tables of one rank that hold different steps; None where either is no op table.

    Raises:
        TraceError: the tables are of different runs or on different clocks: they hold the same step, or steps that overlap.
    """
    ops, other_ops = _step_spans(first), _step_spans(second)
    if ops is None or other_ops is None:
        return None
    rank, prefix = first.info.rank, f"{second.info.path}: is of another run than {first.info.path}"
    if common_steps := sorted(set(ops.index) & set(other_ops.index)):
        raise TraceError(
            f"{prefix} (both hold step {common_steps[0]} of rank {rank}); "
            "expected the tables of one run; analyse them one run at a time, or compare two with `pptrace compare`"
        )
    spans = sorted([*_intervals(ops, 0), *_intervals(other_ops, 1)])
    if any(
        begin < end and table_index != next_index for (_, end, table_index), (begin, _, next_index) in pairwise(spans)
    ):
        raise TraceError(
            f"{prefix}, or on another clock (their steps on rank {rank} run at the same time); expected tables on one clock; "
            "give their times from the same zero"
        )
    return first.with_more(second)


def _step_spans(table: HasOps) -> pd.DataFrame | None:
    """Start and end of each step, index step, ns; None where the rank does not come from an op table."""
    if table.info.format is not InputFormat.OPLOG or table.ops is None or table.ops.empty:
        return None
    return table.ops[table.ops["step"] >= 0].groupby("step").agg({"start_ns": "min", "end_ns": "max"})


def _intervals(steps: pd.DataFrame, table_index: int) -> list[tuple[int, int, int]]:
    return [(int(start), int(end), table_index) for start, end in zip(steps["start_ns"], steps["end_ns"], strict=True)]
