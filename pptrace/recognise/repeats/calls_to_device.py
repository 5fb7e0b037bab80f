"""Calls by which a host drives its device, in order: a token for each, the same for calls that ask for the same."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.intervals import Int64, reduce_ranges
from pptrace.model.device import Rows
from pptrace.model.traces import Category, Events
from pptrace.recognise.device.idle import SYNCHRONISES, named, runtime_rows
from pptrace.recognise.device.work import device_rows, launch_calls

Bool = npt.NDArray[np.bool_]

_LAUNCHES = re.compile(r"Launch(?!Host)")
_GRAPH = re.compile(r"GraphLaunch")
_PROFILER = re.compile(r"^(?:ProfilerStep#|pp1:)")
_NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Calls in order of their begin; ``work_start_ns`` is −1 where no work of theirs was recorded.

    ``launches`` are those that ask for more than a copy, a fill or a wait; ``is_graph`` of them those of CUDA graphs. Without a
    device they are the outermost operators and ranges of the thread that has most of them.
    """

    token: Int64
    start_ns: Int64
    end_ns: Int64
    work_start_ns: Int64
    launches: Bool
    is_graph: Bool

    def __len__(self) -> int:
        return len(self.token)

    def where(self, chosen: Bool | slice) -> Calls:
        times = (self.start_ns[chosen], self.end_ns[chosen], self.work_start_ns[chosen])
        return Calls(self.token[chosen], *times, self.launches[chosen], self.is_graph[chosen])


def calls_to_device(events: Events) -> Calls:
    """The calls of a rank: launches by the kernel they launch, graphs by the names of all of their nodes."""
    rows = device_rows(events)
    if not len(rows):
        return _outermost_calls(events)
    launched_by = launch_calls(events, rows)
    if not (launched_by >= 0).any():
        return _work_itself(events, rows)
    return _runtime_calls(events, rows, launched_by)


def _runtime_calls(events: Events, rows: Rows, launched_by: Rows) -> Calls:
    order = np.argsort(launched_by, kind="stable")
    order = order[np.searchsorted(launched_by[order], 0) :]
    launching, first, count = np.unique(launched_by[order], return_index=True, return_counts=True)
    calls = np.union1d(launching, np.union1d(runtime_rows(events, _LAUNCHES), runtime_rows(events, SYNCHRONISES)))
    at = np.searchsorted(calls, launching)
    work, num_work, work_start = (np.full(len(calls), _NONE, dtype=np.int64) for _ in range(3))
    number_of_name = np.random.default_rng(0).integers(np.iinfo(np.int64).max >> 1, size=len(events.names))
    of_nodes = number_of_name[events.name_id[rows[order]]]
    work[at], num_work[at] = np.add.reduceat(of_nodes, first), count  # in whatever order its nodes ran
    work_start[at] = reduce_ranges(np.minimum, events.start_ns[rows[order]], first, first + count)
    launches = named(events, _LAUNCHES)[events.name_id[calls]]
    return Calls(
        _tokens(events.name_id[calls].astype(np.int64), work, num_work),
        events.start_ns[calls],
        events.ends_of(calls),
        work_start,
        launches,
        named(events, _GRAPH)[events.name_id[calls]] | (launches & (num_work > 1)),
    )


def _work_itself(events: Events, rows: Rows) -> Calls:
    """The kernels of a trace without runtime calls, in the order in which they ran."""
    is_kernel = events.category[rows] == Category.KERNEL
    start = events.start_ns[rows]
    return Calls(
        events.name_id[rows].astype(np.int64), start, events.ends_of(rows), start, is_kernel, np.zeros_like(is_kernel)
    )


def outermost_ranges(events: Events, thread: int | None = None) -> Rows:
    """Rows of the operators and ranges of a thread that are in no other one; without one of the thread that has most of them."""
    on_host = (events.category == Category.CPU_OP) | (events.category == Category.ANNOTATION)
    chosen = on_host if thread is None else on_host & (events.thread == thread)
    rows = np.flatnonzero(chosen & ~named(events, _PROFILER)[events.name_id])
    of_threads = [of[~events.intervals_of(of).are_inside_another()] for of in events.rows_by_thread(rows).values()]
    return max(of_threads, key=len, default=rows)


def _outermost_calls(events: Events) -> Calls:
    outermost = outermost_ranges(events)
    every = np.ones(len(outermost), dtype=np.bool_)
    return Calls(
        events.name_id[outermost].astype(np.int64),
        events.start_ns[outermost],
        events.ends_of(outermost),
        np.full(len(outermost), _NONE, dtype=np.int64),
        every,
        ~every,
    )


def _tokens(*columns: Int64) -> Int64:
    numbers = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        codes, kinds = pd.factorize(column)
        numbers = pd.factorize(numbers * max(len(kinds), 1) + codes)[0].astype(np.int64)
    return numbers
