"""Garbage collections of Python that others than pptrace recorded, as rows of the ops table.

    Python GC               torch's profiler with ``record_python_gc_info``, together with stacks
    gc, gc.collect, …       ranges of scripts around a collection of their own

A collection belongs to the step that began last before it.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd

from pptrace.model.categories import same_category
from pptrace.model.join_tables import concat_tables
from pptrace.model.tables import COMPUTE_KINDS, GARBAGE_COLLECTION, OPS, Int64, make_table
from pptrace.model.traces import Category, Events
from pptrace.slices import rows_among

_NAMES = {
    Category.PYTHON: re.compile(r"Python GC"),
    Category.ANNOTATION: re.compile(r"(?:python[ _])?gc|gc[._ ]collect|garbage[ _-]?collect(?:ion)?", re.IGNORECASE),
}


def with_collections(ops: pd.DataFrame, events: Events) -> pd.DataFrame:
    """The ops with the collections among the events, where marks have none and steps are known."""
    if not events.names or rows_among(ops["kind"], (GARBAGE_COLLECTION,)).any():
        return ops
    rows = _collections(events)
    steps = _begins_of_steps(ops) if len(rows) else {}
    if not steps:
        return ops
    start = events.start_ns[rows]
    index = np.searchsorted(np.array(list(steps.values())), start, side="right") - 1
    columns: dict[str, Any] = {
        **dict.fromkeys(("rank", "stage", "chunk", "microbatch"), np.full(len(rows), -1)),
        **{name: same_category(text, len(rows)) for name, text in _TEXTS.items()},
        "step": np.array(list(steps))[np.maximum(index, 0)],
        "start_ns": start,
        "end_ns": events.ends_of(rows),
    }
    return concat_tables([ops, make_table(OPS, columns)])


_TEXTS = {"kind": GARBAGE_COLLECTION, "phase": "", "clock": "host", "source": "label", "pair": ""}


def _collections(events: Events) -> Int64:
    """The events that are collections."""
    found = [
        (events.category == category) & np.isin(events.name_id, _ids(events.names, pattern))
        for category, pattern in _NAMES.items()
    ]
    rows: Int64 = np.flatnonzero(np.logical_or.reduce(found))
    return rows


def _ids(names: tuple[str, ...], pattern: re.Pattern[str]) -> list[int]:
    return [index for index, name in enumerate(names) if pattern.fullmatch(name)]


def _begins_of_steps(ops: pd.DataFrame) -> dict[int, int]:
    """Time when each step began, ns, in the order of that: its range, or where steps have none its first op."""
    is_step = ops["kind"] == "STEP"
    rows = ops[(is_step if is_step.any() else ops["kind"].isin(COMPUTE_KINDS)) & (ops["step"] >= 0)]
    begins = rows.groupby("step")["start_ns"].min().sort_values()
    return dict(zip(begins.index.tolist(), begins.tolist(), strict=True))
