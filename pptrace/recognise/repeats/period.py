"""Period of a sequence: the shortest piece that comes again and again, and how much of the sequence repeats it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pptrace.model.tables import Int64

Bool = npt.NDArray[np.bool_]

_MOST_CANDIDATES = 32
_MOST_PLACES = 64
_ALMOST = 0.98


@dataclass(frozen=True, slots=True)
class Period:
    """The tokens ``start`` to ``stop`` of a sequence repeat with this length: each equals the one ``length`` before it."""

    length: int
    start: int
    stop: int

    @property
    def num_repeats(self) -> int:
        """Whole repetitions, however they are cut."""
        return (self.stop - self.start) // self.length


def find_period(tokens: Int64) -> Period | None:
    """The shortest period that covers about as much of the sequence as any; None where nothing comes twice in a row.

    Lengths that are looked at are those at which the sequence agrees best with itself: its autocorrelation, with a random number
    of size 1 for each token, by FFT (Wiener–Khinchin), so that a million tokens take a second.
    """
    periods = []
    for length in _lengths(tokens):
        start, run = _longest_true(tokens[length:] == tokens[:-length])
        if run >= length:
            periods.append(Period(length, start, start + run + length))
    if not periods:
        return None
    most = max(period.stop - period.start for period in periods)
    return min((p for p in periods if p.stop - p.start >= _ALMOST * most), key=lambda period: period.length)


def occurs_in(tokens: Int64, piece: Int64) -> bool:
    """Return whether the piece, turned by any number of places, occurs in a sequence.

    It is looked for around its rarest token; what occurs more often than can be looked at counts as found.
    """
    length = len(piece)
    if len(tokens) < length:
        return False
    values, counts = np.unique(piece, return_counts=True)
    anchor = values[np.argmin(counts)]
    positions, at = np.flatnonzero(tokens == anchor), np.flatnonzero(piece == anchor)
    if len(positions) * len(at) > _MOST_PLACES * _MOST_PLACES:
        return True
    for position in positions.tolist():
        window = tokens[max(0, position - length + 1) : position + length]
        here = min(position, length - 1)
        for offset in at.tolist():
            expected = piece[(np.arange(len(window)) - here + offset) % length]
            if _longest_true(window == expected)[1] >= length:
                return True
    return False


def _lengths(tokens: Int64) -> list[int]:
    """Candidates for the length, by how well the sequence agrees with itself at that distance."""
    count = len(tokens)
    half = count // 2
    if half < 1:
        return []
    kinds, codes = np.unique(tokens, return_inverse=True)
    phases = np.random.default_rng(0).random(len(kinds))
    size = 1 << (2 * count - 1).bit_length()
    spectrum = np.fft.fft(np.exp(2j * np.pi * phases)[codes.reshape(-1)], size)
    equal = np.fft.ifft(np.abs(spectrum) ** 2).real[1 : half + 1]
    share = equal / (count - np.arange(1, half + 1))
    chosen = [np.argsort(-values.round(6), kind="stable")[:_MOST_CANDIDATES] + 1 for values in (equal, share)]
    return sorted({int(length) for lengths in chosen for length in lengths})


def _longest_true(mask: Bool) -> tuple[int, int]:
    """(start, length) of the longest run of true values."""
    edges = np.diff(np.concatenate(([False], mask, [False])).astype(np.int8))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    if not len(starts):
        return 0, 0
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest] - starts[longest])
