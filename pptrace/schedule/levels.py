"""The levels of a plan's rows: what can run at once, if everything takes as long as everything else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


def levels_of(rank_ptr: Int32, rank: Int32, needed: npt.NDArray[np.integer]) -> Int32:
    """The level of each row: the length of the longest chain of rows that lead to it; −1 where it never gets to run.

    ``needed`` has in its columns the rows that each row needs, −1 where the plan lacks one, and the number of rows where nothing
    is needed. Lets every rank run its next action, if that can run, for each level.
    """
    num_rows = len(needed)
    awaited = _awaited(needed, rank)
    level = np.full(num_rows, -1, np.int32)
    has_run = np.zeros(num_rows + 2, np.bool_)  # the last stands for a missing row, the one before it for none
    has_run[num_rows] = True
    columns = [np.ascontiguousarray(column) for column in awaited.T]
    next_row, end = rank_ptr[:-1].astype(np.intp), rank_ptr[1:]
    number = check_ends_at = 0
    while True:
        if number == check_ends_at:  # no rank ends earlier
            has_more = next_row < end
            next_row, end = next_row[has_more], end[has_more]
            check_ends_at = number + int((end - next_row).min(initial=num_rows))
        can_run = has_run[columns[0][next_row]]
        for column in columns[1:]:
            can_run &= has_run[column[next_row]]
        rows = next_row[can_run]
        if not len(rows):
            return level
        level[rows] = number
        has_run[rows] = True
        next_row += can_run
        number += 1


def _awaited(needed: npt.NDArray[np.integer], rank: Int32) -> npt.NDArray[np.integer]:
    """Rows that each row needs and that do not come before it on its own rank anyway, in as few columns as hold them."""
    num_rows = len(needed)
    before = np.arange(num_rows)[:, np.newaxis]
    is_before = (needed >= 0) & (needed < before) & (rank[np.minimum(needed, num_rows - 1)] == rank[:, np.newaxis])
    awaited = np.sort(np.where(is_before, num_rows, needed), axis=1)
    most = int(np.count_nonzero(awaited < num_rows, axis=1).max(initial=0))
    return awaited[:, : max(1, most)]
