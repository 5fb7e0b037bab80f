"""Compute of ranks without ops of a pipeline, and recompute in backwards, as bars of kinds of their own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from pptrace.analysis.aligned import AlignedRun
from pptrace.model.tables import COMPUTE_KINDS, OPS, Int64, make_table
from pptrace.timeline.lanes import Lane

COMPUTE, RECOMPUTE = "COMPUTE", "RECOMPUTE"
"""Kinds of these bars: kernels, or operators on the host, whatever microbatch they were of."""


def ops_with_compute(data: AlignedRun) -> pd.DataFrame:
    """The ops of a run and its recompute, and for each rank that has no op of a microbatch the times of its compute."""
    unlabelled = {rank: lane.compute for rank, lane in unlabelled_lanes(data).items()}
    again = {rank: lane.recompute for rank, lane in data.lanes.items() if len(lane.recompute)}
    tables = [_rows(kind, times) for kind, times in ((COMPUTE, unlabelled), (RECOMPUTE, again)) if times]
    return pd.concat([data.ops, *tables], ignore_index=True) if tables else data.ops


def _rows(kind: str, times_of: Mapping[int, Int64]) -> pd.DataFrame:
    """A row for each interval of some ranks."""
    times = np.concatenate(list(times_of.values()))
    ranks = np.repeat(list(times_of), [len(times) for times in times_of.values()])
    known = {"rank": ranks, "start_ns": times[:, 0], "end_ns": times[:, 1], "kind": np.full(len(ranks), kind)}
    empty = {"str": np.full(len(ranks), ""), "int": np.full(len(ranks), -1)}
    columns = {name: known.get(name, empty["str" if dtype == "str" else "int"]) for name, dtype in OPS.items()}
    return make_table(OPS, columns)


def unlabelled_lanes(data: AlignedRun) -> Mapping[int, Lane]:
    """The lane of each rank that computed, and has no op of a microbatch."""
    kinds = data.ops["kind"]
    labelled = set(pd.unique(data.ops["rank"][kinds.isin(COMPUTE_KINDS)]).tolist())
    return {rank: lane for rank, lane in data.lanes.items() if rank not in labelled and len(lane.compute)}
