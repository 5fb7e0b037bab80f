"""Compute of ranks without ops of a pipeline, as bars of a kind of their own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from pptrace.analysis.aligned import AlignedRun
from pptrace.model.tables import COMPUTE_KINDS, OPS, make_table
from pptrace.timeline.lanes import Lane

COMPUTE = "COMPUTE"
"""Kind of these bars: kernels, or operators on the host, whatever microbatch they were of."""


def ops_with_compute(data: AlignedRun) -> pd.DataFrame:
    """The ops of a run, and for each rank that has none of a microbatch the times of its compute, where they are known."""
    lanes = unlabelled_lanes(data)
    if not lanes:
        return data.ops
    times = np.concatenate([lane.compute for lane in lanes.values()])
    ranks = np.repeat(list(lanes), [len(lane.compute) for lane in lanes.values()])
    unknown = np.full(len(ranks), -1)
    known = {"rank": ranks, "start_ns": times[:, 0], "end_ns": times[:, 1], "kind": np.full(len(ranks), COMPUTE)}
    empty = {"str": np.full(len(ranks), ""), "int": unknown}
    columns = {name: known.get(name, empty["str" if dtype == "str" else "int"]) for name, dtype in OPS.items()}
    return pd.concat([data.ops, make_table(OPS, columns)], ignore_index=True)


def unlabelled_lanes(data: AlignedRun) -> Mapping[int, Lane]:
    """The lane of each rank that computed, and has no op of a microbatch."""
    kinds = data.ops["kind"]
    labelled = set(pd.unique(data.ops["rank"][kinds.isin(COMPUTE_KINDS)]).tolist())
    return {rank: lane for rank, lane in data.lanes.items() if rank not in labelled and len(lane.compute)}
