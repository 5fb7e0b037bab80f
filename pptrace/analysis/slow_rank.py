"""Search for ranks that compute slower than they used to, or than their replicas do, step by step while a run goes on.

For each step and rank the *pace* is how long its ops take, over what the same ops of that rank (kind and stage) took in the steps
before: medians on both sides, so that one long op, a garbage collection say, does not count. What it takes longer because it
waited longer for a core is taken away: other work on its machine makes no slow rank. What all ranks have in common, such as a
slower machine, is divided out: the *excess* of a rank is its pace over the median pace of the other ranks, minus 1.

A rank is named where its excess was above the threshold in two of the last three steps that were observed. The threshold is six
standard deviations of the excesses before (1.4826 · median absolute deviation; Hampel's identifier), and at least 15 %. Steps of
a rank that stand out do not become its past, so that a rank that stays slow stays named.

A rank that was slow from the start has no other past. Where other ranks run the same stage, the medians of its ops are compared
with theirs in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

LEAST_EXCESS = 0.15
PAST_STEPS = 32
LEAST_PAST = 4
"""Steps before which a rank is not compared with its own past."""
_WARM_UP = 2
"""First steps, which pay for connections and allocators and are nobody's past."""
_SIGMAS = 6.0
_MAD_TO_SIGMA = 1.4826
_RECENT, _ENOUGH = 3, 2
_LEAST_EXCESSES = 8
_NS_FLOOR = 1

PAST, REPLICAS = "before", "those of its replicas"

_NO_WAITS: Mapping[int, int] = {}

OpKind = tuple[str, int]
"""Kind and stage."""


@dataclass(frozen=True, slots=True)
class OpTimes:
    """The ops of one kind and stage of a rank in a step: how many, and the median of what they computed, ns."""

    count: int
    median_ns: float


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that is named in a step. ``since`` is the first step that stood out, ``excess`` how much longer its ops take in
    this one (0.3: 30 % longer), ``than`` is ``before`` or ``those of its replicas``.
    """

    rank: int
    step: int
    since: int
    excess: float
    than: str


@dataclass(slots=True)
class _Past:
    """Times of a rank's ops in the steps before, ns."""

    ops: dict[OpKind, deque[float]] = field(default_factory=dict)
    core_waits: deque[int] = field(default_factory=lambda: deque(maxlen=PAST_STEPS))

    def pace(self, ops: Mapping[OpKind, OpTimes], core_wait_ns: int | None) -> float | None:
        """Ratio of the time that these ops take to what they took; None where too little is known."""
        now = before = 0.0
        for kind, times in ops.items():
            past = self.ops.get(kind)
            if past is not None and len(past) >= LEAST_PAST:
                now += times.count * times.median_ns
                before += times.count * median(past)
        more_waiting = 0.0
        if core_wait_ns is not None and self.core_waits:
            more_waiting = max(core_wait_ns - median(self.core_waits), 0)
        own = max(now - more_waiting, min(now, before))  # waiting explains no more than what is longer
        return own / before if own >= _NS_FLOOR and before >= _NS_FLOOR else None

    def add(self, ops: Mapping[OpKind, OpTimes], core_wait_ns: int | None) -> None:
        if core_wait_ns is not None:
            self.core_waits.append(core_wait_ns)
        for kind, times in ops.items():
            self.ops.setdefault(kind, deque(maxlen=PAST_STEPS)).append(times.median_ns)


@dataclass(slots=True)
class _Alarm:
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
        self._excesses: dict[str, deque[float]] = {}
        self._alarms: dict[tuple[int, str], _Alarm] = {}

    def add(
        self, step: int, ranks: Mapping[int, Mapping[OpKind, OpTimes]], core_waits: Mapping[int, int] = _NO_WAITS
    ) -> tuple[SlowRank, ...]:
        """The ranks that are named in this step, which comes after those before.

        ``core_waits`` are the times for which ranks waited for a core, ns.
        """
        self._num_steps += 1
        if self._num_steps <= _WARM_UP:
            return ()
        own = self._of_past(ranks, core_waits)
        slow = [*self._judge(step, own, PAST), *self._judge(step, _of_replicas(ranks), REPLICAS)]
        outstanding = {
            rank for rank, alarm in self._alarms.items() if alarm.recent and alarm.recent[-1] == (step, True)
        }
        for rank, ops in ranks.items():
            if (rank, PAST) not in outstanding:
                self._past.setdefault(rank, _Past()).add(ops, core_waits.get(rank))
        return tuple({alarm.rank: alarm for alarm in reversed(slow)}.values())

    def _of_past(
        self, ranks: Mapping[int, Mapping[OpKind, OpTimes]], core_waits: Mapping[int, int]
    ) -> dict[int, float]:
        """Excess of each rank over its past, beyond what all ranks have in common."""
        paces = {
            rank: pace
            for rank, ops in ranks.items()
            if (past := self._past.get(rank)) is not None and (pace := past.pace(ops, core_waits.get(rank))) is not None
        }
        return {
            rank: pace / _common([other for key, other in paces.items() if key != rank]) - 1
            for rank, pace in paces.items()
        }

    def _judge(self, step: int, excesses: Mapping[int, float], than: str) -> Iterator[SlowRank]:
        known = self._excesses.get(than, deque())
        if len(excesses) * PAST_STEPS > (known.maxlen or 0):  # the first step that is compared, or of more ranks
            known = self._excesses[than] = deque(known, maxlen=len(excesses) * PAST_STEPS)
        threshold = _threshold(known)
        outstanding = {rank for rank, excess in excesses.items() if threshold is not None and excess > threshold}
        if not outstanding:  # a slow rank makes the others look fast
            known.extend(excesses.values())
        for rank, excess in excesses.items():
            alarm = self._alarms.setdefault((rank, than), _Alarm())
            if alarm.note(step, rank in outstanding) and alarm.since is not None:
                yield SlowRank(rank, step, alarm.since, excess, than)


def _common(paces: list[float]) -> float:
    """The pace that the other ranks have in common; 1 of a rank that is alone."""
    return median(paces) if paces else 1.0


def _threshold(excesses: deque[float]) -> float | None:
    """The excess above which a rank stands out; None before enough is known."""
    if len(excesses) < _LEAST_EXCESSES:
        return None
    middle = median(excesses)
    sigma = _MAD_TO_SIGMA * median(abs(excess - middle) for excess in excesses)
    return max(LEAST_EXCESS, middle + _SIGMAS * sigma)


def _of_replicas(ranks: Mapping[int, Mapping[OpKind, OpTimes]]) -> dict[int, float]:
    """Excess of each rank over the others that run the same stages."""
    by_kind: dict[OpKind, dict[int, OpTimes]] = {}
    for rank, ops in ranks.items():
        for kind, times in ops.items():
            by_kind.setdefault(kind, {})[rank] = times
    excesses = {}
    for rank, ops in ranks.items():
        own = typical = 0.0
        for kind, times in ops.items():
            others = [other.median_ns for peer, other in by_kind[kind].items() if peer != rank]
            if others:
                own += times.count * times.median_ns
                typical += times.count * median(others)
        if typical >= _NS_FLOOR:
            excesses[rank] = own / typical - 1
    return excesses
