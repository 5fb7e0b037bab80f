"""The table of a plan compiled to what a replay does level by level."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pptrace.schedule.plan_table import Int32, PlanTable

Index = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The n-th dependency of every row that has as many, in the order of a program.

    Those of level l are of its first rows: they need the rows ``source[l]``, and are the entries
    ``pointer[l]:pointer[l + 1]`` of ``message``, which is −1 for what no message brings.
    """

    source: tuple[Index, ...]
    message: Int32
    pointer: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """The rows that run, in order of their levels, within a level those with most dependencies first.

    ``rows`` are their numbers in the table, ``index`` where each row of the table is in this order (those that never run: the
    number of rows that run), ``levels`` where each level begins and ends, ``last`` the last row of each rank.
    ``before`` is the row before each on its rank, by level; for the first of a rank it is the number of rows.
    """

    rows: Index
    index: Index
    levels: tuple[slice, ...]
    before: tuple[Index, ...]
    inputs: tuple[Inputs, ...]
    last: Index
    most_rows: int
    """Largest number of rows of one level."""


def compile_table(table: PlanTable, every_dependency: bool) -> Program:
    """Compile a table; without ``every_dependency`` those on earlier rows of the same rank are left out.

    A rank starts no action before all earlier ones have ended, unless an action takes a negative time.
    """
    num_rows, num_running = len(table), len(table.order)
    reader = table.dep_reader
    kept = np.flatnonzero(every_dependency | table.dep_is_message | (table.rank[table.dep] != table.rank[reader]))
    num_inputs = np.bincount(reader[kept], minlength=num_rows)
    rows = np.lexsort((-num_inputs, table.level))[num_rows - num_running :]
    index = np.full(num_rows + 1, num_running, np.intp)  # the last stands for the row before the first one of a rank
    index[rows] = np.arange(num_running)
    before = index[np.where(table.position[rows] > 0, rows - 1, num_rows)]
    first_input = np.concatenate(([0], np.cumsum(num_inputs)))
    inputs = []
    for number in range(num_inputs[rows].max(initial=0)):
        has_one = num_inputs[rows] > number
        entries = kept[first_input[rows[has_one]] + number]
        pointer = np.concatenate(([0], np.cumsum(has_one)))[table.level_ptr]
        inputs.append(
            Inputs(_split(index[table.dep[entries]], pointer), table.dep_message[entries], tuple(pointer.tolist()))
        )
    ends = np.bincount(table.rank[rows], minlength=table.pp)  # the rows of a rank that run are its first ones
    last = index[(table.rank_ptr[:-1] + ends - 1)[ends > 0]]
    bounds = table.level_ptr.tolist()
    levels = tuple(slice(begin, end) for begin, end in pairwise(bounds))
    most_rows = int(np.diff(table.level_ptr).max(initial=0))
    return Program(rows, index[:-1], levels, _split(before, table.level_ptr), tuple(inputs), last, most_rows)


def _split(values: Index, pointer: npt.NDArray[np.integer]) -> tuple[Index, ...]:
    bounds = pointer.tolist()
    return tuple(values[begin:end] for begin, end in pairwise(bounds))
