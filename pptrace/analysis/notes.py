"""Reasons for everything that is null or left out in a report."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import pandas as pd

from pptrace.analysis.aligned import RowsByRank
from pptrace.analysis.lost_steps import lines_of_lost_work, lost_steps
from pptrace.analysis.result import RankDevice, StepReport
from pptrace.analysis.shared_devices import OWN_DEVICE, TAKING_TURNS, SharedDevice, devices_by_identity, who_shares
from pptrace.analysis.stragglers.slowdowns import LEAST_SLOWDOWN
from pptrace.analysis.whole_run import CLOCKS_OFF, Doubt, InDoubt, Stragglers
from pptrace.clock import Clock
from pptrace.hang_diagnosis.calls import rank_text
from pptrace.marks import P2P
from pptrace.model.device import UNKNOWN_CLOCK, DeviceWork
from pptrace.model.schedule_info import WithPlan
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.model.traces import OP_TABLE, InputFormat
from pptrace.model.wording import as_ranges, listed
from pptrace.recognise.run import RecognisedRun
from pptrace.slices import distinct_of, rows_among, rows_where
from pptrace.timeline.lanes import is_nested

_FEW = 8
_CERTAIN = 0.1
"""An uncertainty of the clocks up to this share of the median op is not worth a line."""


def explain_nulls(
    run: RecognisedRun,
    clock: Clock,
    steps: Sequence[StepReport],
    stragglers: Stragglers | None = None,
    doubts: Sequence[Doubt] | None = None,
    *,
    are_explained: bool = True,
) -> Iterator[str]:
    """Warnings about clocks and missing data, then about null fields, without those of explanations where these were not made.

    ``doubts`` are those of :func:`doubts_of_times`, where they are known.
    """
    if doubts is None:
        doubts = doubts_of_times(run, clock, steps, devices_by_identity(run.facts))
    mesh, comms, is_message = run.mesh, run.comms, rows_among(run.comms["kind"], P2P)
    yield from (doubt.line for doubt in doubts)
    yield from _absent_ranks(run, steps)
    has_sizes = bool(mesh.pp or mesh.dp or mesh.tp or mesh.cp) or mesh.num_ranks < 2
    if not comms.empty and not has_sizes and (comms["axis"] == "unknown").all() and (comms["group_size"] < 1).all():
        yield (
            "not known: how the ranks divide into pipelines and replicas (the calls name no process group; a profiler that "
            "begins before init_process_group records none: let pptrace run watch the groups, without --no-hooks, or begin later)"
        )
    yield from _ranks_alone(run, steps)
    yield from _ranks_outside_steps(run, steps)
    yield from _ranks_that_lack_ops(run, steps)
    yield from _odd_steps(steps)
    yield from _unknown_bubbles(run, clock, steps)
    is_known = any(rank.bubble_ns is not None for step in steps for rank in step.ranks)
    if is_known and not is_message.any() and any(len(pipeline) > 1 for pipeline in mesh.pipelines):
        yield "no messages between stages in these traces: transfers cannot be separated from waiting, and count as bubble"
    if run.framework == OP_TABLE and (num_nested := _count_nested(run)):
        yield (
            f"communication inside ops of host-clock tables is taken out of compute ({num_nested} rows): set clock=device in "
            "both where it overlapped with compute"
        )
    yield from dict.fromkeys(str(line) for facts in run.facts.values() for line in facts.get("notes", ()))
    yield from _nulls(run, steps, are_explained=are_explained)
    if steps:
        yield from _null_line(run, steps, stragglers, are_explained=are_explained)


def doubts_of_times(
    run: RecognisedRun, clock: Clock, steps: Sequence[StepReport], sharing: Sequence[SharedDevice]
) -> tuple[Doubt, ...]:
    """Doubts that all times of a run hang on: clocks that are off, ranks that share a GPU (``sharing``)."""
    return (
        *(Doubt(InDoubt.CLOCK, line) for line in _clocks(run, clock, steps)),
        *(Doubt(InDoubt.DEVICE, f"{who_shares([one])}: {TAKING_TURNS}; {OWN_DEVICE}") for one in sharing),
    )


def _clocks(run: RecognisedRun, clock: Clock, steps: Sequence[StepReport]) -> Iterator[str]:
    """Describe how the clocks were related, and the effect of their uncertainty where ops are not much longer."""
    if all(work.missing_device_events for work in run.work.values()):
        return  # launching relates no clocks, and no figure compares them
    yield from clock.warnings
    durations = (run.ops["end_ns"] - run.ops["start_ns"])[rows_among(run.ops["kind"], COMPUTE_KINDS)]
    uncertainty = clock.uncertainty_ns or 0
    if steps and durations.empty:  # without a pipeline
        shortest = min(step.end_ns - step.start_ns for step in steps)
        if uncertainty > _CERTAIN * shortest:
            yield (
                f"{CLOCKS_OFF} ±{uncertainty / 1e3:,.1f} µs where a step lasts {shortest / 1e3:,.1f} µs: waiting and "
                f"transfers, which compare ranks, are {'not known' if 2 * uncertainty > shortest else 'only that exact'}"
            )
        return
    if not steps or uncertainty <= _CERTAIN * (median := float(durations.median())):
        return
    doubt = "only that exact"
    if all(step.span_ns is None for step in steps):
        doubt = "not known, since that is more than half a step"
    yield (
        f"{CLOCKS_OFF} ±{uncertainty / 1e3:,.1f} µs where the median op lasts {median / 1e3:,.1f} µs: bubbles, "
        f"waiting and transfers, which compare ranks, are {doubt}"
    )


def is_plan_of_all(run: WithPlan) -> bool:
    """Return whether the plan is that of a whole pipeline; a plan found in the order of some of its ranks is not."""
    plan = run.schedule.plan
    return plan is not None and not run.mesh.is_cut and plan.pp >= (run.mesh.pp or 1)


def _absent_ranks(run: RecognisedRun, steps: Sequence[StepReport]) -> Iterator[str]:
    present = set(run.facts)
    absent = sorted({rank for pipeline in run.mesh.pipelines for rank in pipeline} - present)
    num_absent = len(absent)
    if not absent and run.mesh.num_ranks > len(present):  # counted: a file may claim any number of ranks
        num_absent = run.mesh.num_ranks - sum(0 <= rank < run.mesh.num_ranks for rank in present)
        absent = list(islice((rank for rank in range(run.mesh.num_ranks) if rank not in present), _FEW))
    if not absent:
        return
    line = f"no trace of rank {listed(absent, _FEW, count=num_absent)} (of {run.mesh.num_ranks})"
    if not steps:
        yield line
    elif len(present) == 1:
        yield f"{line}: the windows of steps, waits and bubbles do not include those ranks"
    else:
        yield f"{line}: windows and waits do not include it, and bubbles that depend on it are not known"


def _ranks_alone(run: RecognisedRun, steps: Sequence[StepReport]) -> Iterator[str]:
    """Explain, for ranks alone in their pipeline, the meaning of their figures, and the traces that are missing."""
    alone = {
        rank
        for pipeline in run.mesh.pipelines
        if len(present := set(pipeline) & set(run.facts)) == 1
        for rank in present
        if run.mesh.lacks_ranks(rank, run.facts)
    }
    lone = sorted({rank.rank for step in steps for rank in step.ranks if rank.rank in alone})
    if not lone:
        return
    whose = f"rank {listed(lone, _FEW)}"
    yield (
        f"the windows of steps are those of {whose} alone, from its first op to its last, and the pipeline's may be longer; in "
        "them waiting and exposed transfer are one figure, and the bubble has bounds"
    )
    for rank in lone[:_FEW]:
        if peers := _peers(run, rank):
            yield (
                f"rank {rank} exchanges messages with {' and '.join(peers)}: give their traces to separate its "
                "waiting from transfer"
            )


def _peers(run: RecognisedRun, rank: int) -> list[str]:
    """The peers of a rank's messages: global ranks where known, else pipeline ranks."""
    mesh, messages = run.mesh, run.comms[(run.comms["rank"] == rank) & (run.comms["axis"] == "pp")]
    peers = sorted({int(peer) for peer in messages.loc[rows_among(messages["kind"], P2P), "peer"] if peer >= 0})
    if peers:
        return [f"rank {peer}" for peer in peers]
    plan, pp_rank = run.schedule.plan, mesh.pp_rank(rank)
    candidates = run.schedule.candidates
    if plan is not None and pp_rank is not None and pp_rank < plan.pp:
        pp_ranks = sorted(plan.peers_of(pp_rank))
    elif candidates and mesh.pp is not None and pp_rank is not None and {c.num_chunks for c in candidates} == {1}:
        pp_ranks = [neighbour for neighbour in (pp_rank - 1, pp_rank + 1) if 0 <= neighbour < mesh.pp]
    else:
        return []
    pipeline = () if mesh.known_pp_ranks else mesh.pipeline_of(rank)
    return [
        f"rank {pipeline[neighbour]}" if neighbour < len(pipeline) else f"pipeline rank {neighbour}"
        for neighbour in pp_ranks
    ]


_HALVES = ("F", "B", "I", "OVERLAP_F_B")


def _halves_by_step(ops: pd.DataFrame) -> dict[tuple[int, int], int]:
    """(step, rank) → the number of forwards and backwards, a pair counting as two."""
    rows = rows_where(
        ops[["step", "rank", "kind"]], rows_among(ops["kind"], _HALVES) & (ops["microbatch"] >= 0).to_numpy()
    )
    number, first = distinct_of([rows["step"], rows["rank"]])
    counts = np.bincount(number) + np.bincount(number[rows_among(rows["kind"], ("OVERLAP_F_B",))], minlength=len(first))
    steps_and_ranks = (rows[name].to_numpy()[first].tolist() for name in ("step", "rank"))
    return dict(zip(zip(*steps_and_ranks, strict=True), counts.tolist(), strict=True))


def _ranks_outside_steps(run: RecognisedRun, steps: Sequence[StepReport]) -> Iterator[str]:
    """Ranks whose trace has no op of a step, or fewer than the others: cut off, or without marks.

    Forwards and backwards are counted, of which every rank of a pipeline has the same number: a pair run as one op is two,
    and a weight gradient of its own is none.
    """
    counts = _halves_by_step(run.ops)
    incomplete: dict[str, list[int]] = {}
    for step in steps:
        for pipeline in run.mesh.pipelines:
            most = max((counts.get((step.step, rank), 0) for rank in pipeline), default=0)
            for rank in pipeline:
                count = counts.get((step.step, rank), 0)
                if rank in run.facts and count < most:
                    count_text = f"{count} of {most}" if count else "no"
                    incomplete.setdefault(f"rank {rank}: its trace has {count_text} ops", []).append(step.step)
    for what, numbers in incomplete.items():
        yield f"{what} of step {listed(numbers, _FEW)}: the figures of that step do not include them"


def _without_bubble(steps: Sequence[StepReport]) -> list[tuple[int, int]]:
    """(rank, step) of bubbles that are not known, of steps whose length and computing are."""
    return [
        (rank.rank, step.step)
        for step in steps
        for rank in step.ranks
        if rank.bubble_ns is None and rank.compute_ns is not None and step.span_ns is not None
    ]


def _odd_steps(steps: Sequence[StepReport]) -> Iterator[str]:
    """Lines on evaluations, and where ops take longer than there was time: a rank of a pipeline runs them one after the other."""
    if evaluations := [step.step for step in steps if step.is_evaluation]:
        yield f"step {listed(evaluations, _FEW)} has forwards alone, as evaluations have: left out of findings and statistics"
    known = [(step.ideal_ns, step.span_ns) for step in steps if step.ideal_ns is not None and step.span_ns is not None]
    compute, span = (sum(values) for values in zip(*known, strict=True)) if known else (0, 0)
    if compute > span:
        yield (
            f"ops of a rank overlap: they take {compute / span:.0%} of the step, since time that two of them share counts "
            "twice in causes and predictions; expected one at a time, or pairs as OVERLAP_F_B"
        )


def _ranks_that_lack_ops(run: RecognisedRun, steps: Sequence[StepReport]) -> Iterator[str]:
    """A line for the ranks whose figures are not known in steps of which their traces lack ops."""
    lost = lost_steps(run.ops, run.work)
    lacking: dict[int, list[int]] = {}
    unbounded: dict[int, list[int]] = {}
    bare: dict[int, list[int]] = {}
    for step in steps:
        has_pipeline = step.has_pipeline
        for number in (rank.rank for rank in step.ranks if rank.compute_ns is None):
            if has_pipeline and step.span_ns is not None:
                lacking.setdefault(number, []).append(step.step)
            elif step.step not in lost.get(number, ()) and not run.work[number].missing_device_events:
                (unbounded if has_pipeline else bare).setdefault(number, []).append(step.step)
    if bare:
        yield (
            f"compute of {rank_text(bare)} is not known, nor what communication it hides: neither operators nor kernels were "
            "recorded; record operators, as pptrace run does without --record light"
        )
    for number, of_steps in lacking.items():
        yield (
            f"compute and bubble of rank {number} are not known in step {listed(of_steps, _FEW)}: its trace lacks ops of the "
            "plan, whose time would count as bubble"
        )
    numbers = [step.step for step in steps if step.has_pipeline and step.span_ns is None]
    absent = {rank for pipeline in run.mesh.pipelines for rank in pipeline if rank in run.facts} - {
        rank.rank for step in steps for rank in step.ranks
    }
    for number in sorted(absent) if numbers and not lost else ():
        unbounded[number] = numbers
    for number, of_steps in unbounded.items():
        yield (
            f"the length of step {listed(of_steps, _FEW)}, and the bubbles of rank {number}'s pipeline, are not known: its trace "
            "lacks ops of the plan, which may be the first or the last of the step"
        )


def _unknown_bubbles(run: RecognisedRun, clock: Clock, steps: Sequence[StepReport]) -> Iterator[str]:
    unknown = _without_bubble(steps)
    if not unknown:
        return
    ranks, numbers = (sorted(set(column)) for column in zip(*unknown, strict=True))
    of_steps = "" if len(numbers) == len(steps) else f" in step {as_ranges(numbers)}"
    why = "the other side of their messages is not in the traces"
    lacking = run.comms[run.comms["rank"].isin(ranks) & (run.comms["match"] < 0)]
    is_group_known = any(getattr(run.mesh, axis, None) is not None for axis in lacking["axis"].unique())
    if _losing(run).issuperset(numbers):
        why = "the ranks on the other side of their messages lost kernels"
    elif clock.early_ends and not rows_among(lacking["kind"], P2P).any():
        why = "the recorded ends of some messages or collectives are before their other side has begun"
    elif len(lacking) and not rows_among(lacking["kind"], P2P).any():
        why = "other members of their collectives have no trace, or are unknown"
        if run.framework == OP_TABLE and not is_group_known:
            why = "the members of collectives are unknown (add a column match, or dp_rank, tp_rank, … to the table)"
    waits = (
        f"; nor is how much of {listed(unknown_waits, _FEW)} waits, is hidden or is exposed"
        if (unknown_waits := _unknown_waits(steps))
        else ""
    )
    yield (
        f"bubble and exposed communication of rank {listed(ranks, _FEW)} are not known{of_steps}: {why}, so that waiting cannot "
        "be separated from transfer"
        f"{waits}"
    )


def _losing(run: RecognisedRun) -> set[int]:
    """The steps in which some rank lost kernels."""
    return {number for of_rank in lost_steps(run.ops, run.work).values() for number in of_rank}


def _unknown_waits(steps: Sequence[StepReport]) -> list[str]:
    """Axis and kind of communication with unknown waiting."""
    comms = (comm for step in steps for rank in step.ranks for comm in rank.comms)
    return sorted({f"{comm.axis} {comm.kind}" for comm in comms if comm.wait_ns is None and comm.total_ns is not None})


def _count_nested(run: RecognisedRun) -> int:
    """Count the rows of a table's communication that lie inside ops of their rank."""
    rows = RowsByRank(run.ops, rows_where(run.comms, run.comms["end_ns"] > run.comms["start_ns"]))
    of_ranks = map(rows.of_rank, run.facts)
    return sum(int(is_nested(of_rank.comms, of_rank.ops, is_table=True).sum()) for of_rank in of_ranks)


def _missing_devices(run: RecognisedRun) -> Iterator[str]:
    """A warning where device work is not in the traces: nothing ran there, or it was not recorded."""
    lacking = {
        rank: work.missing_device_events for rank, work in sorted(run.work.items()) if work.missing_device_events
    }
    if lacking:
        whose = "" if len(lacking) == len(run.work) else f" of rank {listed(list(lacking), _FEW)}"
        unrecorded = [name for name in lacking.values() if name != UNKNOWN_CLOCK]
        cure = "; record with activities=[CPU, CUDA]" if unrecorded else ""
        yield (
            f"no device events{whose}, though the run computes on devices ({(unrecorded or [UNKNOWN_CLOCK])[0]}): times are "
            f"those of launching on the host, and compute, bubbles, transfers and why devices were idle are not known{cure}"
        )
    elif not any(len(work) for work in run.work.values()):
        on_device = len(run.ops) and (run.ops["clock"] == "device").all()
        what = "times are those of the tables, which say device" if on_device else "times are host ranges"
        yield f"no device events in these traces: {what}; what devices did, and why they were idle, is not known"


def explain_unknown_idle(
    steps: Sequence[StepReport], device: Sequence[RankDevice], work: Mapping[int, DeviceWork], formats: Collection[str]
) -> tuple[str, ...]:
    """A warning for each reason why devices with idle time have no ``host``, with what to do in traces of these formats."""
    ranks_by_reason: dict[str, set[int]] = {}
    lacking = {entry.rank for entry in device if entry.breakdown.idle_ns is not None and entry.host is None}
    lacking |= {
        rank.rank for step in steps for rank in step.ranks if rank.device.idle_ns is not None and rank.host is None
    }
    for rank in sorted(lacking):
        reason = work[rank].idle.reason if rank in work else ""
        ranks_by_reason.setdefault(reason or _LACKS_LAUNCHES, set()).add(rank)
    cures = {_LAUNCHES_OF.get(each, _RECORD_LAUNCHES) for each in formats}
    cure = cures.pop() if len(cures) == 1 else _RECORD_LAUNCHES
    return tuple(
        f"why the device was idle is not known of rank {listed(sorted(ranks), _FEW)}: {reason}; {cure}"
        for reason, ranks in ranks_by_reason.items()
    )


_RECORD_LAUNCHES = (
    "record CUDA runtime calls from before the first step to after the last (Kineto: activities=[CPU, CUDA]; nsys: "
    "--trace=cuda)"
)
_LAUNCHES_OF: Mapping[str, str] = {
    InputFormat.XPLANE: "profile from before the first step to after the last: JAX records launches of GPUs, of TPUs none",
    InputFormat.ASCEND: "record host and device from before the first step to after the last (torch_npu: activities=[CPU, NPU])",
    InputFormat.ROCPD: "record calls of HIP from before the first step to after the last (rocprofv3 --sys-trace)",
}
_LACKS_LAUNCHES = "in some steps or in the whole trace, the launch of work that followed idle time was not recorded"


def _nulls(run: RecognisedRun, steps: Sequence[StepReport], *, are_explained: bool) -> Iterator[str]:
    yield from _missing_devices(run)
    yield from lines_of_lost_work(run.work, lost_steps(run.ops, run.work))
    if not steps and rows_among(run.ops["kind"], COMPUTE_KINDS).any():
        yield (
            "pipeline steps, phases and bubbles are not known: forwards and backwards were recognised, but not the pipeline that "
            "they belong to; give the traces of all of its ranks"
        )
        return
    if not steps:
        marked = (
            "the traces hold ranges of steps, optimizer or gradient sync only"
            if len(run.ops)
            else "neither marks of pptrace nor known labels"
        )
        yield (
            f"no forward or backward of a microbatch recognised ({marked}): pipeline steps, phases and bubbles are "
            "not known; see the README for the runtimes that are recognised"
        )
        return
    if not any(step.has_pipeline for step in steps):
        is_known = not rows_among(run.comms["kind"], P2P).any()
        so = (
            "no pipeline in these traces, and so no bubbles and phases"
            if is_known
            else "whether the messages between ranks are those of a pipeline is not known, nor are bubbles and phases"
        )
        yield (
            f"no forward or backward of a microbatch recognised: {so}; the rest of a rank's step is what is neither compute nor "
            "exposed communication"
        )
        return
    plan = run.schedule.plan
    is_partial = plan is not None and not is_plan_of_all(run)
    if is_partial and plan is not None:
        length = "the" if run.mesh.pp is None else f"the {run.mesh.pp}"
        yield (
            f"the ideal bubble and what the bubble consists of are not known: the recognised plan covers {plan.pp} of {length} "
            "ranks of a pipeline"
        )
    elif plan is not None and (neighbour := [step.step for step in steps if step.bubble.ideal_ratio is None]):
        yield f"the ideal bubble of step {listed(neighbour, _FEW)} is not known: the step has other ops than the plan"
    are_lacking = [step.bubble.waterfall_ns is None and step.span_ns is not None for step in steps]
    if are_explained and not is_partial and any(are_lacking):
        ideal = "the ideal bubble and " if plan is None else ""
        what = "there is no plan" if plan is None else "a step lacks ops of the plan"
        yield f"{ideal}what the bubble consists of {'are' if ideal else 'is'} not known where {what}"


def _null_line(
    run: RecognisedRun, steps: Sequence[StepReport], stragglers: Stragglers | None, *, are_explained: bool
) -> Iterator[str]:
    """One warning that says in words which fields are null, each with its reason; none where all are known."""
    fields = []
    comms = [comm for step in steps for rank in step.ranks for comm in rank.comms]
    falls = [step.bubble.waterfall_ns for step in steps if step.bubble.waterfall_ns is not None]
    if any(len(work) for work in run.work.values()) and any(fall.host is None for fall in falls):
        fields.append("what hosts cost the step (it is not known of every rank why its device was idle)")
    if any(rank.peak_memory_bytes is None for step in steps for rank in step.ranks):
        fields.append("peak memory (the traces hold no memory events)")
    if any(comm.bytes is None for comm in comms):
        fields.append("sizes and bandwidths of messages (the calls record no sizes)")
    if (unknown_waits := _unknown_waits(steps)) and not _without_bubble(steps):
        numbers = [step.step for step in steps if _unknown_waits([step])]
        of_steps = "" if len(numbers) == len(steps) else f" in step {as_ranges(numbers)}"
        is_lost = _losing(run).issuperset(numbers)
        why = "lost kernels" if is_lost else "have no trace, or are unknown"
        fields.append(
            f"how much of {listed(unknown_waits, _FEW)} waits, is hidden or is exposed{of_steps} (other members of the calls "
            f"{why})"
        )
    if are_explained and stragglers is None:
        fields.append("what stragglers cost (no step has every op of a known plan, or the ranks' times do not compare)")
    elif stragglers is not None and stragglers.m_w is None:
        fields.append(
            f"how much of the slowdown the slowest ranks or the last stage cause (ops that vary make the step less than "
            f"{LEAST_SLOWDOWN - 1:.0%} longer, too little to be shared out)"
        )
    if fields:
        yield f"not known: {'; '.join(fields)}"
