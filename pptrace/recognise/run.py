"""Join the recognised ranks of a run: ops and comms of all ranks, the mesh and the schedule.

First the steps that all ranks have; then ops, groups, mesh and stages (:mod:`pptrace.recognise.infer.locate`); then the schedule,
and by it the communication.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from pptrace.model.device import DeviceWork
from pptrace.model.join_tables import join_ranks
from pptrace.model.lacking_records import LackingRecords
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import ScheduleInfo
from pptrace.model.tables import COMMS, MEMORY, Int64
from pptrace.model.traces import InputFormat, Trace
from pptrace.recognise.groups.axes import Groups
from pptrace.recognise.groups.mesh import mesh_with_absent_ranks
from pptrace.recognise.infer.locate import locate
from pptrace.recognise.infer.schedule_of_partial import schedule_of_partial
from pptrace.recognise.infer.stages import StageAssignment
from pptrace.recognise.messages.comms_from_calls import comms_of_calls
from pptrace.recognise.messages.kernels_from_plan import match_calls
from pptrace.recognise.messages.match import match_comms, steps_of_unmatched, warn_unmatched, with_sizes
from pptrace.recognise.messages.messages_from_plan import (
    drop_half_matched,
    drop_messages_beyond_ends,
    with_adjacent,
    with_directions,
    with_peers,
)
from pptrace.recognise.ops.host_compute import HostWork
from pptrace.recognise.rank import (
    recognise_rank,
    with_missing_devices,
    without_disagreeing_ops,
    without_other_numbers,
)
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.recognise.schedule.recognise_schedule import recognise_schedule
from pptrace.recognise.steps.common_steps import (
    with_common_steps,
    with_recorded_steps,
    with_repeated_steps,
    without_capturing_steps,
)
from pptrace.recognise.steps.cut_by_balance import with_balanced_steps


@dataclass(frozen=True, slots=True)
class RecognisedRun:
    """Everything recognised in the traces of a run, each rank still on its own clock.

    ``work`` is each rank's device work, ``host_work`` when the hosts of ranks without device and ops computed; ``facts`` what
    each rank's recorder wrote about itself ({} for others' traces); ``lacking`` are records that some ranks have and others not.
    """

    framework: str
    ops: pd.DataFrame
    comms: pd.DataFrame
    memory: pd.DataFrame
    work: Mapping[int, DeviceWork]
    mesh: MeshInfo
    schedule: ScheduleInfo
    facts: Mapping[int, Mapping[str, Any]]
    warnings: tuple[str, ...]
    host_work: Mapping[int, HostWork] = field(default_factory=dict)
    lacking: LackingRecords = field(default_factory=LackingRecords)


def recognise(traces: Sequence[Trace], schedule: str | None = None, num_ranks: int | None = None) -> RecognisedRun:
    """:func:`recognise_ranks` of these traces, one per rank, with their ranks set."""
    return recognise_ranks([recognise_rank(trace) for trace in traces], schedule, num_ranks)


def recognise_ranks(
    ranks: Sequence[RecognisedRank],
    schedule: str | None = None,
    num_ranks: int | None = None,
    match: Match | None = None,
) -> RecognisedRun:
    """Join the recognised ranks: the ops, the communication, the mesh and the schedule of the run.

    Args:
        ranks: one per rank, each with its rank set.
        schedule: the name of the schedule to compare with, instead of the one that is found.
        num_ranks: the ranks that the run had, when known; more than ``ranks`` when some have no trace.
        match: what matches the communication instead of :func:`match_here`, as where the rows are on other machines.

    Raises:
        UsageError, ScheduleError: ``schedule`` is unknown or does not fit the run.
    """
    spanned = [recognised.number for recognised in ranks if recognised.info.format is InputFormat.OTLP]
    ranks, cut = (ranks, ()) if spanned else with_balanced_steps(without_disagreeing_ops(ranks))
    ranks, unlabelled = without_other_numbers(with_missing_devices(ranks))
    ranks, captured = without_capturing_steps(ranks)
    ranks, left_out = with_recorded_steps(ranks)
    ranks, renumbered = with_common_steps(ranks)
    located = locate(ranks, num_ranks, spanned)
    ranks, placed, groups = located.ranks, located.placed, located.groups
    metadata = list(located.facts.values())
    warnings = [*_warnings_of_ranks(ranks), *cut, *captured, *left_out, *renumbered, *located.warnings]
    ops, repeated = with_repeated_steps(placed.ops, ranks)
    warnings += repeated
    placed, mesh = replace(placed, ops=ops), placed.mesh
    is_partial = placed.explanations is not None
    schedule_info = (
        schedule_of_partial(placed, schedule) if is_partial else recognise_schedule(ops, mesh, metadata, schedule)
    )
    unmatched = Unmatched(ranks, placed, located.calls, groups, schedule_info, spanned, is_partial)
    matched = (match or match_here)(unmatched)
    warnings += matched.warnings
    warnings += [f"process groups: {line}" for line in groups.evidence]
    return RecognisedRun(
        framework=located.framework,
        ops=ops,
        comms=matched.comms,
        memory=join_ranks([(recognised.number, recognised.memory) for recognised in ranks], MEMORY),
        work={recognised.number: recognised.work for recognised in ranks},
        mesh=mesh_with_absent_ranks(mesh, placed.comms) if mesh.is_guess else mesh,
        schedule=schedule_info,
        facts=located.facts,
        warnings=(*warnings, *located.framework_evidence, *schedule_info.warnings, *matched.without_other_side),
        host_work={recognised.number: recognised.host_work for recognised in ranks},
        lacking=LackingRecords(matched.steps_of_unmatched, unlabelled),
    )


@dataclass(frozen=True, slots=True)
class Unmatched:
    """The communication of a run before it is matched (``placed.comms``), and what is known of the run by then.

    ``spanned`` are the ranks of OpenTelemetry spans; ``is_partial``: ranks of the pipelines have no trace.
    """

    ranks: Sequence[RecognisedRank]
    placed: StageAssignment
    calls: Mapping[int, pd.DataFrame]
    groups: Groups
    schedule: ScheduleInfo
    spanned: Sequence[int]
    is_partial: bool


@dataclass(frozen=True, slots=True)
class Matched:
    """Communication with its matches; warnings, and those about rows ``without_other_side``, with the steps of such messages by
    the rank that lacks the other end.
    """

    comms: pd.DataFrame
    warnings: tuple[str, ...]
    without_other_side: tuple[str, ...]
    steps_of_unmatched: Mapping[int, Int64]


Match = Callable[[Unmatched], Matched]


def match_here(run: Unmatched) -> Matched:
    """Match the communication of all ranks in this process."""
    ops, mesh = run.placed.ops, run.placed.mesh
    comms, untimed = _without_untimed(drop_messages_beyond_ends(run.placed.comms, ops, mesh), run.ranks)
    comms = with_ends(with_adjacent(comms, ops, mesh, run.spanned), ops, mesh)
    matched, half_seen = drop_half_matched(match_comms(comms, mesh), run.spanned)
    # Communication calls that neither marks nor labels describe.
    calls, call_warnings = comms_of_calls(run.calls, run.groups, ops, matched, mesh, run.schedule)
    comms = matched
    if len(calls):
        calls = match_calls(calls, first=int(matched["match"].max()) + 1 if len(matched) else 0)[list(COMMS)]
        comms = pd.concat([matched, calls], ignore_index=True) if len(matched) else calls
    numbers = [recognised.number for recognised in run.ranks]
    lines = (*untimed, *half_seen, *call_warnings)
    return Matched(comms, lines, warn_unmatched(comms, numbers), steps_of_unmatched(comms, numbers))


def with_ends(comms: pd.DataFrame, ops: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """Fill in peers, directions and sizes of groups, row by row; of ``ops`` only which rank holds which stage is used."""
    comms = with_directions(with_peers(comms, ops, mesh), ops, mesh)
    return with_sizes(with_peers(comms, ops, mesh), mesh)


def _without_untimed(comms: pd.DataFrame, ranks: Sequence[RecognisedRank]) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Drop pipeline messages of ranks whose ops are the gaps between calls, where receives are posted ahead: the wait for them
    lies in the ops, and its length is unknown.
    """
    is_pipeline = comms["rank"].isin([recognised.number for recognised in ranks if recognised.by_gaps]) & (
        comms["axis"] == "pp"
    )
    is_posted_ahead = (
        is_pipeline & (comms["kind"] == "recv") & (comms["clock"] == "host") & (comms["posted_ns"] > comms["start_ns"])
    )
    if not is_posted_ahead.any():
        return comms, ()
    line = (
        "receives are posted ahead of their ops and no range shows when they completed: messages are left out, and waiting for "
        "them counts as compute; record with ranges around forward_step and backward_step"
    )
    return comms[~is_pipeline], (line,)


def _warnings_of_ranks(ranks: Sequence[RecognisedRank]) -> list[str]:
    """Warnings of all ranks; of those that differ only in numbers the first, and how many ranks have others."""
    by_pattern: dict[str, list[str]] = {}
    for recognised in ranks:
        for line in recognised.warnings:
            by_pattern.setdefault(re.sub(r"\d+", "0", line), []).append(f"rank {recognised.number}: {line}")
    warnings = []
    for lines in by_pattern.values():
        more = len(lines) - 1
        warnings += lines if more < 2 else [lines[0], f"and {more} more ranks like {lines[0].split(':')[0]}"]
    return warnings
