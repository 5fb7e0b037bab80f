"""Label messages with those of a known plan by the adjacent ops: a send follows the op that made it, a receive precedes its
reader.

A function that sends and receives in one call is called on all ranks of a pipeline, with nothing to send or to receive on some
of them: which of its messages there were, the plan says.

A receive comes right before the op that reads it, a send right after the op that made it. What a stage at an end of the pipeline
calls for a neighbour that it does not have moves nothing and is no message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import pandas as pd
from msgspec import Struct

from pptrace.marks import P2P
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS, DIRECTIONS, Int64
from pptrace.schedule.actions import Action
from pptrace.schedule.messages import Direction, messages_of_rank
from pptrace.schedule.plan import Plan
from pptrace.slices import Slice, last_like, rows_among, rows_where, slices

PlanOf = Callable[[int], Plan]
"""The plan of a step."""

PRODUCERS = {str(direction): direction.producers for direction in Direction}
"""Kinds of ops whose output moves in a direction."""


def cross_rank_ops(plan: Plan, rank: int, direction: str, sends: bool) -> Iterator[Action]:
    """The ops of a rank whose output goes to another rank, or whose input comes from one."""
    return (op for op, message in messages_of_rank(plan, rank, sends) if message.direction == direction)


def match_by_adjacent_ops(
    comms: pd.DataFrame, ops: pd.DataFrame, plan_of: PlanOf, mesh: MeshInfo
) -> pd.DataFrame | None:
    """Reduce labelled pipeline messages to those of the plan; None where one of the plan's is missing.

    Args:
        comms: with messages by order alone (their stage is unknown).
        ops: with the stages and microbatches of the plan.
        plan_of: the plan of each step.
    """
    lacking = comms[(comms["axis"] == "pp") & (comms["microbatch"] >= 0) & (comms["stage"] < 0)]
    parts = [comms.drop(lacking.index)]
    for (rank, step, kind, direction), rows in lacking.groupby(["rank", "step", "kind", "direction"], observed=True):
        pp_rank = mesh.pp_rank(int(str(rank)))
        if pp_rank is None or direction not in PRODUCERS:
            return None
        kinds = [str(kind) for kind in PRODUCERS[str(direction)]]
        rank_ops = ops[(ops["rank"] == rank) & (ops["step"] == step) & ops["kind"].isin(kinds)]
        planned = {
            (a.stage, a.microbatch)
            for a in cross_rank_ops(plan_of(int(str(step))), pp_rank, str(direction), sends=kind == "send")
        }
        ordered = rows.sort_values("start_ns", kind="stable"), rank_ops.sort_values("start_ns", kind="stable")
        matched, adjacent = with_adjacent_op(*ordered, sends=kind == "send")
        matched = matched.assign(**{name: adjacent[name].to_numpy() for name in ("stage", "microbatch")})
        matched = matched[[key in planned for key in zip(matched["stage"], matched["microbatch"], strict=True)]]
        matched = matched.drop_duplicates(["stage", "microbatch"], keep="first" if kind == "send" else "last")
        if len(matched) < len(planned):
            return None
        parts.append(matched)
    return pd.concat(parts).sort_index()


def with_adjacent_op(rows: pd.DataFrame, ops: pd.DataFrame, sends: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(messages, ops row by row): the last op over before a send, or the first that begins after a receive; both tables are in
    the order of time, and messages without such an op are left out.
    """
    if sends:
        index = np.searchsorted(ops["end_ns"].to_numpy(), rows["start_ns"].to_numpy(), side="right") - 1
    else:
        index = np.searchsorted(ops["start_ns"].to_numpy(), rows["end_ns"].to_numpy(), side="left")
    inside = (index >= 0) & (index < len(ops))
    return rows[inside], ops.iloc[index[inside]]


class PlannedMessage(Struct, frozen=True):
    """A message of the plan: the op that makes or reads it, and the pipeline rank of its peer."""

    op: Action
    direction: str
    peer_pp_rank: int


def planned_messages(plan: Plan, rank: int, sends: bool) -> Iterator[PlannedMessage]:
    """The messages of a rank in the order of their ops."""
    for op, message in messages_of_rank(plan, rank, sends):
        peer_pp_rank = message.target_stage if sends else message.source_stage
        yield PlannedMessage(op, message.direction, plan.placement[peer_pp_rank])


def label_from_plan(
    calls: pd.DataFrame, ops: pd.DataFrame, plan_of: Callable[[int], Plan | None], pipeline: Sequence[int], rank: int
) -> pd.DataFrame:
    """Label a rank's messages without stage and microbatch with those of the plan.

    A rank sends in the order in which its ops end, and receives in the order in which they begin. Where there are not as many
    as planned, or one would be sent before it was made or read before it was there, none of that step is named.
    """
    is_message = rows_among(calls["kind"], P2P) & (calls["axis"] == "pp")
    if not is_message.any():
        return calls
    planned: dict[tuple[int, str], list[PlannedMessage]] = {}
    steps = {step: rows for (step,), rows in slices(ops, ("step",)).items()}
    named = {name: calls[name].to_numpy(copy=True) for name in ("direction", "stage", "microbatch", "peer")}
    messages = calls.assign(row=np.arange(len(calls)))[is_message]
    for (step, kind), rows in slices(messages, ("step", "kind")).items():
        plan = plan_of(step)
        if plan is None or plan.pp != len(pipeline):
            continue
        key = (plan.num_microbatches, kind)
        if key not in planned:
            planned[key] = list(planned_messages(plan, pipeline.index(rank), sends=kind == "send"))
        ordered = rows.in_order_of("start_ns")
        for row, message in zip(
            ordered["row"], _messages_in_order(planned[key], ordered, steps.get(step)), strict=False
        ):
            named["direction"][row] = message.direction
            named["stage"][row], named["microbatch"][row] = message.op.stage, message.op.microbatch
            named["peer"][row] = pipeline[message.peer_pp_rank]
    return calls.assign(**named).astype(calls.dtypes)


def _messages_in_order(planned: Sequence[PlannedMessage], messages: Slice, ops: Slice | None) -> list[PlannedMessage]:
    """The planned messages in time order; [] where the ops contradict that."""
    if ops is None or not planned or len(messages) % len(planned) or (messages["microbatch"] >= 0).any():
        return []
    keys = zip(*(ops[name].tolist() for name in ("kind", "stage", "microbatch")), strict=True)
    index_of_op = {key: index for index, key in enumerate(keys)}
    op_indices = [
        index_of_op.get((message.op.kind.value, message.op.stage, message.op.microbatch), -1) for message in planned
    ]
    if min(op_indices) < 0:
        return []
    op_times = ops.where(np.repeat(op_indices, len(messages) // len(planned)))
    is_send = messages["kind"] == "send"
    possible = np.where(
        is_send, messages["start_ns"] >= op_times["end_ns"], messages["end_ns"] <= op_times["start_ns"]
    ).all()
    return [message for message in planned for _ in range(len(messages) // len(planned))] if possible else []


_MESSAGE = ("rank", "step", "kind", "stage", "microbatch")


def with_adjacent(comms: pd.DataFrame, ops: pd.DataFrame, mesh: MeshInfo, ranks: Collection[int]) -> pd.DataFrame:
    """Fill in stage and microbatch of messages of ``ranks`` by the adjacent op; messages without one are dropped.

    Args:
        comms: schema COMMS; the rows meant are of the pipeline, with a direction and without stage and microbatch.
        ops: schema OPS with stages and microbatches, where they are known.
    """
    is_open = rows_among(comms["kind"], P2P) & (comms["axis"] == "pp") & rows_among(comms["direction"], PRODUCERS)
    is_open &= (comms["microbatch"] < 0) & (comms["stage"] < 0) & (comms["peer"] < 0) & comms["rank"].isin(ranks)
    if not is_open.any():
        return comms
    compute = ops[rows_among(ops["kind"], COMPUTE_KINDS)].sort_values("start_ns", kind="stable")
    of_rank = {int(str(rank)): rank_ops for rank, rank_ops in compute.groupby("rank")}
    parts = [comms[~is_open]]
    for (rank, kind), rows in comms[is_open].groupby(["rank", "kind"], observed=True):
        if (rank_ops := of_rank.get(int(str(rank)))) is not None:
            parts.append(_of_rank(rows.sort_values("start_ns", kind="stable"), rank_ops, sends=kind == "send"))
    joined: pd.DataFrame = pd.concat([part for part in parts if len(part)] or parts[:1])
    # The stage at the other end has to exist, as far as the number of stages is known.
    next_or_previous = np.where((joined["kind"] == "send") == (joined["direction"] == "F"), 1, -1)
    num_stages = mesh.pp * mesh.vpp if mesh.pp and mesh.vpp else np.iinfo(np.int64).max
    exists = (joined["stage"] + next_or_previous).between(0, num_stages - 1)
    return joined[exists | ~joined.index.isin(comms.index[is_open])].sort_index()


def _of_rank(rows: pd.DataFrame, ops: pd.DataFrame, sends: bool) -> pd.DataFrame:
    """The messages of one rank and way that an op of the right kind stands next to, the nearest one of each op."""
    rows, adjacent = with_adjacent_op(rows, ops, sends)
    is_right_kind = np.array(
        [kind in PRODUCERS[way] for kind, way in zip(adjacent["kind"], rows["direction"], strict=True)], dtype=bool
    )
    named = rows.assign(**{name: adjacent[name].to_numpy() for name in ("step", "stage", "microbatch")})
    named = named.assign(posted_ns=named["start_ns"], asked_ns=named["start_ns"])  # the host waits inside of the call
    named = named[is_right_kind & (adjacent["stage"].to_numpy() >= 0)]
    named = named[named["microbatch"] >= 0]
    of_op = ["step", "direction", "stage", "microbatch"]
    nearest: pd.DataFrame = named.drop_duplicates(of_op, keep="first" if sends else "last")
    return nearest


def with_directions(comms: pd.DataFrame, ops: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """Fill in the direction, F or B, of pipeline messages of known stage, as far as stage and peer determine it.

    What stage s sends to a rank with stage s+1 goes forward, and to one with s−1 backward; what it receives, the other way round.
    Of a peer with both, as between two ranks with chunks, the first message of a microbatch goes forward and the second one back:
    a stage runs the forward of a microbatch before its backward. One alone keeps "". A message whose peer is not known goes to or
    comes from the ranks of its pipeline with the stages before and after its own.
    """
    lacking = rows_among(comms["kind"], P2P) & (comms["axis"] == "pp") & (comms["direction"] == "")
    lacking &= comms["stage"] >= 0
    if not lacking.any():
        return comms
    rows = comms[lacking]
    stages = set(ops.loc[ops["stage"] >= 0, ["rank", "stage"]].drop_duplicates().itertuples(index=False, name=None))

    def has_stage(rank: int, peer: int, stage: int) -> bool:
        """Return whether the other end of a rank's message has a stage: any other rank of its pipeline where it is not known."""
        peers = [peer] if peer >= 0 else [other for other in mesh.pipeline_of(rank) if other != rank]
        return any((other, stage) in stages for other in peers)

    ends = list(rows[["rank", "peer", "stage"]].itertuples(index=False, name=None))
    after, before = (
        np.array([has_stage(rank, peer, stage + offset) for rank, peer, stage in ends]) for offset in (1, -1)
    )
    is_near = np.array([peer < 0 or peer in mesh.pipeline_of(rank) for rank, peer, _ in ends])
    is_send = (rows["kind"] == "send").to_numpy()
    forward, backward = np.where(is_send, after, before), np.where(is_send, before, after)
    directions = np.where(forward & ~backward, "F", np.where(backward & ~forward, "B", ""))
    of_both = forward & backward & (rows["microbatch"] >= 0).to_numpy()
    # Of two messages that a microbatch has of a kind, stage and peer, the first goes forward.
    same = rows[of_both].sort_values("start_ns", kind="stable").groupby([*_MESSAGE, "peer"], observed=True)
    nth, size = (
        column.reindex(rows.index[of_both]) for column in (same.cumcount(), same["start_ns"].transform("size"))
    )
    directions[of_both] = np.where(size == 2, np.where(nth == 0, *DIRECTIONS), "")
    filled = comms.copy()
    filled.loc[lacking, "direction"] = np.where(is_near, directions, "")
    return filled


def drop_half_matched(comms: pd.DataFrame, ranks: Collection[int]) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Drop messages between two of ``ranks`` with a span on one side only; with a warning."""
    between = comms["rank"].isin(ranks) & comms["peer"].isin(ranks) & rows_among(comms["kind"], P2P)
    half = between & (comms["axis"] == "pp") & (comms["match"] < 0)
    if not half.any():
        return comms, ()
    line = (
        f"{int(half.sum())} of {int(between.sum())} sends and receives have a span on one rank only (combined send-receive calls "
        "may have none): they are left out, and the time of messages without spans counts as bubble"
    )
    return comms[~half].reset_index(drop=True), (line,)


def with_peers(comms: pd.DataFrame, ops: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """Fill in the peers of sends and receives: the rank of the same pipeline that holds the other stage."""
    lacking = (comms["peer"] < 0) & (comms["stage"] >= 0) & rows_among(comms["direction"], DIRECTIONS)
    if not lacking.any():
        return comms
    rows = rows_where(comms[["rank", "kind", "direction", "stage"]], lacking)
    holders = rows_where(ops[["rank", "stage"]], ops["stage"] >= 0).drop_duplicates().to_numpy()
    is_onward = (rows["kind"] == "send").to_numpy() == (rows["direction"] == "F").to_numpy()
    other_stage = rows["stage"].to_numpy() + np.where(is_onward, 1, -1)
    holder = last_like(
        [_pipelines(rows["rank"].to_numpy(), mesh), other_stage], [_pipelines(holders[:, 0], mesh), holders[:, 1]]
    )
    peers = comms["peer"].to_numpy(copy=True)
    peers[lacking.to_numpy()] = np.append(holders[:, 0], -1)[holder]
    return comms.assign(peer=peers)


def _pipelines(ranks: Int64, mesh: MeshInfo) -> Int64:
    """A number for the pipeline of each rank, the same for all whose pipeline is unknown."""
    index, present = pd.factorize(ranks)
    numbers: dict[tuple[int, ...], int] = {}
    of_present = [numbers.setdefault(mesh.pipeline_of(rank), len(numbers)) for rank in present.tolist()]
    return np.array(of_present, dtype=np.int64)[index]


def drop_messages_beyond_ends(comms: pd.DataFrame, ops: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """Drop messages from before the first stage or beyond the last one: combined send-receive functions are called on all
    ranks, and move nothing there.
    """
    is_open = ((comms["peer"] < 0) & (comms["stage"] >= 0)).to_numpy()
    last_stage = int(ops["stage"].to_numpy().max(initial=-1))
    if mesh.pp is None or last_stage < 0 or not is_open.any():
        return comms
    last = max(last_stage, mesh.pp * (mesh.vpp or 1) - 1)
    ordered = (comms["axis"] == "pp") & is_open & rows_among(comms["direction"], DIRECTIONS)
    other_stage = comms["stage"] + np.where((comms["kind"] == "send") == (comms["direction"] == "F"), 1, -1)
    absent = ordered & ((other_stage < 0) | (other_stage > last))
    return comms[~absent] if absent.any() else comms
