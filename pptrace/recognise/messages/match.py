"""Match the two ends of each transfer and the members of each collective."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pandas as pd

from pptrace.axes import WITHIN_STAGE
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import MESSAGES
from pptrace.slices import Slice, slice_of, slices


def match_comms(comms: pd.DataFrame, mesh: MeshInfo | None) -> pd.DataFrame:
    """The comms table with ``match`` filled: one number for the two ends of a transfer or the members of a collective.

    A send of stage s and microbatch b forward meets the receive of stage s+1; backward, that of s−1; several of those meet in
    their order. Where a message from one rank to another lacks its stage or microbatch, all of theirs in that step meet in the
    order in which their two ends post them, if their sizes agree. Collectives of a group meet in their order. What has no
    counterpart keeps -1.
    """
    matched = comms.copy()
    matched["match"] = np.int64(-1)
    if comms.empty:
        return matched
    p2p = comms["kind"].isin(("send", "recv"))
    ends = _match_p2p(comms[p2p])
    matched.loc[ends.index, "match"] = ends
    if mesh is not None:
        members = _match_collectives(comms[~p2p], mesh, first=int(ends.max()) + 1 if len(ends) else 0)
        matched.loc[members.index, "match"] = members
    return matched


def with_sizes(comms: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """The comms table with the sizes of those collectives that tell their axis alone, as far as the mesh knows them."""
    sizes = {axis: size for axis in WITHIN_STAGE if (size := getattr(mesh, axis)) is not None}
    unsized = (comms["group_size"] < 0) & comms["axis"].isin(sizes) & ~comms["kind"].isin(MESSAGES)
    known_sizes = comms["axis"].map(sizes).where(unsized, comms["group_size"])
    return comms.assign(group_size=known_sizes.astype("int64"))


def _match_p2p(p2p: pd.DataFrame) -> pd.Series[int]:
    """Match numbers of sends and receives that have exactly one counterpart."""
    numbers: dict[int, int] = {}
    count = itertools.count()
    ordered = p2p.sort_values("start_ns", kind="stable")
    is_incomplete = (ordered["microbatch"] < 0) | (ordered["stage"] < 0)
    for ends in _messages_by_rank_pair(ordered.assign(is_incomplete=is_incomplete)[ordered["peer"] >= 0], by_step=True):
        if any(end["is_incomplete"].any() for end in ends):
            _number_in_order(ends, numbers, count)
    named = ordered[~is_incomplete & ~ordered.index.isin(list(numbers))]
    _number_by_name(named, numbers, count)
    return pd.Series(numbers, dtype="int64")


def _number_by_name(p2p: pd.DataFrame, numbers: dict[int, int], count: Iterator[int]) -> None:
    """Number the sends and receives of one edge, microbatch and direction; several in their order, if their sizes agree."""
    forward = p2p["direction"] == "F"
    is_send = p2p["kind"] == "send"
    key = p2p[["step", "axis", "direction", "microbatch"]].copy()
    key["edge"] = p2p["stage"] - np.where(is_send | (p2p["direction"] == ""), 0, np.where(forward, 1, -1))
    key["source"] = np.where(is_send, p2p["rank"], p2p["peer"])
    key["target"] = np.where(is_send, p2p["peer"], p2p["rank"])
    group = p2p.groupby([key[name] for name in key], sort=False).ngroup()
    of_group = group.groupby(group)
    is_single_pair = (of_group.transform("size") == 2) & (is_send.groupby(group).transform("sum") == 1)
    _number_groups(group[is_single_pair], numbers, count)
    for rows in slices(_with_rows(p2p).assign(group=group)[~is_single_pair], ("group",)).values():
        ends = _sends_and_receives(rows)
        if len(ends[0]) == len(ends[1]):
            _number_in_order(ends, numbers, count)


def _number_groups(group: pd.Series[int], numbers: dict[int, int], count: Iterator[int]) -> None:
    """Give all rows of a group, of which the series has a code, one number."""
    number_of_group = {code: next(count) for code in group.unique().tolist()}
    numbers |= zip(group.index.tolist(), group.map(number_of_group).tolist(), strict=True)


def _number_in_order(ends: Sequence[Slice], numbers: dict[int, int], count: Iterator[int]) -> None:
    """Give the i-th sends and receives one number, where their sizes say how they belong together."""
    shifts = _shifts([end["bytes"].tolist() for end in ends], exact=True)
    if shifts is None:
        return
    rows_of_ends = [end["row"][shift:].tolist() for end, shift in zip(ends, shifts, strict=True)]
    for pair in zip(*rows_of_ends, strict=False):
        numbers |= dict.fromkeys(pair, next(count))


def _match_collectives(collectives: pd.DataFrame, mesh: MeshInfo, first: int) -> pd.Series[int]:
    ordered = collectives.sort_values("start_ns", kind="stable")
    calls = zip(ordered["rank"], ordered["axis"], ordered["group_size"], strict=True)
    groups = [mesh.group_of(rank, axis, size) for rank, axis, size in calls]
    key = ordered[["step", "kind", "axis"]].copy()
    key["group"] = [str(group) if group else "" for group in groups]
    key["nth"] = key.assign(rank=ordered["rank"]).groupby(["step", "kind", "axis", "group", "rank"]).cumcount()
    key = key[key["group"] != ""]
    number = key.groupby(list(key.columns), sort=False).ngroup() + first
    size = number.groupby(number).transform("size")
    complete: pd.Series[int] = number[size == ordered.loc[number.index, "group_size"]]
    return complete


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
    filled = comms.copy()
    matched = comms["match"] >= 0
    matched_comms = comms.loc[matched]
    sides = matched_comms.groupby("match")
    ready, first_done = sides["start_ns"].transform("max"), sides["end_ns"].transform("min")
    on_device = (matched_comms["clock"] == "device").groupby(matched_comms["match"]).transform("all")
    bounded = (matched_comms["kind"] == "send") | ((matched_comms["kind"] == "recv") & on_device)
    buffered = (
        matched_comms["kind"].isin(_EARLY) & (matched_comms["end_ns"] < ready) & (matched_comms["clock"] != "device")
    )
    end = np.where(bounded & (first_done >= ready), first_done, matched_comms["end_ns"])
    filled.loc[matched, "transfer_end_ns"] = end
    filled.loc[matched, "transfer_start_ns"] = np.where(buffered, matched_comms["start_ns"], np.minimum(ready, end))
    untimed = has_posting_time_only(filled)
    filled.loc[untimed, "transfer_start_ns"] = filled.loc[untimed, "transfer_end_ns"]
    return filled


def has_posting_time_only(comms: pd.DataFrame) -> pd.Series[bool]:
    """Which rows have only the host's posting call: the end of the transfer is unknown.

    A send on a rank without devices lies in a buffer when its posting is over.
    """
    on_device = set(comms.loc[comms["clock"] == "device", "rank"].tolist())
    call = (comms["clock"] == "host") & (comms["posted_ns"] == comms["end_ns"]) & (comms["start_ns"] < comms["end_ns"])
    return call & ((comms["kind"] != "send") | comms["rank"].isin(on_device))


def match_calls(calls: pd.DataFrame, first: int = 0) -> pd.DataFrame:
    """The calls of unmarked traces (schema CALL_COMMS) with ``match`` filled, counted from ``first``.

    Members of a collective have the same group, kind and sequence number or, without one, the same place in the order of the
    group's calls; the two ends of a message the same place in the order of messages from one rank to the other. Where one side
    recorded more than the other, sizes must say how the orders belong together; otherwise all of them keep -1.
    """
    matched = calls.copy()
    if calls.empty:
        return matched
    ordered = calls.sort_values("start_ns", kind="stable")
    is_p2p = ordered["kind"].isin(("send", "recv"))
    numbers: dict[int, int] = {}
    count = itertools.count(first)
    messages = ordered[is_p2p & (ordered["peer"] >= 0)]
    named = messages[(messages["direction"] != "") & (messages["microbatch"] >= 0) & (messages["stage"] >= 0)]
    _number_by_name(named, numbers, count)
    for rows in _messages_by_rank_pair(messages[~messages.index.isin(list(numbers))]):
        _number(rows, numbers, count, exact=True)
    rest = ordered[~is_p2p & (ordered["group"] != "") & (ordered["group_size"] > 1)]
    for _, same in rest.groupby(["group", "kind"], sort=False):
        size = int(same["group_size"].iloc[0])
        if same["rank"].nunique() != size:
            continue
        if (same["seq"] >= 0).all():
            call = same.groupby([same["seq"], _nth(same, ["rank", "seq"])], sort=False).ngroup()
            _number_groups(call[call.groupby(call).transform("size") == size], numbers, count)
        else:
            _number(list(slice_of(_with_rows(same)).by("rank").values()), numbers, count)
    matched.loc[list(numbers), "match"] = list(numbers.values())
    return matched


def _messages_by_rank_pair(messages: pd.DataFrame, by_step: bool = False) -> Iterator[list[Slice]]:
    """For each pair of ranks and each way, in each step or in all: the sends and the receives."""
    sends = messages["kind"] == "send"
    directed = _with_rows(messages).assign(
        source=messages["rank"].where(sends, messages["peer"]), target=messages["peer"].where(sends, messages["rank"])
    )
    for rows in slices(directed, ("source", "target", "axis", *(("step",) if by_step else ()))).values():
        ends = _sends_and_receives(rows)
        if all(len(end) for end in ends):
            yield ends


def _with_rows(table: pd.DataFrame) -> pd.DataFrame:
    """With the label of each row, which the matching numbers."""
    return table.assign(row=table.index)


def _sends_and_receives(messages: Slice) -> list[Slice]:
    return [messages.where(messages["kind"] == kind) for kind in ("send", "recv")]


def _nth(rows: pd.DataFrame, by: list[str]) -> pd.Series[int]:
    return rows.groupby(by).cumcount()


def _number(sides: Sequence[Slice], numbers: dict[int, int], count: Iterator[int], exact: bool = False) -> None:
    """Give the i-th calls of all sides one number, as far as their orders belong together: of the run, else of each step."""
    whole = _shifts([side["bytes"].tolist() for side in sides], exact)
    for part in [sides] if whole is not None else _common_steps(sides):
        shifts = _shifts([side["bytes"].tolist() for side in part], exact)
        if shifts is None:
            continue
        rows_of_ends = [side["row"][shift:].tolist() for side, shift in zip(part, shifts, strict=True)]
        for members in zip(*rows_of_ends, strict=False):
            numbers |= dict.fromkeys(members, next(count))


def _common_steps(sides: Sequence[Slice]) -> Iterator[Sequence[Slice]]:
    """The parts of the steps that all sides have."""
    by_step = [side.by("step") for side in sides]
    for step in sorted(set.intersection(*map(set, by_step)) - {-1}):
        yield [side[step] for side in by_step]


def _shifts(sizes: Sequence[Sequence[int]], exact: bool = False) -> list[int] | None:
    """How many calls of each side come before the first that all sides have; None where sizes do not tell.

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


def without_group_or_peer(comms: pd.DataFrame) -> pd.Series[bool]:
    """Which rows have neither a label's stage nor a group nor a peer, as kernels alone."""
    has_no_peer = comms["peer"].where(comms["kind"].isin(("send", "recv")), comms["group_size"]) < 0
    return has_no_peer & (comms["match"] < 0) & (comms["stage"] < 0)


def warn_without_group_or_peer(comms: pd.DataFrame) -> tuple[str, ...]:
    """A warning about communication in steps without a group or peer."""
    rows = comms[without_group_or_peer(comms) & (comms["step"] >= 0)]
    message = rows["kind"].isin(MESSAGES)
    parts = []
    if (count := int(message.sum())) > 0:
        parts.append(f"{count} messages, which count as waiting (bubble)")
    if (count := int((~message).sum())) > 0:
        parts.append(f"{count} collectives, which count as transfer")
    return (f"communication without a recorded group or peer: {' and '.join(parts)}",) if parts else ()


_MOST_LISTED = 3


def warn_unmatched(comms: pd.DataFrame, present: Iterable[int]) -> tuple[str, ...]:
    """A warning for each kind of communication without its other side, although that rank has a trace.

    Where there are steps, of theirs alone: before the first and behind the last, traces begin and end anywhere.
    """
    ranks = set(present)
    of_steps = comms[comms["step"] >= 0]
    comms = of_steps if len(of_steps) else comms
    lacking = comms[(comms["match"] < 0) & (comms["group_size"] != 1)]
    messages = lacking[lacking["kind"].isin(("send", "recv")) & lacking["peer"].isin(ranks)]
    lines = []
    for (kind, axis), rows in messages.groupby(["kind", "axis"], sort=True):
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
