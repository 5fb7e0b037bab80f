"""Candidate plans: those of the registry that ranks may have run by the kinds of their ops, and the number of forwards of each;
and the traced ranks of a pipeline with missing ranks, by which plans are judged.

All ranks of a pipeline, some or one: the fewer there are, the more plans are left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache

import pandas as pd
from msgspec import Struct

from pptrace.marks import P2P
from pptrace.model.tables import COMPUTE_KINDS, FORWARD_KINDS, MESSAGE_CALLS
from pptrace.recognise.labels.label import chunks_in, stage_text
from pptrace.recognise.messages.messages_from_plan import planned_messages
from pptrace.recognise.schedule.measured_steps import built_plan
from pptrace.schedule import registry
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import Schedule
from pptrace.slices import rows_among


class CandidatePlan(Struct, frozen=True):
    """A plan that is not built yet: a schedule and its shape."""

    entry: Schedule
    pp: int
    chunks: int
    microbatches: int
    group_size: int | None = None
    lean: bool = False

    def build(self) -> Plan | None:
        """The plan; None where the schedule has none of this shape."""
        return built_plan(self.entry.name, self.pp, self.microbatches, self.chunks, self.group_size, self.lean)


def num_leading(kinds: Sequence[str]) -> int:
    """The forwards before any other op."""
    return next((index for index, kind in enumerate(kinds) if kind != "F"), len(kinds))


def candidates_by_kinds(pp: int, kinds: Collection[str], total: int, leading: int) -> Iterator[CandidatePlan]:
    """The plans of a pipeline that nothing labels.

    Args:
        pp: ranks of the pipeline.
        kinds: of all ops.
        total, leading: forwards of a rank, and those before any other op.
    """
    for entry in registry.SCHEDULES.values():
        if not has_kinds(entry, kinds):
            continue
        for chunks, microbatches in _sizes(entry, total, leading, pp):
            groups = range(0)
            if entry.takes_group_size:  # with groups of N > p a rank runs (v−1)·N to that + 2p forwards before others
                least = max(pp + 1, (leading - 2 * pp) // (chunks - 1))
                groups = range(least, min(microbatches, leading // (chunks - 1)) + 1)
            for group_size, lean in variants_of(entry, groups):
                if entry.runs_without_labels(pp, microbatches, group_size):
                    yield CandidatePlan(entry, pp, chunks, microbatches, group_size, lean)


def variants_of(entry: Schedule, group_sizes: Sequence[int]) -> Iterator[tuple[int | None, bool]]:
    """The microbatch groups, of p where None, and whether the warmup is lean."""
    yield None, False
    if entry.takes_group_size:
        yield None, True
        yield from ((size, False) for size in group_sizes)


def has_kinds(entry: Schedule, kinds: Collection[str]) -> bool:
    """Return whether a schedule has weight gradients of their own, and overlapped pairs, where ops of these kinds do."""
    return _splits(entry.name) == (bool({"I", "W"} & set(kinds)), "OVERLAP_F_B" in kinds)


@cache
def _splits(name: str) -> tuple[bool, bool]:
    """Return whether a schedule has weight gradients of their own, and whether it has overlapped pairs, whatever its shape."""
    plan = registry.build(name, 2, 4)
    return plan.splits_backward, plan.has_pairs


def _sizes(entry: Schedule, total: int, leading: int, pp: int) -> Iterator[tuple[int, int]]:
    """(v, m) that a schedule may have with so many forwards on a rank."""
    if entry.default_chunks == 1:
        yield 1, total
    elif pp > 1 and entry.bidirectional:
        yield 2, total
    elif pp > 1:  # nobody cuts a model for one rank
        for chunks in range(2, (total if entry.takes_any_chunks else entry.default_chunks) + 1):
            if total % chunks == 0 and (chunks - 1) * min(pp, total // chunks) <= leading:
                yield chunks, total // chunks  # all chunks but the last run forward before the first backward


def match_by_kinds(
    pp: int, kinds: Mapping[int, Sequence[str]], received: int | None = None, like: Plan | None = None
) -> Plan | None:
    """The registry's plan whose ranks run these kinds of ops in this order.

    Several may: microbatch groups of p come before larger ones, and then fewer chunks before more.

    Args:
        pp: ranks of the pipeline.
        kinds: by pipeline rank, those that are in the trace.
        received: activations that the first rank receives, m for each chunk but its first; None: unknown.
        like: a plan of the same schedule with as many chunks, if it is known.
    """
    forwards = {list(row).count("F") for row in kinds.values()}
    if len(forwards) != 1 or not (total := forwards.pop()):
        return None
    chunks = None if like is None else like.num_chunks
    if received is not None and 0 <= received < total and total % (total - received) == 0:
        chunks = total // (total - received)
    every = {kind for row in kinds.values() for kind in row}
    candidates = candidates_by_kinds(pp, every, total, num_leading(kinds[min(kinds)]))
    # The order of a schedule that is always labelled, where there are no labels, is that of another one.
    for candidate in sorted(
        candidates, key=lambda each: (each.group_size or 0, each.chunks, each.lean, each.entry.always_labelled)
    ):
        entry = candidate.entry
        if entry.searches or chunks not in (None, candidate.chunks) or (like is not None and entry.name != like.name):
            continue
        plan = candidate.build()
        if plan is not None and all(
            [action.kind for action in plan.compute_actions(rank)] == list(row) for rank, row in kinds.items()
        ):
            return plan
    return None


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


class TracedRank(Struct, frozen=True):
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
        has_as_many = len(self.peers) <= len(plan.peers_of(pp_rank))
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
    compute = ops[rows_among(ops["kind"], COMPUTE_KINDS) & (ops["microbatch"] >= 0)]
    training = compute.loc[compute["kind"] != "F", ["rank", "step"]].drop_duplicates()
    compute = compute.merge(training, on=["rank", "step"])
    if compute.empty:
        return []
    sizes = compute.groupby("step")["rank"].agg(["nunique", "size"])
    step = max(sizes.index, key=lambda number: tuple(sizes.loc[number]))
    rows = compute[compute["step"] == step].sort_values("start_ns", kind="stable")
    messages = comms[(comms["step"] == step) & (comms["axis"] == "pp") & rows_among(comms["kind"], P2P)]
    traced_ranks = []
    for number, of_rank in rows.groupby("rank"):
        rank = int(str(number))
        has_stage = of_rank["stage"] >= 0
        if has_stage.any() and not has_stage.all():
            return []
        detail, stages = _detail_of(of_rank, names_stages=bool(has_stage.all()))
        kinds = tuple(of_rank["kind"].tolist())
        forwards = sum(kind in FORWARD_KINDS for kind in kinds)
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
