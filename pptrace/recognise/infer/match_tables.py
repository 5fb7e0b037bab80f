"""Tables of a rank from its matched ops and messages, with steps and microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from pptrace.model.tables import COMMS, OPS, Int64, What, make_table
from pptrace.recognise.infer.pipeline_match import MessageKind, RankMatch, numbers_of
from pptrace.recognise.infer.rank_order import Messages
from pptrace.recognise.infer.schedule_runs import Unit
from pptrace.recognise.ops.from_marks import warnings_of_marks
from pptrace.recognise.ops.tables import LaunchIndex
from pptrace.recognise.recognised_rank import RecognisedRank


@dataclass(frozen=True, slots=True)
class Steps:
    """The step of each unit of a pipeline; ``by_ranges``: these are the numbers of the steps' own ranges."""

    of_unit: Int64
    by_ranges: bool


def steps_of_units(units: Sequence[Unit], ranks: Sequence[tuple[RecognisedRank, RankMatch]]) -> Steps:
    """Numbers of the step ranges, if each holds one unit on every rank; else counted from 0."""
    numbers = [_numbers_of_ranges(recognised.host, match, units) for recognised, match in ranks]
    first = numbers[0]
    if first is None or any(
        numbers_of_rank is None or not np.array_equal(first, numbers_of_rank) for numbers_of_rank in numbers
    ):
        return Steps(np.arange(len(units), dtype=np.int64), by_ranges=False)
    return Steps(first, by_ranges=True)


def _numbers_of_ranges(host: pd.DataFrame, match: RankMatch, units: Sequence[Unit]) -> Int64 | None:
    """Number of the range that each unit begins in; None where ranges do not tell the units."""
    steps = host[(host["what"] == What.STEP.value) & (host["number"] >= 0)]
    if steps.empty:
        return None
    starts, ends = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    first = match.forwards.start_ns[[unit.first for unit in units]]
    at = np.searchsorted(starts, first, side="right") - 1
    if not ((at >= 0) & (first < ends[at])).all() or len(set(at.tolist())) < len(at):
        return None
    step_numbers: Int64 = steps["number"].to_numpy()[at]
    return step_numbers


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assignment of a match to the ops and messages of a rank: a step to each unit, to each backward its forward (``behind``),
    the rank's stage (None if unknown), and the peers of its messages.
    """

    units: tuple[Unit, ...]
    steps: Steps
    behind: Int64
    stage: int | None
    peers: Mapping[MessageKind, int]

    @property
    def columns(self) -> dict[str, int]:
        """The columns ``stage`` and ``chunk``: −1 where the stage is unknown."""
        return {"stage": -1, "chunk": -1} if self.stage is None else {"stage": self.stage, "chunk": 0}


def with_match(recognised: RecognisedRank, match: RankMatch, assignment: Assignment) -> RecognisedRank:
    """The rank with the ops and messages of a match."""
    return replace(
        recognised,
        framework=recognised.framework or "unlabelled",
        ops=_ops(recognised, match, assignment),
        comms=_comms(recognised, match, assignment),
        warnings=warnings_of_marks(recognised.warnings),
        is_paired=assignment.stage is None,
    )


def _ops(recognised: RecognisedRank, match: RankMatch, assignment: Assignment) -> pd.DataFrame:
    launches = LaunchIndex(recognised.work)
    unit, microbatch = numbers_of(assignment.units)
    common: dict[str, Any] = {**assignment.columns, "source": "inferred"}
    rows: list[dict[str, Any]] = []
    for kind, ops, of_op in (("F", match.forwards, slice(None)), ("B", match.backwards, assignment.behind)):
        columns = (ops.start_ns, ops.end_ns, assignment.steps.of_unit[unit][of_op], microbatch[of_op])
        for start, end, step, number in zip(*(column.tolist() for column in columns), strict=True):
            span = launches.span(start, end, communication=False)
            clock = "host" if span is None else "device"
            start, end = (start, end) if span is None else span[:2]
            rows.append(_row(kind, step, start, end, microbatch=number, clock=clock, **common))
    rows += _spans(recognised, match, assignment)
    rows.sort(key=lambda row: row["start_ns"])
    return make_table(OPS, {name: [row[name] for row in rows] for name in OPS})


def _spans(recognised: RecognisedRank, match: RankMatch, assignment: Assignment) -> Iterator[dict[str, Any]]:
    """The optimizer's runs, each of the last step that began before it, data of the step that begins next, and the numbered
    ranges of steps.
    """
    numbers = assignment.steps.of_unit
    begun = match.backwards.start_ns[[unit.first for unit in assignment.units]]
    for what, number, start, end in recognised.host[["what", "number", "start_ns", "end_ns"]].itertuples(index=False):
        if what == What.OPTIMIZER and (at := int(np.searchsorted(begun, start)) - 1) >= 0:
            yield _row("OPTIMIZER", int(numbers[at]), start, end)
        elif what == What.DATA:
            yield _row("DATA", int(numbers[min(int(np.searchsorted(begun, start)), len(numbers) - 1)]), start, end)
        elif what == What.STEP and assignment.steps.by_ranges and number >= 0 and number in numbers:
            yield _row("STEP", number, start, end)


def _row(kind: str, step: int, start_ns: int, end_ns: int, **more: Any) -> dict[str, Any]:
    row = {"rank": -1, "step": step, "kind": kind, "stage": -1, "chunk": -1, "microbatch": -1, "phase": ""}
    row |= {"start_ns": start_ns, "end_ns": end_ns, "clock": "host", "source": "label", "pair": ""}
    return row | more


def _comms(recognised: RecognisedRank, match: RankMatch, assignment: Assignment) -> pd.DataFrame:
    """The messages of the ops, and those that are of none."""
    unit, microbatch = numbers_of(assignment.units)
    parts = []
    for (direction, kind), group in match.groups.items():
        row = {"kind": kind, "direction": direction, "peer": assignment.peers[direction, kind]}
        of_op = group.group if direction == "F" else assignment.behind[group.group]
        named = {
            "step": assignment.steps.of_unit[unit[of_op]],
            "stage": assignment.columns["stage"],
            "microbatch": microbatch[of_op],
        }
        parts.append(_messages(recognised, group.messages, row | named))
        parts.append(_messages(recognised, match.others[direction, kind], row | dict.fromkeys(named, -1)))
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
