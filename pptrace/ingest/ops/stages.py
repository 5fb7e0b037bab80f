"""Assign stages to ops that have a chunk and no stage, by the placement of chunks on ranks.

    interleaved   stage = chunk · p + r                  (Megatron-LM's virtual pipeline)
    V             stage = r, and 2p − 1 − r for chunk 1  (zbv, v-half, DualPipeV)

The first microbatch shows the placement: its chunk 1 begins on the rank of stage p.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pandas as pd

from pptrace.model.tables import Int64
from pptrace.schedule.placement import loop, zigzag
from pptrace.slices import group_codes


def assign_stages(ops: pd.DataFrame, pp_rank_of: Mapping[int, int]) -> Int64:
    """Stage of each op, shape (n,); -1 where it has no chunk.

    Args:
        ops: columns rank, kind, chunk and start_ns of all ranks of a run, roughly on one clock.
        pp_rank_of: pipeline rank by rank.
    """
    pp = max(pp_rank_of.values(), default=0) + 1
    pp_rank = np.array([pp_rank_of.get(rank, 0) for rank in ops["rank"].tolist()], dtype=np.int64)
    chunk = ops["chunk"].to_numpy(dtype=np.int64)
    is_chunk_1 = ((ops["kind"] == "F") & (ops["chunk"] == 1)).to_numpy()
    is_v = False  # a V: two chunks, and chunk 1 of the first microbatch begins on the last rank
    if len(set(pp_rank.tolist())) > 1 and chunk.max() == 1 and is_chunk_1.any():
        first = ops["start_ns"].to_numpy()[is_chunk_1].argmin()
        is_v = bool(pp_rank[is_chunk_1][first] == pp - 1)
    return stages_of_chunks(chunk, pp_rank, pp, is_v)


def stages_of_chunks(chunk: Int64, pp_rank: Int64, pp: int, is_v: bool) -> Int64:
    """Stage of each chunk of each pipeline rank, shape (n,), under loop placement or a V; -1 where either is -1."""
    chunks, ranks = cast(Any, chunk), cast(Any, pp_rank)  # the formulas of single stages hold for arrays of them
    stage = np.where(is_v & (chunk == 1), zigzag(1, ranks, pp), loop(chunks, ranks, pp))
    return np.where((chunk >= 0) & (pp_rank >= 0), stage, -1)


def number_chunks(ops: pd.DataFrame) -> Int64:
    """The index of each op's stage among the stages of its rank, shape (n,); −1 without a stage."""
    pair_of_row, pairs = pd.factorize(group_codes([ops["rank"], ops["stage"]]))
    row_of_pair = np.empty(len(pairs), dtype=np.int64)
    row_of_pair[pair_of_row] = np.arange(len(ops))
    of_pair = ops[["rank", "stage"]].iloc[row_of_pair]
    staged = of_pair["stage"].where(of_pair["stage"] >= 0)
    index = staged.groupby(of_pair["rank"]).rank(method="dense").fillna(0).to_numpy().astype(np.int64) - 1
    return index[pair_of_row]
