"""Tables of a rank from its matched ops and messages, with steps and microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from pptrace.model.tables import COMMS, OPS, Int64, What, make_table
from pptrace.recognise.infer.evidence import Messages
from pptrace.recognise.infer.match import Match, RankMatch
from pptrace.recognise.ops.from_marks import warnings_of_marks
from pptrace.recognise.ops.tables import LaunchIndex
from pptrace.recognise.recognised_rank import RecognisedRank


def with_matches(ranks: Sequence[RecognisedRank], matches: Sequence[Match]) -> tuple[RecognisedRank, ...]:
    """The ranks with the ops and messages of the matches."""
    by_rank = {recognised.number: recognised for recognised in ranks}
    for match in matches:
        # Steps have the numbers of their ranges, if each holds one unit on every rank; else they are counted from 0.
        numbers = [_numbers_of_ranges(by_rank[of_rank.rank].host, of_rank, match) for of_rank in match.ranks]
        first = numbers[0]
        by_ranges = first is not None and all(
            of_rank is not None and np.array_equal(first, of_rank) for of_rank in numbers
        )
        steps = first if by_ranges and first is not None else np.arange(len(match.units), dtype=np.int64)
        for of_rank in match.ranks:
            recognised = by_rank[of_rank.rank]
            by_rank[of_rank.rank] = replace(
                recognised,
                framework=recognised.framework or "unlabelled",
                ops=_ops(recognised, of_rank, match, steps, by_ranges),
                comms=_comms(recognised, of_rank, match, steps),
                warnings=warnings_of_marks(recognised.warnings),
                is_paired=of_rank.stage is None,
            )
    return tuple(by_rank.values())


def _numbers_of_ranges(host: pd.DataFrame, of_rank: RankMatch, match: Match) -> Int64 | None:
    """Number of the range that each unit begins in; None where ranges do not tell the units."""
    steps = host[(host["what"] == What.STEP.value) & (host["number"] >= 0)]
    if steps.empty:
        return None
    starts, ends = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    first = of_rank.forwards.start_ns[[unit.first for unit in match.units]]
    at = np.searchsorted(starts, first, side="right") - 1
    if not ((at >= 0) & (first < ends[at])).all() or len(set(at.tolist())) < len(at):
        return None
    step_numbers: Int64 = steps["number"].to_numpy()[at]
    return step_numbers


def _ops(recognised: RecognisedRank, of_rank: RankMatch, match: Match, steps: Int64, by_ranges: bool) -> pd.DataFrame:
    """The ops of a rank; ``steps`` has the step of each unit, ``by_ranges`` tells whether that is the number of its range."""
    launches = LaunchIndex(recognised.work)
    unit, microbatch = match.numbers()
    stage, chunk = (-1, -1) if of_rank.stage is None else (of_rank.stage, 0)
    common: dict[str, Any] = {"stage": stage, "chunk": chunk, "source": "inferred"}
    rows: list[dict[str, Any]] = []
    for kind, ops, of_op in (("F", of_rank.forwards, slice(None)), ("B", of_rank.backwards, match.behind)):
        columns = (ops.start_ns, ops.end_ns, steps[unit][of_op], microbatch[of_op])
        for start, end, step, number in zip(*(column.tolist() for column in columns), strict=True):
            span = launches.span(start, end, communication=False)
            clock = "host" if span is None else "device"
            start, end = (start, end) if span is None else span[:2]
            rows.append(_row(kind, step, start, end, microbatch=number, clock=clock, **common))
    rows += _spans(recognised.host, of_rank, match, steps, by_ranges)
    rows.sort(key=lambda row: row["start_ns"])
    return make_table(OPS, {name: [row[name] for row in rows] for name in OPS})


def _spans(
    host: pd.DataFrame, of_rank: RankMatch, match: Match, steps: Int64, by_ranges: bool
) -> Iterator[dict[str, Any]]:
    """The optimizer's runs, each of the last step that began before it, data of the step that begins next, and the numbered
    ranges of steps.
    """
    begun = of_rank.backwards.start_ns[[unit.first for unit in match.units]]
    for what, number, start, end in host[["what", "number", "start_ns", "end_ns"]].itertuples(index=False):
        at = int(np.searchsorted(begun, start))
        if what == What.OPTIMIZER and at > 0:
            yield _row("OPTIMIZER", int(steps[at - 1]), start, end)
        elif what == What.DATA:
            yield _row("DATA", int(steps[min(at, len(steps) - 1)]), start, end)
        elif what == What.STEP and by_ranges and number >= 0 and number in steps:
            yield _row("STEP", number, start, end)


def _row(kind: str, step: int, start_ns: int, end_ns: int, **more: Any) -> dict[str, Any]:
    row = {"rank": -1, "step": step, "kind": kind, "stage": -1, "chunk": -1, "microbatch": -1, "phase": ""}
    row |= {"start_ns": start_ns, "end_ns": end_ns, "clock": "host", "source": "label", "pair": ""}
    return row | more


def _comms(recognised: RecognisedRank, of_rank: RankMatch, match: Match, steps: Int64) -> pd.DataFrame:
    """The messages of the ops, and those that are of none."""
    unit, microbatch = match.numbers()
    parts = []
    for (direction, kind), group in of_rank.groups.items():
        row = {"kind": kind, "direction": direction, "peer": of_rank.peers[direction, kind]}
        of_op = group.group if direction == "F" else match.behind[group.group]
        named = {
            "step": steps[unit[of_op]],
            "stage": -1 if of_rank.stage is None else of_rank.stage,
            "microbatch": microbatch[of_op],
        }
        parts.append(_messages(recognised, group.messages, row | named))
        parts.append(_messages(recognised, of_rank.others[direction, kind], row | dict.fromkeys(named, -1)))
    return pd.concat([part for part in parts if len(part)], ignore_index=True)


def _messages(recognised: RecognisedRank, messages: Messages, row: Mapping[str, Any]) -> pd.DataFrame:
    """Rows of COMMS."""
    calls = recognised.calls.iloc[messages.row]
    times = {name: calls[name].to_numpy() for name in ("start_ns", "posted_ns", "asked_ns", "end_ns")}
    times |= {"transfer_start_ns": times["start_ns"], "transfer_end_ns": times["end_ns"]}
    copied = {name: calls[name].tolist() for name in ("bytes", "stream", "clock")}
    columns: dict[str, Any] = {"rank": -1, "axis": "pp", "group_size": 2, "match": -1, **row, **copied, **times}
    size = len(messages)
    return make_table(COMMS, {name: value if np.ndim(value) else [value] * size for name, value in columns.items()})
