"""Level of detail of a long step: ops too short to be distinguished are drawn as blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.intervals import Int64
from pptrace.model.tables import COMPUTE_KINDS, FORWARD_KINDS

MOST_BARS = 6_000
"""Up to this number of ops each gets a bar: a browser draws them in well under a second."""

_WIDTH_PX = 1_200
_THIN_PX = 4
_GAP_PX = 1
_BLOCKS_PER_ROW = 60


Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class View:
    """A range of time, ns, that a timeline shows about 1,200 pixels wide."""

    start_ns: int
    end_ns: int

    @property
    def pixel_ns(self) -> float:
        return max(self.end_ns - self.start_ns, 1) / _WIDTH_PX


@dataclass(frozen=True, slots=True)
class Detail:
    """Ops to draw one by one (schema OPS), and blocks of many.

    ``blocks`` has rank, start_ns, end_ns, num_forward, num_backward and ``backward_share``, of the time of its ops.
    """

    ops: pd.DataFrame
    blocks: pd.DataFrame


def select_detail(ops: pd.DataFrame, view: View) -> Detail:
    """Select what to draw of the ops for a view.

    Few ops are all drawn; else those outside the view are dropped, and neighbours too thin to be distinguished merge.
    Half a view on either side is included, so that moving a little shows no blank.
    """
    if len(ops) <= MOST_BARS:
        return Detail(ops, _blocks(ops.iloc[:0], np.empty(0, dtype=np.int64)))
    nearby = rows_near(ops, view)
    if len(nearby) <= MOST_BARS:
        return Detail(nearby, _blocks(nearby.iloc[:0], np.empty(0, dtype=np.int64)))
    is_thin = nearby["kind"].isin(COMPUTE_KINDS) & (nearby["end_ns"] - nearby["start_ns"] < _THIN_PX * view.pixel_ns)
    thin = nearby[is_thin].sort_values(["rank", "start_ns"], kind="stable")
    return Detail(nearby[~is_thin], _blocks(thin, _block_numbers(thin, view)))


def rows_near(table: pd.DataFrame, view: View) -> pd.DataFrame:
    """The rows of a table within a view, or within half its width on either side."""
    margin = (view.end_ns - view.start_ns) // 2
    return table[(table["end_ns"] > view.start_ns - margin) & (table["start_ns"] < view.end_ns + margin)]


def visible(intervals: Int64, view: View | None) -> Int64:
    """The intervals that are near a view and at least a pixel wide in it; all of them without a view."""
    if view is None:
        return intervals
    margin = (view.end_ns - view.start_ns) // 2
    start, end = intervals[:, 0], intervals[:, 1]
    is_near = (end > view.start_ns - margin) & (start < view.end_ns + margin)
    return intervals[is_near & (end - start >= view.pixel_ns)]


def _block_numbers(ops: pd.DataFrame, view: View) -> Numbers:
    """Index of each op's block: a new one begins at a gap, with a new rank, and at each 60th of the view."""
    rank, start, end = (ops[name].to_numpy(dtype=np.int64) for name in ("rank", "start_ns", "end_ns"))
    cell = (start - view.start_ns) // max((view.end_ns - view.start_ns) // _BLOCKS_PER_ROW, 1)
    begins = np.ones(len(ops), dtype=bool)
    begins[1:] = (rank[1:] != rank[:-1]) | (start[1:] - end[:-1] > _GAP_PX * view.pixel_ns) | (cell[1:] != cell[:-1])
    numbers: Numbers = np.cumsum(begins, dtype=np.int64)
    return numbers


def _blocks(ops: pd.DataFrame, numbers: Numbers) -> pd.DataFrame:
    is_forward = ops["kind"].isin(FORWARD_KINDS)
    length = (ops["end_ns"] - ops["start_ns"]).astype("int64")
    columns = pd.DataFrame(
        {
            "rank": ops["rank"],
            "start_ns": ops["start_ns"],
            "end_ns": ops["end_ns"],
            "num_forward": is_forward.astype("int64"),
            "num_backward": (~is_forward).astype("int64"),
            "busy_ns": length,
            "backward_ns": length.where(~is_forward, 0),
        }
    )
    blocks = columns.groupby(numbers).agg(
        {"rank": "first", "start_ns": "min", "end_ns": "max"}
        | dict.fromkeys(("num_forward", "num_backward", "busy_ns", "backward_ns"), "sum")
    )
    blocks["backward_share"] = blocks["backward_ns"] / blocks["busy_ns"].clip(lower=1)
    return blocks.drop(columns=["busy_ns", "backward_ns"]).reset_index(drop=True)
