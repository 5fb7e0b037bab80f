"""Layers of a stage by order: what the kernels of an op repeat, where nothing names the parts of a model.

The layers of a transformer are alike: an op runs the same kernels once for each of them. What repeats is the layers, what comes
before and behind them is an embedding, a head, a loss. In a backward the first or the last layer may run other kernels than the
rest, and is then no repeat: parts are called by what is known, that they repeat.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pptrace.model.tables import Int32

BEFORE, REPEAT, BEHIND = "before what repeats", "repeat", "behind what repeats"
_FEWEST_KERNELS = 3
"""Kernels of a layer: fewer repeat within many that are none."""
_LEAST_COVERED = 0.5
"""Part of an op's kernels that its layers have at least."""
_MOST_KERNELS = 4_000
_MOST_COMPARED = 64
"""Ops whose orders are looked at to find the usual one."""


class Layers(Struct, frozen=True):
    """``count`` layers of ``length`` kernels each, from the kernel ``first`` of an op on."""

    first: int
    length: int
    count: int

    def part_of_each(self, num_kernels: int) -> npt.NDArray[np.int64]:
        """The part of each kernel of an op: 0 before the layers, the number of its layer from 1 on, ``count`` + 1 behind them."""
        return np.clip((np.arange(num_kernels) - self.first) // self.length + 1, 0, self.count + 1)

    def names(self) -> list[str]:
        """The names of the parts."""
        return [BEFORE, *(f"{REPEAT} {number}" for number in range(1, self.count + 1)), BEHIND]


def find_layers(kernels: Int32) -> Layers | None:
    """The layers in the kernels of an op, by the numbers of their names; None where nothing repeats, or what does is too little.

    Of several repetitions it is the one that has most of the kernels, of these the one of the shortest layers.
    """
    best: Layers | None = None
    number = len(kernels)
    if not 2 * _FEWEST_KERNELS <= number <= _MOST_KERNELS:
        return None
    for length in range(_FEWEST_KERNELS, number // 2 + 1):
        alike = kernels[:-length] == kernels[length:]
        if np.count_nonzero(alike) < length:
            continue
        edges = np.flatnonzero(np.diff(np.concatenate(([False], alike, [False]))))  # begins and ends of runs
        begins, runs = edges[::2], edges[1::2] - edges[::2]
        first, run = int(begins[runs.argmax()]), int(runs.max())
        count = run // length + 1
        if run >= length and (best is None or count * length > best.count * best.length):
            best = Layers(first, length, count)
    return best if best is not None and best.count * best.length >= _LEAST_COVERED * number else None


def parts_by_order(op: npt.NDArray[np.intp], kernels: Int32) -> tuple[npt.NDArray[np.int32], list[str]] | None:
    """(the part of each kernel as an index into the names, the names, of which the first is ""); None without layers.

    Args:
        op: the number of the op that each kernel is in, ascending.
        kernels: the number of each one's name.

    Ops that run other kernels than is usual are of no part, ``""``.
    """
    bounds = np.flatnonzero(np.diff(op, prepend=-1, append=op[-1:] + 1)) if len(op) else np.zeros(1, dtype=np.int64)
    sizes = np.diff(bounds)
    if not len(sizes):
        return None
    usual = int(np.bincount(sizes).argmax())
    alike = np.flatnonzero(sizes == usual)
    rows = bounds[alike][:, np.newaxis] + np.arange(usual)
    sampled = kernels[rows[:: max(1, len(rows) // _MOST_COMPARED)]]
    counts = Counter(map(tuple, sampled.tolist()))
    order = np.array(min(counts, key=lambda one: (-counts[one], one)), dtype=kernels.dtype)
    layers = find_layers(order)
    if layers is None:
        return None
    same = rows[(kernels[rows] == order).all(axis=1)]
    part = np.zeros(len(op), dtype=np.int32)
    part[same] = layers.part_of_each(usual) + 1
    return part, ["", *layers.names()]
