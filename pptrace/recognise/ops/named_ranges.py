"""Ranges that others than pptrace recorded of what is no op, as rows of the ops table: garbage collections of Python, loading of
data, checkpoints, logging and evaluation.

    Python GC               torch's profiler with ``record_python_gc_info``, together with stacks
    gc, gc.collect, …       ranges of scripts around a collection of their own
    enumerate(DataLoader)#… torch's DataLoader, while a batch is waited for (``torch/utils/data/dataloader.py``)
    data, get_batch, …      ranges of scripts around what gets the next batch; Lightning's ``…_dataloader_next``
    checkpoint, logging, …  ranges of scripts around what saves and logs
    evaluate, validation, … ranges of scripts around passes that train nothing

A collection belongs to the step that began last before it, data to the one whose first op comes next; without ops to the one that
begins next, or in whose range it is.

Ranges named ``checkpoint`` are also those around activations that are not kept: these run operators of a forward, as a part of it
or again in a backward, or come several times in every step. A range that holds a backward or an update is a step, whatever its
name.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd

from pptrace.intervals import EMPTY, intersect, lengths_within, merge, subtract, union
from pptrace.model.device import DeviceWork, RangedPauses
from pptrace.model.join_tables import concat_tables
from pptrace.model.tables import COMPUTE_KINDS, GARBAGE_COLLECTION, Bool, Int64, as_category, ops_table
from pptrace.model.traces import Category, Events, is_of_forward
from pptrace.recognise.ops.infer_from_operators import engine_nodes
from pptrace.recognise.ops.label_steps import LaunchIndex
from pptrace.slices import rows_among

DATA, CHECKPOINT, LOGGING, EVAL = "DATA", "CHECKPOINT", "LOGGING", "EVAL"
_NAMES = {
    GARBAGE_COLLECTION: r"(?:python[ _])?gc|gc[._ ]collect|garbage[ _-]?collect(?:ion)?",
    DATA: r"enumerate\(DataLoader\)#\w+\.__next__|(?:get|load|next|fetch|read)[ _-]?(?:batch|data)|data(?:[ _-]?load(?:er|ing)?)?"
    r"|batch[ _-]generator|\[pl\]\[profile\].*dataloader_next|pp1:DATA step=\d+",
    CHECKPOINT: r"(?:(?:sav|writ)(?:e|ing)[ _-])?(?:model[ _-])?checkpoint(?:ing|s)?(?:[ _-](?:sav|writ)(?:e|ing))?",
    LOGGING: r"log(?:ging)?(?:[ _-](?:metrics|loss|step))?",
    EVAL: r"(?:eval(?:uat(?:e|ion|ing))?|validat(?:e|ion|ing))(?:[ _-](?:step|loop|epoch|pass))?",
}
"""The names of ranges of each kind."""
_PATTERNS = {kind: re.compile(rf"^(?:pptrace\.mark: )?(?:{names})\Z", re.IGNORECASE) for kind, names in _NAMES.items()}
_COLLECTION = re.compile(r"^Python GC\Z")
"""The name of a collection among the events of Python."""


def with_named_ranges(ops: pd.DataFrame, events: Events, work: DeviceWork) -> pd.DataFrame:
    """The ops with the ranges of these kinds among the events, where marks have none and steps are known. An evaluation lasts
    as long as what it launched.
    """
    for kind in _NAMES:
        if events.names and not rows_among(ops["kind"], (kind,)).any():
            ops = _with_ranges(ops, events, kind, LaunchIndex(work) if kind == EVAL else None)
    return ops


def _with_ranges(ops: pd.DataFrame, events: Events, kind: str, launches: LaunchIndex | None) -> pd.DataFrame:
    rows = found_ranges(events, kind)
    if len(rows) and kind != GARBAGE_COLLECTION:  # for which all threads stand still
        rows = rows[np.isin(events.thread[rows], working_threads(events))]
        rows = rows[~events.intervals_of(rows).are_inside_another()]
    if len(rows) and kind == CHECKPOINT:  # its name says that it writes, or does not come several times a step
        num_steps = len(_begins(ops, kind)[0])
        counts = np.bincount(events.name_id[rows], minlength=len(events.names))
        is_seldom = events.named(_SAVES, rows) | (counts < _MOST_SAVES * num_steps)
        rows = rows[is_seldom[events.name_id[rows]]]
    return with_spans(ops, kind, events.start_ns[rows], events.ends_of(rows), launches) if len(rows) else ops


def _begins(ops: pd.DataFrame, kind: str) -> tuple[pd.Series[Any], pd.DataFrame, bool]:
    """(begins of the steps, in order; the rows of steps that tell them; whether these are ranges of steps).

    A step begins with its range, or where steps have none with its first op, before which its data is loaded.
    """
    is_step, is_op = ops["kind"] == "STEP", rows_among(ops["kind"], COMPUTE_KINDS)
    has_ranges = bool(is_step.any()) and not (kind == DATA and is_op.any())
    of_steps = ops[(is_step if has_ranges else is_op) & (ops["step"] >= 0)]
    return of_steps.groupby("step")["start_ns"].min().sort_values(), of_steps, has_ranges


def with_spans(
    ops: pd.DataFrame, kind: str, start: Int64, end: Int64, launches: LaunchIndex | None = None
) -> pd.DataFrame:
    """The ops with spans of a kind at these times, each of the step that began last before it, data behind that one's last op
    of the next one; as they are where no step is known. With ``launches`` they last as long as what they launched.
    """
    begins, of_steps, has_ranges = _begins(ops, kind)
    if begins.empty:
        return ops
    clock = np.full(len(start), "host", dtype=object)
    if launches is not None:
        found = launches.spans(start, end, communication=False)
        start, end = (np.where(found.launched, *times) for times in ((found.start_ns, start), (found.end_ns, end)))
        clock[found.launched] = "device"
    begun = np.searchsorted(begins.to_numpy(), start, side="right")
    index = np.maximum(begun - 1, 0)
    if kind == DATA:
        # The next step's comes behind the range of a step, or what its host began last: devices run behind their hosts.
        of_hosts = of_steps if has_ranges else of_steps[of_steps["clock"] == "host"]
        latest = of_hosts.groupby("step")["end_ns" if has_ranges else "start_ns"].max()
        is_next = (begun == 0) | (start >= latest.reindex(begins.index, fill_value=begins.iloc[0]).to_numpy()[index])
        index = np.where(is_next, np.minimum(begun, len(begins) - 1), index)
    step = begins.index.to_numpy()[index]
    table = ops_table({"kind": kind, "step": step, "start_ns": start, "end_ns": end, "clock": as_category(clock)})
    return concat_tables([ops, table])


_LEAST_WORK = 0.1
_STEP, _UPDATE = re.compile(r"ProfilerStep#|pp1:STEP "), re.compile(r"Optimizer\.step#|pp1:OPTIMIZER ")


def working_threads(events: Events) -> Int64:
    """The threads that train: what others do keeps no rank from computing. Those of the ranges of steps, else those of updates
    that no backward runs, else those that run operators or launch, a tenth of what the busiest one has at least.
    """
    marked = events.rows_named(_STEP, Category.ANNOTATION)
    if not len(marked):
        marked = events.rows_named(_UPDATE, Category.ANNOTATION)
        nodes = engine_nodes(events)
        marked = marked[~events.are_within(nodes, events.thread[marked], events.start_ns[marked])]
    if len(marked):
        return np.unique(events.thread[marked])
    works = events.is_of(Category.CPU_OP, Category.RUNTIME)
    threads, counts = np.unique(events.thread[works], return_counts=True)
    return threads[counts >= _LEAST_WORK * counts.max()] if len(threads) else np.unique(events.thread)


_SAVES = re.compile(r"sav|writ", re.IGNORECASE)
_MOST_SAVES = 2
"""Ranges a step that may be of one name and save something."""


def found_ranges(events: Events, kind: str) -> Int64:
    """The events of a kind, by their names and by what runs in them, on whatever thread."""
    rows = events.rows_named(_PATTERNS[kind], Category.ANNOTATION)
    if kind == GARBAGE_COLLECTION:
        rows = np.union1d(rows, events.rows_named(_COLLECTION, Category.PYTHON))
    if not len(rows):
        return rows
    nodes = engine_nodes(events)
    trained = np.append(nodes, events.rows_named(_UPDATE, Category.ANNOTATION))
    if kind == CHECKPOINT:
        rows = rows[~events.are_within(nodes, events.thread[rows], events.start_ns[rows])]
        trained = np.append(trained, _of_forwards(events))
    return rows[~_hold(events, rows, trained)]


_LEAST_PAUSE_NS = 500_000
IN_BACKWARD = "backward"


def ranges_around(events: Events, pauses: Int64) -> RangedPauses:
    """The parts of some pauses between operators that lie in ranges of threads that train, each in the innermost one, by its name
    without numbers; pauses in no range between two nodes of autograd's engine are in a backward. Ranges of steps say nothing.
    """
    rows = np.flatnonzero((events.category == Category.ANNOTATION) & ~events.named(_STEP)[events.name_id])
    rows = rows[lengths_within(pauses, events.start_ns[rows], events.ends_of(rows)) >= _LEAST_PAUSE_NS]
    rows = rows[np.isin(events.thread[rows], working_threads(events))] if len(rows) else rows
    steps, updates = (events.rows_named(pattern, Category.ANNOTATION) for pattern in (_STEP, _UPDATE))
    is_step = _hold(events, rows, updates) & _hold(events, rows, _of_forwards(events))
    rows = rows[~(is_step | _hold(events, rows, steps))]
    code = events.codes_without_numbers(rows)
    found, named = dict[str, Int64](), EMPTY
    for number in sorted(np.unique(code), key=lambda number: np.median(events.dur_ns[rows[code == number]])):
        same = rows[code == number]
        inside = subtract(intersect(union(events.start_ns[same], events.ends_of(same)), pauses), named)
        found[events.names[events.name_id[same[0]]]], named = inside, merge(named, inside)
    nodes = engine_nodes(events)
    is_between = np.isin(pauses[:, 0], events.ends_of(nodes)) & np.isin(pauses[:, 1], events.start_ns[nodes])
    found[IN_BACKWARD] = subtract(pauses[is_between], named)
    times = np.concatenate(list(found.values()))
    name = np.repeat(np.arange(len(found)), [len(of_name) for of_name in found.values()])
    return RangedPauses(times[:, 0].copy(), times[:, 1].copy(), name, tuple(found))


def _of_forwards(events: Events) -> Int64:
    """The operators of a model's forwards."""
    named = np.array(["::" in name and is_of_forward(name) for name in events.names], dtype=np.bool_)
    return np.flatnonzero(named[events.name_id] & (events.category == Category.CPU_OP))


def _hold(events: Events, rows: Int64, others: Int64) -> Bool:
    """Mark the ranges in which another event begins on their thread, later than they do."""
    held = np.zeros(len(rows), dtype=np.bool_)
    for thread in np.unique(events.thread[rows]).tolist():
        starts = np.sort(events.start_ns[others[events.thread[others] == thread]])
        chosen = np.flatnonzero(events.thread[rows] == thread)
        first, last = events.start_ns[rows[chosen]], events.ends_of(rows[chosen])
        held[chosen] = np.searchsorted(starts, first, side="right") < np.searchsorted(starts, last)
    return held
