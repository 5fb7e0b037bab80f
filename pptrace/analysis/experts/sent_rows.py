"""Rows that a rank hands to each member of its group in dispatches, and receives from each, by the splits of these calls.

A rank with splits of a thousand calls of 64 members has 128,000 numbers: only their sums are kept, and of each call two sums with
weights, by which ends that do not agree are found once all ranks are known (:func:`ends_that_differ`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from pptrace.analysis.experts.routing import groups_of
from pptrace.model.splits import splits_by_size
from pptrace.model.tables import Int64
from pptrace.slices import Slice

UInt64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class SentRows:
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
    counted = _counted(exchanges)
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


def _counted(exchanges: Slice) -> Bool:
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
