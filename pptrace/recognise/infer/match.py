"""Match of the evidence of ranks of a pipeline: ops and messages of each, the runs of the schedule, and the tables of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.intervals import find_interval
from pptrace.model.tables import Int64, What, comms_table, ops_table
from pptrace.recognise.infer.evidence import Messages, MismatchError
from pptrace.recognise.infer.rank_order import Channel, Grouped, Ops, grouped
from pptrace.recognise.ops.from_marks import warnings_of_marks
from pptrace.recognise.ops.label_steps import LaunchIndex
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.schedule.plan import Plan

OrderedOp = tuple[str, int, int]
"""F or B, its number among those of its kind on its rank, and its start in ns."""


class RankMatch(Struct, frozen=True):
    """The ops and messages of one rank: ``groups`` has those of ops by what they are; ``others`` those of none, with which ranks
    agree on shapes or which carry evaluation. ``peers`` are the ranks at their other ends, −1 where there is none or it is
    unknown. ``stage`` is None where ranks of its pipeline have no trace.
    """

    rank: int
    stage: int | None
    forwards: Ops
    backwards: Ops
    groups: Mapping[Channel, Grouped]
    others: Mapping[Channel, Messages]
    peers: Mapping[Channel, int]

    def in_order(self, behind: Int64) -> list[OrderedOp]:
        """The ops in time order; ``behind`` is the forward of each backward."""
        forwards = zip(range(len(self.forwards)), self.forwards.start_ns.tolist(), strict=True)
        backwards = zip(behind.tolist(), self.backwards.start_ns.tolist(), strict=True)
        ops = [*(("F", *op) for op in forwards), *(("B", *op) for op in backwards)]
        return sorted(ops, key=lambda op: op[2])


class Match(Struct, frozen=True):
    """All ranks of a pipeline, stage by stage, or some of them; ``sizes`` are the microbatches of each run of the schedule, from
    a first forward until no microbatch is in flight, in order; those of a step together once that is known (:func:`in_steps`).

    ``behind`` is for each backward the index of its forward, ``is_behind_known`` whether that is more than the order of the
    forwards. ``plan`` is that of the largest run, None where ranks have no trace; ``by_peers``: the messages name the ranks
    that they go to. ``sizes`` are () where nothing tells when the steps of a rank alone end.
    """

    ranks: tuple[RankMatch, ...]
    sizes: tuple[int, ...]
    behind: Int64
    is_behind_known: bool = True
    plan: Plan | None = None
    by_peers: bool = False

    @property
    def chain(self) -> tuple[int, ...]:
        return tuple(match.rank for match in self.ranks)

    @property
    def firsts(self) -> Int64:
        """The first forward of each run, whose index is that of its backward."""
        return np.append(0, np.cumsum(self.sizes, dtype=np.int64))[:-1]

    def numbers(self) -> tuple[Int64, Int64]:
        """Run and microbatch of each forward."""
        run = np.repeat(np.arange(len(self.sizes)), self.sizes)
        return run, np.arange(len(run)) - self.firsts[run]


def in_steps(matches: Sequence[Match], ends: Mapping[int, Int64], are_updates: bool = False) -> list[Match]:
    """The matches with runs between which no step ends on any rank as one, as where gradients are accumulated over several.
    What one pipeline tells holds for others with as many runs; of those with more or fewer, each has its steps if these are as
    many.

    Args:
        ends: by rank, when ranges of steps began and ended in turn; ranks without any do not tell.
        are_updates: whether these are the times of updates, of which one may be left out (as where gradients overflow): they
            tell steps if as many runs are before each, and behind the last: a trace may begin or end within a step.
    """
    numbers = [
        np.searchsorted(ends[of_rank.rank], of_rank.forwards.start_ns[match.firsts])
        for match in matches
        for of_rank in match.ranks
        if len(ends[of_rank.rank])
    ]
    num_runs = {len(match.sizes) for match in matches}
    if not numbers or 0 in num_runs:
        return list(matches)
    if len(num_runs) > 1:
        apart = [of_one for match in matches for of_one in in_steps([match], ends, are_updates)]
        return apart if len({len(match.sizes) for match in apart}) == 1 else list(matches)
    ran = np.array(numbers)
    is_outside = False if are_updates else ran[:, 1:] % 2 == 0
    begins = np.append(0, np.flatnonzero(np.any((np.diff(ran) > 0) | is_outside, axis=0)) + 1)
    num_before = np.diff(np.append(begins, ran.shape[1]))
    if are_updates and (len(begins) < 3 or (num_before != num_before[0]).any()):
        return list(matches)
    return [replace(match, sizes=tuple(np.add.reduceat(match.sizes, begins).tolist())) for match in matches]


class Outputs(Struct, frozen=True):
    """Messages between two ranks with outputs that backwards followed: their indices, of ``num_tensors`` for each forward.

    ``sizes`` are those of runs in order.
    """

    messages: Int64
    num_tensors: int
    sizes: tuple[int, ...] = ()

    def of(self, messages: Messages) -> Grouped:
        group = np.arange(len(self.messages), dtype=np.int64) // self.num_tensors
        return grouped(messages.where(self.messages), group)

    def others(self, messages: Messages) -> Messages:
        """The messages between the ranks that belong to none."""
        return messages.where(np.delete(np.arange(len(messages)), self.messages))


def trained_outputs(sent_ns: Int64, backward_ns: Int64, num_tensors: int) -> Outputs:
    """The runs of a rank that sends outputs on: found from the end, since a backward always has its forward before it, and what
    no backward follows (evaluation, the agreeing on shapes) is none.

    Args:
        sent_ns: when messages with outputs were posted, ``num_tensors`` for each forward.
        backward_ns: when backwards began.

    Raises:
        MismatchError: a backward has no forward.
    """
    is_backward = np.concatenate((np.zeros(len(sent_ns), dtype=bool), np.ones(len(backward_ns), dtype=bool)))
    order = np.argsort(np.concatenate((sent_ns, backward_ns)), kind="stable")[::-1]
    sizes: list[int] = []
    trained: list[int] = []
    num_sent = num_backwards = 0
    for index, ran in zip(order.tolist(), is_backward[order].tolist(), strict=True):
        if ran:
            num_backwards += 1
        elif num_backwards:
            trained.append(index)
            num_sent += 1
        if num_backwards and num_sent == num_backwards * num_tensors:
            sizes.append(num_backwards)
            num_sent = num_backwards = 0
    if num_backwards:
        raise MismatchError("more backwards than forwards: some forwards were not recorded")
    return Outputs(np.array(trained[::-1], dtype=np.int64), num_tensors, tuple(sizes[::-1]))


def runs_of(
    sizes: Sequence[int], rows: Sequence[Sequence[OrderedOp]], optimizers: Sequence[Int64]
) -> tuple[tuple[int, ...], list[list[list[OrderedOp]]]]:
    """The sizes of the runs and, by rank, the ops of each with their microbatches. They come one after the other on all ranks;
    those of one microbatch each between which no optimizer ran, where there is one, are one: a step without a pipeline in it.

    Raises:
        MismatchError: they overlap; or an optimizer runs within one.
    """
    joined: list[int] = []
    before = -1  # optimizers that ran before the last run, if that is of one microbatch
    for size, ops in zip(sizes, _by_run(rows[0], sizes), strict=True):
        single = int(np.searchsorted(optimizers[0], ops[0][2])) if size == 1 and len(optimizers[0]) else -1
        if single >= 0 and single == before:
            joined[-1] += 1
        else:
            joined.append(size)
        before = single
    runs = [_by_run(row, joined) for row in rows]
    for of_rank, steps in zip(runs, optimizers, strict=True):
        latest = -1
        for ops in of_rank:
            first, last = ops[0][2], ops[-1][2]
            if first <= latest:
                raise MismatchError("the ranks do not run the same steps one after the other")
            latest = last
            if np.searchsorted(steps, first) != np.searchsorted(steps, last):
                raise MismatchError("an optimizer runs while microbatches are under way")
    return tuple(joined), runs


def _by_run(row: Sequence[OrderedOp], sizes: Sequence[int]) -> list[list[OrderedOp]]:
    """The ops of a rank by run, with their microbatches."""
    run_of = np.repeat(np.arange(len(sizes)), sizes).tolist()
    firsts = [0, *np.cumsum(sizes).tolist()]
    runs: list[list[OrderedOp]] = [[] for _ in sizes]
    for kind, at, start in row:
        if at < len(run_of):
            runs[run_of[at]].append((kind, at - firsts[run_of[at]], start))
    return runs


OtherMessages = Mapping[int, Mapping[str, Messages]]
"""Messages that were left out of the evidence, by rank and kind."""


def with_matches(
    ranks: Sequence[RecognisedRank], matches: Sequence[Match], others: OtherMessages | None = None, axis: str = "pp"
) -> tuple[RecognisedRank, ...]:
    """The ranks with the ops and messages of the matches, and with the ``others`` along an axis, which are between no two ops."""
    by_rank = {recognised.number: recognised for recognised in ranks}
    for match in matches:
        # Steps have the numbers of their ranges, if each holds one run on every rank; else they are counted from 0.
        numbers = [_numbers_of_ranges(by_rank[of_rank.rank].host, of_rank, match) for of_rank in match.ranks]
        first = numbers[0]
        by_ranges = first is not None and all(
            of_rank is not None and np.array_equal(first, of_rank) for of_rank in numbers
        )
        steps = first if by_ranges and first is not None else np.arange(len(match.sizes), dtype=np.int64)
        for of_rank in match.ranks:
            recognised = by_rank[of_rank.rank]
            by_rank[of_rank.rank] = replace(
                recognised,
                framework=recognised.framework or "unlabelled",
                ops=_ops(recognised, of_rank, match, steps, by_ranges),
                comms=_comms(recognised, of_rank, match, steps, (others or {}).get(of_rank.rank, {}), axis),
                warnings=warnings_of_marks(recognised.warnings),
                is_paired=of_rank.stage is None,
            )
    return tuple(by_rank.values())


def _numbers_of_ranges(host: pd.DataFrame, of_rank: RankMatch, match: Match) -> Int64 | None:
    """Number of the range that each run begins in; None where ranges do not tell the runs."""
    steps = host[(host["what"] == What.STEP.value) & (host["number"] >= 0)]
    if steps.empty:
        return None
    starts, ends = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    first = of_rank.forwards.start_ns[match.firsts]
    at = find_interval(starts, ends, first)
    if (at < 0).any() or len(set(at.tolist())) < len(at):
        return None
    step_numbers: Int64 = steps["number"].to_numpy()[at]
    return step_numbers


def _ops(recognised: RecognisedRank, of_rank: RankMatch, match: Match, steps: Int64, by_ranges: bool) -> pd.DataFrame:
    """The ops of a rank, the optimizer's runs, each of the last step that began before it, data of the step that begins next,
    and the numbered ranges of steps. ``steps`` has the step of each run; ``by_ranges``: it is the number of its range.
    """
    run, microbatch = match.numbers()
    op = np.concatenate((np.arange(len(run)), match.behind))
    both = (of_rank.forwards, of_rank.backwards)
    start, end = (np.concatenate([getattr(ops, name) for ops in both]) for name in ("start_ns", "end_ns"))
    work = LaunchIndex(recognised.work).spans(start, end, communication=False)
    start, end = np.where(work.launched, work.start_ns, start), np.where(work.launched, work.end_ns, end)
    what, number, begin = (recognised.host[name].to_numpy() for name in ("what", "number", "start_ns"))
    at = np.searchsorted(of_rank.backwards.start_ns[match.firsts], begin)
    is_optimizer, is_data = (what == What.OPTIMIZER.value) & (at > 0), what == What.DATA.value
    is_step = (what == What.STEP.value) & by_ranges & (number >= 0) & np.isin(number, steps)
    spans = np.flatnonzero(is_optimizer | is_data | is_step)
    step_of_span = steps[np.where(is_optimizer, at - 1, np.minimum(at, len(steps) - 1))]
    stage, chunk = (-1, -1) if of_rank.stage is None else (of_rank.stage, 0)

    def column(of_ops: Any, of_spans: Any) -> npt.NDArray[Any]:
        sizes = zip((of_ops, of_spans), (len(op), len(spans)), strict=True)
        return np.concatenate([value if np.ndim(value) else np.full(size, value, object) for value, size in sizes])

    columns = {
        "step": column(steps[run[op]], np.where(is_step, number, step_of_span)[spans]),
        "kind": column(np.repeat(np.array(["F", "B"], object), list(map(len, both))), what[spans]),
        "stage": column(stage, -1),
        "chunk": column(chunk, -1),
        "microbatch": column(microbatch[op], -1),
        "start_ns": column(start, begin[spans]),
        "end_ns": column(end, recognised.host["end_ns"].to_numpy()[spans]),
        "clock": column(np.where(work.launched, "device", "host").astype(object), "host"),
        "source": column("inferred", "label"),
    }
    order = np.argsort(columns["start_ns"], kind="stable")
    return ops_table({name: values[order] for name, values in columns.items()})


def _comms(
    recognised: RecognisedRank,
    of_rank: RankMatch,
    match: Match,
    steps: Int64,
    others: Mapping[str, Messages],
    axis: str,
) -> pd.DataFrame:
    """The messages of the ops, and those that are of none. Of these, the ``others`` within the pipeline, and those along another
    axis, are of the last step that began before them.
    """
    run, microbatch = match.numbers()
    parts = []
    for (direction, kind), group in of_rank.groups.items():
        row = {"kind": kind, "direction": direction, "peer": of_rank.peers[direction, kind]}
        of_op = group.group if direction == "F" else match.behind[group.group]
        named = {
            "step": steps[run[of_op]],
            "stage": -1 if of_rank.stage is None else of_rank.stage,
            "microbatch": microbatch[of_op],
        }
        parts.append(_messages(recognised, group.messages, row | named))
        parts.append(_messages(recognised, of_rank.others[direction, kind], row | dict.fromkeys(named, -1)))
    begins = np.append(np.iinfo(np.int64).min, of_rank.forwards.start_ns[match.firsts])
    for kind, messages in others.items():
        step = np.append(-1, steps)[np.searchsorted(begins, messages.post_ns, side="right") - 1]
        step = np.where(np.isin(messages.peer, match.chain) | (axis != "pp"), step, -1)
        row = {"kind": kind, "direction": "", "peer": messages.peer, "step": step, "stage": -1, "microbatch": -1}
        parts.append(_messages(recognised, messages, {"axis": axis, **row}))
    return pd.concat([part for part in parts if len(part)], ignore_index=True)


def _messages(recognised: RecognisedRank, messages: Messages, row: Mapping[str, Any]) -> pd.DataFrame:
    """Rows of COMMS."""
    calls = recognised.calls.iloc[messages.row]
    names = ("bytes", "stream", "clock", "start_ns", "posted_ns", "asked_ns", "end_ns")
    return comms_table({"axis": "pp", "group_size": 2, **row, **{name: calls[name].to_numpy() for name in names}})
