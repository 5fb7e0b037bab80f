"""Ranges that others than pptrace recorded of what is no op, as rows of the ops table: garbage collections of Python,
loading of data, checkpoints and logging.

    Python GC               torch's profiler with ``record_python_gc_info``, together with stacks
    gc, gc.collect, …       ranges of scripts around a collection of their own
    enumerate(DataLoader)#… torch's DataLoader, while a batch is waited for (``torch/utils/data/dataloader.py``)
    data, get_batch, …      ranges of scripts around what gets the next batch; Lightning's ``…_dataloader_next``
    checkpoint, logging, …  ranges of scripts around what saves and logs

A collection belongs to the step that began last before it, data to the one that begins next.
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

DATA = "DATA"
_NAMES = {
    GARBAGE_COLLECTION: {
        Category.PYTHON: re.compile(r"Python GC"),
        Category.ANNOTATION: re.compile(
            r"(?:python[ _])?gc|gc[._ ]collect|garbage[ _-]?collect(?:ion)?", re.IGNORECASE
        ),
    },
    DATA: {
        Category.ANNOTATION: re.compile(
            r"enumerate\(DataLoader\)#\w+\.__next__|(?:get|load|next|fetch|read)[ _-]?(?:batch|data)|"
            r"data(?:[ _-]?load(?:er|ing)?)?|batch[ _-]generator|\[pl\]\[profile\].*dataloader_next",
            re.IGNORECASE,
        )
    },
    "CHECKPOINT": {
        Category.ANNOTATION: re.compile(
            r"(?:(?:sav|writ)(?:e|ing)[ _-])?(?:model[ _-])?checkpoint(?:ing|s)?(?:[ _-](?:sav|writ)(?:e|ing))?",
            re.IGNORECASE,
        )
    },
    "LOGGING": {Category.ANNOTATION: re.compile(r"log(?:ging)?(?:[ _-](?:metrics|loss|step))?", re.IGNORECASE)},
}
"""The names of ranges of each kind, by the category of their events."""


def with_named_ranges(ops: pd.DataFrame, events: Events) -> pd.DataFrame:
    """The ops with the ranges of these kinds among the events, where marks have none and steps are known."""
    for kind in _NAMES:
        if events.names and not rows_among(ops["kind"], (kind,)).any():
            ops = _with_ranges(ops, events, kind)
    return ops


def _with_ranges(ops: pd.DataFrame, events: Events, kind: str) -> pd.DataFrame:
    rows = found_ranges(events, kind)
    if not len(rows):
        return ops
    # A step begins with its range, or where steps have none with its first op.
    is_step = ops["kind"] == "STEP"
    of_steps = ops[(is_step if is_step.any() else ops["kind"].isin(COMPUTE_KINDS)) & (ops["step"] >= 0)]
    begins = of_steps.groupby("step")["start_ns"].min().sort_values()
    if begins.empty:
        return ops
    start = events.start_ns[rows]
    begun = np.searchsorted(begins.to_numpy(), start, side="right")
    index = np.minimum(begun, len(begins) - 1) if kind == DATA else np.maximum(begun - 1, 0)
    columns: dict[str, Any] = {
        **dict.fromkeys(("rank", "stage", "chunk", "microbatch"), np.full(len(rows), -1)),
        **{name: same_category(text, len(rows)) for name, text in {"kind": kind, **_TEXTS}.items()},
        "step": begins.index.to_numpy()[index],
        "start_ns": start,
        "end_ns": events.ends_of(rows),
    }
    return concat_tables([ops, make_table(OPS, columns)])


_TEXTS = {"phase": "", "clock": "host", "source": "label", "pair": ""}


def found_ranges(events: Events, kind: str) -> Int64:
    """The events of a kind."""
    found = [
        (events.category == category)
        & np.array([bool(pattern.fullmatch(name)) for name in events.names], dtype=np.bool_)[events.name_id]
        for category, pattern in _NAMES[kind].items()
    ]
    rows: Int64 = np.flatnonzero(np.logical_or.reduce(found))
    return rows
