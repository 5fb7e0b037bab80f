"""Ops that name a chunk and no stage → stages, by how the ranks' chunks hang together.

    interleaved   stage = chunk · p + r                  (Megatron-LM's virtual pipeline)
    V             stage = r, and 2p − 1 − r for chunk 1  (zbv, v-half, DualPipeV)

Which of the two it is, the first microbatch shows: its second chunk begins on the rank that holds stage p.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from pptrace.model.tables import Int64


def placed_stages(ops: pd.DataFrame, pp_rank_of: Mapping[int, int]) -> Int64:
    """Shape (n,): the stage of each op; -1 where it has no chunk.

    Args:
        ops: columns rank, kind, chunk and start_ns of all ranks of a run, roughly on one clock.
        pp_rank_of: each rank's place in its pipeline.
    """
    pp = max(pp_rank_of.values(), default=0) + 1
    own = np.array([pp_rank_of.get(rank, 0) for rank in ops["rank"].tolist()], dtype=np.int64)
    chunk = ops["chunk"].to_numpy(dtype=np.int64)
    stage = np.where(_is_v(ops, own, pp) & (chunk == 1), 2 * pp - 1 - own, chunk * pp + own)
    return np.where(chunk >= 0, stage, -1)


def _is_v(ops: pd.DataFrame, own: Int64, pp: int) -> bool:
    """Whether chunk 1 of the first forward begins on the last rank; with two chunks, as a V has."""
    if len(set(own.tolist())) < 2 or ops["chunk"].max() != 1:
        return False
    second = ((ops["kind"] == "F") & (ops["chunk"] == 1)).to_numpy()
    if not second.any():
        return False
    first = ops["start_ns"].to_numpy()[second].argmin()
    return bool(own[second][first] == pp - 1)
