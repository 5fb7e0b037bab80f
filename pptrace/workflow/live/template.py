"""Figures of the steps of a run that goes on: from a template of steps with the same ranges, else from an analysis of their own.

A template is the tables that the analysis recognised in one step: the figures of others follow by new times alone. A step of two
ranks takes a tenth of the time so that its analysis takes.

The times of the step that is analysed are spread apart, so that every begin and end has a remainder of its own. Each time in the
tables of ops and communication then says of which range it is the begin or the end, and another step's times take its place. What
follows is the analysis' own: transfers, lanes, windows (docs/architecture.md).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.analysis.aligned import RowsByRank
from pptrace.analysis.steps.rank_steps import TimesInWindows
from pptrace.live_records.file import LiveStep
from pptrace.model.device import DeviceWork
from pptrace.model.tables import COMPUTE_KINDS, Int64
from pptrace.recognise.messages.match import with_transfers
from pptrace.slices import Slice, rows_among, rows_where
from pptrace.timeline.lanes import lane_of
from pptrace.workflow.analyse import Analysis, analyse
from pptrace.workflow.live.traces import trace_of

_OP_TIMES = ("start_ns", "end_ns")
_COMM_TIMES = ("start_ns", "posted_ns", "asked_ns", "end_ns")
_MOST_TEMPLATES = 64
NO_SHIFT = {"start": {"time_ns": 0, "monotonic_ns": 0, "perf_counter_ns": 0}}


Facts = Mapping[int, Mapping[str, Any]]
Programs = tuple[tuple[int, int], ...]
"""The program of each rank, which a template is for."""


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Figures of a rank in a step, ns, as :class:`pptrace.analysis.result.RankStep` has them; ``wait_ns`` is its waiting in all
    communication.
    """

    compute_ns: int | None
    exposed_comm_ns: int | None
    bubble_ns: int | None
    not_compute_ns: int | None
    wait_ns: int | None


@dataclass(frozen=True, slots=True)
class StepFigures:
    """``span_ns`` is that of the longest pipeline; None where the ranks' times do not compare."""

    span_ns: int | None
    ranks: Mapping[int, RankFigures]


@dataclass(frozen=True, slots=True)
class StepTemplate:
    """Tables of a step without its times: ``op_places`` and ``comm_places`` say which begin or end each of them is."""

    ops: pd.DataFrame
    comms: pd.DataFrame
    op_places: Mapping[str, npt.NDArray[np.intp]]
    comm_places: Mapping[str, npt.NDArray[np.intp]]
    pipelines: tuple[tuple[int, ...], ...]
    analysis: Analysis

    @classmethod
    def of(cls, step: Mapping[int, LiveStep], facts: Mapping[int, Mapping[str, Any]]) -> StepTemplate | None:
        """The template of a step; None where its figures do not follow from its times alone: its ranks are on several hosts, or
        an op is missing.

        Raises:
            PptraceError: it cannot be analysed.
        """
        spread = _Spread.of(step)
        analysis = analyse([spread.trace_of(rank, facts[rank]) for rank in step], num_ranks=len(step))
        report = analysis.report.steps
        clock = analysis.data.clock
        is_related = not any(clock.offsets_ns.values()) and not clock.rates and clock.relates(list(step))
        if len(report) != 1 or not is_related or any(rank.compute_ns is None for rank in report[0].ranks):
            return None
        ops = rows_where(analysis.data.ops, rows_among(analysis.data.ops["kind"], COMPUTE_KINDS)).reset_index(drop=True)
        comms = analysis.data.comms.reset_index(drop=True)
        op_places, comm_places = spread.places(ops, _OP_TIMES), spread.places(comms, _COMM_TIMES)
        if op_places is None or comm_places is None:
            return None
        pipelines = tuple(tuple(rank for rank in ranks if rank in step) for ranks in analysis.mesh.pipelines)
        return cls(ops, comms, op_places, comm_places, pipelines, analysis)

    def figures(self, steps: Sequence[Mapping[int, LiveStep]]) -> list[StepFigures]:
        """The figures of steps with these ranges."""
        times = np.stack([_times(step) for step in steps])
        times -= times.min()
        ops = _filled(self.ops, self.op_places, times)
        comms = _filled(self.comms, self.comm_places, times)
        comms = comms.assign(transfer_start_ns=comms["start_ns"], transfer_end_ns=comms["end_ns"])
        rows = RowsByRank(ops, with_transfers(comms))
        windows = {
            rank: window
            for ranks in self.pipelines
            for window in (_windows(ranks, rows, len(steps)),)
            for rank in ranks
        }
        of_ranks = {rank: self._of_rank(rank, rows, *window) for rank, window in windows.items()}
        spans = np.max([end - start for start, end in windows.values()], axis=0)
        return [
            StepFigures(int(spans[index]), {rank: figures[index] for rank, figures in of_ranks.items()})
            for index in range(len(steps))
        ]

    def _of_rank(self, rank: int, rows: RowsByRank, start_ns: Int64, end_ns: Int64) -> list[RankFigures]:
        part = rows.of_rank(rank)
        data = self.analysis.data
        work: DeviceWork | None = data.work.get(rank)
        lane = lane_of(rank, part.ops, part.comms, work, data.clock, rank in data.lacking)
        times = TimesInWindows(lane, start_ns, end_ns)
        waits = _waits(part.comms, len(start_ns))
        columns = (times.compute_ns, times.exposed_ns, times.bubble_ns, times.rest_ns, times.is_known)
        return [
            RankFigures(compute, exposed if known else None, bubble if known else None, rest, wait)
            for compute, exposed, bubble, rest, known, wait in zip(
                *(column.tolist() for column in columns), waits, strict=True
            )
        ]


@dataclass(frozen=True, slots=True)
class _Spread:
    """A step whose times were multiplied by ``factor``, each with its place as the remainder.

    At equal times begins come before ends, of begins the range that ends last comes first, and of ends the one that is first in
    the record: ranges lie within each other as before.
    """

    step: Mapping[int, LiveStep]
    factor: int
    first_place: Mapping[int, int]

    @classmethod
    def of(cls, step: Mapping[int, LiveStep]) -> _Spread:
        sizes = {rank: 2 * len(step[rank].names) for rank in sorted(step)}
        firsts = np.concatenate(([0], np.cumsum(list(sizes.values()))[:-1])).tolist()
        return cls(step, max(sizes.values(), default=1) + 1, dict(zip(sizes, firsts, strict=True)))

    def trace_of(self, rank: int, facts: Mapping[str, Any]) -> Any:
        record = self.step[rank].record
        num = len(record.begin_ns)
        origin_ns = min(step.record.head.begin_ns for step in self.step.values())
        moved = replace(
            record,
            begin_ns=(record.begin_ns - origin_ns) * self.factor + np.arange(num)[::-1],
            end_ns=(record.end_ns - origin_ns) * self.factor + num + np.arange(num),
        )
        return trace_of(rank, "", {**facts, "clock": NO_SHIFT}, [replace(self.step[rank], record=moved)])

    def places(self, table: pd.DataFrame, columns: Sequence[str]) -> dict[str, npt.NDArray[np.intp]] | None:
        """The place of every time in these columns; None where one is no begin or end of a range."""
        firsts = table["rank"].map(self.first_place).to_numpy(dtype=np.int64)
        times, origin_ns = _times(self.step), min(step.record.head.begin_ns for step in self.step.values())
        places = {}
        for name in columns:
            quotient, remainder = np.divmod(table[name].to_numpy(), self.factor)
            place = firsts + remainder
            if (place >= len(times)).any() or (times[place] - origin_ns != quotient).any():
                return None
            places[name] = place.astype(np.intp)
        return places


def _times(step: Mapping[int, LiveStep]) -> Int64:
    """All begins and ends of a step by place: of each rank the begins from the last range to the first, and the ends."""
    records = [step[rank].record for rank in sorted(step)]
    return np.concatenate([part for record in records for part in (record.begin_ns[::-1], record.end_ns)])


def _filled(table: pd.DataFrame, places: Mapping[str, npt.NDArray[np.intp]], times: Int64) -> pd.DataFrame:
    """The rows once for each step, with its times; steps are numbered from 0, and so are the matches of each step apart."""
    num_steps, num_rows = len(times), len(table)
    filled = table.take(np.tile(np.arange(num_rows), num_steps))
    columns: dict[str, Any] = {name: times[:, place].reshape(-1) for name, place in places.items()}
    columns["step"] = number = np.repeat(np.arange(num_steps), num_rows)
    if "match" in table.columns and num_rows:
        match = filled["match"].to_numpy()
        columns["match"] = np.where(match >= 0, match + number * (int(match.max()) + 1), match)
    return filled.assign(**columns)


def _windows(ranks: Sequence[int], rows: RowsByRank, num_steps: int) -> tuple[Int64, Int64]:
    """Start and end of each step of a pipeline, ns."""
    start, end = np.full(num_steps, np.iinfo(np.int64).max), np.full(num_steps, np.iinfo(np.int64).min)
    for rank in ranks:
        ops = rows.of_rank(rank).ops
        np.minimum.at(start, ops["step"], ops["start_ns"])
        np.maximum.at(end, ops["step"], ops["end_ns"])
    return start, end


def _waits(comms: Slice, num_steps: int) -> list[int | None]:
    """The waiting of a rank in all communication of each step, ns; None where another side of some is not known."""
    waited, unknown = np.zeros(num_steps, dtype=np.int64), np.zeros(num_steps, dtype=np.bool_)
    lasted = comms["end_ns"] - comms["start_ns"] - (comms["transfer_end_ns"] - comms["transfer_start_ns"])
    np.add.at(waited, comms["step"], lasted)
    unknown[comms["step"][(comms["match"] < 0) & (comms["group_size"] != 1)]] = True
    return [None if missing else ns for ns, missing in zip(waited.tolist(), unknown.tolist(), strict=True)]


class StepAnalyser:
    """Figures of steps of one run."""

    def __init__(self) -> None:
        self._templates: OrderedDict[Programs, StepTemplate | None] = OrderedDict()

    def figures(self, steps: Sequence[Mapping[int, LiveStep]], facts: Facts) -> dict[int, StepFigures]:
        """The figures of each step, by its number; a step of which nothing is known has none.

        Raises:
            PptraceError: a step cannot be analysed.
        """
        by_programs: dict[Programs, list[Mapping[int, LiveStep]]] = {}
        for step in steps:
            programs = tuple((rank, step[rank].record.program) for rank in sorted(step))
            by_programs.setdefault(programs, []).append(step)
        figures: dict[int, StepFigures] = {}
        for programs, of_programs in by_programs.items():
            if programs not in self._templates:
                self._templates[programs] = StepTemplate.of(of_programs[0], facts)
                if len(self._templates) > _MOST_TEMPLATES:
                    self._templates.popitem(last=False)
            if (template := self._templates[programs]) is None:
                figures |= _analysed(of_programs, facts)
            else:
                numbers = [next(iter(step.values())).step for step in of_programs]
                figures |= dict(zip(numbers, template.figures(of_programs), strict=True))
        return figures


def _analysed(steps: Sequence[Mapping[int, LiveStep]], facts: Facts) -> dict[int, StepFigures]:
    """The figures of steps from an analysis of their own."""
    ranks = list(steps[0])
    traces = [trace_of(rank, "", facts[rank], [step[rank] for step in steps]) for rank in ranks]
    report = analyse(traces, num_ranks=len(traces))
    figures: dict[int, StepFigures] = {}
    for step in report.report.steps:
        of_ranks: dict[int, RankFigures] = {}
        for rank in step.ranks:
            if rank.compute_ns is not None:
                waits = [comm.wait_ns for comm in rank.comms]
                waited = None if None in waits else sum(ns for ns in waits if ns is not None)
                times = (rank.compute_ns, rank.exposed_comm_ns, rank.bubble_ns, rank.not_compute_ns)
                of_ranks[rank.rank] = RankFigures(*times, waited)
        figures[step.step] = StepFigures(step.span_ns, of_ranks)
    return figures
