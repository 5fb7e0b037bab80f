"""Work of workers between the map (a file → its ranks) and the report: the shuffle by match, and the reports of ranks.

Messages and collectives meet within a step. So the rows of all ranks are dealt out by blocks of steps, matched and timed there,
and what that gives goes back to where the rest of each rank is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.analysis.aligned import AlignedRun, StepsOfRank
from pptrace.analysis.explain.explain import axes_inside_ops
from pptrace.analysis.explain.step_times import IndexedWindows, RankTimes
from pptrace.analysis.lost_steps import outside_lost, without_unknown_times
from pptrace.analysis.notes import count_nested
from pptrace.analysis.questions import Answers, ask_ranks
from pptrace.analysis.result import RankDevice, RankStep
from pptrace.analysis.steps.outside_pipeline import OutsideRows, outside_rows
from pptrace.analysis.steps.rank_steps import RankWindows, report_rank_steps
from pptrace.analysis.steps.steps import PlanPart
from pptrace.clock import Clock, shift
from pptrace.clock.bounds import without_matches_of
from pptrace.marks import P2P
from pptrace.model.categories import with_categories
from pptrace.model.join_tables import join_ranks
from pptrace.model.mesh import MeshInfo
from pptrace.model.predicted import RankPrediction
from pptrace.model.schedule_info import ScheduleInfo
from pptrace.model.tables import COMMS, MEMORY, OPS, Int64
from pptrace.model.traces import OP_TABLE
from pptrace.recognise.messages.match import (
    match_comms,
    rows_of_posting_only,
    unknown_by_rank,
    with_transfers,
)
from pptrace.recognise.messages.messages_from_plan import drop_messages_beyond_ends
from pptrace.recognise.run import RecognisedRun, with_ends
from pptrace.slices import group_codes, rows_among, rows_where, slice_of, slices_by_int
from pptrace.timeline.phases import tag_ops
from pptrace.workflow.analyse import device_of_rank, with_lanes
from pptrace.workflow.remote_rank import Part, whole_rank

_SHUFFLED = (
    *("rank", "step", "kind", "axis", "peer", "group_size", "bytes", "direction", "stage", "microbatch"),
    *("start_ns", "posted_ns", "end_ns", "transfer_start_ns", "transfer_end_ns", "clock"),
)
"""Columns that matches and transfers need."""


def comms_of_ranks(
    numbers: Sequence[int], parts: Sequence[Sequence[Part]], holders: pd.DataFrame, mesh: MeshInfo
) -> pd.DataFrame:
    """The communication of some ranks, with peers, directions and sizes, in order of their numbers.

    Args:
        numbers, parts: of the ranks.
        holders: which rank holds which stage (columns of OPS).
    """
    ranks = zip(numbers, map(whole_rank, parts), strict=True)
    comms = join_ranks([(number, rank.comms) for number, rank in ranks], COMMS)
    return with_ends(drop_messages_beyond_ends(comms, holders, mesh), holders, mesh).reset_index(drop=True)


def dealt_by_step(comms: pd.DataFrame, first_steps: Int64) -> list[pd.DataFrame]:
    """The rows of :func:`comms_of_ranks` by block of steps, each with its number in the table (``row``).

    ``first_steps`` are the first step of each block but the first one, which has what is in no step as well.
    """
    with_devices = comms.loc[comms["clock"] == "device", "rank"].unique()
    rows = comms[list(_SHUFFLED)].assign(row=np.arange(len(comms)), on_device=comms["rank"].isin(with_devices))
    block = np.searchsorted(first_steps, rows["step"].to_numpy(), side="right")
    return [rows[block == index] for index in range(len(first_steps) + 1)]


def matched_block(mesh: MeshInfo, *parts: pd.DataFrame) -> pd.DataFrame:
    """The rows of all ranks in a block of steps, in order of rank and row, with ``match`` as counted in this block."""
    rows = with_categories(pd.concat([part for part in parts if len(part)] or parts[:1]))
    return match_comms(rows.sort_values(["rank", "row"], kind="stable", ignore_index=True), mesh)


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """Facts of a block of steps that the program needs.

    ``matched`` has what relates the clocks: the matched rows whose times are execution times, and for each rank a row without a
    match, from its first to its last time. ``lacking`` are the rows without a match, as far as warnings are of them, after a row
    of a step if there is any. ``by_name``: every message is the only one of its name.
    """

    num_messages: int
    num_collectives: int
    by_name: bool
    matched: pd.DataFrame
    lacking: pd.DataFrame


_RELATING = ("rank", "row", "kind", "start_ns", "end_ns", "match", "clock")
_LACKING = ("step", "match", "group_size", "kind", "peer", "axis", "rank")


def facts_of_block(
    block: pd.DataFrame, without_devices: Sequence[int], lost: Mapping[int, frozenset[int]]
) -> BlockFacts:
    """The facts of a matched block.

    ``without_devices`` are ranks whose times are those of launching, ``lost`` the steps of each rank that lost kernels.
    """
    is_p2p = rows_among(block["kind"], P2P)
    match = block["match"].to_numpy()
    num_messages = int(match[is_p2p].max(initial=-1)) + 1
    timed = (block["clock"] != "none") & ~block["rank"].isin(without_devices) & ~_posting_only(block)
    timed &= outside_lost(block, lost)
    relating = block.loc[timed, list(_RELATING)]
    spans = relating.groupby("rank", as_index=False).agg(start_ns=("start_ns", "min"), end_ns=("end_ns", "max"))
    spans = spans.assign(row=-1, kind="", match=-1, clock="")
    unmatched = block[(block["match"] < 0) & (block["group_size"] != 1)]
    of_step = block[block["step"] >= 0].head(1).assign(match=0)
    return BlockFacts(
        num_messages,
        max(int(match.max(initial=-1)) + 1 - num_messages, 0),
        _has_own_names(block[is_p2p]),
        pd.concat([relating[relating["match"] >= 0], spans[list(_RELATING)]], ignore_index=True),
        pd.concat([of_step[list(_LACKING)], unmatched[list(_LACKING)]], ignore_index=True),
    )


def _has_own_names(messages: pd.DataFrame) -> bool:
    if not len(messages):
        return True
    names = ("rank", "kind", "step", "axis", "direction", "stage", "microbatch", "peer")
    is_named = bool((messages["stage"] >= 0).all() and (messages["microbatch"] >= 0).all())
    return is_named and len(np.unique(group_codes([messages[name] for name in names]))) == len(messages)


def _posting_only(rows: pd.DataFrame) -> npt.NDArray[np.bool_]:
    return rows_of_posting_only(rows, rows["on_device"]).to_numpy()


def timed_block(
    block: pd.DataFrame, clock: Clock, without: Sequence[int], lost: Mapping[int, frozenset[int]]
) -> pd.DataFrame:
    """Begin and end of the transfers of a matched block, on the common clock: rank, row, match and both times.

    ``without`` and ``lost`` are as for :func:`~pptrace.analysis.lost_steps.without_unknown_times`.
    """
    block = without_unknown_times(without_matches_of(block, clock.early_ends), without, lost)
    columns = ["rank", "row", "match", "transfer_start_ns", "transfer_end_ns"]
    has_times = block["clock"] != "none"
    moved = shift(rows_where(block, has_times), clock)
    timed = with_transfers(moved, _posting_only(moved))[columns]
    return timed if has_times.all() else pd.concat([timed, block.loc[~has_times, columns]])


def rows_of_ranks(timed: pd.DataFrame, numbers: Sequence[int]) -> pd.DataFrame:
    """The rows of some ranks."""
    return timed[timed["rank"].isin(numbers)]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of the run that reports of ranks need. ``plans`` are the steps that are attributed together, ``inside`` is the time
    in which pipelines run, ``lost`` the steps of each rank in which kernels are missing.
    """

    framework: str
    mesh: MeshInfo
    schedule: ScheduleInfo
    clock: Clock
    predicted: Mapping[int, RankPrediction]
    incomplete: frozenset[int]
    plans: tuple[PlanPart, ...]
    inside: Int64
    lost: Mapping[int, frozenset[int]]


@dataclass(frozen=True, slots=True)
class RankReport:
    """Report of a rank that goes to the program: its steps, without ops; what it measured of the actions of each plan
    (``times``), None where it is in no window of that plan; how long each axis communicated inside its ops, ns;
    (messages, collectives) without a group or peer; what it did ``outside`` of pipelines; and what it answers to the questions of
    :mod:`pptrace.analysis.questions`.
    """

    steps: list[RankStep]
    device: RankDevice
    times: tuple[RankTimes | None, ...]
    axes_inside_ops: Mapping[str, int]
    unknown: tuple[int, int]
    outside: OutsideRows
    answers: Answers


@dataclass(frozen=True, slots=True)
class GroupReport:
    """The reports of some ranks by their numbers, how many rows of communication lie inside ops of a table, and of each rank's
    ``comms`` one row for each kind there is, matched or not.
    """

    ranks: Mapping[int, RankReport]
    num_nested: int
    comms: pd.DataFrame


def report_of_group(
    numbers: Sequence[int],
    parts: Sequence[Sequence[Part]],
    comms: pd.DataFrame,
    timed: Sequence[pd.DataFrame],
    of_rank: Mapping[int, RankWindows],
    run: RunFacts,
) -> GroupReport:
    """The reports of these ranks.

    Args:
        comms: of :func:`comms_of_ranks`.
        timed: of :func:`rows_of_ranks`, of every block.
        of_rank: their windows; a rank that is in none has no steps.
    """
    ranks = dict(zip(numbers, map(whole_rank, parts), strict=True))
    times = pd.concat(map(_with_run_numbers, range(len(timed)), timed)).sort_values("row", ignore_index=True)
    comms = comms.assign(**{name: times[name] for name in ("match", "transfer_start_ns", "transfer_end_ns")})
    recognised = RecognisedRun(
        framework=run.framework,
        ops=join_ranks([(number, rank.ops) for number, rank in ranks.items()], OPS),
        comms=comms,
        memory=join_ranks([(number, rank.memory) for number, rank in ranks.items()], MEMORY),
        work={number: rank.work for number, rank in ranks.items()},
        mesh=run.mesh,
        schedule=run.schedule,
        facts={number: {"memory": rank.info.metadata.get("memory")} for number, rank in ranks.items()},
        warnings=(),
        host_work={number: rank.host_work for number, rank in ranks.items()},
    )
    data = _aligned(recognised, run)
    unknown = unknown_by_rank(data.comms)
    own, none = slices_by_int(comms, "rank", ()), slice_of(comms.iloc[:0])
    answers = ask_ranks(data, {number: steps_of(part) for number, part in of_rank.items()}, {})
    reports = {
        number: RankReport(
            [replace(step, ops=()) for step in report_rank_steps(of_rank[number], data, run.mesh)]
            if number in of_rank
            else [],
            device_of_rank(number, rank.work, own.get(number, none), rank.host_work),
            tuple(_times(plan, number, data) for plan in run.plans),
            axes_inside_ops(data.rows.of_rank(number).comms),
            unknown.get(number, (0, 0)),
            outside_rows(data.rows.of_rank(number), data.lanes.get(number), run.inside),
            answers[number],
        )
        for number, rank in ranks.items()
    }
    num_nested = count_nested(recognised.ops, comms, numbers) if run.framework == OP_TABLE else 0
    return GroupReport(reports, num_nested, _distinct(comms))


_MOST_MATCHES = 1 << 40
"""Matches of one block are fewer."""


def _with_run_numbers(block: int, timed: pd.DataFrame) -> pd.DataFrame:
    """The rows of a block with numbers of matches that no other block has."""
    match = timed["match"].to_numpy()
    return timed.assign(match=np.where(match >= 0, match + block * _MOST_MATCHES, match))


def steps_of(windows: RankWindows) -> StepsOfRank:
    """The steps of a rank."""
    steps = windows.steps
    return StepsOfRank(steps.tolist(), steps[windows.comparable].tolist(), steps.tolist())


def _aligned(recognised: RecognisedRun, run: RunFacts) -> AlignedRun:
    timed = rows_where(recognised.comms, recognised.comms["clock"] != "none")
    transfers = timed[["transfer_start_ns", "transfer_end_ns"]]  # on the common clock already
    comms = shift(timed, run.clock).assign(**{str(name): transfers[name] for name in transfers})
    ops = tag_ops(shift(recognised.ops, run.clock), run.schedule.plan_of, run.schedule.has_phases)
    return with_lanes(recognised, ops, comms, run.clock, run.predicted, run.incomplete)


def _times(plan: PlanPart, number: int, data: AlignedRun) -> RankTimes | None:
    windows = IndexedWindows.of(plan.windows)
    return RankTimes.of(plan.plan.table, windows, number, data) if number in windows.of_rank else None


def _distinct(comms: pd.DataFrame) -> pd.DataFrame:
    """A row of each kind of communication of each rank: what notes on null figures look at."""
    kinds = comms[["rank", "kind", "axis", "group_size", "peer", "clock"]].assign(
        matched=comms["match"] >= 0, in_step=comms["step"] >= 0
    )
    return comms[~kinds.duplicated()]
