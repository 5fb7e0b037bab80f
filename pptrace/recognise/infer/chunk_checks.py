"""Check whether several chunks per rank, inferred from the order of ops alone, are consistent with messages and autograd.

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
from pptrace.recognise.infer.evidence import MismatchError, Rows, evidence_of, outcome_of
from pptrace.recognise.infer.rank_order import Ops, forwards_behind
from pptrace.recognise.recognised_rank import RecognisedRank


def contradiction_of_chunks(ranks: Sequence[RecognisedRank], ops: pd.DataFrame, mesh: MeshInfo) -> str:
    """The contradiction to the chunks of these ranks, in words; "" without one.

    Args:
        ranks: those whose host threads show the messages and operators.
        ops: of all ranks, with their stages.
        mesh: with the pipelines and the number of chunks.
    """
    inferred = ops[(ops["source"] == "inferred") & ops["kind"].isin(COMPUTE_KINDS) & (ops["stage"] >= 0)]
    by_rank = {int(str(rank)): rank_ops.sort_values("start_ns") for rank, rank_ops in inferred.groupby("rank")}
    with_inferred_ops = [recognised for recognised in ranks if recognised.number in by_rank]
    last = (mesh.pp or 1) * (mesh.vpp or 1) - 1
    ratios = set()
    for recognised in with_inferred_ops:
        rank_ops = by_rank[recognised.number]
        if len(set(rank_ops.groupby("step").size())) > 1:
            continue  # one step was cut off, and some of its messages without their ops
        for kind, num_planned in _num_planned_messages(rank_ops, last).items():
            ratios.add(int((recognised.calls["kind"] == kind).sum()) / max(num_planned, 1))
    if any(not ratio.is_integer() for ratio in ratios) or len(ratios) > 1:
        return f"the ranks send and receive other numbers of messages than stages 0 to {last} do"
    for recognised in with_inferred_ops:
        if not _backwards_match_forwards(recognised, by_rank[recognised.number]):
            return f"backwards of rank {recognised.number} run the nodes of other forwards than in that order"
    return ""


def _num_planned_messages(ops: pd.DataFrame, last: int) -> dict[str, int]:
    """Number of messages that the ops of a rank send and receive, each of one tensor."""
    forward, stage = (ops["kind"] == "F").to_numpy(), ops["stage"].to_numpy()
    to_and_from_next = np.count_nonzero(forward & (stage < last)), np.count_nonzero(~forward & (stage < last))
    to_and_from_previous = np.count_nonzero(forward & (stage > 0)), np.count_nonzero(~forward & (stage > 0))
    return {
        "send": int(to_and_from_next[0] + to_and_from_previous[1]),
        "recv": int(to_and_from_next[1] + to_and_from_previous[0]),
    }


def _backwards_match_forwards(recognised: RecognisedRank, ops: pd.DataFrame) -> bool:
    """Return whether each backward runs the nodes of the forward of its stage and microbatch, as far as nodes are numbered."""
    evidence = evidence_of(recognised.number, recognised.host, recognised.calls, [-1] * len(recognised.calls))
    forwards, backwards = ops[ops["kind"] == "F"], ops[ops["kind"] == "B"]

    def rows_of(ops_of_kind: pd.DataFrame, rows: Rows) -> Ops:
        start, end = ops_of_kind["start_ns"].to_numpy(), ops_of_kind["end_ns"].to_numpy()
        return Ops(np.searchsorted(rows.start_ns, start), np.searchsorted(rows.start_ns, end), start, end)

    ops_and_rows = rows_of(forwards, evidence.operators), rows_of(backwards, evidence.engine)
    behind = outcome_of(lambda pair: forwards_behind(evidence, *pair), ops_and_rows)
    if isinstance(behind, MismatchError):
        return False
    columns = ["step", "stage", "microbatch"]
    return behind is None or bool((forwards[columns].to_numpy()[behind] == backwards[columns].to_numpy()).all())
