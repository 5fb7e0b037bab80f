"""Slow hosts: ranks whose ops begin late although all that they need is there, at the start of steps, now and then, or always.

Where a rank has no device, this is what its host does between ops (Python, input, garbage collection). Collections that
``pptrace run`` recorded tell why a host stood still, in ops or before them. Pauses are now and then, seen by their effect alone:
at different times on different ranks, or on all at once where collections are planned. What a rank waits for in most steps is no
pause but a gap: Python between ops, a late start, or one op that comes late in each step, as the first one of a schedule's second
call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from msgspec.structs import replace

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.outside import AMONG, BEFORE
from pptrace.analysis.stragglers.reason import (
    LEAST_ANYWHERE,
    LEAST_SHARE,
    Reason,
    gains,
    gains_if_sooner,
    time_by_rank,
    waits_with_late_windows,
    where_most,
)
from pptrace.model.tables import Int64
from pptrace.model.wording import counted, listed
from pptrace.schedule.actions import KINDS

LATE_LAUNCHES, LATE_START, GARBAGE_COLLECTION = "late launches", "late start", "garbage collection"
LATE_OP = "late op"
_LEAST_DELAY = 0.25
"""Share of a mean op: a rank that is less late into a step is none that is late."""
_CLEARLY = 1.25
"""A rank is named if its ops are so many times as late as those of others."""
_ALWAYS = 0.1
"""Ops are always late if this part of them is, or more, and the median of their delays is this part of the mean: else a few
single ones are. Those that wait for something else are not late."""
FEWEST_WINDOWS = 4
"""Steps of a pipeline; fewer tell too little of what is usual."""
PAUSES = "pauses"
_MOST_LATE = 0.25
"""Share of a rank's ops: where more come late in each step, no single ones do."""
_SPANS = ("DATA", "CHECKPOINT", "LOGGING")
_LEAST_SPAN = 0.1
_LEAST_PAUSE = 0.25
"""Share of a mean op: a shorter delay is no pause."""
_ADVICE = (
    "; garbage collection is the usual reason where none was recorded (pptrace run does): turn it off and collect on all ranks "
    "at once, every so many steps; else look at other processes on that host"
)


def late_starts(plans: Sequence[StepMatrix]) -> Reason | None:
    """Ranks that come late into steps, and what steps would get back if they did not; None where none does.

    Nor where several do and no message is known: their first receives would look the same.
    """
    met = [_late_to_meet(costs) for costs in plans]
    late = [np.maximum(_late_firsts(costs), ns) for costs, (ns, _) in zip(plans, met, strict=True)]
    times = np.concatenate([ns[ns > 0] for ns in late])
    if not len(times):
        return None
    where = where_most(time_by_rank(plans, late))
    if not where and not _knows_messages(plans):
        return None
    who = f"because rank {where['rank']} begins it late" if where else "because several ranks begin it late"
    return Reason(
        LATE_START,
        _causes(plans),
        where,
        f"Late start: {{share}} is lost {who}",
        f"{counted(len(times), 'time')} the first op of a rank in a step began late with all inputs there, typically by "
        f"{np.median(times) / 1e6:,.2f} ms: look at what that host does between steps (input, checkpoints, logging)",
        gains(
            plans,
            (
                replace(
                    costs.with_lateness(costs.lateness - _with_waits(costs, _late_firsts(costs))),
                    durations=costs.durations - np.minimum(waited, costs.inner),
                )
                for costs, (_, waited) in zip(plans, met, strict=True)
            ),
        ),
        {
            "num_late": len(times),
            "typical_ns": round(float(np.median(times))),
            **_spans_meanwhile(plans, late, where, BEFORE, _SPANS),
        },
    )


def _spans_meanwhile(
    plans: Sequence[StepMatrix], late: Sequence[Int64], where: Mapping[str, int | str], side: int, kinds: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Shares of a tenth or more of what a rank is late by in which ranges of these kinds on one side of its ops say what its
    host did, the largest first, as ``idle_spans``; {} where there are none.
    """
    taken, total = Counter[str](), 0
    for costs, ns in zip(plans, late, strict=True):
        of_window = np.where(costs.ranks[:, costs.table.rank] == where.get("rank"), ns, 0).sum(axis=1)
        total += int(of_window.sum())
        spans = costs.outside.where(costs.outside["side"] == side)
        spans = spans.where(costs.ranks[spans["window"], spans["pp_rank"]] == where.get("rank"))
        for kind in kinds:
            of_kind = spans.where(spans["name"] == kind)
            sums = np.bincount(of_kind["window"], of_kind["end"] - of_kind["start"], len(of_window))
            taken[kind] += int(np.minimum(sums, of_window).sum())
    shares = {kind: ns / total for kind, ns in taken.most_common() if ns >= max(_LEAST_SPAN * total, 1)}
    return {"idle_spans": shares} if shares else {}


def late_ops(plans: Sequence[StepMatrix]) -> Reason | None:
    """Single ops of ranks that come late in each step, as the first one of a schedule's second call before one update, and what
    steps would get back if they did not; None where there are none.
    """
    late = [_late_places(costs) for costs in plans]
    times = np.concatenate([ns[ns > 0] for ns in late])
    if not len(times):
        return None
    where = where_most(time_by_rank(plans, late))
    names = [
        f"{KINDS[costs.table.kind[row]]} of microbatch {costs.table.microbatch[row]}"
        for costs, ns in zip(plans, late, strict=True)
        for row in np.flatnonzero(np.where(costs.ranks[:, costs.table.rank] == where.get("rank"), ns, 0).any(axis=0))
    ]
    who = f"rank {where['rank']} comes" if where else "several ranks come"
    which = f" ({listed(dict.fromkeys(names), 3)})" if names else ""
    return Reason(
        LATE_OP,
        _causes(plans),
        where,
        f"Late ops: {{share}} is lost because {who} late to the same ops of each step{which}",
        f"all that they need is there {np.median(times) / 1e6:,.2f} ms before they begin, typically: look at what that host does "
        "then (input, evaluation, logging between calls of the schedule)",
        gains_if_sooner(plans, list(map(_with_waits, plans, late))),
        {"num_late": len(times), "typical_ns": round(float(np.median(times)))}
        | _spans_meanwhile(plans, late, where, AMONG, (*_SPANS, "EVAL", "GRAD_SYNC")),
    )


def _late_places(costs: StepMatrix) -> Int64:
    """Lateness of single ops that come late in most steps, but the first ones of ranks, beyond what is usual of their rank's ops,
    shape (windows, rows), ns.
    """
    late = np.zeros(costs.lateness.shape, dtype=np.int64)
    own = np.where(_with_waits(costs, _late_firsts(costs)) > 0, 0, costs.lateness - costs.waits_for(costs.lateness))
    for windows in costs.of_pipelines():
        if len(windows) < FEWEST_WINDOWS:
            continue
        middle = (len(windows) - 1) // 2
        in_most_steps = np.partition(own[windows], middle, axis=0)[middle]
        for begin, end in pairwise(costs.table.rank_ptr.tolist()):
            usual = np.median(in_most_steps[begin:end]) if end > begin else 0
            is_late = in_most_steps[begin:end] - usual >= costs.durations.mean()
            if is_late.sum() <= _MOST_LATE * (end - begin):
                late[windows, begin:end] = np.where(
                    is_late, np.maximum(own[windows, begin:end] - round(float(usual)), 0), 0
                )
    return late


def late_launches(plans: Sequence[StepMatrix]) -> Reason | None:
    """The rank whose ops always begin later than those of the others, and what steps would get back if they did not.

    Where all ranks are about as late, what they would get back if none was late; not where no message is known, whose transfers
    would look the same. Late starts, pauses and single ops that come late in each step are reasons of their own.
    """
    delays = [
        costs.lateness
        - _with_waits(costs, _late_firsts(costs))
        - _with_waits(costs, _pauses(costs))
        - _with_waits(costs, _late_places(costs))
        for costs in plans
    ]
    usual = [_usual_delay(costs, ns) for costs, ns in zip(plans, delays, strict=True)]
    excess = [np.maximum(ns - limit, 0) for ns, limit in zip(delays, usual, strict=True)]
    if not any(ns.any() for ns in delays):
        return None
    where = where_most(time_by_rank(plans, excess))
    if where and _is_later(plans, delays, rank := int(where["rank"])):
        is_of_rank = [costs.ranks[:, costs.table.rank] == rank for costs in plans]
        removed = [np.where(is_own, ns, 0) for is_own, ns in zip(is_of_rank, excess, strict=True)]
        times = np.concatenate([ns[is_own] for is_own, ns in zip(is_of_rank, delays, strict=True)])
        title = "Late ops: {share} goes to the ops of " + f"rank {rank}, which begin late"
    elif not _knows_messages(plans):
        return None
    else:
        removed, times = delays, np.concatenate([ns.ravel() for ns in delays])
        title, where = "Late ops: {share} goes to the ops of all ranks, which begin late", {}
    num_ops, times = len(times), times[times > 0]
    if len(times) < _ALWAYS * num_ops or not len(times) or np.median(times) < _ALWAYS * times.mean():
        return None
    return Reason(
        LATE_LAUNCHES,
        _causes(plans),
        where,
        title,
        f"ops that have all they need typically begin {np.median(times) / 1e6:,.2f} ms late, by the median of all ranks "
        f"{max(usual) / 1e6:,.2f} ms: look at the Python between ops there, at other processes on that host and at its clocks",
        gains_if_sooner(plans, removed),
        {"typical_ns": round(float(np.median(times))), "usual_ns": round(max(usual))},
        LEAST_SHARE if where else LEAST_ANYWHERE,
    )


def _causes(plans: Sequence[StepMatrix]) -> tuple[str, ...]:
    """The causes that late ops are part of: where others wait for them inside theirs, these are ops that vary."""
    return ("host", "unexplained", *(["jitter"] if any(len(costs.waits) for costs in plans) else []))


def _knows_messages(plans: Sequence[StepMatrix]) -> bool:
    """Return whether the transfer of any message is known; else they look like delays."""
    return any((costs.transfers >= 0).any() for costs in plans)


def _is_later(plans: Sequence[StepMatrix], delays: Sequence[Int64], rank: int) -> bool:
    """Return whether a rank is clearly later than the others, in the mean over its ops and the median over these."""
    means: dict[int, float] = {}
    for costs, ns in zip(plans, delays, strict=True):
        for windows in costs.of_pipelines():
            for pp_rank in range(costs.table.pp):
                of_rank = ns[windows][:, costs.table.rank == pp_rank]
                means[int(costs.ranks[windows[0], pp_rank])] = float(of_rank.mean()) if of_rank.size else 0.0
    mean = means.pop(rank)
    return not means or mean >= _CLEARLY * float(np.median(list(means.values())))


def _late_firsts(costs: StepMatrix) -> Int64:
    """Lateness of each rank's first op of a step beyond what is usual of its ops, shape (windows, rows), ns; 0 for all other
    ops, and where a rank is not late in most steps: that is a pause.
    """
    late, table = np.zeros(costs.durations.shape, dtype=np.int64), costs.table
    least = _LEAST_DELAY * costs.durations.mean()
    for windows in costs.of_pipelines():
        for begin, end in pairwise(table.rank_ptr.tolist()):
            if begin == end:
                continue
            delays = costs.lateness[windows, begin:end].astype(np.int64)
            excess = np.maximum(delays[:, 0] - round(float(np.median(delays))), 0)
            if np.median(excess) >= least:
                late[windows, begin] = excess
    return late


def _late_to_meet(costs: StepMatrix) -> tuple[Int64, Int64]:
    """Return (how late the first ops of pipelines, which need nothing, came to collectives in them, what others waited there),
    shape (windows, rows), ns; 0 where a pipeline is not late in most steps.
    """
    late, waited = np.zeros((2, *costs.durations.shape), dtype=np.int64)
    waits, window = waits_with_late_windows(costs)
    row, ns = waits["late_row"], waits["ns"] - waits["longer"]
    is_first = costs.table.level[row] == 0
    np.maximum.at(late, (window[is_first], row[is_first]), ns[is_first])
    for windows in costs.of_pipelines():
        late[windows] *= np.median(late[windows], axis=0) >= _LEAST_DELAY * costs.durations.mean()
    is_late = is_first & (late[window, row] > 0)
    np.add.at(waited, (waits["window"][is_late], waits["row"][is_late]), ns[is_late])
    return late, waited


def _with_waits(costs: StepMatrix, late: Int64) -> Int64:
    """The part of the delays by which ranks are late, and that of those that wait for them, shape (windows, rows), ns."""
    return np.maximum(late, costs.waits_for(late))


def _usual_delay(costs: StepMatrix, delays: Int64) -> int:
    """The median delay of a rank in a step, of all ranks and steps the lower median, ns: of two ranks that of the better one."""
    table = costs.table
    by_pp_rank = [np.median(delays[:, table.rank == pp_rank], axis=1) for pp_rank in range(table.pp)]
    ordered = np.sort(np.stack(by_pp_rank), axis=None)
    return round(float(ordered[(len(ordered) - 1) // 2]))


def host_pauses(plans: Sequence[StepMatrix]) -> Reason | None:
    """Pauses, and what steps would get back without them; None where there are none."""
    paused = [_pauses(costs) for costs in plans]
    times = np.concatenate([pauses[pauses > 0] for pauses in paused])
    if not len(times):
        return None
    of_rank = time_by_rank(plans, paused)
    where = where_most(of_rank)
    place = f"rank {where['rank']}" if where else f"{len(of_rank)} ranks"
    return Reason(
        PAUSES,
        _causes(plans),
        where,
        "Pauses: {share} is lost where the host stands still now and then, on " + place,
        f"{counted(len(times), 'op')} began late with all inputs there, typically by {np.median(times) / 1e6:,.2f} ms{_ADVICE}",
        gains_if_sooner(plans, list(map(_with_waits, plans, paused))),
        {"num_pauses": len(times), "num_ranks": len(of_rank), "typical_ns": round(float(np.median(times)))},
    )


def _pauses(costs: StepMatrix) -> Int64:
    """Pauses beyond what is usual before an op, shape (windows, rows), ns; what is waiting for a rank that is late is not."""
    pauses = np.zeros(costs.lateness.shape, dtype=np.int64)
    own = costs.lateness - costs.waits_for(costs.lateness)
    for windows in costs.of_pipelines():
        if len(windows) >= FEWEST_WINDOWS:
            delays = own[windows]
            # what is late in half of the steps is not so in most
            excess = delays - np.sort(delays, axis=0)[(len(windows) - 1) // 2]
            pauses[windows] = np.where(excess >= _LEAST_PAUSE * costs.durations.mean(), excess, 0)
    return np.where(_with_waits(costs, _late_firsts(costs)) > 0, 0, pauses)


def garbage_collections(plans: Sequence[StepMatrix]) -> Reason | None:
    """Collections that held up ops, and what steps would get back without them; None where there are none."""
    if not any(costs.has_collections for costs in plans):
        return None
    taken = [costs.collected_before.astype(np.int64) + costs.collected_inside for costs in plans]
    times = np.concatenate([ns[ns > 0] for ns in taken])
    of_rank = time_by_rank(plans, taken)
    where = where_most(of_rank)
    place = f"rank {where['rank']}" if where else f"{len(of_rank)} ranks"
    return Reason(
        GARBAGE_COLLECTION,
        ("host", "unexplained", "jitter", "straggler"),
        where,
        "Garbage collection: {share} is lost while Python collects garbage, on " + place,
        f"{len(times)} ops were held up by it, typically for {np.median(times) / 1e6:,.2f} ms: turn it off (gc.disable), collect "
        "on all ranks at once between steps, every so many of them (gc.collect), and keep what stays out of it (gc.freeze once "
        "the model is built)",
        gains(plans, (costs.without_collections() for costs in plans)),
        {"num_ops": len(times), "num_ranks": len(of_rank), "typical_ns": round(float(np.median(times)))},
    )
