"""Match the two ends of each transfer and the members of each collective."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.axes import WITHIN_STAGE
from pptrace.marks import P2P, Collective
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import MESSAGES, Int64
from pptrace.recognise.messages.match_by_splits import have_splits, shifts_by_splits
from pptrace.slices import Slice, group_codes, rows_where, slice_of, slices


def match_comms(comms: pd.DataFrame, mesh: MeshInfo | None) -> pd.DataFrame:
    """The comms table with ``match`` filled: one number for the two ends of a transfer or the members of a collective.

    A send of stage s and microbatch b forward meets the receive of stage s+1; backward, that of s−1; several of those meet in
    their order. Where a message from one rank to another lacks its stage or microbatch, all of theirs in that step meet in the
    order in which their two ends post them, if their sizes agree. Collectives of a group meet in their order. What has no
    counterpart keeps -1.
    """
    match = np.full(len(comms), -1, dtype=np.int64)
    if comms.empty:
        return comms.assign(match=match)
    is_p2p = comms["kind"].isin(P2P).to_numpy()
    match[is_p2p] = _match_p2p(rows_where(comms[list(_ENDS)], is_p2p))
    if mesh is not None and not is_p2p.all():
        match[~is_p2p] = _match_collectives(comms[~is_p2p], mesh, first=int(match.max()) + 1)
    return comms.assign(match=match)


def with_sizes(comms: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """The comms table with the sizes of those collectives that tell their axis alone, as far as the mesh knows them."""
    sizes = {axis: size for axis in WITHIN_STAGE if (size := mesh.size_of(axis)) is not None}
    unsized = (comms["group_size"] < 0) & comms["axis"].isin(sizes) & ~comms["kind"].isin(MESSAGES)
    if not unsized.any():
        return comms
    known_sizes = comms["axis"].map(sizes).where(unsized, comms["group_size"])
    return comms.assign(group_size=known_sizes.astype("int64"))


@dataclass(slots=True)
class _MatchNumbers:
    """The match number of each row, −1 where it has none yet; ``next`` is the first that is free."""

    of_row: Int64
    next: int = 0

    @classmethod
    def for_rows(cls, num_rows: int) -> _MatchNumbers:
        return cls(np.full(num_rows, -1, dtype=np.int64))

    def give(self, rows_of_ends: Sequence[Int64]) -> None:
        """Give the i-th rows of all ends one number; those that not all ends have get none."""
        length = min(map(len, rows_of_ends))
        for rows in rows_of_ends:
            self.of_row[rows[:length]] = np.arange(self.next, self.next + length)
        self.next += length

    def give_groups(self, rows: Int64, group: Int64) -> None:
        """Give the rows of each group, counted from 0, one number."""
        self.of_row[rows] = self.next + group
        self.next += int(group.max(initial=-1)) + 1


_ENDS = ("rank", "step", "kind", "axis", "peer", "bytes", "direction", "stage", "microbatch", "start_ns")
"""Columns whose values the two ends of a message share."""
_BLOCK, _MOST_BLOCKS = 200_000, 20
"""Rows that are matched or timed together, more where there would be too many blocks: all at once would take much memory."""


def _match_p2p(p2p: pd.DataFrame) -> Int64:
    """Match numbers of sends and receives that have exactly one counterpart, −1 for the others, row by row."""
    match = np.full(len(p2p), -1, dtype=np.int64)
    first, steps = 0, p2p["step"].to_numpy()
    for least, most in _blocks_of_steps(steps):
        in_block = (steps >= least) & (steps <= most)
        part = _match_block(rows_where(p2p, in_block))
        match[in_block] = np.where(part >= 0, part + first, -1)
        first += int(part.max(initial=-1)) + 1
    return match


def _blocks_of_steps(steps: Int64) -> list[tuple[int, int]]:
    """(first, last) of consecutive steps that have about as many rows as a block; a message stays within its step."""
    if not len(steps):
        return []
    if len(steps) <= _BLOCK:
        return [(int(steps.min()), int(steps.max()))]
    numbers, counts = np.unique(steps, return_counts=True)
    block = np.cumsum(counts) // max(_BLOCK, len(steps) // _MOST_BLOCKS)
    return [(int(numbers[block == index][0]), int(numbers[block == index][-1])) for index in np.unique(block).tolist()]


def _match_block(p2p: pd.DataFrame) -> Int64:
    numbers = _MatchNumbers.for_rows(len(p2p))
    rows = p2p.assign(row=np.arange(len(p2p)))
    is_incomplete = ((p2p["microbatch"] < 0) | (p2p["stage"] < 0)).to_numpy()
    if is_incomplete.any():
        unclear = _with_ends(rows.assign(is_incomplete=is_incomplete)[p2p["peer"] >= 0])
        group = group_codes([unclear[name] for name in ("source", "target", "axis", "step")])
        in_unclear_group = np.isin(group, group[unclear["is_incomplete"]])
        ordered = unclear[in_unclear_group].sort_values("start_ns", kind="stable")
        for ends in _messages_by_rank_pair(ordered, by_step=True):
            _number_in_order(ends, numbers)
    is_named = ~is_incomplete & (numbers.of_row < 0)
    _number_by_name(rows if is_named.all() else rows[is_named], numbers)
    return numbers.of_row


def _number_by_name(p2p: pd.DataFrame, numbers: _MatchNumbers) -> None:
    """Number the sends and receives of one edge, microbatch and direction; several in their order, if their sizes agree.

    Args:
        p2p: the messages, with the index into ``numbers`` of each (``row``).
        numbers: filled.
    """
    if p2p.empty:
        return
    ends = _with_ends(p2p)
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
    several = np.repeat((num_sends > 0) & (num_sends < sizes) & ~is_pair, sizes)
    if several.any():
        group = np.repeat(np.arange(len(begins)), sizes)[several]
        ordered = p2p.iloc[order[several]].assign(group=group).sort_values("start_ns", kind="stable")
        for same in slices(ordered, ("group",)).values():
            both = _sends_and_receives(same)
            if len(both[0]) == len(both[1]):
                _number_in_order(both, numbers)


def _number_in_order(ends: Sequence[Slice], numbers: _MatchNumbers) -> None:
    """Give the i-th sends and receives one number, where their sizes say how they belong together."""
    shifts = _shifts([end["bytes"].tolist() for end in ends], exact=True)
    if shifts is not None:
        numbers.give([end["row"][shift:] for end, shift in zip(ends, shifts, strict=True)])


def _match_collectives(collectives: pd.DataFrame, mesh: MeshInfo, first: int) -> Int64:
    """Match numbers from ``first`` on of collectives of which all members are there, −1 for the others, row by row."""
    ordered = collectives.assign(row=np.arange(len(collectives))).sort_values("start_ns", kind="stable")
    group = _group_numbers(ordered, mesh)
    key = ordered[["step", "kind", "axis"]].assign(group=group)
    code = group_codes([key[name] for name in key])
    nth = key.assign(code=code, rank=ordered["rank"]).groupby(["code", "rank"]).cumcount()
    number = pd.Series(code).groupby([code, nth.to_numpy()], sort=False).ngroup().to_numpy()
    size = np.bincount(number)[number]
    is_complete = (group >= 0) & (size == ordered["group_size"].to_numpy())
    numbers = np.full(len(collectives), -1, dtype=np.int64)
    numbers[ordered["row"].to_numpy()[is_complete]] = number[is_complete] + first
    return numbers


def _group_numbers(comms: pd.DataFrame, mesh: MeshInfo) -> Int64:
    """The number of each row's group of ranks; −1 where the mesh does not tell it."""
    code = group_codes([comms[name] for name in ("rank", "axis", "group_size")])
    _, first, index = np.unique(code, return_index=True, return_inverse=True)
    calls = comms.iloc[first]
    groups = [
        mesh.group_of(rank, axis, size)
        for rank, axis, size in zip(
            calls["rank"].tolist(), calls["axis"].tolist(), calls["group_size"].tolist(), strict=True
        )
    ]
    keys = [tuple(group or ()) for group in groups]
    number_of = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    numbers = np.array([number_of[key] if key else -1 for key in keys], dtype=np.int64)
    return numbers[index]


_EARLY = ("send", "broadcast", "reduce", "gather", "scatter")
"""Kinds that one side may finish before the last side starts, because the data lies in a buffer."""


@dataclass(frozen=True, slots=True)
class _Sides:
    """Times at which all sides of a match are ready and the first is done, ns, by match number, and whether all were timed on
    devices.
    """

    ready_ns: Int64
    first_end_ns: Int64
    on_device: npt.NDArray[np.bool_]


def _sides_of_matches(comms: pd.DataFrame) -> _Sides:
    match = comms["match"].to_numpy()
    size = int(match.max(initial=-1)) + 1
    sides = _Sides(np.full(size, _EARLIEST), np.full(size, _LATEST), np.ones(size, dtype=np.bool_))
    is_host = (comms["clock"] != "device").to_numpy()
    start, end = comms["start_ns"].to_numpy(), comms["end_ns"].to_numpy()
    for first in range(0, len(comms), _BLOCK):
        rows = np.flatnonzero(match[first : first + _BLOCK] >= 0) + first
        np.maximum.at(sides.ready_ns, match[rows], start[rows])
        np.minimum.at(sides.first_end_ns, match[rows], end[rows])
        sides.on_device[match[rows[is_host[rows]]]] = False
    return sides


_EARLIEST, _LATEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def with_transfers(comms: pd.DataFrame, untimed: npt.NDArray[np.bool_] | None = None) -> pd.DataFrame:
    """Fill ``transfer_start_ns`` and ``transfer_end_ns``: between them a side moved data, around them it waited.

    Needs aligned clocks. A transfer starts when all sides are ready; a side that may be done before that (a small message
    lies in a buffer) did not wait, and its transfer starts when it does. It ends with the side itself, but a send not after
    its receive: a group of transfers, one kernel on a device, lasts until the slowest of them. On devices a receive does not
    outlast its send either. Unmatched rows keep their own start and end. What is :func:`has_posting_time_only` has a transfer of
    length 0, so that bytes over the time of that call are not taken for a bandwidth; ``untimed`` is where, if that is known.
    """
    match, start, end = (comms[name].to_numpy() for name in ("match", "start_ns", "end_ns"))
    sides = _sides_of_matches(comms)
    transfer_start, transfer_end = (comms[f"transfer_{edge}_ns"].to_numpy(copy=True) for edge in ("start", "end"))
    for first in range(0, len(comms), _BLOCK):
        rows = np.flatnonzero(match[first : first + _BLOCK] >= 0) + first
        part = comms[["kind", "clock"]].iloc[rows]
        members = match[rows]
        ready, first_end = sides.ready_ns[members], sides.first_end_ns[members]
        is_receive = (part["kind"] == "recv").to_numpy()
        bounded = (part["kind"] == "send").to_numpy() | (is_receive & sides.on_device[members])
        buffered = part["kind"].isin(_EARLY).to_numpy() & (end[rows] < ready) & (part["clock"] != "device").to_numpy()
        over = np.where(bounded & (first_end >= ready), first_end, end[rows])
        transfer_end[rows] = over
        transfer_start[rows] = np.where(buffered, start[rows], np.minimum(ready, over))
    if untimed is None:
        untimed = has_posting_time_only(comms).to_numpy()
    transfer_start[untimed] = transfer_end[untimed]
    return comms.assign(transfer_start_ns=transfer_start, transfer_end_ns=transfer_end)


def has_posting_time_only(comms: pd.DataFrame) -> pd.Series[bool]:
    """Mark the rows that have only the host's posting call: the end of the transfer is unknown.

    A send on a rank without devices lies in a buffer when its posting is over.
    """
    on_device = set(comms.loc[comms["clock"] == "device", "rank"].tolist())
    return rows_of_posting_only(comms, comms["rank"].isin(on_device))


def rows_of_posting_only(comms: pd.DataFrame, on_device: pd.Series[bool]) -> pd.Series[bool]:
    """The same, where it is known which rows are of a rank with devices."""
    call = (comms["clock"] == "host") & (comms["posted_ns"] == comms["end_ns"]) & (comms["start_ns"] < comms["end_ns"])
    return call & ((comms["kind"] != "send") | on_device)


def match_calls(calls: pd.DataFrame, first: int = 0) -> pd.DataFrame:
    """The calls of unmarked traces (schema CALL_COMMS) with ``match`` filled, counted from ``first``.

    Members of a collective have the same group, kind and sequence number or, without one, the same position in the order of the
    group's calls; the two ends of a message the same position in the order of messages from one rank to the other. Where one side
    recorded more than the other, sizes must say how the orders belong together, of all-to-alls of uneven parts their splits;
    otherwise all of them keep -1.
    """
    if calls.empty:
        return calls.copy()
    numbers = _MatchNumbers.for_rows(len(calls))
    ordered = calls.assign(row=np.arange(len(calls))).sort_values("start_ns", kind="stable")
    is_p2p = ordered["kind"].isin(P2P)
    messages = ordered[is_p2p & (ordered["peer"] >= 0)]
    _number_by_name(
        messages[(messages["direction"] != "") & (messages["microbatch"] >= 0) & (messages["stage"] >= 0)], numbers
    )
    for rows in _messages_by_rank_pair(_with_ends(messages[numbers.of_row[messages["row"]] < 0])):
        _number(rows, numbers, exact=True)
    rest = ordered[~is_p2p & (ordered["group"] != "") & (ordered["group_size"] > 1)]
    for _, same in rest.groupby(["group", "kind"], sort=False, observed=True):
        size = int(same["group_size"].iloc[0])
        if same["rank"].nunique() != size:
            continue
        if (same["seq"] >= 0).all():
            nth = same.groupby(["rank", "seq"]).cumcount()
            call = same.groupby([same["seq"], nth], sort=False).ngroup().to_numpy()
            is_whole = np.bincount(call)[call] == size
            _, index = np.unique(call[is_whole], return_inverse=True)
            numbers.give_groups(same["row"].to_numpy()[is_whole], index)
        else:
            _number(list(slice_of(same).by("rank").values()), numbers)
    return calls.assign(match=np.where(numbers.of_row >= 0, numbers.of_row + first, -1))


def _messages_by_rank_pair(messages: pd.DataFrame, by_step: bool = False) -> Iterator[list[Slice]]:
    """Yield the sends and the receives of each pair of ranks and each way, in each step or in all."""
    for rows in slices(messages, ("source", "target", "axis", *(("step",) if by_step else ()))).values():
        ends = _sends_and_receives(rows)
        if all(len(end) for end in ends):
            yield ends


def _with_ends(messages: pd.DataFrame) -> pd.DataFrame:
    """Add the ranks that each message comes from and goes to."""
    is_send = (messages["kind"] == "send").to_numpy()
    rank, peer = messages["rank"].to_numpy(), messages["peer"].to_numpy()
    return messages.assign(source=np.where(is_send, rank, peer), target=np.where(is_send, peer, rank))


def _sends_and_receives(messages: Slice) -> list[Slice]:
    return [messages.where(messages["kind"] == kind) for kind in P2P]


def _number(sides: Sequence[Slice], numbers: _MatchNumbers, exact: bool = False) -> None:
    """Give the i-th calls of all sides one number, as far as their orders belong together: of the run, else of each step."""

    def shifts_of(part: Sequence[Slice]) -> list[int] | None:
        if not exact and have_splits(part):
            return shifts_by_splits(part)
        return _shifts([side["bytes"].tolist() for side in part], exact)

    for part in [sides] if shifts_of(sides) is not None else _common_steps(sides):
        shifts = shifts_of(part)
        if shifts is not None:
            numbers.give([side["row"][shift:] for side, shift in zip(part, shifts, strict=True)])


def _common_steps(sides: Sequence[Slice]) -> Iterator[Sequence[Slice]]:
    """The parts of the steps that all sides have."""
    by_step = [side.by("step") for side in sides]
    for step in sorted(set.intersection(*map(set, by_step)) - {-1}):
        yield [side[step] for side in by_step]


def _shifts(sizes: Sequence[Sequence[int]], exact: bool = False) -> list[int] | None:
    """Number of calls of each side before the first that all sides have; None where sizes do not tell.

    Equally many are taken to be the same, unless ``exact`` asks for equal sizes, as the ends of a message have. Of more, those
    are left out that no call of the shortest side fits; only one way to do that will do.
    """
    shortest = min(sizes, key=len)
    shifts = []
    for side in sizes:
        spare = len(side) - len(shortest)
        possible = (
            shift for shift in range(spare + 1) if (not spare and not exact) or _sizes_agree(side, shortest, shift)
        )
        first, another = next(possible, None), next(possible, None)
        if first is None or another is not None:
            return None
        shifts.append(first)
    return shifts


def _sizes_agree(side: Sequence[int], shortest: Sequence[int], shift: int) -> bool:
    return all(
        size == shortest_size or -1 in (size, shortest_size)
        for size, shortest_size in zip(itertools.islice(side, shift, None), shortest, strict=False)
    )


def without_group_or_peer(comms: Slice) -> npt.NDArray[np.bool_]:
    """Mark the rows with neither a label's stage nor a group nor a peer, as of kernels alone."""
    lacking: npt.NDArray[np.bool_] = (comms["match"] < 0) & (comms["stage"] < 0)
    if lacking.any():
        lacking &= np.where(comms.among("kind", P2P), comms["peer"], comms["group_size"]) < 0
    return lacking


def warn_without_group_or_peer(comms: pd.DataFrame) -> tuple[str, ...]:
    """A warning about communication in steps without a group or peer."""
    return warn_of_unknown(*count_without_group_or_peer(comms))


def count_without_group_or_peer(comms: pd.DataFrame) -> tuple[int, int]:
    """(messages, collectives) in steps without a group or peer; not the barriers, which wait and move nothing."""
    rows = comms[without_group_or_peer(slice_of(comms)) & (comms["step"] >= 0) & (comms["kind"] != Collective.BARRIER)]
    num_messages = int(rows["kind"].isin(MESSAGES).sum())
    return num_messages, len(rows) - num_messages


def warn_of_unknown(num_messages: int, num_collectives: int) -> tuple[str, ...]:
    """The warning of :func:`warn_without_group_or_peer`, by counts."""
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
    return {int(str(peer)): rows["step"].to_numpy() for peer, rows in messages.groupby("peer")}


def _without_peer(comms: pd.DataFrame, present: Iterable[int]) -> pd.DataFrame:
    """The messages without their other side, although that rank has a trace.

    Where there are steps, of theirs alone: before the first and behind the last, traces begin and end anywhere.
    """
    of_steps = comms[comms["step"] >= 0]
    comms = of_steps if len(of_steps) else comms
    lacking = comms[(comms["match"] < 0) & (comms["group_size"] != 1)]
    return lacking[lacking["kind"].isin(P2P) & lacking["peer"].isin(set(present))]


def warn_unmatched(comms: pd.DataFrame, present: Iterable[int]) -> tuple[str, ...]:
    """A warning for each kind of communication without its other side, although that rank has a trace."""
    lines = []
    for (kind, axis), rows in _without_peer(comms, present).groupby(["kind", "axis"], sort=True, observed=True):
        pairs = rows.groupby(["rank", "peer"], sort=True).size()
        preposition, counterpart = ("to", "receive") if kind == "send" else ("from", "send")
        first = pairs.head(_MOST_LISTED).reset_index(name="count").to_numpy().tolist()
        listed = [f"{count} of rank {rank} {preposition} rank {peer}" for rank, peer, count in first]
        more = f" and {len(pairs) - _MOST_LISTED} more pairs" if len(pairs) > _MOST_LISTED else ""
        verb = "has" if len(rows) == 1 else "have"
        lines.append(
            f"{_counted(len(rows), str(kind))} ({axis}) {verb} no matching {counterpart} in the peer's trace: "
            f"{', '.join(listed)}{more}"
        )
    return tuple(lines)


def _counted(number: int, kind: str) -> str:
    noun = {"recv": "receive"}.get(kind, kind)
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
