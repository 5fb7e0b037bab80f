"""One step of one pipeline: partition of its window, phases, bubble and its ideal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.attribution import measured_costs, merge_costs, waterfall
from pptrace.analysis.communication import summarise_comms
from pptrace.analysis.result import (
    Bubble,
    CommSummary,
    MarkedStep,
    OpPart,
    OpSummary,
    PhaseSummary,
    RankIdeal,
    RankStep,
    StepReport,
    Waterfall,
)
from pptrace.errors import ScheduleError
from pptrace.intervals import length
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS, MESSAGES
from pptrace.recognise.device.work import breakdown
from pptrace.recognise.groups.topology import UNKNOWN
from pptrace.schedule.actions import parse_action
from pptrace.schedule.plan import Plan
from pptrace.simulator import IDEAL, SimulatedRank, simulate
from pptrace.slices import Slice, slices
from pptrace.timeline.lanes import Lane
from pptrace.timeline.phases import phase_spans
from pptrace.timeline.windows import StepWindow


@dataclass(frozen=True, slots=True)
class Ideal:
    """The bubble of a plan with F = I = W and free messages, and that of each of its ranks."""

    ratio: float
    share: float
    ranks: tuple[RankIdeal, ...]


def ideal_of(plan: Plan) -> Ideal:
    simulation = simulate(plan.compute_only(), IDEAL)
    return Ideal(
        simulation.bubble_ratio,
        simulation.bubble_share,
        tuple(_ideal_of_rank(rank, simulation.makespan_ns) for rank in simulation.ranks),
    )


def _ideal_of_rank(rank: SimulatedRank, makespan_ns: int) -> RankIdeal:
    own_bubble = rank.inner_bubble_ns
    return RankIdeal(
        ratio=rank.bubble_ns / rank.compute_ns,
        share=rank.bubble_ns / makespan_ns,
        own_ratio=own_bubble / rank.compute_ns,
        own_share=own_bubble / (own_bubble + rank.compute_ns),
    )


def report_step(
    windows: tuple[StepWindow, ...], data: AlignedRun, plan: Plan | None, ideal: Ideal | None, mesh: MeshInfo
) -> StepReport:
    """One step over all its pipelines; ``windows`` are the pipelines' windows of that step.

    ``plan`` is None where none is known. Where ranks of the mesh's pipelines are not in the windows, the step's
    bubble is not known.
    """
    ranks = [_report_rank(rank, window, data, ideal, mesh) for window in windows for rank in window.ranks]
    compute = sum(rank.compute_ns or 0 for rank in ranks)
    bubbles = [rank.bubble_ns for rank in ranks if rank.bubble_ns is not None]
    complete = len(bubbles) == len(ranks) == mesh.num_pipeline_ranks
    bubble = sum(bubbles)
    total_window = sum(rank.window_ns for rank in ranks)
    longest = max(windows, key=lambda window: window.span_ns)
    comparable = all(map(data.is_comparable, windows))
    return StepReport(
        step=windows[0].step,
        start_ns=min(window.start_ns for window in windows),
        end_ns=max(window.end_ns for window in windows),
        span_ns=longest.span_ns if comparable else None,
        bubble=Bubble(
            ratio=bubble / compute if complete and compute else None,
            share=bubble / total_window if complete and total_window else None,
            ideal_ratio=ideal.ratio if ideal else None,
            ideal_share=ideal.share if ideal else None,
            waterfall_ns=_waterfall(longest, data, plan) if comparable else None,
        ),
        ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
    )


def _waterfall(window: StepWindow, data: AlignedRun, plan: Plan | None) -> Waterfall | None:
    if plan is None:
        return None
    parts = {rank: data.part(rank, window.step) for rank in window.ranks}
    costs = [measured_costs(part.ops, part.comms, data.lanes[rank]) for rank, part in parts.items()]
    return waterfall(plan, merge_costs(costs), window.span_ns)


def _report_rank(rank: int, window: StepWindow, data: AlignedRun, ideal: Ideal | None, mesh: MeshInfo) -> RankStep:
    part = data.part(rank, window.step)
    ops, comms = part.ops.in_order_of("start_ns"), part.comms
    lane = data.lanes[rank].clipped(window.start_ns, window.end_ns)
    work = data.work[rank]
    comparable = data.is_comparable(window)
    if not comparable:
        window = StepWindow(window.step, (rank,), int(ops["start_ns"].min()), int(ops["end_ns"].max()))
        lane = data.lanes[rank].clipped(window.start_ns, window.end_ns)
    is_alone = rank in data.lacking and len(window.ranks) == 1
    bubble = lane.bubble_ns(window.start_ns, window.end_ns) if comparable and not is_alone else None
    pp_rank = mesh.pp_rank(rank)
    has_messages = _has_messages(comms) or not is_alone
    slack = None if work.missing_device_events else _slack(comms, data, comparable)
    phases = _phases(ops, window, lane)
    stages = sorted(stage for stage in set(ops["stage"].tolist()) if stage >= 0)
    return RankStep(
        rank=rank,
        stage=stages[0] if stages else None,
        window_ns=window.span_ns,
        compute_ns=None if work.missing_device_events else length(lane.compute),
        exposed_comm_ns=lane.exposed_ns(window.start_ns, window.end_ns) if comparable and not is_alone else None,
        bubble_ns=bubble,
        phases=phases if bubble is not None else {name: replace(p, bubble_ns=None) for name, p in phases.items()},
        comms=comms_of_step(comms, rank, window.step, data, matched=comparable),
        spans=durations(part.spans),
        device=breakdown(work, *(data.clock.to_rank_clock(rank, time) for time in (window.start_ns, window.end_ns))),
        peak_memory_bytes=peak_memory(data, rank, part.spans),
        ops=_op_summaries(ops),
        pp_rank=pp_rank,
        **_not_compute(window, lane, bubble, slack, has_messages),
        ideal=ideal.ranks[pp_rank]
        if ideal is not None and pp_rank is not None and pp_rank < len(ideal.ranks)
        else None,
    )


def _has_messages(comms: Slice) -> bool:
    return bool((comms.among("kind", MESSAGES) & comms.among("axis", ("pp", UNKNOWN))).any())


def _slack(comms: Slice, data: AlignedRun, comparable: bool) -> float:
    """Part of the exposed communication that may be waiting after all, ns: the clocks of both sides have an uncertainty."""
    matched = int((comms["match"] >= 0).sum())
    return 2 * matched * (data.clock.uncertainty_ns or 0) if comparable else math.inf


def _not_compute(
    window: StepWindow, lane: Lane, bubble: int | None, slack: float | None, has_messages: bool
) -> dict[str, int | None]:
    """Time of a window without compute, and bounds of the bubble in it, ns.

    Args:
        slack: see :func:`_slack`; None where the rank's times do not say when it computed.
        has_messages: whether its messages were recorded: any part of the rest may have been a transfer otherwise.
    """
    if slack is None:
        return {"not_compute_ns": None, "bubble_low_ns": None, "bubble_high_ns": None}
    rest = window.span_ns - length(lane.compute)
    low, high = lane.bubble_bounds_ns(window.start_ns, window.end_ns)
    if bubble is not None:
        low = high = bubble
    else:
        high = int(min(rest, high + slack))
    return {"not_compute_ns": rest, "bubble_low_ns": low if has_messages else 0, "bubble_high_ns": high}


_TIMES = ("total_ns", "wait_ns", "hidden_ns", "exposed_ns", "overlap_ratio", "algbw_gbps", "busbw_gbps")


def comms_of_step(comms: Slice, rank: int, step: int, data: AlignedRun, *, matched: bool) -> tuple[CommSummary, ...]:
    """The summaries of a rank's communication in a step, without times where its device was not recorded.

    Not ``matched``, the ranks' times do not compare: then nothing tells waiting from transfer.
    """
    comms = comms if matched else _unmatched(comms)
    predicted = None if data.volume is None else data.volume.of_rank(rank, step)
    summaries = summarise_comms(comms, data.lanes[rank].compute, predicted)
    if not data.work[rank].missing_device_events:
        return summaries
    unknown: dict[str, Any] = dict.fromkeys(_TIMES)
    return tuple(replace(comm, **unknown) for comm in summaries)


def _unmatched(comms: Slice) -> Slice:
    return Slice({**comms.columns, "match": np.full(len(comms), -1)})


def marked_steps(ops: pd.DataFrame) -> tuple[MarkedStep, ...]:
    """The STEP ranges of every rank, with the time of the other marked ranges in each."""
    marked = []
    for (rank, step), rows in sorted(slices(ops[~ops["kind"].isin(COMPUTE_KINDS)], ("rank", "step")).items()):
        is_step = rows["kind"] == "STEP"
        if is_step.any():
            start, end = int(rows["start_ns"][is_step].min()), int(rows["end_ns"][is_step].max())
            marked.append(MarkedStep(rank, step, start, end, durations(rows.where(~is_step))))
    return tuple(marked)


def durations(spans: Slice) -> dict[str, int]:
    """Total duration by kind, ns."""
    return {kind: int((rows["end_ns"] - rows["start_ns"]).sum()) for kind, rows in spans.by("kind").items()}


def _op_summaries(ops: Slice) -> tuple[OpSummary, ...]:
    named = ("stage", "chunk", "microbatch")
    columns = [
        [None if value < 0 else value for value in ops[name].tolist()]
        if name in named
        else [value if value != "" else None for value in ops[name].tolist()]
        for name in ("kind", *named, "phase", "start_ns", "end_ns")
    ]
    chunk_of = dict(zip(columns[1], columns[2], strict=True))
    parts = (_parts(text, chunk_of) if text else () for text in ops["pair"].tolist())
    return tuple(map(OpSummary, *columns, parts))


def _parts(pair: str, chunk_of: Mapping[int | None, int | None]) -> tuple[OpPart, ...]:
    """The halves of an overlapped pair, as far as they are known: ``pair`` is the whole action as text."""
    try:
        halves = parse_action(pair).parts
    except ScheduleError:  # its microbatches are not known
        return tuple(OpPart(kind, None, None, None) for kind in _KINDS_OF_PAIR)
    return tuple(OpPart(str(half.kind), half.stage, chunk_of.get(half.stage), half.microbatch) for half in halves)


_KINDS_OF_PAIR = ("F", "B")


def _phases(ops: Slice, window: StepWindow, lane: Lane) -> dict[str, PhaseSummary]:
    if (ops["phase"] == "").any():
        return {}
    return {
        str(span.phase): PhaseSummary(
            span.start_ns,
            span.end_ns,
            span.num_forward,
            span.num_backward,
            lane.bubble_ns(span.start_ns, span.end_ns),
        )
        for span in phase_spans(ops, window)
    }


def peak_memory(data: AlignedRun, rank: int, spans: Slice) -> int | None:
    """Peak allocated memory during the rank's step, bytes; None without memory events."""
    step = spans.where(spans["kind"] == "STEP")
    return data.peak_memory(rank, int(step["start_ns"].min()), int(step["end_ns"].max())) if len(step) else None
