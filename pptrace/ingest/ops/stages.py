"""Assign stages to ops that have a chunk and no stage, by the placement of chunks on ranks.

    interleaved   stage = chunk · p + r                  (Megatron-LM's virtual pipeline)
    V             stage = r, and 2p − 1 − r for chunk 1  (zbv, v-half, DualPipeV)

The first microbatch shows the placement: its chunk 1 begins on the rank of stage p.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from pptrace.model.tables import Int64


def assign_stages(ops: pd.DataFrame, pp_rank_of: Mapping[int, int]) -> Int64:
    """Stage of each op, shape (n,); -1 where it has no chunk.

    Args:
        ops: columns rank, kind, chunk and start_ns of all ranks of a run, roughly on one clock.
        pp_rank_of: pipeline rank by rank.
    """
    pp = max(pp_rank_of.values(), default=0) + 1
    pp_rank = np.array([pp_rank_of.get(rank, 0) for rank in ops["rank"].tolist()], dtype=np.int64)
    chunk = ops["chunk"].to_numpy(dtype=np.int64)
    stage = np.where(_is_v(ops, pp_rank, pp) & (chunk == 1), 2 * pp - 1 - pp_rank, chunk * pp + pp_rank)
    return np.where(chunk >= 0, stage, -1)


def _is_v(ops: pd.DataFrame, pp_rank: Int64, pp: int) -> bool:
    """Whether the placement is a V: two chunks, and chunk 1 of the first microbatch begins on the last rank."""
    if len(set(pp_rank.tolist())) < 2 or ops["chunk"].max() != 1:
        return False
    is_chunk_1 = ((ops["kind"] == "F") & (ops["chunk"] == 1)).to_numpy()
    if not is_chunk_1.any():
        return False
    first = ops["start_ns"].to_numpy()[is_chunk_1].argmin()
    return bool(pp_rank[is_chunk_1][first] == pp - 1)
