"""Ops in order and messages of the traced ranks of a pipeline with missing ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import pandas as pd

from pptrace.marks import P2P
from pptrace.model.stage_texts import chunks_in, stage_text
from pptrace.model.tables import COMPUTE_KINDS, MESSAGE_CALLS
from pptrace.recognise.infer.candidates import num_leading
from pptrace.recognise.messages.messages_from_plan import PRODUCERS, planned_messages
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan


class Detail(StrEnum):
    """Contents of the labels of ops: stages, chunks of a rank, or kinds alone."""

    STAGES = "stages"
    CHUNKS = "chunks"
    KINDS = "kinds"


@dataclass(frozen=True, slots=True)
class StepMessages:
    """Messages of a rank in one step: their (kind, direction), and the global ranks of their peers.

    ``is_exact``: none is there but those that moved. Labels of functions that may move four messages name all of them.
    """

    kinds_and_directions: frozenset[tuple[str, str]]
    peers: frozenset[int]
    is_any: bool
    is_exact: bool

    def allow(self, plan: Plan, pp_rank: int) -> bool:
        """Return whether a pipeline rank of a plan may have these messages: some of each kind and direction of the plan, and no
        others.
        """
        needed = message_kinds_of(plan, pp_rank)
        if self.is_any and not needed:
            return False
        if self.peers and self.is_exact and len(self.peers) > len(peers_of(plan, pp_rank)):
            return False
        if not self.kinds_and_directions:
            return True
        return self.kinds_and_directions == needed if self.is_exact else self.kinds_and_directions >= needed


def message_kinds_of(plan: Plan, pp_rank: int) -> frozenset[tuple[str, str]]:
    """The (kind, direction) of the messages that a pipeline rank has."""
    return frozenset(
        (kind, direction)
        for kind in P2P
        for direction in PRODUCERS
        if _has_messages_of(plan, pp_rank, direction, sends=kind == "send")
    )


def _has_messages_of(plan: Plan, pp_rank: int, direction: str, sends: bool) -> bool:
    return any(message.direction == direction for message in planned_messages(plan, pp_rank, sends))


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
    """The fullest step of one rank: its ops in time order as text, with the detail of its labels.

    ``stages`` are its chunks where labels name these. ``num_chunks`` is None and ``num_microbatches`` the forwards of all chunks
    where kinds alone are known; ``pairs`` is then, if known, for each backward in order the index of its forward.
    """

    rank: int
    detail: Detail
    cells: tuple[str, ...]
    kinds: tuple[str, ...]
    stages: tuple[int, ...]
    num_microbatches: int
    messages: StepMessages
    pairs: tuple[int, ...] | None = None

    @property
    def num_chunks(self) -> int | None:
        return None if self.detail is Detail.KINDS else len(self.stages)

    @property
    def num_leading(self) -> int:
        """The forwards before any other op."""
        return num_leading(self.kinds)

    @property
    def is_last_first(self) -> bool:
        """Return whether all forwards come first, and then their backwards from the last one to the first."""
        count = len(self.pairs or ())
        return count > 1 and self.num_leading == count and self.pairs == tuple(range(count))[::-1]

    def follows(self, plan: Plan, pp_rank: int) -> bool:
        """Return whether the order of the ops is exactly that of a pipeline rank of a plan."""
        actions = plan.compute_actions(pp_rank)
        if len(actions) != len(self.kinds) or any(
            action.kind != kind for action, kind in zip(actions, self.kinds, strict=True)
        ):
            return False
        if self.detail is Detail.KINDS:
            return self.pairs is None or self.pairs == _pairs_of(actions)
        return self.cells == tuple(texts_of(actions, self.detail))


def _pairs_of(actions: tuple[Action, ...]) -> tuple[int, ...]:
    """Index of each backward's forward among the forwards."""
    forwards = [(action.stage, action.microbatch) for action in actions if action.kind is Kind.F]
    index = {key: position for position, key in enumerate(forwards)}
    return tuple(index[action.stage, action.microbatch] for action in actions if action.kind is Kind.B)


def texts_of(actions: tuple[Action, ...], detail: Detail) -> Iterator[str]:
    """Actions as the labels of a rank write them."""
    for action in actions:
        if detail is Detail.STAGES:
            yield str(action)
        elif detail is Detail.CHUNKS:
            yield _by_chunk(action)
        else:
            yield action.kind.value


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
    traced_ranks = []
    for rank, rank_ops in rows.groupby("rank"):
        messages = _messages(comms[(comms["rank"] == rank) & (comms["step"] == step)], calls.get(int(str(rank))), exact)
        if (traced := _traced_rank(int(str(rank)), rank_ops, messages, rank in paired)) is None:
            return []
        traced_ranks.append(traced)
    return traced_ranks


def _traced_rank(rank: int, ops: pd.DataFrame, messages: StepMessages, is_paired: bool) -> TracedRank | None:
    has_stage = ops["stage"] >= 0
    if has_stage.any() and not has_stage.all():
        return None
    pairs = list(filter(None, ops["pair"].tolist()))
    if has_stage.all():
        stages = {half for text in pairs for half in _stages_in(text)} | set(ops["stage"].tolist())
        detail = Detail.STAGES
    else:
        stages = {chunk for text in pairs for chunk in chunks_in(text)} | set(ops["chunk"].clip(lower=0).tolist())
        detail = Detail.CHUNKS if len(stages) > 1 else Detail.KINDS
    kinds = tuple(ops["kind"].tolist())
    microbatches = int(ops["microbatch"].max()) + 1
    forwards = sum(kind in ("F", "OVERLAP_F_B") for kind in kinds)
    return TracedRank(
        rank,
        detail,
        tuple(_cells(ops)),
        kinds,
        tuple(sorted(stages)),
        forwards if detail is Detail.KINDS else microbatches,
        messages,
        tuple(ops.loc[ops["kind"] == "B", "microbatch"].tolist()) if is_paired else None,
    )


def _cells(ops: pd.DataFrame) -> Iterator[str]:
    """Ops as their labels write them."""
    columns = (ops[name].tolist() for name in ("stage", "chunk", "kind", "microbatch", "pair"))
    for stage, chunk, kind, microbatch, pair in zip(*columns, strict=True):
        yield pair or f"{stage_text(stage, chunk)}{kind}{microbatch}"


def _stages_in(pair: str) -> Iterator[int]:
    """The stages of the two halves of an overlapped pair."""
    for half in pair[1 : pair.index(")")].split(";"):
        yield int(half[: next(index for index, letter in enumerate(half) if letter.isalpha())])


def _messages(comms: pd.DataFrame, calls: pd.DataFrame | None, exact: bool) -> StepMessages:
    pipeline_messages = comms[(comms["axis"] == "pp") & comms["kind"].isin(P2P)]
    kinds_and_directions = (
        frozenset(zip(pipeline_messages["kind"], pipeline_messages["direction"], strict=True))
        if (pipeline_messages["direction"] != "").all()
        else frozenset()
    )
    peers = {int(peer) for peer in pipeline_messages["peer"].tolist() if peer >= 0}
    return StepMessages(
        kinds_and_directions, frozenset(peers), bool(len(pipeline_messages)) or _has_messages(calls), exact
    )


def _has_messages(calls: pd.DataFrame | None) -> bool:
    return calls is not None and bool(calls["kind"].isin(MESSAGE_CALLS).any())
