"""Squares of the score matrix that a ring rank computes at each step: its queries against the keys that it holds then.

The work is cut into squares that no mask touches and triangles on the diagonal, so that nothing is computed and then
thrown away. The first step has the rank's local keys, step j those of ring rank (rank − j) mod ring.

Balanced and causal, in chunks c of which a rank holds two: the local step is a triangle of 2c · (2c + 1) / 2 scores. Keys
from an earlier rank: their first chunk lies before all queries, their second after all. Keys from a later rank: both
chunks lie before the second half of the queries and after the first. Either way 2c² scores, on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from instrument.context.shard import Layout


@dataclass(frozen=True, slots=True)
class Square:
    """Queries against keys; ``masked`` leaves the part on and below the diagonal."""

    queries: slice
    keys: slice
    masked: bool = False


@dataclass(frozen=True, slots=True)
class RingPlan:
    """The squares that one ring rank computes. ``length`` is the number of positions that it holds."""

    ring: int
    rank: int
    length: int
    causal: bool
    layout: Layout

    def source(self, step: int) -> int:
        """The ring rank whose keys this rank holds at a step."""
        return (self.rank - step) % self.ring

    @property
    def local(self) -> Square:
        """The first step, in one piece."""
        return Square(slice(0, self.length), slice(0, self.length), self.causal)

    @property
    def local_early(self) -> tuple[Square, ...]:
        """A part of the local step, to run while the first keys travel; with ``local_late`` it makes up the whole."""
        half = self.length // 2
        if half == 0:
            return ()
        return (Square(slice(half, self.length), slice(0, half if self.causal else self.length)),)

    @property
    def local_late(self) -> tuple[Square, ...]:
        """The rest of the local step, to run while the last gradients return."""
        half = self.length // 2
        if half == 0:
            return (self.local,)
        first = Square(slice(0, half), slice(0, half if self.causal else self.length), self.causal)
        return (first, Square(slice(half, self.length), slice(half, self.length), True)) if self.causal else (first,)

    def remote(self, step: int) -> Square | None:
        """A later step; None where every score is masked."""
        whole = slice(0, self.length)
        if not self.causal:
            return Square(whole, whole)
        earlier = self.source(step) < self.rank
        if self.layout is Layout.CONTIGUOUS:
            return Square(whole, whole) if earlier else None
        half = self.length // 2
        return Square(whole, slice(0, half)) if earlier else Square(slice(half, self.length), whole)
