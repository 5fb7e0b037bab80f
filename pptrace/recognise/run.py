"""Join the recognised ranks of a run: ops and comms of all ranks, the mesh and the schedule.

First the steps that all ranks have; then ops, groups, mesh and stages (:mod:`pptrace.recognise.infer.locate`); then the schedule,
and by it the communication.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.marks import P2P
from pptrace.model.damage import LackingRecords
from pptrace.model.device import DeviceWork
from pptrace.model.join_tables import join_ranks
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import ScheduleInfo
from pptrace.model.tables import COMMS, COMPUTE_KINDS, HOST_ORDER, MEMORY, Int64, empty_table
from pptrace.model.traces import InputFormat
from pptrace.recognise.groups.broadcast_links import line_of_broadcast_links, with_messages_of_links
from pptrace.recognise.groups.mesh import mesh_with_absent_ranks
from pptrace.recognise.groups.peers_by_members import with_peers_by_members
from pptrace.recognise.infer.locate import Located, groups_of, locate
from pptrace.recognise.messages.comms_from_calls import comms_of_calls
from pptrace.recognise.messages.kernels_from_plan import match_between, match_calls
from pptrace.recognise.messages.match import match_comms, steps_of_unmatched, warn_unmatched, with_sizes
from pptrace.recognise.messages.messages_from_plan import (
    drop_half_matched,
    drop_messages_beyond_ends,
    with_adjacent,
    with_directions,
    with_peers,
)
from pptrace.recognise.rank import (
    with_missing_devices,
    without_disagreeing_ops,
    without_other_numbers,
)
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.recognise.schedule.recognise_schedule import recognise_schedule
from pptrace.recognise.steps.common_steps import (
    with_common_runs,
    with_common_steps,
    with_recorded_steps,
    with_repeated_steps,
    with_step_ranges_of_most,
    without_capturing_steps,
)
from pptrace.recognise.steps.cut_by_balance import with_balanced_steps
from pptrace.recognise.steps.shared_updates import with_whole_updates
from pptrace.slices import rows_among


class RecognisedRun(Struct, frozen=True):
    """Everything recognised in the traces of a run, each rank still on its own clock.

    ``work`` is each rank's device work, ``host_work`` when the hosts of ranks without device and ops computed, without ranks of
    tables; ``facts`` what each rank's recorder wrote about itself ({} for others' traces); ``lacking`` are records that some
    ranks have and others not.
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
    host_work: Mapping[int, Int64] = field(default_factory=dict)
    lacking: LackingRecords = field(default_factory=LackingRecords)


def recognise_ranks(
    ranks: Sequence[RecognisedRank],
    schedule: str | None = None,
    num_ranks: int | None = None,
) -> RecognisedRun:
    """Join the recognised ranks: the ops, the communication, the mesh and the schedule of the run.

    Args:
        ranks: one per rank, each with its rank set.
        schedule: the name of the schedule to compare with, instead of the one that is found.
        num_ranks: the ranks that the run had, when known; more than ``ranks`` when some have no trace.

    Raises:
        UsageError, ScheduleError: ``schedule`` is unknown or does not fit the run.
    """
    spanned = [recognised.number for recognised in ranks if recognised.info.format is InputFormat.OTLP]
    ranks, cut = (ranks, ()) if spanned else with_balanced_steps(without_disagreeing_ops(ranks))
    ranks, unlabelled = without_other_numbers(with_missing_devices(ranks))
    ranks, captured = without_capturing_steps(ranks)
    ranks, step_ranges = with_step_ranges_of_most(ranks)
    ranks, left_out = with_recorded_steps(ranks)
    ranks, renumbered = with_common_steps(ranks)
    ranks, peers = _with_peers(with_common_runs(ranks))
    located = _located_by_broadcasts(ranks, num_ranks, spanned)
    ranks, placed, groups = located.ranks, located.placed, located.groups
    metadata = list(located.facts.values())
    warnings = [
        *_warnings_of_ranks(ranks),
        *cut,
        *captured,
        *left_out,
        *renumbered,
        *peers,
        *located.warnings,
    ]
    ops, repeated = with_repeated_steps(placed.ops, ranks)
    ops, own_comms, updates = with_whole_updates(ops, placed.comms)
    warnings += (*step_ranges, *repeated, *updates)
    placed, mesh = replace(placed, ops=ops, comms=own_comms), placed.mesh
    if placed.explanations is None:
        schedule_info = recognise_schedule(ops, mesh, metadata, schedule)
    else:
        from pptrace.recognise.infer.schedule_of_partial import schedule_of_partial

        schedule_info = schedule_of_partial(placed, schedule)
    if not rows_among(ops["kind"], COMPUTE_KINDS).any():
        distributed = {recognised.number: recognised.info.distributed for recognised in ranks}
        warnings += line_of_broadcast_links(located.calls, distributed)
    comms, lines = _matched_comms(replace(located, placed=placed), schedule_info, spanned)
    numbers = [recognised.number for recognised in ranks]
    warnings += lines
    warnings += [f"process groups: {line}" for line in groups.evidence]
    return RecognisedRun(
        framework=located.framework,
        ops=ops,
        comms=comms,
        memory=join_ranks([(recognised.number, recognised.memory) for recognised in ranks], MEMORY),
        work={recognised.number: recognised.work for recognised in ranks},
        mesh=mesh_with_absent_ranks(mesh, placed.comms) if mesh.is_guess else mesh,
        schedule=schedule_info,
        facts=located.facts,
        warnings=(*warnings, *located.framework_evidence, *schedule_info.warnings, *warn_unmatched(comms, numbers)),
        host_work={
            recognised.number: recognised.host_work
            for recognised in ranks
            if recognised.info.format is not InputFormat.OPLOG
        },
        lacking=LackingRecords(steps_of_unmatched(comms, numbers), unlabelled),
    )


def _with_peers(ranks: Sequence[RecognisedRank]) -> tuple[Sequence[RecognisedRank], tuple[str, ...]]:
    """The ranks with the peers of messages that name places in groups; with a line about them."""
    calls, lines = with_peers_by_members(
        {recognised.number: recognised.calls for recognised in ranks},
        {recognised.number: recognised.info.distributed for recognised in ranks},
    )
    return [replace(recognised, calls=calls[recognised.number]) for recognised in ranks] if lines else ranks, lines


def _located_by_broadcasts(ranks: Sequence[RecognisedRank], num_ranks: int | None, spanned: Sequence[int]) -> Located:
    """The ranks located with broadcasts in groups of two as the messages of their pipelines, if these explain their ops."""
    have_messages = [rows_among(each.calls["kind"], P2P).any() for each in ranks]
    hosts = {
        each.number: each.host for each, has in zip(ranks, have_messages, strict=True) if len(each.host) and not has
    }
    if not hosts:
        return _located(ranks, num_ranks, spanned)
    calls = {each.number: each.calls for each in ranks}
    linked = calls if any(have_messages) else with_messages_of_links(calls, hosts)
    if linked is not calls:
        located = _located([replace(each, calls=linked[each.number]) for each in ranks], num_ranks, spanned)
        if rows_among(located.placed.ops["kind"], COMPUTE_KINDS).any():
            return located
    plain = [replace(each, host=empty_table(HOST_ORDER)) if each.number in hosts else each for each in ranks]
    return _located(plain, num_ranks, spanned)


def _located(ranks: Sequence[RecognisedRank], num_ranks: int | None, spanned: Sequence[int]) -> Located:
    """The ranks located; where some have no labels, with what infers their ops, which no other run imports."""
    if any(len(recognised.host) for recognised in ranks):
        from pptrace.recognise.infer.locate_unlabelled import locate_unlabelled

        return locate_unlabelled(ranks, num_ranks, spanned)
    return locate(tuple(ranks), groups_of(ranks), (), num_ranks, spanned)


def _matched_comms(
    located: Located, schedule: ScheduleInfo, spanned: Sequence[int]
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The communication of all ranks, with peers, directions, sizes of groups and matches; with warnings.

    ``spanned`` are the ranks of OpenTelemetry spans.
    """
    ops, mesh = located.placed.ops, located.placed.mesh
    comms, untimed = _without_untimed(drop_messages_beyond_ends(located.placed.comms, ops, mesh), located.ranks)
    comms = with_directions(with_peers(with_adjacent(comms, ops, mesh, spanned), ops, mesh), ops, mesh)
    comms = with_sizes(with_peers(comms, ops, mesh), mesh)
    matched, half_seen = drop_half_matched(match_comms(comms, mesh), spanned)
    # Communication calls that neither marks nor labels describe.
    calls, call_warnings = comms_of_calls(located.calls, located.groups, ops, matched, mesh, schedule)
    lines = (*untimed, *half_seen, *call_warnings)
    if not len(calls):
        return matched, lines
    calls = match_calls(calls, first=int(matched["match"].max()) + 1 if len(matched) else 0)[list(COMMS)]
    return match_between(matched, calls) if len(matched) else calls, lines


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
