"""Align the clocks of all ranks, and estimate the uncertainty.

A message cannot be received before it is sent, and a collective ends on no rank before it has begun on all. Each such
pair bounds the difference of two ranks' clocks from one side; messages both ways bound it from both.

An offset is one number per rank. For clocks that drift apart it is that of the middle of the trace: how fast they drift is taken
from the traffic in several stretches of time. Where messages contradict each other without that, times are corrected by it;
else the uncertainty covers what it makes of the offset from end to end.

Ranks of one host read one clock: where readings of it say so, or the host's name in the traces, and no message is against it.
A few messages that are were recorded wrongly, and relate nothing. A rank whose times are shifted is related by messages alone.

Where no messages relate the ranks, the order of a pipeline's ops does: a stage's forward ends before the next stage's forward
of that microbatch begins, and its backward begins after the next stage's has ended.

Times of a rank may be shifted against those of others on its host, though ranks of a host read one clock. A recorder reads the
clock when it begins and ends: a rank whose ops lie outside of that, where those of others do not, has other times than it had.
Ranks of one host are recorded together: times that do not overlap are off, or of another run. And messages say how far a clock is
off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.clock.bounds import UNBOUNDED, Matrix, Pairs, is_bounded, lower_bounds, offset_ranges, without_early_ends
from pptrace.clock.drift import with_drift
from pptrace.clock.offsets import from_bounds, offsets_by_common_ends
from pptrace.clock.result import READING_NS, Clock, ClockMethod, microseconds
from pptrace.clock.same_host import (
    drop_contradicted,
    from_op_order,
    host_name,
    pairs_of_same_host_name,
    readings_of,
    same_host_spread,
)
from pptrace.model.tables import OPS, Int64, empty_table
from pptrace.model.traces import HOST, ONE_CLOCK, SESSION
from pptrace.slices import reduce_groups, rows_where

Mask = npt.NDArray[np.bool_]
_BEGINNING_NS = 1_000_000
_ENDING_NS = 10_000_000
"""Ops that begin so much before the first reading of the clock, or end so much after the last one, are no doubt of their times: a
recorder reads it before it starts, and before it stops, which takes a while.
"""
_SYNCHRONISED_NS = 1_000_000_000
"""Closer than this are the clocks of two hosts, which may have one name: NTP keeps them together."""


class RecordedTimes(Struct, frozen=True):
    """Begin of the first op of each rank, end of the last one, and of the last one on the host, ns on each rank's own clock.

    Of shape (n,) each, in the order of the ranks. Of ranks without ops it is that of their communication; one without either
    begins last of all and ends first.
    """

    begin_ns: Int64
    end_ns: Int64
    host_end_ns: Int64

    @classmethod
    def of(cls, ranks: Sequence[int], ops: pd.DataFrame, comms: pd.DataFrame) -> RecordedTimes:
        """The times of these ranks' ops (schema OPS), of ranks without any those of their communication (schema COMMS)."""
        names = ["rank", "start_ns", "end_ns", "clock"]
        others = rows_where(comms, ~comms["rank"].isin(ops["rank"].unique()))
        ops = pd.concat((ops[names], others[names])) if len(others) else ops
        ops = ops[ops["rank"].isin(ranks)]
        rank = np.searchsorted(np.asarray(ranks), ops["rank"].to_numpy())
        start_ns, end_ns = (ops[name].to_numpy(dtype=np.int64) for name in ("start_ns", "end_ns"))
        is_host = (ops["clock"] == "host").to_numpy()
        return cls(
            reduce_groups(np.minimum, start_ns, rank, len(ranks)),
            reduce_groups(np.maximum, end_ns, rank, len(ranks)),
            reduce_groups(np.maximum, end_ns[is_host], rank[is_host], len(ranks)),
        )

    def overlap(self, index: int) -> Mask:
        """Shape (n,): which ranks' times overlap those of one; those of ranks without times might."""
        is_known = self.begin_ns <= self.end_ns
        meets = (self.begin_ns <= self.end_ns[index]) & (self.begin_ns[index] <= self.end_ns)
        found: Mask = meets | ~is_known | ~is_known[index]
        return found


def shifted_in_hosts(
    ranks: Sequence[int], facts: Mapping[int, Mapping[str, object]], ops: pd.DataFrame, comms: pd.DataFrame
) -> set[int]:
    """The ranks whose times are not those of their host's other ranks, as readings of its clock and the times themselves tell."""
    found: set[int] = set()
    hosts = ranks_by_host(ranks, facts)
    if not hosts:
        return found
    times = RecordedTimes.of(ranks, ops, comms)
    outside = _outside_of_readings(ranks, facts, times)
    for members in hosts:
        wrong = {index for index in members if outside[index]}
        is_inside = np.array([outside[index] is False for index in range(len(ranks))], dtype=np.bool_)
        if len(wrong) == len(members):  # times on a clock that is not that of the readings
            wrong = set()
        others = [index for index in members if index not in wrong]
        # ranks inside of their readings are on one clock, also where they ran one after the other
        overlaps = [(times.overlap(index) | is_inside & is_inside[index])[others] for index in others]
        most = max(overlaps, key=np.count_nonzero)
        found |= {ranks[index] for index in (*wrong, *_minority(others, most))}
    return found


def shifted_by_messages(
    clock: Clock, ranks: Sequence[int], facts: Mapping[int, Mapping[str, object]], known: Set[int], least_ns: int
) -> set[int]:
    """The ranks that messages have put elsewhere than others on their host, by more than ``least_ns`` and than is uncertain.

    Of a host with ranks that are ``known`` to be shifted there are no others.
    """
    found: set[int] = set()
    for members in ranks_by_host(ranks, facts):
        of_host = [index for index in members if ranks[index] not in clock.unrelated]
        if known & {ranks[index] for index in members}:
            continue
        least = max(least_ns, clock.uncertainty_ns or 0)
        if any(facts.get(ranks[index], {}).get("host") is None for index in of_host):
            least = max(least, _SYNCHRONISED_NS)
        offsets = np.array([clock.offsets_ns[ranks[index]] for index in of_host], dtype=np.int64)
        agreeing = [np.abs(offsets - offset) <= least for offset in offsets]
        if agreeing:
            found |= {ranks[index] for index in _minority(of_host, max(agreeing, key=np.count_nonzero))}
    return found


def ranks_by_host(ranks: Sequence[int], facts: Mapping[int, Mapping[str, object]]) -> list[list[int]]:
    """The indices of the ranks of each host that has several, in files of their own."""
    hosts: dict[str, list[int]] = {}
    for index, rank in enumerate(ranks):
        of_rank = facts.get(rank, {})
        host = host_name(of_rank) if of_rank.get("host") is None else str(of_rank["host"])
        if (shared := of_rank.get(ONE_CLOCK)) is not None:  # its recorder says it, or the file is of several ranks
            host = str(shared) if str(shared).startswith(HOST) else None
        if host:
            hosts.setdefault(host, []).append(index)
    return [members for members in hosts.values() if len(members) > 1]


def _outside_of_readings(
    ranks: Sequence[int], facts: Mapping[int, Mapping[str, object]], times: RecordedTimes
) -> list[bool | None]:
    """Tell of each rank whether ops begin before its recorder read the clock first, or end on the host after it read it last;
    None where it did not read it twice, and nothing is outside.
    """
    outside: list[bool | None] = []
    for index, rank in enumerate(ranks):
        walls = [wall for wall, _ in readings_of(facts.get(rank, {}))]
        if len(walls) > 1 and min(walls) == max(walls):  # it stopped before it began to record
            walls = []
        is_early = bool(walls) and int(times.begin_ns[index]) < min(walls) - _BEGINNING_NS
        is_late = len(walls) > 1 and int(times.host_end_ns[index]) > max(walls) + _ENDING_NS
        outside.append(is_early or is_late or (False if len(walls) > 1 else None))
    return outside


def _minority(members: Sequence[int], agrees: Mask) -> list[int]:
    """The members that do not agree with most; all of them where no most do."""
    others = [member for member, is_one in zip(members, agrees.tolist(), strict=True) if not is_one]
    return others if 2 * len(others) < len(members) else list(members)


def estimate_clock(
    comms: pd.DataFrame,
    ranks: Sequence[int],
    facts: Mapping[int, Mapping[str, object]],
    ops: pd.DataFrame | None = None,
    pipelines: Sequence[Sequence[int]] = (),
    every_op: pd.DataFrame | None = None,
) -> Clock:
    """The clock of a set of ranks.

    Args:
        comms: matched communication (schema COMMS) in each rank's own time.
        ranks: the global ranks.
        facts: per rank what its recorder wrote down: ``host`` and ``clock``, readings of the wall and the monotonic clock;
            ``one_clock`` is what ranks share whose reader found them on one clock; ``host_name`` is the producer's own word.
        ops: the ops that follow causality (schema OPS) in each rank's own time: used where messages do not relate all ranks.
        pipelines: the global ranks of each pipeline.
        every_op: all ops (schema OPS), hosts' too, in each rank's own time: they show ranks whose times are shifted.
    """
    ordered = sorted(ranks)
    if len(ordered) < 2:
        return Clock(ClockMethod.SINGLE_RANK, dict.fromkeys(ordered, 0), 0)
    matched = rows_where(comms, (comms["match"] >= 0) & comms["rank"].isin(ordered))
    matched = _without_mixed_clocks(matched)
    shared = [facts.get(rank, {}).get("one_clock") for rank in ordered]
    spread = same_host_spread(ordered, facts)
    hosts = pairs_of_same_host_name(ordered, facts)
    shifted = set() if every_op is None else shifted_in_hosts(ordered, facts, every_op, comms)
    if shifted:
        shared = [None if rank in shifted else of_rank for rank, of_rank in zip(ordered, shared, strict=True)]
        is_right = ~np.isin(ordered, list(shifted))
        hosts = (hosts | (spread is not None)) & is_right & is_right[:, None]
        spread = None
    is_one = spread is not None or (shared[0] is not None and len(set(shared)) == 1)
    same = np.full((len(ordered), len(ordered)), is_one) | hosts
    low = lower_bounds(matched, ordered)  # with a diagonal of 0
    limit, every = READING_NS + (spread or 0), matched
    early = matched.iloc[:0]
    if low.max(initial=0, where=same) > limit:
        matched, early = without_early_ends(matched, ordered, same, limit)
        low = lower_bounds(matched, ordered) if len(early) else low
    violated = int(low.max())
    clock = _clock(ordered, low, spread, shared, hosts, comms, matched, ops, pipelines)
    # Is the clock as good as readings of one clock, which messages contradict by ``violated`` ns?
    is_close = clock.method not in (ClockMethod.OP_ORDER, ClockMethod.NONE)
    if clock.method is ClockMethod.BOUNDS:
        is_close = clock.uncertainty_ns is not None and _CLOSER * clock.uncertainty_ns < violated
    if spread is not None and not is_close:
        _, early = without_early_ends(every, ordered, same, limit, least_share=np.inf)
        clock = Clock(ClockMethod.SAME_HOST, dict.fromkeys(ordered, 0), violated)
    clock = clock.with_early_ends(early) if len(early) else clock
    return replace(clock, shifted=frozenset(shifted | shifted_by_messages(clock, ordered, facts, shifted, limit)))


_CLOSER = 10
"""Times closer than readings of one clock are contradicted: so much closer messages know the clocks that contradict them."""


def _clock(
    ordered: Sequence[int],
    low: Matrix,
    spread: int | None,
    shared: Sequence[object],
    hosts: Pairs,
    comms: pd.DataFrame,
    matched: pd.DataFrame,
    ops: pd.DataFrame | None,
    pipelines: Sequence[Sequence[int]],
) -> Clock:
    """The clock of several ranks, of which ``matched`` communication tells ``low``; ``spread`` is of readings of one host, and
    ``hosts`` are the pairs on one.
    """
    violated = int(low.max())
    if len(set(shared)) == 1 and shared[0] is not None:
        return _of_one_recording(ordered, str(shared[0]), violated)
    if spread is not None and violated <= spread + READING_NS:
        return Clock(ClockMethod.SAME_HOST, dict.fromkeys(ordered, 0), max(spread, violated))
    if hosts.any():
        hosts = drop_contradicted(hosts, low, ordered, comms, empty_table(OPS) if ops is None else ops, pipelines)
    if hosts.all():
        return Clock(ClockMethod.SAME_HOST, dict.fromkeys(ordered, 0), READING_NS)
    same = hosts | np.array(
        [[recording is not None and recording == other for other in shared] for recording in shared], dtype=np.bool_
    )
    low = np.where(same, 0, low)
    clock = _from_messages(ordered, low, same, matched, shared, ops, pipelines)
    if clock.uncertainty_ns is None or not (hosts & ~np.eye(len(ordered), dtype=np.bool_)).any():
        return clock
    return replace(clock, uncertainty_ns=clock.uncertainty_ns + READING_NS)


def _from_messages(
    ordered: Sequence[int],
    low: Matrix,
    same: Pairs,
    matched: pd.DataFrame,
    shared: Sequence[object],
    ops: pd.DataFrame | None,
    pipelines: Sequence[Sequence[int]],
) -> Clock:
    """The clock from messages and the order of ops; ``same`` pairs share a clock already."""
    if ops is not None and not all(is_bounded(*bounds) for bounds in offset_ranges(low)):
        by_order = from_op_order(ordered, low, ops, pipelines)
        if by_order is not None:
            return by_order
    others = ~np.eye(len(ordered), dtype=np.bool_)
    if low.max(initial=-UNBOUNDED, where=~same & others) > -UNBOUNDED:
        clock = from_bounds(ordered, low, offsets_by_common_ends(matched, ordered))
        return clock if clock.uncertainty_ns is None else with_drift(clock, matched, ordered, same)
    if (same & others).any():  # no message crosses hosts or recordings: ranks of one share a clock
        recordings = [str(each) for each in shared if each is not None and shared.count(each) > 1]
        is_session = any(recording.startswith(SESSION) for recording in recordings)
        of_file = ClockMethod.SAME_SESSION if is_session else ClockMethod.ONE_FILE
        return replace(from_bounds(ordered, low, {}), method=of_file if recordings else ClockMethod.SAME_HOST)
    warning = (
        "the ranks' clocks could not be related: no matched messages, and no order of ops that bounds them; their times are "
        "left unchanged, and figures that compare ranks (a step's span, bubble and waterfall) are null"
    )
    return Clock(ClockMethod.NONE, dict.fromkeys(ordered, 0), None, (warning,), frozenset(ordered[1:]))


def _without_mixed_clocks(matched: pd.DataFrame) -> pd.DataFrame:
    """Drop communication that is a host call on one rank and a kernel on another: a call may return before its message comes."""
    match, on_device = matched["match"].to_numpy(), (matched["clock"] == "device").to_numpy()
    has_device, has_host = (np.zeros(int(match.max(initial=-1)) + 1, dtype=np.bool_) for _ in range(2))
    has_device[match[on_device]] = True
    has_host[match[~on_device]] = True
    return rows_where(matched, ~(has_device & has_host)[match])


def _of_one_recording(ranks: Sequence[int], shared: str, violated: int) -> Clock:
    """The clock of ranks in one file; ``violated``: by how much a message seems to arrive before it is sent at most, ns."""
    if not shared.startswith(SESSION):
        method = ClockMethod.SAME_HOST if shared.startswith(HOST) else ClockMethod.ONE_FILE
        return Clock(method, dict.fromkeys(ranks, 0), violated)
    if violated <= READING_NS:
        return Clock(ClockMethod.SAME_SESSION, dict.fromkeys(ranks, 0), violated)
    warning = (
        f"messages between processes of one recording contradict its clock by {microseconds(violated)}: some "
        "are matched wrongly, and their waiting and transfer times are unreliable"
    )
    return Clock(ClockMethod.SAME_SESSION, dict.fromkeys(ranks, 0), READING_NS, (warning,))
