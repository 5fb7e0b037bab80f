"""The ``memory`` block of a report: for each rank its measured peak, microbatches in flight, and what was predicted.

The peak of a rank's step is its recorder's, or that of its trace's events.

An activation of one chunk and one microbatch is held from its forward until its B, or its W where the backward is split
(:func:`pptrace.simulator.peak_inflight` counts those of a plan in the same way).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pptrace.analysis.aligned import AlignedRun, RankRows
from pptrace.analysis.memory.types import InFlight, MemoryReport, PredictedMemory, RankMemory, StageActivations
from pptrace.analysis.result import RankStep, StepReport
from pptrace.errors import ScheduleError
from pptrace.model.mesh import MeshInfo
from pptrace.model.predicted import MemoryParts, RankPrediction, predictions_of, why_unpredicted
from pptrace.model.schedule_info import ScheduleInfo
from pptrace.model.step_memory import MemoryKind, PeakMemory, kind_of_events
from pptrace.model.tables import Bool, Int64
from pptrace.schedule.actions import Kind, parse_action
from pptrace.schedule.plan import Plan
from pptrace.simulator import peak_inflight
from pptrace.slices import Slice, group_codes

if TYPE_CHECKING:
    from pptrace.analysis.questions import QuestionInputs


def peaks_in_flight(ops: Slice, window: Int64, num_steps: int) -> list[int | None]:
    """The most that were in flight in each step of a rank.

    None where a step has no backward (evaluation), or a forward without one, or the other way around: then what is held at the
    start or the end of the step is not known.

    Args:
        ops: F, B, I, W and overlapped pairs of one rank, in order of step and start.
        window: index of each one's step.
    """
    if not len(ops):
        return [None] * num_steps
    change, freed_in_pair = _changes(ops, window)
    held = np.cumsum(change)
    most = held + freed_in_pair  # the forward of a pair comes before its backward
    first = np.flatnonzero(np.diff(window, prepend=-1))
    last = np.append(first[1:], len(window)) - 1
    base = held[first] - change[first]
    is_whole = (held[last] == base) & (np.minimum.reduceat(held, first) >= base)
    peaks: list[int | None] = [None] * num_steps
    found = zip(
        window[first].tolist(), (np.maximum.reduceat(most, first) - base).tolist(), is_whole.tolist(), strict=True
    )
    for step, peak, whole in found:
        peaks[step] = peak if whole else None
    return peaks


def _changes(ops: Slice, window: Int64) -> tuple[Int64, Int64]:
    """(Change of the number held with each op, number that the backward of a pair frees.)"""
    kind, kinds = ops.codes("kind")

    def of(*names: str) -> Bool:
        return np.isin(kind, [index for index, name in enumerate(kinds) if name in names])

    is_pair = of("OVERLAP_F_B")
    freed_in_pair = np.zeros(len(kind), dtype=np.int64)
    if is_pair.any():
        pairs = ops.where(is_pair)
        code, texts = pairs.codes("pair")
        freed_in_pair[is_pair] = np.array([_ends_with_backward(text) for text in texts], dtype=np.int64)[code]
    frees = of("B")
    has_weight_grad = of("W")
    if frees.any() and has_weight_grad.any():
        key = group_codes([window, ops["stage"], ops["microbatch"]])
        frees &= ~np.isin(key, key[has_weight_grad])
    change = (of("F") | is_pair).astype(np.int64) - (frees | has_weight_grad) - freed_in_pair
    return change, freed_in_pair


def _ends_with_backward(text: str) -> bool:
    try:
        return any(part.kind is Kind.B for part in parse_action(text).parts)
    except ScheduleError:
        return False


def peaks_of_steps(
    rows: RankRows, rank: int, steps: Int64, start_ns: Int64, end_ns: Int64, data: AlignedRun
) -> list[PeakMemory | None]:
    """The peak of each step; None where nothing tells.

    The allocator's own statistic of a device comes first, then memory events, then the resident memory of the process.

    Args:
        rows: of the rank.
        steps, start_ns, end_ns: the steps and their windows, in which events are looked for where the rank has no STEP range.
    """
    recorded = data.recorded_memory.get(rank)
    events = data.memory_events.get(rank)
    if recorded is None and events is None:
        return [None] * len(steps)
    by_event: list[PeakMemory | None] = [None] * len(steps)
    if events is not None:
        by_event = _by_events(events, *_ranges(rows, steps, start_ns, end_ns))
    if recorded is None:
        return by_event
    return [
        recorded.device_of(step) or seen or recorded.process_of(step)
        for step, seen in zip(steps.tolist(), by_event, strict=True)
    ]


def _ranges(rows: RankRows, steps: Int64, start_ns: Int64, end_ns: Int64) -> tuple[Int64, Int64]:
    """The STEP range of each step, else its window, ns."""
    spans = rows.spans.where(rows.spans["kind"] == "STEP")
    starts, ends = start_ns.copy(), end_ns.copy()
    for index, step in enumerate(steps.tolist()):
        first, last = np.searchsorted(spans["step"], (step, step + 1))
        if first < last:
            starts[index], ends[index] = spans["start_ns"][first:last].min(), spans["end_ns"][first:last].max()
    return starts, ends


def _by_events(events: Slice, start_ns: Int64, end_ns: Int64) -> list[PeakMemory | None]:
    """The highest level in each range, both ends included; None without an event in it.

    A level holds until the next event, so that of the last event before a range counts.
    """
    time, allocated, reserved = events["t_ns"], events["allocated_bytes"], events["reserved_bytes"]
    kind = kind_of_events(allocated, reserved)
    first = np.searchsorted(time, start_ns)
    before, last = np.searchsorted(time, start_ns, side="right") - 1, np.searchsorted(time, end_ns, side="right")
    peaks: list[PeakMemory | None] = []
    for inside, begin, end in zip(first.tolist(), before.tolist(), last.tolist(), strict=True):
        if inside == end:
            peaks.append(None)
            continue
        start = int(allocated[begin]) if begin >= 0 else None
        levels = slice(max(begin, 0), end)
        most_reserved = int(reserved[levels].max()) if kind is MemoryKind.DEVICE_ALLOCATED else None
        peaks.append(PeakMemory(kind, int(allocated[levels].max()), start, most_reserved))
    return peaks


def answer(inputs: QuestionInputs) -> Mapping[str, Any]:
    """The memory of all ranks."""
    run, facts = inputs.run, inputs.run.facts
    predicted, unpredicted = predictions_of(facts, run.schedule), why_unpredicted(facts, run.schedule)
    return {"memory": report_memory(inputs.report.steps, run.mesh, run.schedule, predicted, unpredicted)}


def report_memory(
    steps: Sequence[StepReport],
    mesh: MeshInfo,
    schedule: ScheduleInfo,
    predicted: Mapping[int, RankPrediction],
    unpredicted: str,
) -> MemoryReport | None:
    """The memory of all ranks in steps; None without any.

    Args:
        predicted: the predictions of each rank.
        unpredicted: the reason why a run has none.
    """
    by_rank: dict[int, list[tuple[StepReport, RankStep]]] = {}
    for step in steps:
        for rank in step.ranks:
            by_rank.setdefault(rank.rank, []).append((step, rank))
    if not by_rank:
        return None
    peaks: dict[int, tuple[Plan, tuple[int, ...]]] = {}  # by the plan's identity: to compare plans takes long
    ranks = []
    for number, entries in sorted(by_rank.items()):
        step, rank = max(entries, key=lambda entry: -1 if (peak := entry[1].peak_memory_bytes) is None else peak)
        plan, pp_rank, in_flight = schedule.plan_of(step.step), mesh.pp_rank(number), None
        if plan is None or pp_rank is None or pp_rank >= plan.pp or plan.pp != mesh.pp:
            plan = None
        else:
            if id(plan) not in peaks:
                peaks[id(plan)] = plan, peak_inflight(plan)
            in_flight = peaks[id(plan)][1][pp_rank]
        measured = max((each.peak_in_flight for _, each in entries if each.peak_in_flight is not None), default=None)
        ranks.append(_rank_memory(step.step, rank, plan, InFlight(in_flight, measured), predicted.get(number)))
    return MemoryReport(tuple(ranks), _reasons(ranks, predicted, unpredicted))


def _rank_memory(
    step: int, rank: RankStep, plan: Plan | None, in_flight: InFlight, prediction: RankPrediction | None
) -> RankMemory:
    """The memory of a rank in the step with its highest peak."""
    if plan is not None and rank.pp_rank is not None:
        stages: tuple[int, ...] = tuple(plan.stages_of(rank.pp_rank))
    else:
        stages = () if rank.stage is None else (rank.stage,)
    is_known = rank.peak_memory_bytes is not None
    return RankMemory(
        rank=rank.rank,
        pp_rank=rank.pp_rank,
        stages=stages,
        step=step if is_known else None,
        peak_bytes=rank.peak_memory_bytes,
        kind=rank.peak_memory_kind,
        start_bytes=rank.start_memory_bytes,
        reserved_bytes=rank.peak_reserved_bytes,
        in_flight=in_flight,
        predicted=None if prediction is None else _predicted(prediction.memory),
    )


def _predicted(parts: MemoryParts) -> PredictedMemory:
    known = parts.weights + parts.gradients + parts.optimizer
    return PredictedMemory(
        parts.weights,
        parts.gradients,
        parts.optimizer,
        parts.activations,
        None if parts.activations is None else known + parts.activations,
        tuple(
            StageActivations(
                stage, num_bytes, *(parts.by_recompute.get(how, {}).get(stage) for how in ("none", "full"))
            )
            for stage, num_bytes in parts.of_stage.items()
        ),
    )


def _reasons(ranks: Sequence[RankMemory], predicted: Mapping[int, RankPrediction], unpredicted: str) -> tuple[str, ...]:
    """Reasons why figures are null, a sentence each."""
    reasons = []
    if any(rank.peak_bytes is None for rank in ranks):
        reasons.append(
            "peak_bytes: no memory events, and nothing measured the memory of steps; record with pptrace run"
        )
    if any(rank.predicted is None for rank in ranks):
        reasons.append(f"predicted: {unpredicted}")
    unknown = {predicted[rank.rank].memory.reason for rank in ranks if rank.rank in predicted} - {None}
    reasons += [f"activations_bytes and total_bytes: {reason}" for reason in sorted(map(str, unknown))]
    if any(rank.pp_rank is not None and rank.in_flight.planned is None for rank in ranks):
        reasons.append("in_flight.planned: there is no plan of all ranks of the pipeline")
    if any(rank.pp_rank is not None and rank.in_flight.measured is None for rank in ranks):
        reasons.append("in_flight.measured: steps have forwards without backwards, or the other way around")
    return tuple(reasons)
