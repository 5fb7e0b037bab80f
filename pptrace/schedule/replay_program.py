"""Nodes of a replay, as the rows of a plan's table, compiled to what a replay does level by level."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pptrace.schedule.plan_table import PlanTable

Index = npt.NDArray[Any]
"""Numbers of nodes, levels or latencies."""


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The n-th need of every node that has as many, in the order of a program.

    Those of level l are of its first nodes: they need the nodes ``source[l]``, and are the entries
    ``pointer[l]:pointer[l + 1]`` of ``latency``, the number of the time until what was needed is there; −1 for no time.
    """

    source: tuple[Index, ...]
    latency: Index
    pointer: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """The nodes that run, in order of their levels, within a level those with most needs first: of a table its rows.

    ``rows`` are their numbers, ``index`` where each node is in this order (those that never run: the number of nodes that run),
    ``levels`` where each level begins and ends, ``last`` the last row of each rank. ``before`` is a need of each node, of a row
    that before it on its rank, by level; the number of nodes that run where there is none.
    """

    rows: Index
    index: Index
    levels: tuple[slice, ...]
    before: tuple[Index, ...]
    inputs: tuple[Inputs, ...]
    last: Index
    most_rows: int
    """Largest number of nodes of one level."""


def compile_table(table: PlanTable, every_dependency: bool) -> Program:
    """Compile a table; without ``every_dependency`` those on earlier rows of the same rank are left out.

    A rank starts no action before all earlier ones have ended, unless an action takes a negative time.
    """
    num_rows, reader = len(table), table.dep_reader
    kept = np.flatnonzero(every_dependency | table.dep_is_message | (table.rank[table.dep] != table.rank[reader]))
    before = np.where(table.position > 0, np.arange(num_rows) - 1, num_rows)
    ends = np.bincount(
        table.rank[table.level >= 0], minlength=table.pp
    )  # the rows of a rank that run are its first ones
    last = (table.rank_ptr[:-1] + ends - 1)[ends > 0]
    return compile_nodes(table.level, before, (reader[kept], table.dep[kept], table.dep_message[kept]), last)


def compile_nodes(level: Index, before: Index, needs: tuple[Index, Index, Index], last: Index) -> Program:
    """Compile nodes that begin when all that they need has ended.

    Args:
        level: of each node, −1 for those that never run. What a node needs is of a lower level.
        before: a node that each needs; the number of nodes for none.
        needs: the other needs: (node, the node that it needs, the number of the latency between them, −1 for none), by node.
        last: the nodes of which a program has the places.
    """
    num_nodes, num_running = len(level), int(np.count_nonzero(level >= 0))
    reader, source, latency = needs
    num_inputs = np.bincount(reader, minlength=num_nodes)
    rows = np.lexsort((-num_inputs, level))[num_nodes - num_running :]
    index = np.full(num_nodes + 1, num_running, np.intp)  # the last stands for nothing
    index[rows] = np.arange(num_running)
    level_ptr = np.searchsorted(level[rows], np.arange(int(level.max(initial=-1)) + 2))
    first_input = np.concatenate(([0], np.cumsum(num_inputs)))
    inputs = []
    for number in range(num_inputs[rows].max(initial=0)):
        has_one = num_inputs[rows] > number
        entries = first_input[rows[has_one]] + number
        pointer = np.concatenate(([0], np.cumsum(has_one)))[level_ptr]
        inputs.append(Inputs(_split(index[source[entries]], pointer), latency[entries], tuple(pointer.tolist())))
    levels = tuple(slice(begin, end) for begin, end in pairwise(level_ptr.tolist()))
    most_rows = int(np.diff(level_ptr).max(initial=0))
    return Program(
        rows, index[:-1], levels, _split(index[before[rows]], level_ptr), tuple(inputs), index[last], most_rows
    )


def _split(values: Index, pointer: npt.NDArray[np.integer]) -> tuple[Index, ...]:
    bounds = pointer.tolist()
    return tuple(values[begin:end] for begin, end in pairwise(bounds))
