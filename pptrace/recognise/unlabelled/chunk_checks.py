"""Whether several chunks on each rank, which the order of forwards and backwards alone told, can be what ran.

Many programs run forwards and then backwards with messages between them: a ring runs them in the order of breadth-first chunks,
and a loop by hand may run the backwards of chunks in an order of its own. What a pipeline sends and receives, and the nodes of
autograd that a backward runs, tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.recognise.unlabelled.rank_order import MismatchError, Ops, evidence_of, forwards_behind


def contradiction_of_chunks(ranks: Sequence[RecognisedRank], ops: pd.DataFrame, mesh: MeshInfo) -> str:
    """What speaks against the chunks of these ranks, in words; "" where nothing does.

    Args:
        ranks: those whose host threads show the messages and operators.
        ops: of all ranks, with their stages.
        mesh: with the pipelines and the number of chunks.
    """
    inferred = ops[(ops["source"] == "inferred") & ops["kind"].isin(COMPUTE_KINDS) & (ops["stage"] >= 0)]
    by_rank = {int(str(rank)): own.sort_values("start_ns") for rank, own in inferred.groupby("rank")}
    known = [found for found in ranks if found.number in by_rank]
    last = (mesh.pp or 1) * (mesh.vpp or 1) - 1
    ratios = set()
    for found in known:
        own = by_rank[found.number]
        if len(set(own.groupby("step").size())) > 1:
            continue  # one step was cut off, and some of its messages without their ops
        for kind, planned in _planned(own, last).items():
            ratios.add(int((found.calls["kind"] == kind).sum()) / max(planned, 1))
    if any(not ratio.is_integer() for ratio in ratios) or len(ratios) > 1:
        return f"the ranks send and receive other numbers of messages than stages 0 to {last} do"
    for found in known:
        if not _runs_its_own(found, by_rank[found.number]):
            return f"backwards of rank {found.number} run the nodes of other forwards than in that order"
    return ""


def _planned(ops: pd.DataFrame, last: int) -> dict[str, int]:
    """How many messages the ops of a rank send and receive, each of one tensor."""
    forward, stage = (ops["kind"] == "F").to_numpy(), ops["stage"].to_numpy()
    ahead = np.count_nonzero(forward & (stage < last)), np.count_nonzero(~forward & (stage < last))
    behind = np.count_nonzero(forward & (stage > 0)), np.count_nonzero(~forward & (stage > 0))
    return {"send": int(ahead[0] + behind[1]), "recv": int(ahead[1] + behind[0])}


def _runs_its_own(found: RecognisedRank, ops: pd.DataFrame) -> bool:
    """Whether each backward runs the nodes of the forward of its stage and microbatch, as far as nodes are numbered."""
    evidence = evidence_of(found.number, found.host, found.calls, [-1] * len(found.calls))
    forwards, backwards = ops[ops["kind"] == "F"], ops[ops["kind"] == "B"]
    places = []
    for own, rows in ((forwards, evidence.operators), (backwards, evidence.engine)):
        start, end = own["start_ns"].to_numpy(), own["end_ns"].to_numpy()
        places.append(Ops(np.searchsorted(rows.start_ns, start), np.searchsorted(rows.start_ns, end), start, end))
    try:
        behind = forwards_behind(evidence, *places)
    except MismatchError:
        return False
    columns = ["step", "stage", "microbatch"]
    return behind is None or bool((forwards[columns].to_numpy()[behind] == backwards[columns].to_numpy()).all())
