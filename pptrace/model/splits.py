"""Splits of all-to-alls: how many rows a rank sends to each member of the group, and receives from each."""

from __future__ import annotations

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
