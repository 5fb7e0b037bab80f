"""The part of the model that each kernel or operator is for: modules, or ranges that the program set.

What a backward runs is of the part of its forward. Autograd's engine evaluates nodes; the operator of the forward that created a
node has the node's sequence number, which torch counts on each thread. Where several threads counted the same numbers, it is the
operator that the node is named after. Gradients of a parameter are added up (``AccumulateGrad``) right behind the node that they
come from.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from pptrace.intervals import NestedIntervals
from pptrace.marks import PART, PREFIX
from pptrace.model.device import Rows
from pptrace.model.tables import Int32
from pptrace.model.traces import Category, Events
from pptrace.recognise.labels import read_label
from pptrace.recognise.ops.infer_from_operators import ENGINE

_MODULE = "nn.Module: "
_NO_PART = re.compile(rf"(?:gloo|mpi|ucc|[nrhx]ccl):|c10d|ProfilerStep|Optimizer\.|## |{re.escape(PREFIX)}")
"""Ranges that are no part of a model, as labels of ops are none: communication, steps, what the compiler writes, marks."""
_NODE = re.compile(re.escape(ENGINE))
_BACKWARD = re.compile(rf"{re.escape(ENGINE)}|Backward\d*$")
_ACCUMULATION = re.compile("AccumulateGrad$")
_NOT_IN_KEY = re.compile(rf"{re.escape(ENGINE)}: |\w+::|_|Backward\d*$")
"""The part of names that a node and the operator of its forward do not have in common: "AddmmBackward0" is of "aten::addmm"."""


def parts_of(events: Events, calls: Rows) -> tuple[Int32, tuple[str, ...]]:
    """(the part of the model that each call or operator is for, as an index into the names, the names).

    It is a module on the level on which modules are several, inside what only wraps them, else the innermost range that the
    program set; in a node of autograd, unless a range begins there, that of the node's forward; 0 of rows (−1) without any.
    """
    named = _NamedRanges(events)
    ranges = named.around(calls)
    nodes = events.rows_named(_NODE, Category.CPU_OP) if named else np.zeros(0, dtype=np.intp)
    of_forwards = nodes
    if len(nodes):
        of_forwards = _with_accumulations(events, nodes, named.around(forwards_of(events, nodes)))
    if _are_parts(events, of_forwards[of_forwards >= 0]):
        for thread, rows in events.rows_by_thread(nodes).items():
            inside = np.flatnonzero((calls >= 0) & (events.thread[calls] == thread))
            node = events.intervals_of(rows).innermost(events.start_ns[calls[inside]])
            inside, node = inside[node >= 0], rows[node[node >= 0]]
            of_forward = of_forwards[np.searchsorted(nodes, node)]
            chosen = (of_forward >= 0) & (ranges[inside] < node)  # no range that began within the node
            ranges[inside[chosen]] = of_forward[chosen]
    codes: dict[str, int] = {"": 0}
    code_of_name = np.zeros(len(events.names) + 1, dtype=np.int32)
    for name_id in np.unique(events.name_id[ranges[ranges >= 0]]).tolist():
        code_of_name[name_id] = codes.setdefault(events.names[name_id].removeprefix(_MODULE), len(codes))
    name_ids = np.append(events.name_id, len(events.names))  # the last one of those without a range
    return code_of_name[name_ids[ranges]], tuple(codes)


def _are_parts(events: Events, ranges: Rows) -> bool:
    """Return whether forwards have several ranges, or ones that are parts for sure: one alone may be around all of a forward."""
    names = [events.names[name_id] for name_id in np.unique(events.name_id[ranges]).tolist()]
    return len(names) > 1 or any(name.startswith((PART, _MODULE)) for name in names)


class _NamedRanges:
    """The ranges of a rank that name parts of the model, by thread: modules first."""

    def __init__(self, events: Events) -> None:
        self._events = events
        has_module_name = np.array([name.startswith(_MODULE) for name in events.names], dtype=np.bool_)
        modules = np.flatnonzero((events.category == Category.PYTHON) & has_module_name[events.name_id])
        annotations = np.flatnonzero((events.category == Category.ANNOTATION) & may_be_part(events)[events.name_id])
        self._of_threads = [(True, *part) for part in events.rows_by_thread(modules).items()]
        self._of_threads += [(False, *part) for part in events.rows_by_thread(annotations).items()]

    def __bool__(self) -> bool:
        return bool(self._of_threads)

    def around(self, calls: Rows) -> Rows:
        """The row of the range that each call, or operator, is in; -1 without any, and of calls that are not known (-1)."""
        events, around = self._events, np.full(len(calls), -1, dtype=np.intp)
        for is_module, thread, ranges in self._of_threads:
            chosen = np.flatnonzero((calls >= 0) & (around < 0) & (events.thread[calls] == thread))
            if not len(chosen):
                continue
            intervals, times = events.intervals_of(ranges), events.start_ns[calls[chosen]]
            if is_module:
                found = intervals.at_level(times, _level_of_parts(events, ranges, intervals))
            else:
                found = intervals.innermost(times)
            around[chosen] = np.where(found >= 0, ranges[found], -1)
        return around


def forwards_of(events: Events, nodes: Rows) -> Rows:
    """The operator of the forward that created each node of autograd's engine: the last one before it that was recorded with its
    sequence number; -1 where none was, or operators of several threads may be it.
    """
    operators = np.flatnonzero((events.category == Category.CPU_OP) & (events.correlation >= 0))
    operators = operators[~events.named(_BACKWARD, operators)[events.name_id[operators]]]
    numbers, of_operator = np.unique(events.correlation[operators], return_inverse=True)
    number = np.searchsorted(numbers, events.correlation[nodes])
    is_numbered = np.append(numbers, -2)[number] == events.correlation[nodes]
    keys = np.unique([_NOT_IN_KEY.sub("", name).lower() for name in events.names], return_inverse=True)[1]
    found, num_found = np.full(len(nodes), -1, dtype=np.intp), np.zeros((2, len(nodes)), dtype=np.int64)
    for thread in np.unique(events.thread[operators]).tolist():
        chosen = np.flatnonzero(events.thread[operators] == thread)
        order = np.sort(of_operator[chosen] * len(events) + operators[chosen])
        at = np.append(order, -1)[np.searchsorted(order, number * len(events) + nodes) - 1]
        is_one = is_numbered & (at >= 0) & (at // len(events) == number)
        agrees = is_one & (keys[events.name_id[at % len(events)]] == keys[events.name_id[nodes]])
        better = agrees | (is_one & (num_found[0] == 0))
        found[better] = at[better] % len(events)
        num_found += np.stack((is_one, agrees))
    found[(num_found[0] != 1) & (num_found[1] != 1)] = -1
    return found


def _with_accumulations(events: Events, nodes: Rows, ranges: Rows) -> Rows:
    """The ranges of nodes, those that add up gradients with that of the node before them on their thread."""
    is_sum = events.named(_ACCUMULATION, nodes)[events.name_id[nodes]]
    filled = ranges.copy()
    for thread in np.unique(events.thread[nodes]).tolist():
        at = np.flatnonzero(events.thread[nodes] == thread)
        before = np.maximum.accumulate(np.where(is_sum[at], -1, np.arange(len(at))))
        filled[at] = np.where(before >= 0, ranges[at[before]], -1)
    return filled


def may_be_part(events: Events) -> npt.NDArray[np.bool_]:
    """Mask of names, whether a range of it may name a part of the model."""
    return np.array([not (_NO_PART.match(name) or read_label(name)) for name in events.names], dtype=np.bool_)


def _level_of_parts(events: Events, ranges: Rows, intervals: NestedIntervals) -> int:
    """The level of the outermost modules that are several inside one: wrappers, as of DDP, have one alone. 1 where none are."""
    level, names = intervals.levels, events.name_id[ranges]
    inner = np.flatnonzero(intervals.enclosing >= 0)
    pairs = np.unique(np.stack((intervals.enclosing[inner], names[inner])), axis=1)
    around, num_names = np.unique(pairs[0], return_counts=True)
    several = around[num_names > 1]
    return int(level[several].min()) + 1 if len(several) else 1
