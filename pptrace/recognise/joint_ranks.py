"""Ranks without labels → the ops and messages that the match of all of them gives, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from pptrace.recognise.group_shapes import GROUP_COLUMNS, global_peer, key_of
from pptrace.recognise.groups import Groups
from pptrace.recognise.host_order import What
from pptrace.recognise.joint_match import PipelineMatch, RankMatch, chains_by_peers, match_pipeline, numbers_of
from pptrace.recognise.rank import RankFound
from pptrace.recognise.rank_order import Evidence, Messages, MismatchError, evidence_of
from pptrace.recognise.rank_tables import Owner
from pptrace.recognise.schedule import COMPUTE_KINDS
from pptrace.tables import COMMS, OPS, Int64, make_table


@dataclass(frozen=True, slots=True)
class Joint:
    """The ranks, those that form pipelines with their ops and messages; the pipelines; lines that say so, or why not.

    ``refused`` are ranks with messages between operators that no pipeline explains.
    """

    ranks: tuple[RankFound, ...]
    pipelines: tuple[tuple[int, ...], ...] = ()
    notes: tuple[str, ...] = ()
    refused: frozenset[int] = frozenset()


def match_ranks(ranks: Sequence[RankFound], groups: Groups) -> Joint:
    """Match the ranks whose host threads show messages between operators that no label names."""
    evidence = {own.number: _evidence(own, groups) for own in ranks if len(own.host)}
    if len(evidence) < 2 or any(len(own.ops) and not len(own.host) for own in ranks):
        return Joint(tuple(ranks))
    try:
        matches, cut = _whole_steps(evidence, groups, len(ranks))
    except MismatchError as err:
        return Joint(
            tuple(ranks), notes=(f"not one stage of a pipeline on each rank: {err}",), refused=frozenset(evidence)
        )
    by_rank = {own.number: own for own in ranks}
    for match in matches:
        steps = _steps(match, by_rank)
        by_rank |= {own.rank: _with_match(by_rank[own.rank], match, at, steps) for at, own in enumerate(match.ranks)}
    known = tuple(by_rank.values())
    return Joint(known, tuple(match.chain for match in matches), (*_notes(matches, known), *cut))


def alone_with_messages(ranks: Sequence[RankFound]) -> tuple[str, ...]:
    """A line where one rank's messages between operators were not matched with any other's, and told no op by themselves."""
    shown = [own for own in ranks if len(own.host) and own.calls["kind"].isin(("send", "recv")).any()]
    if len(shown) != 1 or any(own.ops["kind"].isin(COMPUTE_KINDS).any() for own in ranks):
        return ()
    return (
        f"rank {shown[0].number} sends and receives between operators, and its order alone does not tell the ops of a pipeline "
        "from the rest: give the traces of the other ranks as well, which are matched together",
    )


def is_unsure_alone(ranks: Sequence[RankFound], ops: pd.DataFrame) -> bool:
    """Whether one rank alone has messages between operators, and its order gives more forwards than backwards, or fewer, in a
    pipeline that nothing tells: some of them may be no ops, and shift the microbatches of those behind them.
    """
    if sum(bool(len(own.host)) for own in ranks) != 1:
        return False
    own = ops[(ops["source"] == "inferred") & ops["kind"].isin(COMPUTE_KINDS)]
    kinds = own["kind"].value_counts()
    return len(own) > 0 and bool((own["stage"] < 0).all()) and kinds.get("F", 0) != kinds.get("B", 0)


def without_inferred(found: RankFound) -> RankFound:
    """The rank without the ops and messages that its own order alone told."""
    is_inferred = (found.ops["source"] == "inferred") & found.ops["kind"].isin(COMPUTE_KINDS)
    if not is_inferred.any():
        return found
    return replace(found, ops=found.ops[~is_inferred], comms=found.comms[found.comms["axis"] != "pp"], warnings=())


def _evidence(found: RankFound, groups: Groups) -> Evidence:
    calls, rank = found.calls, found.number
    keys = zip(*(calls[name] for name in GROUP_COLUMNS), strict=True)
    of_call = [groups.of_call[key_of(rank, key)] for key in keys]
    peers = [
        global_peer(peer, place, group if group.id or group.ranks else groups.unnamed[rank])
        for peer, place, group in zip(calls["peer"], calls["local_peer"], of_call, strict=True)
    ]
    return evidence_of(rank, found.host, calls, peers)


def _whole_steps(
    evidence: Mapping[int, Evidence], groups: Groups, num_ranks: int
) -> tuple[list[PipelineMatch], tuple[str, ...]]:
    """The pipelines; where they need it without the part of the traces before the first optimizer that all ranks show, or behind
    the last one, and a line that says so: ranks may be cut off within a step.

    Raises:
        MismatchError: there are none either way.
    """
    try:
        return _pipelines(evidence, groups, num_ranks), ()
    except MismatchError as err:
        problem = err
    count = min(len(own.optimizers) for own in evidence.values())
    for first, last in ((None, count), (-count, None), (-count, -1)):
        if count < (1 if first is None else 2):
            continue
        parts = {rank: _cut(own, first, last) for rank, own in evidence.items()}
        try:
            found = _pipelines(parts, groups, num_ranks)
        except MismatchError:
            continue
        where = (
            "behind the last"
            if first is None
            else "before the first"
            if last is None
            else "before the first or behind the last"
        )
        return found, (f"left out what is {where} optimizer that all ranks show: {problem}",)
    raise problem


def _cut(evidence: Evidence, first: int | None, last: int | None) -> Evidence:
    """What lies between two of a rank's optimizers, by their places; None: from its beginning, or to its end."""
    times = evidence.optimizers
    begin = np.iinfo(np.int64).min if first is None else int(times[first]) + 1
    end = np.iinfo(np.int64).max if last is None else int(times[last - 1 if last > 0 else last]) + 1
    return evidence.between(begin, end)


def _pipelines(evidence: Mapping[int, Evidence], groups: Groups, num_ranks: int) -> list[PipelineMatch]:
    """The pipelines that all of these ranks form, of ``num_ranks`` that have a trace.

    Raises:
        MismatchError: they form none.
    """
    chains = chains_by_peers(evidence)
    if not chains and groups.pipelines and {r for p in groups.pipelines for r in p} == set(evidence):
        chains = list(groups.pipelines)
    if chains:
        return [match_pipeline(evidence, chain) for chain in chains]
    ranks = sorted(evidence)
    absent = max(num_ranks, groups.world_size or 0) - len(ranks)
    if absent:
        raise MismatchError(
            f"{_counted(absent, 'rank')} of the run show no messages, and those of the others name no peers"
        )
    try:
        return [match_pipeline(evidence, ranks)]
    except MismatchError as err:
        problem = err
    readings = list(_replicas(evidence, ranks))
    if len(readings) != 1:
        raise problem
    return readings[0]


def _replicas(evidence: Mapping[int, Evidence], ranks: Sequence[int]) -> Iterator[list[PipelineMatch]]:
    """The ways to read the ranks as several pipelines of equal length, next to each other or one within the other."""
    size = len(ranks)
    for length in (length for length in range(2, size // 2 + 1) if size % length == 0):
        count = size // length
        for chains in (
            [ranks[place * length : (place + 1) * length] for place in range(count)],
            [ranks[place::count] for place in range(count)],
        ):
            try:
                yield [match_pipeline(evidence, chain) for chain in chains]
            except MismatchError:
                continue


def _notes(matches: Sequence[PipelineMatch], ranks: Sequence[RankFound]) -> Iterator[str]:
    by_rank = {own.number: own for own in ranks}
    for match in matches:
        counts = sorted({unit.count for unit in match.units})
        microbatches = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        rest = sum(_num_left(by_rank[own.rank], own) for own in match.ranks)
        yield (
            f"ranks {_shown(match.chain)}: {_counted(len(match.units), 'step')} of {match.plan.name} with {microbatches} "
            "microbatches explain all messages between them and all that autograd's engine ran; "
            f"{_counted(rest, 'operator')} of their threads are of no op"
        )
    if not all(match.is_behind_known for match in matches):
        yield "nothing tells of which microbatches the backwards are: they are numbered in the order of the forwards"
    if matches[0].by_peers:
        yield "no label tells the stages: the chain of ranks that exchange messages does"
    elif any(list(match.chain) != sorted(match.chain) for match in matches):
        yield "no label tells the stages: the only order of the ranks that their messages allow is taken for them"
    else:
        yield "no label tells the stages: the ranks in their order are taken for them"


def _num_left(found: RankFound, match: RankMatch) -> int:
    total = int((found.host["what"] == What.OPERATOR.value).sum())
    return total - int((match.forwards.high - match.forwards.low).sum())


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _shown(ranks: Sequence[int]) -> str:
    return (
        f"{ranks[0]} to {ranks[-1]}"
        if list(ranks) == list(range(ranks[0], ranks[-1] + 1))
        else ", ".join(map(str, ranks))
    )


@dataclass(frozen=True, slots=True)
class _Steps:
    """The step of each unit of a pipeline; ``by_ranges``: these are the numbers of the steps' own ranges."""

    of_unit: Int64
    by_ranges: bool


def _steps(match: PipelineMatch, by_rank: Mapping[int, RankFound]) -> _Steps:
    """Those of the numbered ranges, where on every rank each such range holds one unit; else counted from 0."""
    numbers = [_numbers_of_ranges(by_rank[own.rank].host, own, match) for own in match.ranks]
    first = numbers[0]
    if first is None or any(other is None or not np.array_equal(first, other) for other in numbers):
        return _Steps(np.arange(len(match.units), dtype=np.int64), by_ranges=False)
    return _Steps(first, by_ranges=True)


def _numbers_of_ranges(host: pd.DataFrame, own: RankMatch, match: PipelineMatch) -> Int64 | None:
    """For each unit the number of the range that it begins in; None where ranges do not tell the units."""
    steps = host[(host["what"] == What.STEP.value) & (host["number"] >= 0)]
    if steps.empty:
        return None
    starts, ends = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    first = own.forwards.start_ns[[unit.first for unit in match.units]]
    at = np.searchsorted(starts, first, side="right") - 1
    if not ((at >= 0) & (first < ends[at])).all() or len(set(at.tolist())) < len(at):
        return None
    found: Int64 = steps["number"].to_numpy()[at]
    return found


def _with_match(found: RankFound, match: PipelineMatch, place: int, steps: _Steps) -> RankFound:
    """The rank with the ops and messages of its place in the pipeline."""
    return replace(
        found,
        framework=found.framework or "unlabelled",
        ops=_ops(found, match, place, steps),
        comms=_comms(found, match, place, steps.of_unit),
        warnings=(),
    )


def _ops(found: RankFound, match: PipelineMatch, place: int, steps: _Steps) -> pd.DataFrame:
    own, owner = match.ranks[place], Owner(found.work)
    unit, microbatch = numbers_of(match.units)
    rows: list[dict[str, Any]] = []
    for kind, ops, of_op in (("F", own.forwards, slice(None)), ("B", own.backwards, match.behind)):
        columns = (ops.start_ns, ops.end_ns, steps.of_unit[unit][of_op], microbatch[of_op])
        for start, end, step, number in zip(*(column.tolist() for column in columns), strict=True):
            span = owner.span(start, end, communication=False)
            clock = "host" if span is None else "device"
            start, end = (start, end) if span is None else span[:2]
            rows.append(
                _row(kind, step, start, end, stage=place, chunk=0, microbatch=number, clock=clock, source="inferred")
            )
    rows += _spans(found, match, place, steps)
    rows.sort(key=lambda row: row["start_ns"])
    return make_table(OPS, {name: [row[name] for row in rows] for name in OPS})


def _spans(found: RankFound, match: PipelineMatch, place: int, steps: _Steps) -> Iterator[dict[str, Any]]:
    """The optimizer's runs, each of the last step that began before it, and the numbered ranges of steps."""
    own, numbers = match.ranks[place], steps.of_unit
    begun = own.backwards.start_ns[[unit.first for unit in match.units]]
    for what, number, start, end in found.host[["what", "number", "start_ns", "end_ns"]].itertuples(index=False):
        if what == What.OPTIMIZER and (at := int(np.searchsorted(begun, start)) - 1) >= 0:
            yield _row("OPTIMIZER", int(numbers[at]), start, end)
        elif what == What.STEP and steps.by_ranges and number >= 0 and number in numbers:
            yield _row("STEP", number, start, end)


def _row(kind: str, step: int, start_ns: int, end_ns: int, **more: Any) -> dict[str, Any]:
    row = {"rank": -1, "step": step, "kind": kind, "stage": -1, "chunk": -1, "microbatch": -1, "phase": ""}
    row |= {"start_ns": start_ns, "end_ns": end_ns, "clock": "host", "source": "label", "pair": ""}
    return row | more


def _comms(found: RankFound, match: PipelineMatch, place: int, numbers: Int64) -> pd.DataFrame:
    """The messages of the ops, and those that are of none."""
    own = match.ranks[place]
    unit, microbatch = numbers_of(match.units)
    parts = []
    for (direction, kind), group in own.groups.items():
        peer = match.chain[place + (1 if (direction == "F") == (kind == "send") else -1)]
        row = {"kind": kind, "direction": direction, "peer": peer}
        of_op = group.group if direction == "F" else match.behind[group.group]
        named = {"step": numbers[unit[of_op]], "stage": place, "microbatch": microbatch[of_op]}
        parts.append(_messages(found, group.messages, row | named))
        parts.append(_messages(found, own.others[direction, kind], row | dict.fromkeys(named, -1)))
    return pd.concat([part for part in parts if len(part)], ignore_index=True)


def _messages(found: RankFound, messages: Messages, row: Mapping[str, Any]) -> pd.DataFrame:
    """Rows of COMMS. A send on the host's clock lies in a buffer when its posting is over."""
    calls = found.calls.iloc[messages.row]
    posted = calls["posted_ns"].to_numpy()
    buffered = (calls["clock"] == "host").to_numpy() & (row["kind"] == "send")
    asked, end = (np.where(buffered, posted, calls[name].to_numpy()) for name in ("asked_ns", "end_ns"))
    start, rest = calls["start_ns"].to_numpy(), {name: calls[name].tolist() for name in ("bytes", "stream", "clock")}
    times = {"start_ns": start, "posted_ns": posted, "asked_ns": asked, "end_ns": end}
    times |= {"transfer_start_ns": start, "transfer_end_ns": end}
    columns: dict[str, Any] = {"rank": -1, "axis": "pp", "group_size": 2, "match": -1, **row, **rest, **times}
    size = len(messages)
    return make_table(COMMS, {name: value if np.ndim(value) else [value] * size for name, value in columns.items()})
