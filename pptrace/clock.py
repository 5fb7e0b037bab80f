"""Puts all ranks on one clock, and says how well that is known.

A message cannot be received before it is sent, and a collective ends on no rank before it has begun on all. Each such
pair bounds the difference of two ranks' clocks from one side; messages both ways bound it from both.

An offset is one number per rank. For clocks that drift apart it is that of the middle of the trace: how fast they drift is taken
from the traffic in several stretches of time, and the uncertainty covers what that makes of the offset from end to end.

Where no messages relate the ranks, the order of a pipeline's ops does: a stage's forward ends before the next stage's forward
of that microbatch begins, and its backward begins after the next stage's has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.tables import SESSION


class ClockMethod(StrEnum):
    SINGLE_RANK = "single-rank"
    SAME_HOST = "same-host"  # the ranks read one clock of one host
    ONE_FILE = "one-file"  # the ranks stand in one table, whose times are on one clock already
    SAME_SESSION = "same-session"  # one recording of several processes of a host, which its tool put on one clock
    BOUNDS = "message-bounds"  # offsets from the causality of messages and collectives
    OP_ORDER = "op-order"  # offsets from the order of the pipeline's ops, where no messages relate the ranks
    NONE = "none"  # nothing relates the ranks: their times are taken as they are


@dataclass(frozen=True, slots=True)
class Clock:
    """What was added to each rank's times, ns, and how far off that may be; None where nothing bounds it.

    ``unrelated`` are the ranks whose times nothing relates to the first one's.
    """

    method: ClockMethod
    offsets_ns: Mapping[int, int]
    uncertainty_ns: int | None
    warnings: tuple[str, ...] = field(default=())
    unrelated: frozenset[int] = frozenset()

    def relates(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks' times may be compared with each other."""
        if len(ranks) < 2:
            return True
        return self.method is not ClockMethod.NONE and len(self.unrelated & set(ranks)) in (0, len(ranks))


_UNBOUNDED = np.iinfo(np.int64).max // 4


def estimate_clock(
    comms: pd.DataFrame,
    ranks: Sequence[int],
    facts: Mapping[int, Mapping[str, object]],
    ops: pd.DataFrame | None = None,
    pipelines: Sequence[Sequence[int]] = (),
) -> Clock:
    """The clock of a set of ranks.

    Args:
        comms: matched communication (schema COMMS) in each rank's own time.
        ranks: the global ranks.
        facts: per rank what its recorder wrote down: ``host`` and ``clock``, readings of the wall and the monotonic clock;
            ``one_clock`` is what ranks share whose reader found them on one clock.
        ops: the ops that follow causality (schema OPS) in each rank's own time: used where messages do not relate all ranks.
        pipelines: the global ranks of each pipeline.
    """
    ordered = sorted(ranks)
    if len(ordered) < 2:
        return Clock(ClockMethod.SINGLE_RANK, dict.fromkeys(ordered, 0), 0)
    matched = comms[(comms["match"] >= 0) & comms["rank"].isin(ordered)]
    matched = _on_one_side(matched)
    shared = [facts.get(rank, {}).get("one_clock") for rank in ordered]
    low = _lower_bounds(matched, ordered)
    if len(set(shared)) == 1 and shared[0] is not None:
        return _of_one_recording(ordered, str(shared[0]), max(int(low.max()), 0))
    spread = _same_host_spread(ordered, facts)
    if spread is not None:
        violated = int(low.max())  # the diagonal is 0
        if violated <= spread + _READING_NS:
            return Clock(ClockMethod.SAME_HOST, dict.fromkeys(ordered, 0), max(spread, violated))
    same = np.array([[own is not None and own == other for other in shared] for own in shared], dtype=np.bool_)
    low = np.where(same, 0, low)
    if ops is not None and not all(_is_bounded(*bounds) for bounds in _ranges(low)):
        by_order = _from_op_order(ordered, low, ops, pipelines)
        if by_order is not None:
            return by_order
    if low.max(initial=-_UNBOUNDED, where=~np.eye(len(ordered), dtype=bool)) <= -_UNBOUNDED:
        warning = (
            "the ranks' clocks could not be related: no matched messages, and no order of ops that bounds them; their times are "
            "taken as they are, and what compares ranks (a step's span, bubble and waterfall) is null"
        )
        return Clock(ClockMethod.NONE, dict.fromkeys(ordered, 0), None, (warning,), frozenset(ordered[1:]))
    clock = _from_bounds(ordered, low)
    return clock if clock.uncertainty_ns is None else _with_drift(clock, matched, ordered, same)


def _on_one_side(matched: pd.DataFrame) -> pd.DataFrame:
    """Without what is a host's call on one rank and a kernel on another: a call may return long before its message comes."""
    on_device = (matched["clock"] == "device").groupby(matched["match"])
    return matched[on_device.transform("all") == on_device.transform("any")]


def _of_one_recording(ranks: Sequence[int], shared: str, violated: int) -> Clock:
    """The ranks of one file as they are; ``violated`` is how long before it is sent a message seems to arrive, ns."""
    if not shared.startswith(SESSION):
        return Clock(ClockMethod.ONE_FILE, dict.fromkeys(ranks, 0), violated)
    warnings = (
        (
            f"messages between processes of one recording contradict its clock by {_microseconds(violated)}: some of them "
            "are not joined rightly, and their waiting and transfer are not to be trusted",
        )
        if violated > _READING_NS
        else ()
    )
    return Clock(ClockMethod.SAME_SESSION, dict.fromkeys(ranks, 0), min(violated, _READING_NS), warnings)


def _from_op_order(
    ranks: Sequence[int], low: Matrix, ops: pd.DataFrame, pipelines: Sequence[Sequence[int]]
) -> Clock | None:
    """Offsets from what messages tell and from the order of ops; None where these do not bound all ranks or contradict.

    An op that includes its own waiting for a message begins before that message is sent: where starts contradict, ends alone
    count. Clocks that no bound speaks against are left as they are.
    """
    pairs = _op_pairs(ops, pipelines)
    columns = ("start_ns", "end_ns") if (pairs["clock_after"] == "device").all() else ("end_ns",)
    for column in columns:
        both = low.copy()
        source, target = (np.searchsorted(np.asarray(ranks), pairs[name].to_numpy()) for name in ("rank", "rank_after"))
        np.maximum.at(both, (source, target), (pairs["end_ns"] - pairs[f"{column}_after"]).to_numpy(dtype=np.int64))
        np.fill_diagonal(both, 0)
        ranges = _ranges(both)
        if not all(_is_bounded(*bounds) for bounds in ranges):
            return None
        if any(lower > upper for lower, upper in ranges):
            continue
        if both.max() <= 0:
            widest = max(max(-lower, upper) for lower, upper in ranges)
            return Clock(ClockMethod.OP_ORDER, dict.fromkeys(ranks, 0), widest)
        clock = _from_bounds(ranks, both)
        return Clock(ClockMethod.OP_ORDER, clock.offsets_ns, clock.uncertainty_ns)
    return None


def _op_pairs(ops: pd.DataFrame, pipelines: Sequence[Sequence[int]]) -> pd.DataFrame:
    """Ops of neighbouring stages of which the second begins after the first has ended: its columns end in ``_after``."""
    known = ops[ops["kind"].isin(("F", "B", "I")) & (ops["stage"] >= 0) & (ops["microbatch"] >= 0)]
    known = known.assign(way=np.where(known["kind"] == "F", "F", "B"))
    pipeline_of = {rank: number for number, pipeline in enumerate(pipelines) for rank in pipeline}
    known = known.assign(pipeline=known["rank"].map(pipeline_of)).dropna(subset=["pipeline"])
    key = ["pipeline", "step", "way", "microbatch", "stage"]
    known = known[~known.duplicated(key, keep=False)][[*key, "rank", "start_ns", "end_ns", "clock"]]
    following = known.assign(stage=known["stage"] - np.where(known["way"] == "F", 1, -1))
    return known.merge(following, on=key, suffixes=("", "_after"))


_READING_NS = 50_000
"""A profiler's own conversion of one host clock may differ by some µs between processes; more than this is no reading error."""


def _same_host_spread(ranks: Sequence[int], facts: Mapping[int, Mapping[str, object]]) -> int | None:
    """How far the ranks' (wall − monotonic) differ, ns, when all ran on one host; None otherwise."""
    hosts = {str(facts.get(rank, {}).get("host")) for rank in ranks}
    if len(hosts) != 1 or "None" in hosts:
        return None
    differences = [
        int(sample["time_ns"]) - int(sample["monotonic_ns"])
        for rank in ranks
        for sample in _samples(facts.get(rank, {}))
    ]
    return max(differences) - min(differences) if differences else None


def _samples(facts: Mapping[str, object]) -> list[Mapping[str, int]]:
    """The clock readings of a rank: {"start": {…}, "stop": {…}}, each with ``time_ns`` and ``monotonic_ns``."""
    readings = facts.get("clock")
    if not isinstance(readings, Mapping):
        return []
    return [
        reading
        for reading in readings.values()
        if isinstance(reading, Mapping)
        and all(isinstance(reading.get(key), int) for key in ("time_ns", "monotonic_ns"))
    ]


Matrix = npt.NDArray[np.int64]
_ALL_TO_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives in which everyone waits for everyone; a broadcast's root, say, may be done before the others begin."""


def _lower_bounds(matched: pd.DataFrame, ranks: Sequence[int]) -> Matrix:
    """Shape (n, n): offset[j] − offset[i] ≥ low[i, j], from single messages and collectives; its upper bound is −low[j, i]."""
    places = np.asarray(ranks)
    low = np.full((len(ranks), len(ranks)), -_UNBOUNDED, dtype=np.int64)
    sends, recvs = matched[matched["kind"] == "send"], matched[matched["kind"] == "recv"]
    one_way = sends.merge(recvs, on="match", suffixes=("_from", "_to"))
    slack = (one_way["start_ns_from"] - one_way["end_ns_to"]).to_numpy()
    source, target = (np.searchsorted(places, one_way[name].to_numpy()) for name in ("rank_from", "rank_to"))
    np.maximum.at(low, (source, target), slack)
    collectives = matched[matched["kind"].isin(_ALL_TO_ALL)]
    if len(collectives):
        low = np.maximum(low, _of_collectives(collectives, places))
    np.fill_diagonal(low, 0)
    return low


def _of_collectives(rows: pd.DataFrame, places: Matrix) -> Matrix:
    """The same from collectives, in memory that grows with the members and not with the pairs of them."""
    calls, call = np.unique(rows["match"].to_numpy(), return_inverse=True)
    member = np.searchsorted(places, rows["rank"].to_numpy())
    shape = (len(calls), len(places))
    starts, ends = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    present = np.zeros(shape, dtype=np.bool_)
    present[call, member] = True
    starts[call, member] = rows["start_ns"].to_numpy()
    ends[call, member] = rows["end_ns"].to_numpy()
    low = np.full((len(places), len(places)), -_UNBOUNDED, dtype=np.int64)
    for place in range(len(places)):
        mine = present[:, place]
        slack = starts[mine, place][:, None] - ends[mine]
        low[place] = np.max(slack, axis=0, initial=-_UNBOUNDED, where=present[mine])
    return low


_MAX_STRETCHES = 8
_FITS = 3  # of the drift; each sees what the one before left
_MATCHES_PER_LINK = 16  # that a stretch needs for each pair of neighbours in the pipeline, both ways together


_MAX_RATE = 1e-3
"""Of drift: an oscillator is wrong by less than 100 parts per million, and a clock is slewed by 500 at most."""


def _with_drift(clock: Clock, matched: pd.DataFrame, ranks: Sequence[int], same: npt.NDArray[np.bool_]) -> Clock:
    """The clock with an uncertainty that holds at all times, also where clocks drift."""
    times = matched["start_ns"] + matched["rank"].map(clock.offsets_ns)
    begin, end = int(times.min()), int(times.max())
    place = np.searchsorted(np.asarray(ranks), matched["rank"].to_numpy())
    rates = np.zeros(len(ranks))
    straight = matched
    for _ in range(_FITS):
        stretches = _stretches(straight, times, len(ranks))
        if len(stretches) < 2:
            return clock
        rates += _rates(stretches, times, ranks, same)
        gained = np.rint(rates[place] * (times - (begin + end) // 2)).astype("int64")
        straight = matched.assign(start_ns=matched["start_ns"] + gained, end_ns=matched["end_ns"] + gained)
    whole, corrected = (_ranges(np.where(same, 0, _lower_bounds(rows, ranks))) for rows in (matched, straight))
    offsets, uncertainty, warnings = dict(clock.offsets_ns), 0, list(clock.warnings)
    is_possible = bool(np.abs(rates).max() <= _MAX_RATE)
    for rank, rate, (lower, upper), (low, high) in list(zip(ranks, rates, whole, corrected, strict=True))[1:]:
        width, drift = abs(upper - lower), round(abs(rate) * (end - begin))
        if lower > upper and not (is_possible and 2 * (low - high) <= lower - upper):
            if lower - upper > _READING_NS:
                offsets[rank] = 0 if upper <= 0 <= lower else offsets[rank]
                width = 2 * max(lower - offsets[rank], offsets[rank] - upper)
                warnings.append(
                    f"rank {rank}: messages contradict each other by {_microseconds(lower - upper)} about its clock against "
                    f"rank {ranks[0]}'s, and no drift explains it: the uncertainty covers that"
                )
        elif is_possible and (2 * drift > width or lower > upper):  # else the offset is right all the time
            offsets[rank] = (low + high) // 2
            width = abs(high - low) + drift
            if lower > upper and 2 * drift > abs(high - low):
                warnings.append(
                    f"rank {rank}: its clock drifts against rank {ranks[0]}'s, by {_microseconds(drift)} over the trace; its "
                    "offset is that of the middle, and the uncertainty covers the ends"
                )
        uncertainty = max(uncertainty, (width + 1) // 2)
    return Clock(clock.method, offsets, uncertainty, tuple(warnings))


def _rates(
    stretches: Sequence[pd.DataFrame], times: pd.Series[int], ranks: Sequence[int], same: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """How much each rank's offset grows per ns: the slope through the middles of what the stretches allow."""
    middles = np.array([times[stretch.index].mean() for stretch in stretches])
    rates = np.zeros(len(ranks))
    parts = [_ranges(np.where(same, 0, _lower_bounds(stretch, ranks))) for stretch in stretches]
    for place in range(1, len(ranks)):
        known = [row for row, part in enumerate(parts) if _is_bounded(*part[place])]
        if len(known) > 1:
            base = sum(parts[known[0]][place]) // 2
            offsets = [sum(parts[row][place]) // 2 - base for row in known]
            rates[place] = np.polyfit(middles[known] - middles[known[0]], offsets, 1)[0]
    return rates


def _microseconds(span_ns: int) -> str:
    return f"{span_ns / 1000:,.1f} µs"


def _stretches(rows: pd.DataFrame, times: pd.Series[int], num_ranks: int) -> list[pd.DataFrame]:
    """The rows in parts that follow each other in time, each with traffic enough to bound the clocks by itself."""
    first = times.groupby(rows["match"]).min().sort_values(kind="stable")
    num = min(_MAX_STRETCHES, len(first) // (_MATCHES_PER_LINK * (num_ranks - 1)))
    if num < 2:
        return []
    return [rows[rows["match"].isin(part)] for part in np.array_split(first.index.to_numpy(), num)]


def _ranges(low: Matrix) -> list[tuple[int, int]]:
    """The lowest and the highest offset of each rank against the first that all chains of messages allow."""
    after_first, before_first = _longest_chains(low), _longest_chains(low.T)
    return [(int(lower), -int(upper)) for lower, upper in zip(after_first, before_first, strict=True)]


def _is_bounded(lower: int, upper: int) -> bool:
    return lower > -_UNBOUNDED // 2 and upper < _UNBOUNDED // 2


def _from_bounds(ranks: Sequence[int], low: Matrix) -> Clock:
    """Offsets against the first rank, in the middle of what all chains of messages allow."""
    offsets: dict[int, int] = {}
    uncertainty = 0
    warnings = []
    unrelated: set[int] = set()
    for rank, (lower, upper) in zip(ranks, _ranges(low), strict=True):
        if _is_bounded(lower, upper):
            offsets[rank] = (lower + upper) // 2
            uncertainty = max(uncertainty, (abs(upper - lower) + 1) // 2)
        elif lower > -_UNBOUNDED // 2 or upper < _UNBOUNDED // 2:
            offsets[rank] = lower if lower > -_UNBOUNDED // 2 else upper
            warnings.append(f"rank {rank}: messages bound its clock from one side only; its offset is that bound")
        else:
            offsets[rank] = 0
            unrelated.add(rank)
            warnings.append(f"rank {rank}: no message relates its clock to rank {ranks[0]}'s; taken as it is")
    return Clock(ClockMethod.BOUNDS, offsets, None if warnings else uncertainty, tuple(warnings), frozenset(unrelated))


def _longest_chains(low: Matrix) -> npt.NDArray[np.int64]:
    """Shape (n,): the tightest bound that a chain of at most n−1 pairs puts on each rank against the first.

    Clocks that drift contradict each other a little, which makes endless chains ever longer: hence the limit.
    """
    best: npt.NDArray[np.int64] = low[0].copy()
    for _ in range(len(low) - 2):
        further = np.maximum((best[:, None] + low).max(axis=0), -_UNBOUNDED)
        if (further <= best).all():
            break
        best = np.maximum(best, further)
    return best


def shift(table: pd.DataFrame, clock: Clock) -> pd.DataFrame:
    """The table with every ``*_ns`` column on the common clock."""
    offset = table["rank"].map(clock.offsets_ns).fillna(0).astype("int64")
    return table.assign(**{name: table[name] + offset for name in table.columns if name.endswith("_ns")})
