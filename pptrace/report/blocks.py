"""Ops of a long step that are too short to be distinguished, as blocks."""

from __future__ import annotations

import numpy as np
import pandas as pd

from pptrace.model.tables import COMPUTE_KINDS, FORWARD_KINDS

MOST_BARS = 6_000
"""Up to this number of ops each gets a bar: a browser draws them in well under a second."""
WIDTH_PX = 1_200
"""Width of a timeline, about."""
_THIN_PX = 4
_GAP_PX = 1
_BLOCKS_PER_ROW = 60


def with_blocks(ops: pd.DataFrame, start_ns: int, shown_ns: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Merge neighbours too thin to be distinguished where ``shown_ns`` from ``start_ns`` are shown.

    Returns the other ops (schema OPS), and the blocks: rank, start_ns, end_ns, num_forward, num_backward and ``backward_share``,
    of the time of its ops. Few ops are all kept.
    """
    if len(ops) <= MOST_BARS:
        return ops, _blocks(ops.iloc[:0], np.empty(0, dtype=bool))
    pixel_ns = max(shown_ns, 1) / WIDTH_PX
    is_thin = ops["kind"].isin(COMPUTE_KINDS) & (ops["end_ns"] - ops["start_ns"] < _THIN_PX * pixel_ns)
    thin = ops[is_thin].sort_values(["rank", "start_ns"], kind="stable")
    rank, start, end = (thin[name].to_numpy(dtype=np.int64) for name in ("rank", "start_ns", "end_ns"))
    cell = (start - start_ns) // max(shown_ns // _BLOCKS_PER_ROW, 1)
    begins = np.ones(len(thin), dtype=bool)
    begins[1:] = (rank[1:] != rank[:-1]) | (start[1:] - end[:-1] > _GAP_PX * pixel_ns) | (cell[1:] != cell[:-1])
    return ops[~is_thin], _blocks(thin, begins)


def _blocks(ops: pd.DataFrame, begins: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> pd.DataFrame:
    """A row for each block; ``begins`` marks the first op of each."""
    is_forward = ops["kind"].isin(FORWARD_KINDS)
    length = (ops["end_ns"] - ops["start_ns"]).astype("int64")
    blocks = (
        ops[["rank", "start_ns", "end_ns"]]
        .assign(num_forward=is_forward.astype("int64"), num_backward=(~is_forward).astype("int64"))
        .assign(busy_ns=length, backward_ns=length.where(~is_forward, 0))
        .groupby(np.cumsum(begins))
        .agg(
            {"rank": "first", "start_ns": "min", "end_ns": "max"}
            | dict.fromkeys(("num_forward", "num_backward", "busy_ns", "backward_ns"), "sum")
        )
    )
    blocks["backward_share"] = blocks["backward_ns"] / blocks["busy_ns"].clip(lower=1)
    return blocks.drop(columns=["busy_ns", "backward_ns"]).reset_index(drop=True)
