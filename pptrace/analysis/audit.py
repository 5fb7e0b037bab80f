"""The audit of a recording: what its recorder lost, stretched or mislabelled, what figures that affects, and what cures it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np
import pandas as pd

from pptrace.analysis.report import AuditEntry, Report
from pptrace.clock.result import Clock
from pptrace.model import units
from pptrace.model.damage import KINDS, NO_TIME, Damage, LackingRecords, RankDamage
from pptrace.model.tables import COMPUTE_KINDS, Int64
from pptrace.slices import reduce_groups, rows_among, slices_by_rank

_MOST_NAMED = 1_000
"""Most ranks without a trace that are named."""
_SLOWER = 1.1
"""Times as long from which on steps are another program's."""
_RECORD_LESS = "record fewer steps or fewer activities"
_WARM_UP = "let the profiler warm up for a step (schedule(warmup=1)), and record again"
_NEWER = "record with a newer torch"
_SHIFTED = (
    "where several waits of the host agree on how far, its times are shifted back; else they are not known, and null"
)
_SAME_CLOCKS = f"{_RECORD_LESS}; {_NEWER}; several torch.cuda.synchronize() in a recording tell how far it is off"


_WORDS: Mapping[Damage, tuple[str, str]] = {
    Damage.LOST_KERNELS: (
        "compute, bubbles and idle time of these ranks in these steps are null; of fewer than ten of 10,000 kernels nothing is",
        f"{_RECORD_LESS}, and let the profiler warm up for a step: CUPTI's buffers were full, or the session had just begun",
    ),
    Damage.NO_DEVICE_EVENTS: (
        "times of launching are no times of computing: what the device did is null",
        "record with ProfilerActivity.CUDA; a profiler that ran before in this process may have to be ended first",
    ),
    Damage.KERNELS_WITHOUT_LAUNCH: (
        "which op they are of, and why the device was idle before them, is not known: they count as lost",
        f"{_RECORD_LESS}; record the host's calls too (ProfilerActivity.CPU)",
    ),
    Damage.WORK_BEFORE_RECORDING: (
        "why the device was idle before this work is not known: its launch came before the recording",
        "nothing is wrong; torch.cuda.synchronize() before the profiler starts leaves none of it",
    ),
    Damage.NO_CORRELATION: (
        "which call launched what is not known: when ops ran, and why the device was idle, is null",
        "record the host's calls with their correlations: ProfilerActivity.CPU, or nsys --trace=cuda,nvtx",
    ),
    Damage.REPEATED_CORRELATION: (
        "which of the kernels a call launched is not known: they count as lost",
        f"{_NEWER} (or ROCm): the recorder gave several launches one number",
    ),
    Damage.KERNELS_BEFORE_LAUNCH: (
        f"the clock of the device was behind that of the host: {_SHIFTED}",
        _SAME_CLOCKS,
    ),
    Damage.KERNELS_AFTER_WAIT: (
        f"the clock of the device was ahead of that of the host: {_SHIFTED}",
        _SAME_CLOCKS,
    ),
    Damage.KERNELS_OUT_OF_ORDER: (
        "they are left out, as if they were lost: a stream runs its work in the order of the launches",
        _NEWER,
    ),
    Damage.OVERRUNNING_KERNELS: (
        "each is cut where the next one on its stream begins, or where the longest other one of its name would end",
        _NEWER,
    ),
    Damage.REPEATED_KERNELS: (
        "counts and sums by name have them twice; times in which the device works do not",
        "end one profiler before another begins in the same process",
    ),
    Damage.EMPTY_KERNELS: (
        "their compute is not counted; of communication they count as lost: a resolution of a microsecond, or no end",
        _NEWER,
    ),
    Damage.UNNAMED_KERNELS: (
        "what launched them tells whether they compute or communicate; of those of which nothing does they count as lost",
        _NEWER,
    ),
    Damage.CONTRADICTING_NAMES: (
        "what launched them tells whether they compute or communicate; the kind of work of kernels may be another's",
        _NEWER,
    ),
    Damage.EMPTY_RANGES: (
        "they are left out: steps that lack ops are null",
        "end every range (with record_function(…):), and let the profiler end behind the last one",
    ),
    Damage.GRAPHS_AS_ONE_EVENT: (
        "communication inside the graphs counts as compute, and their kernels have no names",
        "record with nsys --cuda-graph-trace=node",
    ),
    Damage.GRAPHS_WITHOUT_KERNELS: (
        "what these replays computed is missing: compute is too short, and idle time too long",
        f"{_NEWER} and CUDA 12, whose profiler has the nodes of graphs",
    ),
    Damage.FAR_TIMES: ("they are left out, as if they were lost", _NEWER),
    Damage.UNSET_TIMES: ("they are left out; kernels among them count as lost", _RECORD_LESS),
    Damage.IMPOSSIBLE_TIMES: ("they are left out", "let the profiler end before the process does, and record again"),
    Damage.UNREADABLE_EVENTS: ("they are left out", "let the profiler end before the file is copied"),
    Damage.CUT_FILE: (
        "what comes behind the cut is missing, and maybe facts about the run",
        "let the profiler end before the process does; copy the file whole",
    ),
    Damage.UNFINISHED_OPERATORS: (
        "the last operators seem to last until the recording ends: no op is taken to last as long",
        _NEWER,
    ),
    Damage.REPEATED_OPERATORS: (
        "the cost of recording and what hosts did are counted twice: figures of hosts are wrong",
        "end one profiler before another begins in the same process",
    ),
    Damage.UNFINISHED_CALLS: (
        "these Python calls seem to last until the recording ends; ops do not depend on them",
        "record without with_stack, or with a newer torch",
    ),
    Damage.CROSSING_RANGES: (
        "ranges of one thread cannot cross: what lies in them may be taken for another range's",
        "end ranges on the thread, and in the order, in which they began (with record_function)",
    ),
    Damage.EARLY_ENDS: (
        "communication that ends before its other side begins, on one clock: it relates no clocks, and waits are too short",
        "let the recording begin and end between steps (profiler.step(), or --steps), with the ranges of all waits",
    ),
    Damage.BUFFER_REQUESTS: (
        "the profiler took memory for its records in these steps: launches then last longer than without it",
        _WARM_UP,
    ),
}
"""Text on what a kind of damage affects, with what was done about it, and on what cures it."""
_OF_DEVICE = frozenset(list(Damage)[: list(Damage).index(Damage.UNSET_TIMES)]) - {
    Damage.LOST_KERNELS,
    Damage.GRAPHS_WITHOUT_KERNELS,
}
"""Kinds of the device's records; the others are of the host, as launches whose kernels are missing, or of the file."""
SETTINGS_COST, SLOWED_AFTER, MISSING_RANKS = "costly_settings", "slowed_after", "missing_ranks"
INCOMPLETE_STEPS, OTHER_SETTINGS = "incomplete_steps", "other_settings"
UNMATCHED_MESSAGES, MISSING_RANGES, SHIFTED_TIMES = "unmatched_messages", "missing_ranges", "shifted_times"
_COSTLY = {
    "record_shapes": "shapes",
    "with_stack": "stacks",
    "with_modules": "modules",
    "with_flops": "FLOPs",
    "profile_memory": "memory",
}


def audit_events(damage: Mapping[int, RankDamage], ops: pd.DataFrame, clock: Clock) -> Iterator[AuditEntry]:
    """The damage of events, an entry for each kind: how much, of which ranks, in which steps.

    Args:
        damage: of each rank, on its own clock.
        ops: of all ranks, on the common ``clock``.
    """
    bounds_of_host, bounds_of_device = _begins_of_steps(ops, on_device=False), _begins_of_steps(ops, on_device=True)
    for code, kind in enumerate(KINDS):
        count, ranks, steps = 0, [], set[int]()
        bounds = bounds_of_device if kind in _OF_DEVICE else bounds_of_host
        for rank, of_rank in sorted(damage.items()):
            times = of_rank.start_ns[of_rank.kind == code]
            if not len(times):
                continue
            known = clock.to_common_clock(rank, times[times != NO_TIME])
            if rank in bounds:
                numbers, begin, end = bounds[rank]
                index = np.searchsorted(begin, known, side="right") - 1
                in_steps = numbers[index[(index >= 0) & (known <= end)]]
                if kind is Damage.BUFFER_REQUESTS:  # those before and after the steps are as they should be
                    times = times[: len(in_steps)]
                steps |= set(np.unique(in_steps).tolist())
            if len(times):
                count += len(times)
                ranks.append(rank)
        if count:
            yield AuditEntry(str(kind), count, tuple(ranks), tuple(sorted(steps)), *_WORDS[kind])


def _begins_of_steps(ops: pd.DataFrame, *, on_device: bool) -> dict[int, tuple[Int64, Int64, int]]:
    """(numbers of the steps, their begins, the end of the last one) of each rank that has steps, ns.

    A host may be steps ahead of its device: the steps of a device are those of the ops that it ran, where there are any.
    """
    in_steps = ops[(ops["step"] >= 0) & rows_among(ops["kind"], (*COMPUTE_KINDS, "STEP"))]
    is_marks = rows_among(in_steps["kind"], ("STEP",))
    with_marks = in_steps.loc[is_marks, "rank"].unique()
    by_device = ~is_marks & rows_among(in_steps["clock"], ("device",))
    devices = in_steps.loc[by_device, "rank"].unique()
    of_host = is_marks | ~in_steps["rank"].isin(with_marks).to_numpy()
    of_device = by_device | (of_host & ~in_steps["rank"].isin(devices).to_numpy())
    chosen = in_steps[of_device if on_device else of_host]
    found = {}
    for rank, rows in slices_by_rank(chosen, ("step", "start_ns", "end_ns")).items():
        steps, number = np.unique(rows["step"], return_inverse=True)
        begin = reduce_groups(np.minimum, rows["start_ns"], number, len(steps))
        order = np.argsort(begin, kind="stable")
        found[rank] = steps[order].astype(np.int64), begin[order], int(rows["end_ns"].max())
    return found


def audit_clock(clock: Clock) -> Iterator[AuditEntry]:
    """Find the ranks whose times are not those of their host."""
    if not clock.shifted:
        return
    ranks = sorted(clock.shifted)
    others = [rank for rank in clock.offsets_ns if rank not in clock.shifted] or ranks
    if all(clock.relates([rank, *others]) for rank in ranks):
        moved_ns = max(abs(clock.offsets_ns[rank] - clock.offsets_ns[other]) for rank in ranks for other in others)
        moved = f"{moved_ns / 1e9:,.1f} s" if moved_ns >= 1e9 else f"{units.milliseconds(moved_ns)} ms"
        off = "" if clock.uncertainty_ns is None else f" ({units.uncertainty(clock.uncertainty_ns)})"
        done = f"put back as messages or the order of ops demand, by {moved}{off}"
    else:
        done = "no message relates them to the others, and what compares ranks is null"
    yield AuditEntry(
        SHIFTED_TIMES,
        len(ranks),
        tuple(ranks),
        (),
        f"these ranks' times are not on one clock with those of others on their host, though they read one: {done}",
        "record all ranks at the same time, and leave the clock of the host alone while it records (NTP, date)",
    )


def audit_report(
    report: Report,
    settings: Mapping[int, Mapping[str, object]],
    slowdown: float | None,
    slowed_after: float | None,
    lacking: LackingRecords,
) -> Iterator[AuditEntry]:
    """Find what of the recording as a whole makes figures those of another program, or of a part of the run.

    Args:
        report: of the run as it was recorded.
        settings: what each rank's recorder recorded.
        slowdown: how many times as long as without recording a step takes.
        slowed_after: how many times as long as before it the steps after the recording take.
        lacking: records that some ranks lack and others have.
    """
    yield from _lacking_records(lacking)
    yield from _missing_parts(report, settings)
    yield from _other_program(settings, slowdown, slowed_after)


def _lacking_records(lacking: LackingRecords) -> Iterator[AuditEntry]:
    """Find the ranks that lack ranges or ends of messages, which others have."""
    if lacking.ranges:
        yield AuditEntry(
            MISSING_RANGES,
            len(lacking.ranges),
            lacking.ranges,
            (),
            "ops of these ranks are inferred, of the others labelled: where their numbers differ the inferred ones are null",
            "record all ranks with the same ranges (user annotations, NVTX) and profiler options",
        )
    if lacking.messages:
        every = np.concatenate(list(lacking.messages.values()))
        yield AuditEntry(
            UNMATCHED_MESSAGES,
            len(every),
            tuple(sorted(lacking.messages)),
            tuple(np.unique(every[every >= 0]).tolist()),
            "the other ends of messages are not in these ranks' traces: waits cannot be told from transfers, and are null",
            "record all of these steps on every rank, with the ranges or calls of all messages",
        )


def _missing_parts(report: Report, settings: Mapping[int, Mapping[str, object]]) -> Iterator[AuditEntry]:
    """Find ranks without a trace, and steps that are not explained."""
    absent = report.mesh.num_ranks - len(settings)
    if absent > 0:
        missing = islice((rank for rank in range(report.mesh.num_ranks) if rank not in settings), _MOST_NAMED)
        yield AuditEntry(
            MISSING_RANKS,
            absent,
            tuple(missing),
            (),
            "what these ranks did is not known; others that wait for them are explained as far as the plan tells",
            "record all ranks, or those of one pipeline (pptrace run --profile-ranks)",
        )
    known = [step for step in report.steps if step.causes is not None]
    unexplained = [step for step in report.steps if step.has_pipeline and step.causes is None]
    if known and unexplained:
        yield AuditEntry(
            INCOMPLETE_STEPS,
            len(unexplained),
            (),
            tuple(step.step for step in unexplained),
            "these steps are not explained: they lack ops of their plan, or kernels, or were cut by the recording",
            "record from the beginning of a step to the end of one (profiler.step(), or --steps)",
        )


def _other_program(
    settings: Mapping[int, Mapping[str, object]], slowdown: float | None, slowed_after: float | None
) -> Iterator[AuditEntry]:
    """Find what made the recorded program another one than the program without its recorder."""
    costly = {name for of_rank in settings.values() for name in _COSTLY if of_rank.get(name)}
    if costly and (slowdown or 1.0) > _SLOWER:
        names = ", ".join(_COSTLY[name] for name in sorted(costly))
        yield AuditEntry(
            SETTINGS_COST,
            len(costly),
            tuple(rank for rank, of_rank in sorted(settings.items()) if any(of_rank.get(name) for name in costly)),
            (),
            f"the program runs {slowdown:.2f} times as long with {names} recorded; the cost is taken out as far as it is known",
            "record without them (pptrace run --record light)",
        )
    if (slowed_after or 1.0) > _SLOWER:
        yield AuditEntry(
            SLOWED_AFTER,
            1,
            (),
            (),
            f"steps after the recording take {slowed_after:.2f} times as long as those before it: it left something on",
            "set TEARDOWN_CUPTI=1 in the environment, or look at unrecorded steps in a run of their own",
        )
    kinds = {str(sorted((name, value) for name, value in of_rank.items())) for of_rank in settings.values()}
    if len(kinds) > 1:
        yield AuditEntry(
            OTHER_SETTINGS,
            len(kinds),
            tuple(sorted(settings)),
            (),
            "ranks were recorded with different settings: some are slower by their recorder alone",
            "record all ranks with the same options",
        )
