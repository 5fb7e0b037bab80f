"""Splits of all-to-alls: how many rows a rank sends to each member of the group, and receives from each."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.model.tables import Int64


def parse_splits(text: str) -> tuple[Sequence[int], Sequence[int]]:
    """(rows sent to each member, rows received from each); empty where nothing is known."""
    if not text:
        return (), ()
    sent, received = (tuple(map(int, side.split(","))) for side in text.split(">"))
    return sent, received


def rows_of_splits(texts: npt.NDArray[np.object_]) -> tuple[Int64, Int64]:
    """(rows sent, rows received) of each call; −1 where its splits are not known."""
    codes, distinct = pd.factorize(texts)
    sums = [tuple(map(sum, parse_splits(str(text)))) if text else (-1, -1) for text in distinct.tolist()]
    columns = np.array(sums or [(-1, -1)], dtype=np.int64)[codes]
    return columns[:, 0], columns[:, 1]


def splits_by_size(texts: Sequence[str]) -> dict[int, tuple[Int64, Int64]]:
    """(places, rows) of the texts of each number of members: ``places`` (n,) among ``texts``, ``rows`` (2, n, members), those
    sent first, then those received.

    Texts without splits, or with what is none (sides of different length, other signs than digits), have no place.
    """
    places: dict[int, list[int]] = {}
    for place, text in enumerate(texts):
        sent, _, received = text.partition(">")
        if _SPLITS.fullmatch(text) and (size := sent.count(",") + 1) == received.count(",") + 1:
            places.setdefault(size, []).append(place)
    found = {}
    for size, chosen in places.items():
        numbers = ",".join([texts[place] for place in chosen]).replace(">", ",")
        rows = np.fromstring(numbers, dtype=np.int64, sep=",").reshape(len(chosen), 2, size)
        found[size] = np.array(chosen, dtype=np.int64), np.ascontiguousarray(rows.swapaxes(0, 1))
    return found


def are_uneven(texts: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Return which texts have parts of different size."""
    return np.array([len(set(text.replace(">", ",").split(","))) > 1 for text in texts], dtype=np.bool_)


_SPLITS = re.compile(r"\d{1,15}(?:,\d{1,15})*>\d{1,15}(?:,\d{1,15})*", re.ASCII)
