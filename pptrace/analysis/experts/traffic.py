"""Rows from each rank to each in dispatches of forwards: by the splits of the calls, or by the routes that the runtime counted.

By counts, a rank's rows to another are its kept routes to the experts which that one holds: also where calls have equal parts
(padded) or take all tokens everywhere (all-gather), of which they say what is computed where, not what travels.

Rows that a rank hands to each member of its group in dispatches, and receives from each, by the splits of these calls.

A rank with splits of a thousand calls of 64 members has 128,000 numbers: only their sums are kept, and of each call two sums with
weights, by which ends that do not agree are found once all ranks are known (:func:`ends_that_differ`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pptrace.analysis.experts.counts import RankCounts, TokenSizes
from pptrace.analysis.experts.routing import groups_of
from pptrace.analysis.experts.types import COUNTS, SPLITS, Group, TrafficMatrix
from pptrace.model.tables import UNKNOWN, Bool, Int64, splits_by_size
from pptrace.slices import Slice, distinct_of, reduce_groups

UInt64 = npt.NDArray[np.uint64]


class SentRows(Struct, frozen=True, eq=False):
    """Rows of one rank's dispatches.

    ``sums`` has by the number of members (2, members) rows sent to each and received from each, in the forwards, or where
    nothing tells the direction in all exchanges; ``num_calls`` is how many dispatches these are, and of ``num_known`` the splits
    are known. ``row_bytes`` are the bytes of a row where all have the same, else None. ``size`` and ``weighted`` (2, exchanges)
    are of every dispatch: its members, 0 where its splits are not known, and the weighted sums of what it sends and receives,
    modulo 2⁶⁴.
    """

    sums: Mapping[int, Int64]
    num_calls: int
    num_known: int
    row_bytes: int | None
    size: Int64
    weighted: UInt64


def sent_rows_of(exchanges: Slice, comms: Slice) -> SentRows:
    """The rows of one rank's ``exchanges``, whose calls are rows of ``comms``."""
    codes, texts = comms.where(exchanges["out_row"]).codes("splits")
    counted = in_forwards(exchanges)
    size, weighted = np.zeros(len(exchanges), dtype=np.int64), np.zeros((2, len(exchanges)), dtype=np.uint64)
    size_of_text, weighted_of_text = np.zeros(len(texts), dtype=np.int64), np.zeros((2, len(texts)), dtype=np.uint64)
    times = np.bincount(codes[counted], minlength=len(texts))
    sums = {}
    for members, (places, rows) in splits_by_size(texts).items():
        size_of_text[places] = members
        weighted_of_text[:, places] = (rows.astype(np.uint64) * _weights(members)[:, None]).sum(axis=2, dtype=np.uint64)
        if times[places].any():
            sums[members] = np.einsum("n,enm->em", times[places], rows)
    if len(texts):
        size, weighted = size_of_text[codes], weighted_of_text[:, codes]
    is_known = counted & (size > 0)
    row_bytes = _row_bytes(exchanges.where(is_known))
    return SentRows(sums, int(counted.sum()), int(is_known.sum()), row_bytes, size, weighted)


def in_forwards(exchanges: Slice) -> Bool:
    """Mark the exchanges of forwards, recomputations left out; all of them where nothing tells the direction."""
    if (exchanges["backward"] < 0).all():
        return np.ones(len(exchanges), dtype=np.bool_)
    forward: Bool = (exchanges["backward"] == 0) & (exchanges["again"] == 0)
    return forward


def _row_bytes(exchanges: Slice) -> int | None:
    """The bytes of a row in dispatches, where all that send any have the same; None where they have not, or none is known."""
    some = exchanges.where((exchanges["sent"] > 0) & (exchanges["out_bytes"] > 0))
    if not len(some):
        return None
    width = some["out_bytes"] // some["sent"]
    is_same = (width == width[0]) & (width * some["sent"] == some["out_bytes"])
    return int(width[0]) if is_same.all() else None


@cache
def _weights(members: int) -> UInt64:
    """Random weights of each member as one that receives and as one that sends, shape (2, members)."""
    return np.random.default_rng(members).integers(0, 2**64, (2, members), dtype=np.uint64)


def ends_that_differ(exchanges: Slice, size: Int64, weighted: UInt64) -> tuple[int, int]:
    """(dispatches in which a member receives other rows than the others send it, dispatches that were compared).

    A dispatch is compared where all members' splits are known. With s_r[q] what r sends to q, t_q[r] what q receives from r, and
    random weights u and v, Σ u_r Σ_q v_q s_r[q] = Σ v_q Σ_r u_r t_q[r] modulo 2⁶⁴ where all ends agree, and where they do not
    only by an unlikely chance: the inner sums are those of each call.
    """
    group, num_members = groups_of(exchanges)
    known = np.flatnonzero(group >= 0)
    of = group[known]
    whole = np.ones(len(num_members), dtype=np.bool_)
    whole[of[size[known] != num_members[of]]] = False
    known = known[whole[of]]
    order = known[np.lexsort((exchanges["rank"][known], group[known]))]
    of, members = group[order], num_members[group[order]]
    begins = np.flatnonzero(np.diff(of, prepend=-1))
    nth = np.arange(len(order)) - np.repeat(begins, members[begins])
    outer = np.zeros((2, len(order)), dtype=np.uint64)
    for number in np.unique(members).tolist():
        same = members == number
        to, from_ = _weights(number)
        outer[:, same] = np.stack((from_, to))[:, nth[same]]
    difference = outer[0] * weighted[0, order] - outer[1] * weighted[1, order]
    totals = np.add.reduceat(difference, begins) if len(begins) else difference
    return int((totals != 0).sum()), len(begins)


_Cells = tuple[Int64, Int64, Int64, int | None]
"""(source, target, rows) of a rank to the members of its group, or of these to it; bytes of a row, None where not known."""


class Traffic(Struct, frozen=True, eq=False):
    """The matrix of a run, None where neither splits nor counts tell it, and lines on what it lacks."""

    matrix: TrafficMatrix | None
    reasons: tuple[str, ...]


NO_TRAFFIC = Traffic(None, ())


def traffic_of(
    exchanges: Slice, counts: Mapping[int, RankCounts], sent: Mapping[int, SentRows], sizes: TokenSizes | None
) -> Traffic:
    """The rows from rank to rank of a run: by splits, or where these do not tell of all forwards, by counts.

    ``exchanges`` are those of all ranks in ascending order, ``sent`` what their splits say; ``sizes`` are those of the run.
    """
    members = _members(exchanges, sizes)
    matrix, lines = _by_splits(members, sent)
    if (
        matrix is None
        or lines
        or any(len(of.step) > sent[rank].num_known for rank, of in counts.items() if rank in sent)
    ):
        by_counts, other_lines = _by_counts(members, counts, sizes)
        matrix, lines = (matrix, lines) if by_counts is None else (by_counts, other_lines)
    if matrix is None:
        return Traffic(None, tuple(_reasons(members, counts, sent)))
    return Traffic(matrix, (*lines, *_without_bytes(matrix, sizes), *_disagreements(exchanges, sent, members)))


def _members(exchanges: Slice, sizes: TokenSizes | None) -> dict[tuple[int, int], Group]:
    """The group of each (rank, number of members): by the run's mesh, else those that met in a call.

    Ranks that met others in several groups of one size have none of it. A call's parts are in the order of the ranks.
    """
    groups = () if sizes is None else sizes.ep_groups
    if groups:
        return {(rank, len(group)): tuple(sorted(group)) for group in groups for rank in group}
    found: dict[tuple[int, int], set[Group]] = {}
    for group in _groups_that_met(exchanges):
        for rank in group:
            found.setdefault((rank, len(group)), set()).add(group)
    return {key: next(iter(of_key)) for key, of_key in found.items() if len(of_key) == 1}


def _groups_that_met(exchanges: Slice) -> set[Group]:
    """The distinct groups of ranks that exchanged with each other."""
    group, size = groups_of(exchanges)
    known = np.flatnonzero(group >= 0)
    order = known[np.lexsort((exchanges["rank"][known], group[known]))]
    rank = exchanges["rank"][order]
    begins = np.flatnonzero(np.diff(group[order], prepend=-1))
    groups: set[Group] = set()
    lengths = size[group[order[begins]]]
    for length in np.unique(lengths).tolist():
        places = begins[lengths == length, None] + np.arange(length)
        groups |= set(map(tuple, np.unique(rank[places], axis=0).tolist()))
    return groups


def _by_splits(
    members: Mapping[tuple[int, int], Group], sent: Mapping[int, SentRows]
) -> tuple[TrafficMatrix | None, tuple[str, ...]]:
    """(the matrix by splits, a line on ranks whose rows are missing); rows of ranks without a trace are what others got of
    them.
    """
    cells: list[_Cells] = []
    missing = []
    for rank, of_rank in sent.items():
        groups = {size: members.get((rank, size)) for size in of_rank.sums}
        if of_rank.num_known < of_rank.num_calls or not groups or None in groups.values():
            missing.append(rank)
            continue
        for size, (to_others, from_others) in of_rank.sums.items():
            ranks = np.array(groups[size], dtype=np.int64)
            own, is_silent = np.full(size, rank), np.array([other not in sent for other in ranks.tolist()])
            cells.append((own, ranks, to_others, of_rank.row_bytes))
            if is_silent.any():
                cells.append((ranks[is_silent], own[is_silent], from_others[is_silent], of_rank.row_bytes))
    if not cells:
        return None, ()
    lines = (f"rows of rank {names_of(missing)} are not in `traffic`: splits or members of its calls are not known",)
    return _matrix(SPLITS, cells, set(members.values())), lines if missing else ()


def _by_counts(
    members: Mapping[tuple[int, int], Group], counts: Mapping[int, RankCounts], sizes: TokenSizes | None
) -> tuple[TrafficMatrix | None, tuple[str, ...]]:
    """(the matrix by counts of the groups all of whose members counted, and whose experts fit; a line on ranks of others)."""
    travels = sizes is not None and sizes.dispatcher == "all-to-all"
    row_bytes = sizes.row_bytes if sizes is not None and travels else None
    groups = sorted({group for group in members.values() if len(group) > 1})
    cells: list[_Cells] = []
    missing: list[int] = []
    for group in groups:
        of_group = [counts[rank] for rank in group if rank in counts]
        held = _held_by(of_group) if len(of_group) == len(group) else None
        if held is None:
            missing += [rank for rank in group if rank in counts]
            continue
        for rank in group:
            own, rows = counts[rank], np.zeros(len(group), dtype=np.int64)
            for layer, (begin, end) in held.items():  # kept routes to the experts of each member
                up_to = np.concatenate(([0], np.cumsum(own.kept[own.layer == layer].sum(axis=0))))
                rows += up_to[end] - up_to[begin]
            cells.append((np.full(len(group), rank), np.array(group), rows, row_bytes))
    if not cells:
        return None, ()
    line = f"rows of rank {names_of(missing)} are not in `traffic`: not all ranks of its group counted routes that fit"
    return _matrix(COUNTS, cells, groups), (line,) if missing else ()


def _held_by(group: Sequence[RankCounts]) -> dict[int, Int64] | None:
    """Layer → (2, members) the first expert of each member, and that after its last one; None where the members of a layer do not
    hold each of its experts once.
    """
    held = {}
    for layer in sorted({layer for of_rank in group for layer in np.unique(of_rank.layer).tolist()}):
        firsts = [np.flatnonzero(of_rank.layer == layer)[:1] for of_rank in group]
        columns = [(of.first[at], (of.first + of.held)[at], of.num[at]) for of, at in zip(group, firsts, strict=True)]
        if any(not len(at) for at in firsts):
            return None
        begin, end, num = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.argsort(begin, kind="stable")
        if not np.array_equal(np.append(begin[order], num[0]), np.append(0, end[order])) or (num != num[0]).any():
            return None
        held[layer] = np.stack((begin, end))
    return held


def _matrix(known_from: str, cells: Sequence[_Cells], groups: Iterable[Group]) -> TrafficMatrix:
    """The cells by source and target, those of one pair added up."""
    sources, targets, counts, widths = zip(*cells, strict=True)
    source, target, rows = map(np.concatenate, (sources, targets, counts))
    width = np.repeat([of_rank or UNKNOWN for of_rank in widths], list(map(len, counts)))
    size = np.where(rows == 0, 0, np.where(width < 0, UNKNOWN, width * rows))
    number, first = distinct_of([source, target])
    num_rows, num_bytes = (reduce_groups(np.add, of_cells, number, len(first)) for of_cells in (rows, size))
    is_open = np.zeros(len(first), dtype=np.bool_)
    is_open[number[size < 0]] = True
    order = np.lexsort((target[first], source[first]))
    num_bytes[is_open] = UNKNOWN
    shown = set(np.concatenate((source, target)).tolist())
    kept = tuple(sorted(group for group in groups if shown & set(group)))
    return TrafficMatrix(
        known_from, source[first][order], target[first][order], num_rows[order], num_bytes[order], kept
    )


def _reasons(
    members: Mapping[tuple[int, int], Group], counts: Mapping[int, RankCounts], sent: Mapping[int, SentRows]
) -> Iterable[str]:
    if not sent:
        return  # a line says that there are no calls
    if not counts and not any(of_rank.num_known for of_rank in sent.values()):
        yield "calls do not tell how many rows go to which rank, and routes were not counted: `traffic` is null"
    elif not members:
        yield "which ranks the calls of experts are of is not known: `traffic` is null"
    else:
        yield "splits of calls or counts of routes do not fit the members of their groups: `traffic` is null"


def _without_bytes(matrix: TrafficMatrix, sizes: TokenSizes | None) -> Iterable[str]:
    """A line where bytes of rows to other ranks are not known."""
    if not (matrix.bytes[matrix.source != matrix.target] < 0).any():
        return
    if matrix.known_from == SPLITS:
        reason = "of some calls the bytes of a row are not known, or differ"
    elif sizes is None:
        reason = "what a token takes is not among the facts of these traces"
    else:
        reason = f"with the dispatcher {sizes.dispatcher} other rows travel than those that are computed"
    yield f"{reason}: `away_bytes` of `traffic` is null"


def _disagreements(
    exchanges: Slice, sent: Mapping[int, SentRows], members: Mapping[tuple[int, int], Group]
) -> Iterable[str]:
    """A line where members received other rows than were sent to them."""
    if not sent:
        return
    of_ranks = [of_rank for _, of_rank in sorted(sent.items())]
    size = np.concatenate([of_rank.size for of_rank in of_ranks])
    weighted = np.concatenate([of_rank.weighted for of_rank in of_ranks], axis=1)
    num, compared = ends_that_differ(exchanges, size, weighted)
    if num:
        pair = next(iter(_pairs_that_differ(sent, members)), "")
        yield f"in {num:,} of {compared:,} dispatches a rank received other rows than were sent to it{pair}"


def _pairs_that_differ(sent: Mapping[int, SentRows], members: Mapping[tuple[int, int], Group]) -> Iterable[str]:
    for rank, of_rank in sorted(sent.items()):
        for size, sums in of_rank.sums.items():
            group = members.get((rank, size), ())
            for place, other in enumerate(group):
                got = sent[other].sums.get(size) if other in sent else None
                if got is not None and int(sums[0, place]) != (arrived := int(got[1, group.index(rank)])):
                    yield f": from rank {rank} to rank {other} {int(sums[0, place]):,} rows were sent, {arrived:,} received"


def names_of(ranks: Sequence[int]) -> str:
    """The first few of some ranks, in order."""
    shown = ", ".join(map(str, sorted(ranks)[:_MOST_NAMES]))
    return shown + (" …" if len(ranks) > _MOST_NAMES else "")


_MOST_NAMES = 8
