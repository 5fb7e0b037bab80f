"""Match the two ends of each transfer and the members of each collective, and what that tells: transfers, and what has no
match.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pandas as pd

from pptrace.axes import WITHIN_STAGE
from pptrace.marks import P2P, Collective
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import MESSAGES, Bool, Int64
from pptrace.model.wording import counted
from pptrace.slices import Slice, distinct_of, group_codes, rows_among, rows_where, slice_of, slices


class MatchNumbers:
    """The match number of each row, −1 where it has none yet."""

    def __init__(self, num_rows: int) -> None:
        self.of_row = np.full(num_rows, -1, dtype=np.int64)
        self._next = 0

    def give(self, rows_of_ends: Sequence[Int64]) -> None:
        """Give the i-th rows of all ends one number; those that not all ends have get none."""
        length = min(map(len, rows_of_ends))
        for rows in rows_of_ends:
            self.of_row[rows[:length]] = np.arange(self._next, self._next + length)
        self._next += length

    def give_groups(self, rows: Int64, group: Int64) -> None:
        """Give the rows of each group, counted from 0, one number."""
        self.of_row[rows] = self._next + group
        self._next += int(group.max(initial=-1)) + 1


_ENDS = ("rank", "step", "kind", "axis", "peer", "bytes", "direction", "stage", "microbatch", "start_ns")
"""Columns whose values the two ends of a message share."""
_BLOCK, _MOST_BLOCKS = 200_000, 20
"""Rows that are matched or timed together, more where there would be too many blocks: all at once would take much memory."""


def match_comms(comms: pd.DataFrame, mesh: MeshInfo | None) -> pd.DataFrame:
    """The comms table with ``match`` filled: one number for the two ends of a transfer or the members of a collective.

    A send of stage s and microbatch b forward meets the receive of stage s+1; backward, that of s−1; several of those meet in
    their order. Where a message from one rank to another lacks its stage or microbatch, all of theirs in that step meet in the
    order in which their two ends post them, if their sizes agree. Collectives of a group meet in their order. What has no
    counterpart keeps -1.
    """
    numbers = MatchNumbers(len(comms))
    if comms.empty:
        return comms.assign(match=numbers.of_row)
    is_p2p = rows_among(comms["kind"], P2P)
    p2p, row = rows_where(comms[list(_ENDS)], is_p2p), np.flatnonzero(is_p2p)
    steps = p2p["step"].to_numpy()
    for least, most in _blocks_of_steps(steps):  # a message stays within its step
        in_block = (steps >= least) & (steps <= most)
        _match_messages(rows_where(p2p, in_block).assign(row=row[in_block]), numbers)
    if mesh is not None and not is_p2p.all():
        # Number the collectives of which all members are there
        collectives = comms.assign(row=np.arange(len(comms)))[~is_p2p]
        of_group = ("rank", "axis", "group_size")
        ordered = collectives.iloc[np.argsort(turns(collectives, (*of_group, "kind")), kind="stable")]
        index, first = distinct_of([ordered[name] for name in of_group])
        calls = ordered[list(of_group)].iloc[first].itertuples(index=False)
        members = [tuple(mesh.group_of(*call) or ()) for call in calls]
        number_of = {ranks: number for number, ranks in enumerate(dict.fromkeys(members))}
        group = np.array([number_of[ranks] if ranks else -1 for ranks in members], dtype=np.int64)[index]
        code = group_codes([*(ordered[name] for name in ("step", "kind", "axis")), group])
        nth = pd.DataFrame({"code": code, "rank": ordered["rank"].to_numpy()}).groupby(["code", "rank"]).cumcount()
        number = pd.Series(code).groupby([code, nth.to_numpy()], sort=False).ngroup().to_numpy()
        is_complete = (group >= 0) & (np.bincount(number)[number] == ordered["group_size"].to_numpy())
        numbers.give_groups(ordered["row"].to_numpy()[is_complete], number[is_complete])
    return comms.assign(match=numbers.of_row)


def turns(calls: pd.DataFrame, of_group: Sequence[str]) -> Int64:
    """Time at which it is the turn of each call of a rank, ns: its start.

    A call whose kernel was not recorded, where a device ran others of its group, comes after those that the host called before
    it: they may have run long after this call.

    Rows of a rank are in the order of the host's calls; ``of_group`` are the columns that tell the calls which follow each other.
    """
    start: Int64 = calls["start_ns"].to_numpy()
    is_untimed = has_posting_time_only(calls).to_numpy()
    if not is_untimed.any():
        return start
    ran = np.where((calls["clock"] == "device").to_numpy(), start, start.min())
    latest = pd.Series(ran).groupby(group_codes([calls[name] for name in of_group])).cummax().to_numpy()
    return np.where(is_untimed, np.maximum(start, latest), start)


def _blocks_of_steps(steps: Int64) -> list[tuple[int, int]]:
    """(first, last) of consecutive steps that have about as many rows as a block."""
    numbers, counts = np.unique(steps, return_counts=True)
    size = max(_BLOCK, len(steps) // _MOST_BLOCKS)
    block = np.cumsum(counts) // size if len(steps) > _BLOCK else np.zeros(len(counts), dtype=np.int64)
    return [(int(numbers[block == index][0]), int(numbers[block == index][-1])) for index in np.unique(block).tolist()]


def _match_messages(p2p: pd.DataFrame, numbers: MatchNumbers) -> None:
    """Number sends and receives (``row``: the index into ``numbers``) that have exactly one counterpart."""
    is_incomplete = ((p2p["microbatch"] < 0) | (p2p["stage"] < 0)).to_numpy()
    if is_incomplete.any():
        unclear = with_ends(p2p.assign(is_incomplete=is_incomplete)[p2p["peer"] >= 0])
        group = group_codes([unclear[name] for name in ("source", "target", "axis", "step")])
        in_unclear_group = np.isin(group, group[unclear["is_incomplete"]])
        ordered = unclear[in_unclear_group].sort_values("start_ns", kind="stable")
        for ends in messages_by_rank_pair(ordered, by_step=True):
            # The i-th of both belong together where their sizes say so.
            shifts = shifts_by_sizes([end["bytes"].tolist() for end in ends], exact=True)
            if shifts is not None:
                numbers.give([end["row"][shift:] for end, shift in zip(ends, shifts, strict=True)])
    number_by_name(rows_where(p2p, ~is_incomplete & (numbers.of_row[p2p["row"]] < 0)), numbers)


def number_by_name(p2p: pd.DataFrame, numbers: MatchNumbers) -> None:
    """Number the sends and receives of one edge, microbatch and direction; several in their order, if their sizes agree.

    Args:
        p2p: the messages, with the index into ``numbers`` of each (``row``).
        numbers: filled.
    """
    if p2p.empty:
        return
    ends = with_ends(p2p)
    is_send = (p2p["kind"] == "send").to_numpy()
    to_next = np.where((p2p["direction"] == "F").to_numpy(), 1, -1)
    edge = p2p["stage"] - np.where(is_send | (p2p["direction"] == "").to_numpy(), 0, to_next)
    names = ("axis", "direction", "microbatch", "source", "target")
    code = group_codes([ends["step"], edge, *(ends[name] for name in names)])  # numbers in the order of steps
    order = np.argsort(code, kind="stable")
    begins = np.flatnonzero(np.concatenate(([True], (code := code[order])[1:] != code[:-1])))
    sizes = np.diff(np.append(begins, len(order)))
    num_sends = np.add.reduceat(is_send[order].astype(np.int64), begins)
    is_pair = (sizes == 2) & (num_sends == 1)
    rows, of_pair = p2p["row"].to_numpy(), begins[is_pair]
    numbers.give([rows[order[of_pair]], rows[order[of_pair + 1]]])
    several = np.repeat((2 * num_sends == sizes) & ~is_pair, sizes)
    if several.any():
        at, group = order[several], np.repeat(np.arange(len(begins)), sizes)[several]
        of_group = np.lexsort((p2p["start_ns"].to_numpy()[at], ~is_send[at], group))
        at, group = at[of_group], group[of_group]
        sends, receives = at[is_send[at]], at[~is_send[at]]
        sent, received = (p2p["bytes"].to_numpy()[end] for end in (sends, receives))
        differ = group[is_send[at]][(sent != received) & (sent >= 0) & (received >= 0)]
        agree = ~np.isin(group[is_send[at]], differ)
        numbers.give([rows[sends[agree]], rows[receives[agree]]])


def with_sizes(comms: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """The comms table with the sizes of those collectives that tell their axis alone, as far as the mesh knows them."""
    sizes = {axis: size for axis in WITHIN_STAGE if (size := mesh.size_of(axis)) is not None}
    unsized = (comms["group_size"] < 0) & comms["axis"].isin(sizes) & ~rows_among(comms["kind"], MESSAGES)
    if not unsized.any():
        return comms
    known_sizes = comms["axis"].map(sizes).where(unsized, comms["group_size"])
    return comms.assign(group_size=known_sizes.astype("int64"))


def messages_by_rank_pair(messages: pd.DataFrame, by_step: bool = False) -> Iterator[list[Slice]]:
    """Yield the sends and the receives of each pair of ranks and each way, in each step or in all."""
    for rows in slices(messages, ("source", "target", "axis", *(("step",) if by_step else ()))).values():
        ends = [rows.where(rows["kind"] == kind) for kind in P2P]
        if all(len(end) for end in ends):
            yield ends


def with_ends(messages: pd.DataFrame) -> pd.DataFrame:
    """Add the ranks that each message comes from and goes to."""
    is_send = (messages["kind"] == "send").to_numpy()
    rank, peer = messages["rank"].to_numpy(), messages["peer"].to_numpy()
    return messages.assign(source=np.where(is_send, rank, peer), target=np.where(is_send, peer, rank))


def shifts_by_sizes(sizes: Sequence[Sequence[int]], exact: bool = False) -> list[int] | None:
    """Number of calls of each side before the first that all sides have; None where sizes do not tell.

    Equally many are taken to be the same, unless ``exact`` asks for equal sizes, as the ends of a message have. Of more, those
    are left out that no call of the shortest side fits; only one way to do that will do.
    """
    shortest = min(sizes, key=len)
    shifts = []
    for side in sizes:
        spare = len(side) - len(shortest)
        possible = (
            shift
            for shift in range(spare + 1)
            if (not spare and not exact)
            or all(
                size == other or -1 in (size, other)
                for size, other in zip(itertools.islice(side, shift, None), shortest, strict=False)
            )
        )
        first, another = next(possible, None), next(possible, None)
        if first is None or another is not None:
            return None
        shifts.append(first)
    return shifts


_EARLY = ("send", "broadcast", "reduce", "gather", "scatter")
"""Kinds that one side may finish before the last side starts, because the data lies in a buffer."""


def with_transfers(comms: pd.DataFrame) -> pd.DataFrame:
    """Fill ``transfer_start_ns`` and ``transfer_end_ns``: between them a side moved data, around them it waited.

    Needs aligned clocks. A transfer starts when all sides are ready; a side that may be done before that (a small message
    lies in a buffer) did not wait, and its transfer starts when it does. It ends with the side itself, but a send not after
    its receive: a group of transfers, one kernel on a device, lasts until the slowest of them. On devices a receive does not
    outlast its send either. Unmatched rows keep their own start and end. What is :func:`has_posting_time_only` has a transfer of
    length 0, so that bytes over the time of that call are not taken for a bandwidth.
    """
    match, start, end = (comms[name].to_numpy() for name in ("match", "start_ns", "end_ns"))
    size, is_host = int(match.max(initial=-1)) + 1, (comms["clock"] != "device").to_numpy()
    all_ready, one_over = np.full(size, np.iinfo(np.int64).min), np.full(size, np.iinfo(np.int64).max)
    on_device = np.ones(size, dtype=np.bool_)
    blocks = [first + np.flatnonzero(match[first : first + _BLOCK] >= 0) for first in range(0, len(comms), _BLOCK)]
    for rows in blocks:
        np.maximum.at(all_ready, match[rows], start[rows])
        np.minimum.at(one_over, match[rows], end[rows])
        on_device[match[rows[is_host[rows]]]] = False
    transfer_start, transfer_end = (comms[f"transfer_{edge}_ns"].to_numpy(copy=True) for edge in ("start", "end"))
    for rows in blocks:
        kind, ready, first_end = comms["kind"].iloc[rows], all_ready[match[rows]], one_over[match[rows]]
        bounded = (kind == "send").to_numpy() | ((kind == "recv").to_numpy() & on_device[match[rows]])
        buffered = kind.isin(_EARLY).to_numpy() & (end[rows] < ready) & is_host[rows]
        over = np.where(bounded & (first_end >= ready), first_end, end[rows])
        transfer_end[rows] = over
        transfer_start[rows] = np.where(buffered, start[rows], np.minimum(ready, over))
    untimed = has_posting_time_only(comms).to_numpy()
    transfer_start[untimed] = transfer_end[untimed]
    return comms.assign(transfer_start_ns=transfer_start, transfer_end_ns=transfer_end)


def has_posting_time_only(comms: pd.DataFrame) -> pd.Series[bool]:
    """Mark the rows that have only the host's posting call: the end of the transfer is unknown.

    A send on a rank without devices lies in a buffer when its posting is over.
    """
    on_device = set(comms.loc[comms["clock"] == "device", "rank"].tolist())
    call = (comms["clock"] == "host") & (comms["posted_ns"] == comms["end_ns"]) & (comms["start_ns"] < comms["end_ns"])
    return call & ((comms["kind"] != "send") | comms["rank"].isin(on_device))


def without_group_or_peer(comms: Slice) -> Bool:
    """Mark the rows with neither a label's stage nor a group nor a peer, as of kernels alone."""
    lacking: Bool = (comms["match"] < 0) & (comms["stage"] < 0)
    if lacking.any():
        lacking &= np.where(comms.among("kind", P2P), comms["peer"], comms["group_size"]) < 0
    return lacking


def unknown_by_rank(comms: pd.DataFrame) -> dict[int, tuple[int, int]]:
    """(messages, collectives) in steps without a group or peer, of each rank that has any; not the barriers, which wait and move
    nothing.
    """
    rows = comms[without_group_or_peer(slice_of(comms)) & (comms["step"] >= 0) & (comms["kind"] != Collective.BARRIER)]
    if rows.empty:
        return {}
    is_message = rows["kind"].isin(MESSAGES).groupby(rows["rank"].to_numpy())
    counts = zip(is_message.sum().items(), is_message.size(), strict=True)
    return {int(str(rank)): (int(messages), int(total - messages)) for (rank, messages), total in counts}


def warn_of_unknown(num_messages: int, num_collectives: int) -> tuple[str, ...]:
    """A warning about communication in steps without a group or peer, by their counts."""
    parts = []
    if num_messages:
        parts.append(f"{num_messages} messages, which count as waiting (bubble)")
    if num_collectives:
        parts.append(f"{num_collectives} collectives, which count as transfer")
    return (f"communication without a recorded group or peer: {' and '.join(parts)}",) if parts else ()


_MOST_LISTED = 3


def steps_of_unmatched(comms: pd.DataFrame, present: Iterable[int]) -> dict[int, Int64]:
    """The steps of messages without their other side, by the rank that should have it and has a trace."""
    messages = _without_peer(comms, present)
    if messages.empty:
        return {}
    return {int(str(peer)): rows["step"].to_numpy() for peer, rows in messages.groupby("peer")}


def _without_peer(comms: pd.DataFrame, present: Iterable[int]) -> pd.DataFrame:
    """The messages without their other side, although that rank has a trace.

    Where there are steps, of theirs alone: before the first and behind the last, traces begin and end anywhere.
    """
    lacking = rows_among(comms["kind"], P2P) & (comms["match"] < 0).to_numpy() & (comms["group_size"] != 1).to_numpy()
    in_step = (comms["step"] >= 0).to_numpy()
    rows = comms[lacking & in_step if in_step.any() else lacking]
    return rows[rows["peer"].isin(set(present))]


def warn_unmatched(comms: pd.DataFrame, present: Iterable[int]) -> tuple[str, ...]:
    """A warning for each kind of communication without its other side, although that rank has a trace."""
    lines = []
    unmatched = _without_peer(comms, present)
    if unmatched.empty:
        return ()
    for (kind, axis), rows in unmatched.groupby(["kind", "axis"], sort=True, observed=True):
        pairs = rows.groupby(["rank", "peer"], sort=True).size()
        preposition, counterpart = ("to", "receive") if kind == "send" else ("from", "send")
        first = pairs.head(_MOST_LISTED).reset_index(name="count").to_numpy().tolist()
        listed = [f"{count} of rank {rank} {preposition} rank {peer}" for rank, peer, count in first]
        more = f" and {len(pairs) - _MOST_LISTED} more pairs" if len(pairs) > _MOST_LISTED else ""
        noun = "receive" if kind == "recv" else str(kind)
        verb = "has" if len(rows) == 1 else "have"
        lines.append(
            f"{counted(len(rows), noun)} ({axis}) {verb} no matching {counterpart} in the peer's trace: {', '.join(listed)}{more}"
        )
    return tuple(lines)
