"""Replays of a plan as rows of tables: its ops, and the messages between its ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from pptrace.model.tables import Int64
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan_table import PlanTable

_KINDS = np.array([str(kind) for kind in Kind], dtype=object)
Replicas = tuple[int, int]
"""(number of replicas of the pipeline, index of one)."""


def op_rows(table: PlanTable, start: Int64, end: Int64, of: Replicas = (1, 0), **columns: Any) -> pd.DataFrame:
    """The ops of a step, with more columns."""
    rows = _rows(table, np.arange(len(table)), of) | {"kind": _KINDS[table.kind], "start_ns": start, "end_ns": end}
    return pd.DataFrame(rows | columns)


def message_rows(
    table: PlanTable, sent: tuple[Int64, Int64], received: tuple[Int64, Int64], of: Replicas = (1, 0), **columns: Any
) -> pd.DataFrame:
    """The sends and receives of a step, with more columns; of both when they started and ended, message by message."""
    senders, readers = table.dep[table.dep_is_message], table.dep_reader[table.dep_is_message]
    same = {"axis": "pp", "direction": np.where(table.kind[senders] == Kind.F.code, "F", "B")} | columns
    parts = []
    for kind, rows, peers, (start, end) in (("send", senders, readers, sent), ("recv", readers, senders, received)):
        ends = {"kind": kind, "peer": _rows(table, peers, of)["rank"], "start_ns": start, "end_ns": end}
        parts.append(pd.DataFrame(_rows(table, rows, of) | ends | same))
    return pd.concat(parts)


def ops_of_steps(table: PlanTable, start: Int64, end: Int64, gap_ns: int) -> pd.DataFrame:
    """The ops of steps that follow one another, from their times since each began, shape (steps, ops)."""
    begins = np.cumsum([0, *(end.max(axis=1) + gap_ns)])
    steps = enumerate(zip(start, end, begins[:-1], strict=True))
    return pd.concat([op_rows(table, first + begin, last + begin, step=step) for step, (first, last, begin) in steps])


def _rows(table: PlanTable, rows: Int64, of: Replicas) -> dict[str, Any]:
    dp, replica = of
    return {"rank": table.rank[rows] * dp + replica, "stage": table.stage[rows], "microbatch": table.microbatch[rows]}
