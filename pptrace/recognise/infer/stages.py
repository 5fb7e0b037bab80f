"""Stages, chunks and microbatches of ops and messages: what is known when the ranks are joined, and how they are filled in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from msgspec import Struct

from pptrace.marks import P2P
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS, MESSAGE_CALLS, with_categories
from pptrace.recognise.groups.axes import Groups
from pptrace.recognise.labels.label import with_stage_of_chunk
from pptrace.recognise.messages.messages_from_plan import PRODUCERS, PlanOf, cross_rank_ops, match_by_adjacent_ops
from pptrace.schedule.actions import Action
from pptrace.slices import distinct_rows, rows_among, rows_where

if TYPE_CHECKING:
    from pptrace.recognise.infer.explanations import Explanation


TORCH = "torch.distributed.pipelining"
EXACT = (TORCH, "pptrace", "unlabelled")
"""Frameworks whose messages are those that moved and no others; others label functions that may move four."""


class JoinedRanks(Struct, frozen=True):
    """The joined ranks of a run, and what is known of their pipeline.

    ``ops`` and ``comms`` have unknown stages where no label names them; ``mesh`` is that of labels and groups, or the one that
    the facts of the run declare (``is_declared``). By rank ``calls`` has its communication, ``distributed`` what its profiler
    wrote of the job. ``framework`` is that of the labels. On the ``paired`` ranks the microbatches of backwards are those of
    their forwards, not only counted. ``tells_sizes``: the run itself tells the sizes of its pipelines.
    """

    ops: pd.DataFrame
    comms: pd.DataFrame
    mesh: MeshInfo
    calls: Mapping[int, pd.DataFrame]
    groups: Groups
    distributed: Mapping[int, Mapping[str, Any]]
    framework: str
    is_declared: bool
    paired: frozenset[int]
    tells_sizes: bool


class StageAssignment(Struct, frozen=True):
    """The tables with the stages that are certain, the mesh with its number of chunks, and lines about what was inferred.

    ``explanations`` is every schedule that the traced ranks may have run where ranks of their pipelines have no trace, None
    where none lacks one; ``is_complete``: all that there may be were tried.
    """

    ops: pd.DataFrame
    comms: pd.DataFrame
    mesh: MeshInfo
    notes: tuple[str, ...] = ()
    explanations: tuple[Explanation, ...] | None = None
    is_complete: bool = True


def known_stages(joined: JoinedRanks) -> StageAssignment | None:
    """The tables as they are, where all ranks of the pipelines have a trace and all ops and messages a stage; None otherwise."""
    if not joined.tells_sizes and lacks_ranks(joined):
        return None
    comms = without_incomplete_pipelines(joined)
    if lack_stages(joined.ops).any() or lack_stages(comms).any():
        return None
    return StageAssignment(joined.ops, comms, joined.mesh)


def lack_stages(table: pd.DataFrame) -> pd.Series[bool]:
    """Mark the ops or messages of a microbatch whose stage is not known."""
    lacking: pd.Series[bool] = (table["microbatch"] >= 0) & (table["stage"] < 0)
    return lacking


def lacks_ranks(joined: JoinedRanks) -> bool:
    """Return whether ranks of the pipeline have no trace: by its groups, by stages that no rank holds, or for a single rank
    that is not the only one of the run.
    """
    ops, comms, mesh, calls = joined.ops, joined.comms, joined.mesh, joined.calls
    compute = rows_where(ops[["rank", "stage"]], rows_among(ops["kind"], COMPUTE_KINDS) & (ops["microbatch"] >= 0))
    ranks = set(compute["rank"].unique().tolist())
    if not ranks:
        return False
    pipelines = joined.groups.pipelines
    if joined.is_declared or (pipelines and mesh.pipelines == pipelines):
        return any(ranks & set(pipeline) and set(pipeline) - set(calls) for pipeline in mesh.pipelines)
    stages = {stage for stage in compute["stage"].unique().tolist() if stage >= 0}
    if stages and len(stages) <= max(stages):
        return True
    if len(ranks) > 1:
        return not stages and mesh.in_order and not mesh.is_guess and mesh.num_ranks > len(calls)
    messages = comms[comms["rank"].isin(ranks) & (comms["axis"] == "pp") & rows_among(comms["kind"], P2P)]
    is_sending = bool(len(messages)) or any(
        calls[rank]["kind"].isin(MESSAGE_CALLS).any() for rank in ranks if rank in calls
    )
    return is_sending or (mesh.is_guess and joined.framework not in EXACT) or mesh.num_ranks > len(calls)


def without_incomplete_pipelines(joined: JoinedRanks) -> pd.DataFrame:
    """Drop messages of pipelines in which some rank's ops were inferred without its messages: they are matched from the calls
    instead (:mod:`pptrace.recognise.messages.comms_from_calls`).
    """
    ops, comms, mesh = joined.ops, joined.comms, joined.mesh
    inferred = set(ops.loc[(ops["source"] == "inferred") & rows_among(ops["kind"], COMPUTE_KINDS), "rank"].tolist())
    is_message = (comms["axis"] == "pp") & rows_among(comms["kind"], P2P)
    with_messages = set(comms.loc[is_message, "rank"].tolist())
    incomplete = [
        p
        for p in mesh.pipelines
        if (ranks_with_ops := inferred & set(p)) & with_messages and ranks_with_ops - with_messages
    ]
    return comms[~(is_message & comms["rank"].isin([rank for p in incomplete for rank in p]))] if incomplete else comms


Layout = Callable[[int, int, int], int]
"""(chunk, pipeline rank, p) → stage."""


def with_stages(table: pd.DataFrame, pp_ranks: Mapping[int, int], pp: int, layout: Layout) -> pd.DataFrame:
    """Fill in the stages of ops or messages with a microbatch by their chunks, also in the texts of overlapped pairs."""
    lacking = (table["microbatch"] >= 0) & (table["stage"] < 0)
    if not lacking.any():
        return table
    filled, rows = table.copy(), table[lacking]
    chunk = rows["chunk"].clip(lower=0)
    distinct, index = distinct_rows(np.stack((chunk.to_numpy(), rows["rank"].to_numpy()), axis=1))
    filled.loc[lacking, "stage"] = np.array([layout(c, pp_ranks[rank], pp) for c, rank in distinct])[index]
    if "pair" not in table:
        return filled
    filled.loc[lacking, "chunk"] = chunk
    pairs = rows[rows["pair"] != ""]
    if pairs.empty:
        return filled
    codes, texts_of_pairs = pd.factorize(pairs["pair"].astype(object))
    of_rank, index = distinct_rows(np.stack((codes, pairs["rank"].to_numpy()), axis=1))

    def with_layout(text: str, pp_rank: int) -> str:
        return with_stage_of_chunk(text, lambda chunk: layout(chunk, pp_rank, pp))

    texts = filled["pair"].astype(object)
    new = [with_layout(texts_of_pairs[code], pp_ranks[rank]) for code, rank in of_rank]
    texts[pairs.index] = np.array(new, dtype=object)[index]
    return with_categories(filled.assign(pair=texts))


def with_actions(ops: pd.DataFrame, planned: Iterable[tuple[Any, Sequence[Action]]]) -> pd.DataFrame:
    """Fill in stages, chunks and microbatches of some rows by the actions of a plan; rows that have none are of none."""
    filled = ops.copy()
    for labels, actions in planned:
        for name in ("stage", "chunk", "microbatch"):
            filled.loc[labels, name] = [getattr(action, name) for action in actions] or -1
    return filled


def messages_of_plan(
    comms: pd.DataFrame, ops: pd.DataFrame, plan_of: PlanOf, mesh: MeshInfo
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Assign the plan's stages and microbatches to messages, in the order of the ops that send or receive them; with warnings.
    ``ops`` have theirs.
    """
    lacking = comms[(comms["microbatch"] >= 0) & (comms["stage"] < 0)].sort_values("start_ns", kind="stable")
    filled, is_possible = comms.copy(), True
    for (rank, step, kind, direction), rows in lacking.groupby(["rank", "step", "kind", "direction"], observed=True):
        pp_rank = mesh.pp_rank(int(str(rank)))
        if pp_rank is None or direction not in PRODUCERS:
            continue
        planned = list(cross_rank_ops(plan_of(int(str(step))), pp_rank, str(direction), sends=kind == "send"))
        # Combined send-receive functions are called on all stages, also where one side is absent.
        is_possible &= int((rows["axis"] == "pp").sum()) <= len(planned)
        actions = planned[: len(rows)]
        filled.loc[rows.index[: len(actions)], "stage"] = [action.stage for action in actions]
        filled.loc[rows.index[: len(actions)], "microbatch"] = [action.microbatch for action in actions]
        filled.loc[rows.index[len(actions) :], "microbatch"] = -1
    if is_possible:
        return filled, ()
    name = plan_of(int(ops["step"].iloc[0])).name
    chosen = match_by_adjacent_ops(comms, ops, plan_of, mesh)
    if chosen is not None:
        warning = (
            f"there are more labelled messages than {name} has: only those next to an op that sends or receives in "
            f"{name} are counted"
        )
        return chosen, (warning,)
    line = (
        f"there are more labelled messages than {name} has, and the real ones cannot be identified: the labelled messages of the "
        "pipeline are left out, so that exposed communication may count as bubble"
    )
    return comms[comms["axis"] != "pp"], (line,)
