"""Ops in order and messages of the traced ranks of a pipeline with missing ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

import pandas as pd

from pptrace.marks import P2P
from pptrace.model.stage_texts import chunks_in, stage_text
from pptrace.model.tables import COMPUTE_KINDS, MESSAGE_CALLS
from pptrace.recognise.infer.candidates import num_leading
from pptrace.recognise.messages.messages_from_plan import planned_messages
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan


class Detail(StrEnum):
    """Contents of the labels of ops: stages, chunks of a rank, or kinds alone."""

    STAGES = "stages"
    CHUNKS = "chunks"
    KINDS = "kinds"


def message_kinds_of(plan: Plan, pp_rank: int) -> frozenset[tuple[str, str]]:
    """The (kind, direction) of the messages that a pipeline rank has."""
    return frozenset(
        (kind, str(message.direction))
        for kind in P2P
        for message in planned_messages(plan, pp_rank, sends=kind == "send")
    )


def peers_of(plan: Plan, pp_rank: int) -> frozenset[int]:
    """The pipeline ranks with which one exchanges messages."""
    around = {
        neighbour
        for stage in plan.stages_of(pp_rank)
        for neighbour in (plan.previous_stage(stage), plan.next_stage(stage))
        if neighbour is not None
    }
    return frozenset(plan.placement[neighbour] for neighbour in around) - {pp_rank}


@dataclass(frozen=True, slots=True)
class TracedRank:
    """The fullest step of one rank: its ops in time order as text, with the detail of its labels, and its messages.

    ``stages`` are its chunks where labels name these. ``num_microbatches`` are the forwards of all chunks where kinds alone are
    known; ``pairs`` is then, if known, for each backward in order the index of its forward.

    ``message_kinds`` are the (kind, direction) of its messages, none where some have no direction, and ``peers`` the global ranks
    at their other ends. ``has_exact_messages``: none is there but those that moved. Labels of functions that may move four
    messages name all of them.
    """

    rank: int
    detail: Detail
    cells: tuple[str, ...]
    kinds: tuple[str, ...]
    stages: tuple[int, ...]
    num_microbatches: int
    pairs: tuple[int, ...] | None
    message_kinds: frozenset[tuple[str, str]]
    peers: frozenset[int]
    has_messages: bool
    has_exact_messages: bool

    @property
    def is_last_first(self) -> bool:
        """Return whether all forwards come first, and then their backwards from the last one to the first."""
        count = len(self.pairs or ())
        return count > 1 and num_leading(self.kinds) == count and self.pairs == tuple(range(count))[::-1]

    def may_be(self, plan: Plan, pp_rank: int) -> bool:
        """Return whether a pipeline rank of a plan runs exactly these ops in this order, and may have these messages: some of
        each kind and direction of the plan, and no others.
        """
        actions = plan.compute_actions(pp_rank) if pp_rank < plan.pp else ()
        if len(actions) != len(self.kinds) or any(
            action.kind != kind for action, kind in zip(actions, self.kinds, strict=True)
        ):
            return False
        if self.detail is not Detail.KINDS:
            texts = map(str if self.detail is Detail.STAGES else _by_chunk, actions)
            if self.cells != tuple(texts):
                return False
        elif self.pairs is not None:
            forwards = [(action.stage, action.microbatch) for action in actions if action.kind is Kind.F]
            index = {key: position for position, key in enumerate(forwards)}
            backwards = (action for action in actions if action.kind is Kind.B)
            if self.pairs != tuple(index[action.stage, action.microbatch] for action in backwards):
                return False
        planned = message_kinds_of(plan, pp_rank)
        if self.has_messages and not planned:
            return False
        if not self.has_exact_messages:
            return not self.message_kinds or self.message_kinds >= planned
        has_as_many = len(self.peers) <= len(peers_of(plan, pp_rank))
        return has_as_many and (not self.message_kinds or self.message_kinds == planned)


def _by_chunk(action: Action) -> str:
    if action.parts:
        return f"({';'.join(map(_by_chunk, action.parts))}){action.kind}"
    return f"{stage_text(None, action.chunk)}{action.kind}{'' if action.microbatch is None else action.microbatch}"


def find_traced_ranks(
    ops: pd.DataFrame,
    comms: pd.DataFrame,
    calls: Mapping[int, pd.DataFrame],
    exact: bool,
    paired: Collection[int] = (),
) -> list[TracedRank]:
    """The ops and messages of each rank with training ops in its fullest step; [] without one, or where labels name the stages
    of some ops only.

    Args:
        exact: whether the messages are those that moved and no others.
        paired: the ranks on which the microbatches of backwards are those of their forwards, not only counted.
    """
    compute = ops[ops["kind"].isin(COMPUTE_KINDS) & (ops["microbatch"] >= 0)]
    training = compute.loc[compute["kind"] != "F", ["rank", "step"]].drop_duplicates()
    compute = compute.merge(training, on=["rank", "step"])
    if compute.empty:
        return []
    sizes = compute.groupby("step")["rank"].agg(["nunique", "size"])
    step = max(sizes.index, key=lambda number: tuple(sizes.loc[number]))
    rows = compute[compute["step"] == step].sort_values("start_ns", kind="stable")
    messages = comms[(comms["step"] == step) & (comms["axis"] == "pp") & comms["kind"].isin(P2P)]
    traced_ranks = []
    for number, of_rank in rows.groupby("rank"):
        rank = int(str(number))
        has_stage = of_rank["stage"] >= 0
        if has_stage.any() and not has_stage.all():
            return []
        detail, stages = _detail_of(of_rank, names_stages=bool(has_stage.all()))
        kinds = tuple(of_rank["kind"].tolist())
        forwards = sum(kind in ("F", "OVERLAP_F_B") for kind in kinds)
        moved = messages[messages["rank"] == rank]
        have_directions = (moved["direction"] != "").all()
        has_calls = rank in calls and bool(calls[rank]["kind"].isin(MESSAGE_CALLS).any())
        columns = (of_rank[name].tolist() for name in ("stage", "chunk", "kind", "microbatch", "pair"))
        traced = TracedRank(
            rank,
            detail,
            tuple(
                pair or f"{stage_text(stage, chunk)}{kind}{mb}"
                for stage, chunk, kind, mb, pair in zip(*columns, strict=True)
            ),
            kinds,
            stages,
            forwards if detail is Detail.KINDS else int(of_rank["microbatch"].max()) + 1,
            tuple(of_rank.loc[of_rank["kind"] == "B", "microbatch"].tolist()) if rank in paired else None,
            frozenset(zip(moved["kind"], moved["direction"], strict=True)) if have_directions else frozenset(),
            frozenset(int(peer) for peer in moved["peer"].tolist() if peer >= 0),
            bool(len(moved)) or has_calls,
            exact,
        )
        traced_ranks.append(traced)
    return traced_ranks


def _detail_of(ops: pd.DataFrame, names_stages: bool) -> tuple[Detail, tuple[int, ...]]:
    """Facts that the labels of a rank name, and the stages or chunks that they do."""
    pairs = [pair for pair in ops["pair"].tolist() if pair]
    if names_stages:
        halves = [half for pair in pairs for half in pair[1 : pair.index(")")].split(";")]
        of_pairs = {
            int(half[: next(index for index, letter in enumerate(half) if letter.isalpha())]) for half in halves
        }
        return Detail.STAGES, tuple(sorted(of_pairs | set(ops["stage"].tolist())))
    chunks = {chunk for pair in pairs for chunk in chunks_in(pair)} | set(ops["chunk"].clip(lower=0).tolist())
    return Detail.CHUNKS if len(chunks) > 1 else Detail.KINDS, tuple(sorted(chunks))
