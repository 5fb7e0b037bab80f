"""Tables of a rank from its matched ops and messages, with steps and microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
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
                comms=_comms(recognised, of_rank, match, steps),
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
    at = np.searchsorted(starts, first, side="right") - 1
    if not ((at >= 0) & (first < ends[at])).all() or len(set(at.tolist())) < len(at):
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
        "rank": column(-1, -1),
        "step": column(steps[run[op]], np.where(is_step, number, step_of_span)[spans]),
        "kind": column(np.repeat(np.array(["F", "B"], object), list(map(len, both))), what[spans]),
        "stage": column(stage, -1),
        "chunk": column(chunk, -1),
        "microbatch": column(microbatch[op], -1),
        "phase": column("", ""),
        "start_ns": column(start, begin[spans]),
        "end_ns": column(end, recognised.host["end_ns"].to_numpy()[spans]),
        "clock": column(np.where(work.launched, "device", "host").astype(object), "host"),
        "source": column("inferred", "label"),
        "pair": column("", ""),
    }
    order = np.argsort(columns["start_ns"], kind="stable")
    return make_table(OPS, {name: values[order] for name, values in columns.items()})


def _comms(recognised: RecognisedRank, of_rank: RankMatch, match: Match, steps: Int64) -> pd.DataFrame:
    """The messages of the ops, and those that are of none."""
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
    return pd.concat([part for part in parts if len(part)], ignore_index=True)


def _messages(recognised: RecognisedRank, messages: Messages, row: Mapping[str, Any]) -> pd.DataFrame:
    """Rows of COMMS."""
    calls = recognised.calls.iloc[messages.row]
    columns: dict[str, Any] = {"rank": -1, "axis": "pp", "group_size": 2, "match": -1, **row}
    names = ("bytes", "stream", "clock", "start_ns", "posted_ns", "asked_ns", "end_ns")
    columns |= {name: calls[name].to_numpy() for name in names}
    columns |= {"transfer_start_ns": columns["start_ns"], "transfer_end_ns": columns["end_ns"]}
    size = len(messages)
    return make_table(COMMS, {name: value if np.ndim(value) else [value] * size for name, value in columns.items()})
