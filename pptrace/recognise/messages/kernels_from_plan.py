"""Map NCCL SendRecv kernels, whose direction is unknown, to the plan's messages by the ops that precede and follow them.

Captures without NCCL's own ranges, and Kineto without operators, show ``SendRecv`` kernels alone, each one a message or a batch
of several, both ways. What an op made leaves in the first kernel that begins after it, and what an op reads has come in the last
one that ended before it. That is taken where every message of every rank of a pipeline has a kernel then, every kernel a message,
and the two kernels of each message can have run at the same time. Of two kernels between two ops either may be the send
(DeepSpeed receives from the rank before it first, and from the one after it last): right is the order in which the two kernels of
a message end together.

Match the calls of traces without marks: both ends of a message, and the members of a collective.

Calls of an all-to-all of uneven parts belong together by their splits: what one rank sends to another is what that one gets from
it. Calls whose sizes never agree are kept apart so, also where ranks recorded different numbers of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from pptrace.marks import P2P
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import ScheduleInfo
from pptrace.model.tables import parse_splits
from pptrace.recognise.groups.topology import UNKNOWN
from pptrace.recognise.messages.match import (
    MatchNumbers,
    messages_by_rank_pair,
    number_by_name,
    shifts_by_sizes,
    turns,
    with_ends,
)
from pptrace.recognise.messages.messages_from_plan import PlannedMessage, planned_messages
from pptrace.slices import Slice, rows_among, slice_of

_NAME, _TIMES = ("kind", "stage", "microbatch"), ("start_ns", "end_ns")
_FUSED = "send_recv"
_DRIFT_NS = 50_000
"""Tolerance, ns: clock drift within a trace, and the difference between the ends of a message's two kernels."""
_MOST = 0.9
_RECEIVED_FIRST: tuple[frozenset[int], ...] = (
    frozenset(),
    frozenset({-1}),
    frozenset({1}),
    frozenset({-1, 1}),
)
"""Neighbours from which a rank may receive before it sends to them: the one before it (-1), or the one after it (1)."""


def kernels_from_plan(
    calls: pd.DataFrame, known: pd.DataFrame, ops: pd.DataFrame, schedule: ScheduleInfo, mesh: MeshInfo
) -> tuple[pd.DataFrame, str]:
    """Map the kernels of complete pipelines to the plan's messages; with a warning, or "".

    A kernel that carries several messages is a row for each. Pipelines of which a message is known, here or in ``known`` (schema
    COMMS), stay as they are.
    """
    if schedule.plan is None:
        return calls, ""
    unclear = calls[(calls["kind"] == _FUSED) & (calls["axis"] == UNKNOWN)]
    ranks_with_messages = {
        rank for table in (calls, known) for rank in table.loc[rows_among(table["kind"], P2P), "rank"].unique().tolist()
    }
    parts, replaced = [], []
    for pipeline in mesh.pipelines:
        kernels = unclear[unclear["rank"].isin(pipeline)]
        if len(pipeline) != schedule.plan.pp or kernels.empty or ranks_with_messages & set(pipeline):
            continue
        orders = (_of_pipeline(kernels, ops, schedule, pipeline, early) for early in _RECEIVED_FIRST)
        likely = next((order for order in orders if order is not None and _can_be(order)), None)
        if likely is not None:
            parts.append(likely.drop(columns="shared"))
            replaced += kernels.index.tolist()
    if not parts:
        return calls, ""
    line = (
        f"{len(replaced)} send/receive kernels without a direction are assumed to be the messages of "
        f"{schedule.plan.name} between the ops before and after them"
    )
    return pd.concat([calls.drop(index=replaced), *parts], ignore_index=True), line


_Carried = tuple[PlannedMessage, str, int, int]
"""(a message, its kind, its step, the index of the kernel that carries it among the rank's)."""


def _of_pipeline(
    kernels: pd.DataFrame,
    ops: pd.DataFrame,
    schedule: ScheduleInfo,
    pipeline: Sequence[int],
    received_first: frozenset[int],
) -> pd.DataFrame | None:
    """The messages of all ranks; None where a message has no kernel or a kernel no message."""
    parts = []
    for pp_rank, rank in enumerate(pipeline):
        rank_kernels = kernels[kernels["rank"] == rank].sort_values("start_ns", kind="stable")
        planned = list(_carried(rank_kernels, ops[(ops["rank"] == rank) & (ops["step"] >= 0)], schedule, pp_rank))
        carried_by = _swapped(planned, pp_rank, received_first)
        if set(carried_by) != set(range(len(rank_kernels))):
            return None
        messages, kinds, steps, _ = zip(*planned, strict=True) if planned else ((),) * 4
        count = Counter(carried_by)
        parts.append(
            rank_kernels.iloc[carried_by].assign(
                kind=kinds,
                axis="pp",
                step=steps,
                peer=[pipeline[message.peer_pp_rank] for message in messages],
                shared=[count[kernel] for kernel in carried_by],
                group_size=2,
                direction=[message.direction for message in messages],
                stage=[message.op.stage for message in messages],
                microbatch=[message.op.microbatch or 0 for message in messages],
            )
        )
    return pd.concat(parts, ignore_index=True)


def _carried(kernels: pd.DataFrame, ops: pd.DataFrame, schedule: ScheduleInfo, pp_rank: int) -> Iterator[_Carried]:
    """The planned messages of a rank; the kernel is -1 where there is none, or where the op is not in the trace."""
    starts, ends = kernels["start_ns"].to_numpy(), np.maximum.accumulate(kernels["end_ns"].to_numpy())
    for step, rows in ops.groupby("step"):
        plan = schedule.plan_of(int(str(step)))
        if plan is None:
            continue
        spans = {op[:3]: op[3:] for op in rows[[*_NAME, *_TIMES]].itertuples(index=False, name=None)}
        for kind in P2P:
            for message in planned_messages(plan, pp_rank, sends=kind == "send"):
                span = spans.get((message.op.kind.value, message.op.stage, message.op.microbatch))
                if span is None:
                    at = -1
                elif kind == "send":
                    at = int(np.searchsorted(starts, span[1], side="left"))
                else:
                    at = int(np.searchsorted(ends, span[0], side="right")) - 1
                yield message, kind, int(str(step)), at if at < len(kernels) else -1


def _swapped(carried: Sequence[_Carried], pp_rank: int, received_first: frozenset[int]) -> list[int]:
    """The kernels, those of a send and a receive in a row with the same neighbour swapped, for neighbours received from first."""
    counts = Counter(kernel for *_, kernel in carried)
    peer_of = {(kernel, kind): message.peer_pp_rank for message, kind, _, kernel in carried if counts[kernel] == 1}
    kernels = []
    for message, kind, _, kernel in carried:
        offset, other = (1, "recv") if kind == "send" else (-1, "send")
        is_pair = counts[kernel] == 1 and peer_of.get((kernel + offset, other)) == message.peer_pp_rank
        is_early = (1 if message.peer_pp_rank > pp_rank else -1) in received_first
        kernels.append(kernel + offset if is_pair and is_early else kernel)
    return kernels


def _can_be(messages: pd.DataFrame) -> bool:
    """Return whether for each pair of ranks one offset of their clocks lets the two kernels of all messages run at the same
    time, and most of those that carry nothing else end together.
    """
    sends, recvs = (messages[messages["kind"] == kind] for kind in P2P)
    made = recvs["stage"] - np.where(recvs["direction"] == "F", 1, -1)
    key = ["step", "direction", "microbatch", "stage"]
    both = sends.merge(recvs.assign(stage=made), on=key, suffixes=("", "_to"))
    if not len(sends) == len(recvs) == len(both) or (both["peer"] != both["rank_to"]).any():
        return False
    sign = np.where(both["rank"] < both["rank_to"], 1, -1)  # of what is added to the clock of the pair's second rank
    begun, over = sign * (both["start_ns"] - both["end_ns_to"]), sign * (both["end_ns"] - both["start_ns_to"])
    both = both.assign(
        one=both[["rank", "rank_to"]].min(axis=1),
        other=both[["rank", "rank_to"]].max(axis=1),
        lower=np.minimum(begun, over),
        upper=np.maximum(begun, over),
        ahead=sign * (both["end_ns"] - both["end_ns_to"]),
    )
    bounds = both.groupby(["one", "other"]).agg(lower=("lower", "max"), upper=("upper", "min"))
    unshared = both[(both["shared"] == 1) & (both["shared_to"] == 1)]
    off = (unshared["ahead"] - unshared.groupby(["one", "other"])["ahead"].transform("median")).abs()
    end_together = (off <= _DRIFT_NS).groupby([unshared["one"], unshared["other"]]).mean()
    return bool((bounds["lower"] <= bounds["upper"] + _DRIFT_NS).all() and (end_together >= _MOST).all())


_Call = tuple[Sequence[int], Sequence[int], int]
"""Rows sent to each member and received from each (empty: not known), and bytes."""


def match_calls(calls: pd.DataFrame, first: int = 0) -> pd.DataFrame:
    """The calls of unmarked traces (schema CALL_COMMS) with ``match`` filled, counted from ``first``.

    Members of a collective have the same group, kind and sequence number or, without one, the same position in the order of the
    group's calls; the two ends of a message the same position in the order of messages from one rank to the other. Where one side
    recorded more than the other, sizes must say how the orders belong together, of all-to-alls of uneven parts their splits;
    otherwise all of them keep -1.
    """
    if calls.empty:
        return calls.copy()
    numbers = MatchNumbers(len(calls))
    order = np.argsort(turns(calls, ("rank", "group", "kind", "peer")), kind="stable")
    ordered = calls.assign(row=np.arange(len(calls))).iloc[order]
    is_p2p = rows_among(ordered["kind"], P2P)
    messages = ordered[is_p2p & (ordered["peer"] >= 0)]
    number_by_name(
        messages[(messages["direction"] != "") & (messages["microbatch"] >= 0) & (messages["stage"] >= 0)], numbers
    )
    for rows in messages_by_rank_pair(with_ends(messages[numbers.of_row[messages["row"]] < 0])):
        _number(rows, numbers, exact=True)
    rest = ordered[~is_p2p & (ordered["group"] != "") & (ordered["group_size"] > 1)]
    for _, same in rest.groupby(["group", "kind"], sort=False, observed=True):
        size = int(same["group_size"].iloc[0])
        if same["rank"].nunique() != size:
            continue
        if (same["seq"] >= 0).all():
            nth = same.groupby(["rank", "seq"]).cumcount()
            call = same.groupby([same["seq"], nth], sort=False).ngroup().to_numpy()
            is_complete = np.bincount(call)[call] == size
            _, index = np.unique(call[is_complete], return_inverse=True)
            numbers.give_groups(same["row"].to_numpy()[is_complete], index)
        else:
            _number(list(slice_of(same).by("rank").values()), numbers)
    return calls.assign(match=np.where(numbers.of_row >= 0, numbers.of_row + first, -1))


def match_between(matched: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """The rows of both tables (schema COMMS), with messages matched of which each table has one end, as those of a pipeline's
    rank to one without ops: in their order, if their sizes agree. Their ranks may count steps differently.
    """
    both = pd.concat([matched, calls], ignore_index=True)
    numbers = MatchNumbers(len(both))
    is_open = rows_among(both["kind"], P2P) & ((both["match"] < 0) & (both["peer"] >= 0)).to_numpy()
    messages = both[is_open].assign(row=np.flatnonzero(is_open)).sort_values("start_ns", kind="stable")
    for ends in messages_by_rank_pair(with_ends(messages)):
        is_call = [end["row"] >= len(matched) for end in ends]
        if all(of_end.all() or not of_end.any() for of_end in is_call) and is_call[0][0] != is_call[1][0]:
            _number(ends, numbers, exact=True)
    first = int(both["match"].max()) + 1
    return both.assign(match=np.where(numbers.of_row >= 0, numbers.of_row + first, both["match"]))


def _number(sides: Sequence[Slice], numbers: MatchNumbers, exact: bool = False) -> None:
    """Give the i-th calls of all sides one number, as far as their orders belong together: of the run, else of each step."""

    def shifts_of(part: Sequence[Slice]) -> list[int] | None:
        if not exact and have_splits(part):
            return shifts_by_splits(part)
        return shifts_by_sizes([side["bytes"].tolist() for side in part], exact)

    by_step = [side.by("step") for side in sides] if shifts_of(sides) is None else []
    common = sorted(set.intersection(*map(set, by_step)) - {-1}) if by_step else []
    for part in [[of_side[step] for of_side in by_step] for step in common] if by_step else [sides]:
        shifts = shifts_of(part)
        if shifts is not None:
            numbers.give([side["row"][shift:] for side, shift in zip(part, shifts, strict=True)])


def have_splits(sides: Sequence[Slice]) -> bool:
    """Return whether some call of every side has splits."""
    return all(any(side["splits"].tolist()) for side in sides)


def shifts_by_splits(sides: Sequence[Slice]) -> list[int] | None:
    """Number of calls of each side before the first that all sides have; ``sides`` are in the order of the group.

    None where no order of them fits, or more than one.
    """
    calls = [
        [
            (*parse_splits(splits), size)
            for splits, size in zip(side["splits"].tolist(), side["bytes"].tolist(), strict=True)
        ]
        for side in sides
    ]
    base = min(range(len(calls)), key=lambda index: len(calls[index]))
    shifts = []
    for index, side in enumerate(calls):
        spare = len(side) - len(calls[base])
        possible = [
            shift
            for shift in range(spare + 1)
            if index == base
            or all(_belong_together(*pair, base, index) for pair in zip(calls[base], side[shift:], strict=False))
        ]
        if len(possible) != 1:
            return None
        shifts.append(possible[0])
    return shifts


def _belong_together(call: _Call, other_call: _Call, member: int, other: int) -> bool:
    (sent, received, size), (sent_back, received_back, other_size) = call, other_call
    if not sent or not sent_back:
        return bool(sent) == bool(sent_back) and (size == other_size or -1 in (size, other_size))
    if max(member, other) >= min(len(sent), len(sent_back)):
        return False
    return sent[other] == received_back[member] and received[other] == sent_back[member]
