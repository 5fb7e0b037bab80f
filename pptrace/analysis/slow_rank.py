"""Search for ranks that compute slower than they used to, or than their replicas do, step by step while a run goes on.

For each step and rank the *pace* is how long its ops take, over what the same ops of that rank (kind and stage) took in the
steps before: medians on both sides, so that one long op, a garbage collection say, does not count, and of the kinds the lower
median, so that forwards alone, or backwards, make no slow rank unless the others take hardly any of its time. What it takes
longer because it waited longer for a core is taken away: other work on its machine makes no slow rank. What all ranks have in
common, such as a slower machine, is divided out: the *excess* of a rank is its pace over the median pace of the
other ranks, minus 1.

A rank is named where its excess was above the threshold in two of the last three steps that were observed. The threshold is four
standard deviations of the excesses before (1.4826 · median absolute deviation; Hampel's identifier), of all ranks and of its own,
and twice what one in twenty of them exceeds, which is more where they have heavy tails; it is 15 % at least. What the rank takes
longer has to be more than all its waiting for a core in that step. Steps of a rank that stand out do not become its past, so that
a rank that stays slow stays named; steps above the threshold are not what is usual either where it waited for a core so long that
nobody is named.

A rank that was slow from the start has no other past. Where other ranks run the same stage, the medians of its ops are compared
with theirs in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median, median_low

import numpy as np
from msgspec import Struct, field

from pptrace.analysis.aligned import AlignedRun
from pptrace.intervals import lengths_within

LEAST_EXCESS = 0.15
PAST_STEPS = 32
LEAST_PAST = 3
"""Steps before which a rank is not compared with its own past."""
_WARM_UP = 2
"""First steps, which pay for connections and allocators and are nobody's past."""
_SIGMAS = 4.0
_MAD_TO_SIGMA = 1.4826
_RECENT, _ENOUGH = 3, 2
_LEAST_EXCESSES = 6
_SELDOM, _TIMES_SELDOM = 0.05, 2.0
_SMALL_KIND = 0.4
"""Kinds that take less than so much of what a kind takes in the mean do not count: their pace says nothing of the rank's."""
_NS_FLOOR = 1

PAST, REPLICAS = "before", "those of its replicas"

_NO_WAITS: Mapping[int, int] = {}

OpKind = tuple[str, int]
"""Kind and stage."""


class OpTimes(Struct, frozen=True):
    """The ops of one kind and stage of a rank in a step: how many, and the median of what they computed, ns."""

    count: int
    median_ns: float


OpTimesByKind = Mapping[OpKind, OpTimes]


def op_times(data: AlignedRun) -> dict[int, dict[int, OpTimesByKind]]:
    """Compute of the ops of each step and rank. An unknown stage is that of no other rank."""
    times: dict[int, dict[int, dict[OpKind, list[int]]]] = {}
    for rank, lane in data.lanes.items():
        ops = data.rows.of_rank(rank).ops
        compute_ns = lengths_within(lane.compute, ops["start_ns"], ops["end_ns"])
        stages = np.where(ops["stage"] < 0, -1 - rank, ops["stage"])
        rows = zip(ops["step"].tolist(), ops["kind"].tolist(), stages.tolist(), compute_ns.tolist(), strict=True)
        for step, kind, stage, ns in rows:
            times.setdefault(step, {}).setdefault(rank, {}).setdefault((kind, stage), []).append(ns)
    return {
        step: {
            rank: {kind: OpTimes(len(ns), median(ns)) for kind, ns in of_rank.items()}
            for rank, of_rank in of_step.items()
        }
        for step, of_step in times.items()
    }


class SlowRank(Struct, frozen=True):
    """A rank that is named in a step. ``since`` is the first step that stood out, ``excess`` how much longer its ops take in
    this one (0.3: 30 % longer), ``than`` is ``before`` or ``those of its replicas``.
    """

    rank: int
    step: int
    since: int
    excess: float
    than: str


class _Past(Struct):
    """Times of a rank's ops in the steps before, ns."""

    ops: dict[OpKind, deque[float]] = field(default_factory=dict)
    core_waits: deque[int] = field(default_factory=lambda: deque(maxlen=PAST_STEPS))

    def pace(self, ops: OpTimesByKind, core_wait_ns: int | None) -> float | None:
        """Ratio of the time that these ops take to what they took; None where too little is known."""
        before = {kind: median(past) for kind, past in self.ops.items() if len(past) >= LEAST_PAST}
        more_waiting = 0.0
        if core_wait_ns is not None and self.core_waits:
            more_waiting = core_wait_ns - median(self.core_waits)
        return _pace(ops, before, more_waiting)

    def add(self, ops: OpTimesByKind, core_wait_ns: int | None) -> None:
        if core_wait_ns is not None:
            self.core_waits.append(core_wait_ns)
        for kind, times in ops.items():
            self.ops.setdefault(kind, deque(maxlen=PAST_STEPS)).append(times.median_ns)


class _Alarm(Struct):
    """The last steps of one comparison of a rank: which of them stood out."""

    recent: deque[tuple[int, bool]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    since: int | None = None

    def note(self, step: int, stands_out: bool) -> bool:
        """Return whether the rank is named now."""
        self.recent.append((step, stands_out))
        outstanding = [number for number, is_out in self.recent if is_out]
        if len(outstanding) < _ENOUGH:
            self.since = None if not outstanding else outstanding[0]
            return False
        self.since = outstanding[0] if self.since is None else min(self.since, outstanding[0])
        return stands_out


class SlowRanks:
    """Follows the ranks of a run, step by step."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._past: dict[int, _Past] = {}
        self._excesses: dict[str, dict[int, deque[float]]] = {}
        self._alarms: dict[tuple[int, str], _Alarm] = {}

    def add(
        self, step: int, ranks: Mapping[int, OpTimesByKind], core_waits: Mapping[int, int] = _NO_WAITS
    ) -> tuple[SlowRank, ...]:
        """The ranks that are named in this step, which comes after those before.

        ``core_waits`` are the times for which ranks waited for a core, ns.
        """
        self._num_steps += 1
        if self._num_steps <= _WARM_UP:
            return ()
        # excess of each rank over its past, beyond what all ranks have in common
        paces = {
            rank: pace
            for rank, ops in ranks.items()
            if (past := self._past.get(rank)) is not None and (pace := past.pace(ops, core_waits.get(rank))) is not None
        }
        excesses = {
            rank: pace / median([other for key, other in paces.items() if key != rank] or [1.0]) - 1
            for rank, pace in paces.items()
        }
        unsure = {
            rank: (
                core_waits.get(rank, 0) / max(sum(times.count * times.median_ns for times in ops.values()), _NS_FLOOR)
            )
            for rank, ops in ranks.items()
        }
        of_replicas = _of_replicas(ranks, core_waits)
        slow = [*self._judge(step, excesses, PAST, unsure), *self._judge(step, of_replicas, REPLICAS, unsure)]
        outstanding = {
            rank for rank, alarm in self._alarms.items() if alarm.recent and alarm.recent[-1] == (step, True)
        }
        for rank, ops in ranks.items():
            if (rank, PAST) not in outstanding:
                self._past.setdefault(rank, _Past()).add(ops, core_waits.get(rank))
        return tuple({alarm.rank: alarm for alarm in reversed(slow)}.values())

    def _judge(
        self, step: int, excesses: Mapping[int, float], than: str, unsure: Mapping[int, float]
    ) -> Iterator[SlowRank]:
        """Name ranks; ``unsure`` is the part of the time of a rank's ops that its waiting for a core may have been."""
        known = self._excesses.setdefault(than, {})
        usual = _threshold(list(known.values()))
        above = {
            rank
            for rank, excess in excesses.items()
            if usual is not None and excess > max(usual, _threshold([known.get(rank, ())]) or 0)
        }
        outstanding = {rank for rank in above if excesses[rank] / (1 + excesses[rank]) > unsure[rank]}
        if not above:  # a slow rank makes the others look fast
            for rank, excess in excesses.items():
                known.setdefault(rank, deque(maxlen=PAST_STEPS)).append(excess)
        for rank, excess in excesses.items():
            alarm = self._alarms.setdefault((rank, than), _Alarm())
            if alarm.note(step, rank in outstanding) and alarm.since is not None:
                yield SlowRank(rank, step, alarm.since, excess, than)


def _threshold(of_ranks: Sequence[Collection[float]]) -> float | None:
    """The excess above which a rank stands out, from those of some ranks before; None before enough is known.

    Each rank's excesses count from their own median: one that is always slower does not widen what is usual.
    """
    deviations = sorted(excess - middle for past in of_ranks if past for middle in (median(past),) for excess in past)
    if len(deviations) < _LEAST_EXCESSES:
        return None
    sigma = _MAD_TO_SIGMA * median(map(abs, deviations))
    seldom = deviations[len(deviations) - 1 - int(_SELDOM * len(deviations))]
    return max(LEAST_EXCESS, _SIGMAS * sigma, _TIMES_SELDOM * seldom)


def _of_replicas(ranks: Mapping[int, OpTimesByKind], core_waits: Mapping[int, int]) -> dict[int, float]:
    """Excess of each rank over the others that run the same stages."""
    by_kind: dict[OpKind, dict[int, float]] = {}
    for rank, ops in ranks.items():
        for kind, times in ops.items():
            by_kind.setdefault(kind, {})[rank] = times.median_ns
    excesses = {}
    for rank, ops in ranks.items():
        others = {kind: [ns for peer, ns in by_kind[kind].items() if peer != rank] for kind in ops}
        peers = {peer for kind in ops for peer in by_kind[kind]} - {rank}
        waits = [core_waits[peer] for peer in peers if peer in core_waits]
        more_waiting = core_waits[rank] - median(waits) if waits and rank in core_waits else 0.0
        pace = _pace(ops, {kind: median(times) for kind, times in others.items() if times}, more_waiting)
        if pace is not None:
            excesses[rank] = pace - 1
    return excesses


def _pace(ops: OpTimesByKind, usual: Mapping[OpKind, float], more_waiting_ns: float) -> float | None:
    """Ratio of the time of ops to what is usual: the lower median over their kinds, less what waiting for a core explains.

    None where nothing is known.
    """
    usual_ops = {kind: times for kind, times in ops.items() if usual.get(kind, 0) >= _NS_FLOOR}
    took = {kind: times.count * usual[kind] for kind, times in usual_ops.items()}
    least = _SMALL_KIND * sum(took.values()) / max(len(took), 1)
    known = {kind: times for kind, times in usual_ops.items() if took[kind] >= least}
    now = sum(times.count * times.median_ns for times in known.values())
    before = sum(times.count * usual[kind] for kind, times in known.items())
    if before < _NS_FLOOR or now < _NS_FLOOR:
        return None
    own = max(now - max(more_waiting_ns, 0), min(now, before))  # waiting explains no more than what is longer
    return median_low(times.median_ns / usual[kind] for kind, times in known.items()) * own / now
