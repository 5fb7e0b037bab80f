"""Several tables of ops that name the same rank: more steps of one run, or another run."""

from __future__ import annotations

from typing import Protocol, Self, TypeVar

import pandas as pd

from pptrace.errors import TraceError
from pptrace.model.traces import InputFormat, TraceInfo


class RankData(Protocol):
    """The result of reading one trace, with its ops where its format lists ops: the trace, or what a transform made of it."""

    @property
    def info(self) -> TraceInfo: ...

    @property
    def ops(self) -> pd.DataFrame | None: ...

    def with_more(self, later: Self) -> Self:
        """This rank with the rows of a further table of the same rank."""

    def with_info(self, info: TraceInfo) -> Self:
        """This result with the rank and warnings of ``info``."""


Table = TypeVar("Table", bound=RankData)


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
    spans = pd.concat([ops.assign(table=0), other_ops.assign(table=1)]).sort_values(["start_ns", "end_ns", "table"])
    overlaps = spans["start_ns"].to_numpy()[1:] < spans["end_ns"].to_numpy()[:-1]
    if (overlaps & (spans["table"].to_numpy()[1:] != spans["table"].to_numpy()[:-1])).any():
        raise TraceError(
            f"{prefix}, or on another clock (their steps on rank {rank} run at the same time); expected tables on one clock; "
            "give their times from the same zero"
        )
    return first.with_more(second)


def _step_spans(table: RankData) -> pd.DataFrame | None:
    """Start and end of each step, index step, ns; None where the rank does not come from an op table."""
    if table.info.format is not InputFormat.OPLOG or table.ops is None or table.ops.empty:
        return None
    return table.ops[table.ops["step"] >= 0].groupby("step").agg({"start_ns": "min", "end_ns": "max"})
