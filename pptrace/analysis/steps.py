"""One step of one pipeline: partition of its window, phases, bubble and its ideal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from pptrace.analysis.attribution import measured_costs, waterfall
from pptrace.analysis.communication import summarise_comms
from pptrace.analysis.result import (
    Bubble,
    CommSummary,
    MarkedStep,
    OpSummary,
    PhaseSummary,
    RankStep,
    StepReport,
    Waterfall,
)
from pptrace.analysis.step_volume import StepVolume
from pptrace.clock import Clock
from pptrace.intervals import length
from pptrace.recognise.devices import DeviceWork, breakdown
from pptrace.recognise.schedule import COMPUTE_KINDS
from pptrace.schedule.plan import Plan
from pptrace.simulate import IDEAL, simulate
from pptrace.timeline.lanes import Lane
from pptrace.timeline.phases import phase_spans
from pptrace.timeline.windows import StepWindow


@dataclass(frozen=True, slots=True)
class Aligned:
    """Everything measured, on one clock: tagged ops, comms with transfer starts, and each rank's lane.

    ``volume`` predicts what each rank communicates, where the run's facts tell.
    """

    ops: pd.DataFrame
    comms: pd.DataFrame
    memory: pd.DataFrame
    lanes: Mapping[int, Lane]
    work: Mapping[int, DeviceWork]
    clock: Clock
    volume: StepVolume | None = None

    def compares(self, window: StepWindow) -> bool:
        """Whether the times of a window's ranks say what they did at the same time.

        Where they do not, nothing of a step is known but what each rank shows by itself: their clocks are not related, or hardly
        (see :meth:`is_vague`), or a rank's times are those of launching what its device did at other times.
        """
        seen = not any(self.work[rank].unseen for rank in window.ranks)
        return seen and self.clock.relates(window.ranks) and not self.is_vague(window)

    def is_vague(self, window: StepWindow) -> bool:
        """Whether the clocks may be off by more than half the window."""
        return 2 * (self.clock.uncertainty_ns or 0) > window.span_ns


@dataclass(frozen=True, slots=True)
class Ideal:
    """The bubble of a plan with F = I = W and free messages."""

    ratio: float
    share: float


def ideal_of(plan: Plan) -> Ideal:
    simulation = simulate(plan.compute_only(), IDEAL)
    return Ideal(simulation.bubble_ratio, simulation.bubble_share)


def report_step(
    windows: tuple[StepWindow, ...], data: Aligned, plan: Plan | None, ideal: Ideal | None, num_ranks: int
) -> StepReport:
    """One step over all its pipelines; ``windows`` are the pipelines' windows of that step.

    ``num_ranks`` is how many ranks the pipelines have: where some are not in the windows, the step's bubble is not known.
    """
    ranks = [_report_rank(rank, window, data) for window in windows for rank in window.ranks]
    compute = sum(rank.compute_ns or 0 for rank in ranks)
    bubbles = [rank.bubble_ns for rank in ranks if rank.bubble_ns is not None]
    complete = len(bubbles) == len(ranks) == num_ranks
    bubble = sum(bubbles)
    whole = sum(rank.window_ns for rank in ranks)
    longest = max(windows, key=lambda window: window.span_ns)
    comparable = all(map(data.compares, windows))
    return StepReport(
        step=windows[0].step,
        start_ns=min(window.start_ns for window in windows),
        end_ns=max(window.end_ns for window in windows),
        span_ns=longest.span_ns if comparable else None,
        bubble=Bubble(
            ratio=bubble / compute if complete and compute else None,
            share=bubble / whole if complete and whole else None,
            ideal_ratio=ideal.ratio if ideal else None,
            ideal_share=ideal.share if ideal else None,
            waterfall_ns=_waterfall(longest, data, plan) if comparable else None,
        ),
        ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
    )


def _waterfall(window: StepWindow, data: Aligned, plan: Plan | None) -> Waterfall | None:
    if plan is None:
        return None
    ops = data.ops[
        data.ops["rank"].isin(window.ranks) & (data.ops["step"] == window.step) & data.ops["kind"].isin(COMPUTE_KINDS)
    ]
    comms = data.comms[data.comms["rank"].isin(window.ranks) & (data.comms["step"] == window.step)]
    lanes = {rank: data.lanes[rank] for rank in window.ranks}
    return waterfall(plan, measured_costs(ops, comms, lanes), window.span_ns)


def _report_rank(rank: int, window: StepWindow, data: Aligned) -> RankStep:
    in_step = (data.ops["rank"] == rank) & (data.ops["step"] == window.step)
    is_compute = data.ops["kind"].isin(COMPUTE_KINDS)
    ops = data.ops[in_step & is_compute].sort_values("start_ns", kind="stable")
    spans = data.ops[in_step & ~is_compute]
    comms = data.comms[(data.comms["rank"] == rank) & (data.comms["step"] == window.step)]
    lane = data.lanes[rank].within(window.start_ns, window.end_ns)
    work = data.work[rank]
    comparable = data.compares(window)
    if not comparable:
        window = StepWindow(window.step, (rank,), int(ops["start_ns"].min()), int(ops["end_ns"].max()))
        lane = data.lanes[rank].within(window.start_ns, window.end_ns)
    bubble = lane.bubble_ns(window.start_ns, window.end_ns) if comparable else None
    phases = _phases(ops, window, lane)
    stages = sorted(stage for stage in set(ops["stage"]) if stage >= 0)
    return RankStep(
        rank=rank,
        stage=int(stages[0]) if stages else None,
        window_ns=window.span_ns,
        compute_ns=None if work.unseen else length(lane.compute),
        exposed_comm_ns=lane.exposed_ns(window.start_ns, window.end_ns) if comparable else None,
        bubble_ns=bubble,
        phases=phases if bubble is not None else {name: replace(p, bubble_ns=None) for name, p in phases.items()},
        comms=_comms(comms if comparable else comms.assign(match=-1), rank, window.step, data),
        spans={str(kind): int((rows["end_ns"] - rows["start_ns"]).sum()) for kind, rows in spans.groupby("kind")},
        device=breakdown(work, *(data.clock.own(rank, time) for time in (window.start_ns, window.end_ns))),
        peak_memory_bytes=_peak_memory(data.memory, rank, spans),
        ops=tuple(_op(row) for row in ops.itertuples()),
    )


_TIMES = ("total_ns", "wait_ns", "hidden_ns", "exposed_ns", "overlap_ratio", "algbw_gbps", "busbw_gbps")


def _comms(comms: pd.DataFrame, rank: int, step: int, data: Aligned) -> tuple[CommSummary, ...]:
    """The summaries of a rank's step, without times where its device was not recorded."""
    predicted = None if data.volume is None else data.volume.of_rank(rank, step)
    summaries = summarise_comms(comms, data.lanes[rank].compute, predicted)
    if not data.work[rank].unseen:
        return summaries
    unknown: dict[str, Any] = dict.fromkeys(_TIMES)
    return tuple(replace(comm, **unknown) for comm in summaries)


def marked_steps(ops: pd.DataFrame) -> tuple[MarkedStep, ...]:
    """The STEP ranges of every rank, with the time of the other marked ranges in each."""
    spans = ops[~ops["kind"].isin(COMPUTE_KINDS)]
    found = []
    for rank, step in sorted(set(zip(spans["rank"].tolist(), spans["step"].tolist(), strict=True))):
        rows = spans[(spans["rank"] == rank) & (spans["step"] == step)]
        whole = rows[rows["kind"] == "STEP"]
        if whole.empty:
            continue
        inside = rows[rows["kind"] != "STEP"]
        times = {str(kind): int((part["end_ns"] - part["start_ns"]).sum()) for kind, part in inside.groupby("kind")}
        found.append(MarkedStep(rank, step, int(whole["start_ns"].min()), int(whole["end_ns"].max()), times))
    return tuple(found)


def _op(row: object) -> OpSummary:
    values = {name: getattr(row, name) for name in OpSummary.__slots__}
    return OpSummary(**values | {name: None for name in ("stage", "chunk", "microbatch") if values[name] < 0})


def _phases(ops: pd.DataFrame, window: StepWindow, lane: Lane) -> dict[str, PhaseSummary]:
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


def _peak_memory(memory: pd.DataFrame, rank: int, spans: pd.DataFrame) -> int | None:
    """The most that was allocated during the rank's step; None when the trace has no memory events."""
    step = spans[spans["kind"] == "STEP"]
    if memory.empty or step.empty:
        return None
    mine = memory[(memory["rank"] == rank) & memory["t_ns"].between(step["start_ns"].min(), step["end_ns"].max())]
    return int(mine["allocated_bytes"].max()) if len(mine) else None
