"""The heuristic of the zero-bubble paper (arXiv 2401.10241, section 3.1), written down on its own in letters and times.

Nothing here uses the package under test, so that the two can disagree. A rank's row is a string of F, I and W; the n-th of a
letter is that of microbatch n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Heuristic:
    """``f``, ``i`` and ``w`` are what each rank's F, I and W take; ``limit``: the most microbatches between F and W on a rank.

    The switches are those of the paper's heuristic.
    """

    p: int
    m: int
    f: Sequence[int]
    i: Sequence[int]
    w: Sequence[int]
    message: int
    limit: int
    overfill: bool
    backward_first: bool
    fill_short_gaps: bool
    rows: list[str] = field(default_factory=list)
    now: list[int] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    end: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def run(self) -> list[str]:
        self.rows, self.now, self.idle = [""] * self.p, [0] * self.p, [0] * self.p
        self.fill_the_pipeline()
        for turn in range(1, self.m):
            for rank in self.ranks_that_run_a_forward():
                self.make_room_and_run_a_forward(rank)
            for rank in range(self.p - 1, -1, -1):
                assert self.rows[rank].count("I") == turn
                self.use_the_wait_for("I", rank)
                self.run_next("I", rank)
        return [row + "W" * (row.count("I") - row.count("W")) for row in self.rows]

    def held(self, rank: int) -> int:
        return self.rows[rank].count("F") - self.rows[rank].count("W")

    def owes_weights(self, rank: int) -> int:
        return self.rows[rank].count("I") - self.rows[rank].count("W")

    def input_comes(self, letter: str, rank: int) -> int:
        source = {"F": rank - 1, "I": rank + 1, "W": -1}[letter]
        if source in (-1, self.p):
            return 0
        return self.end[letter, source, self.rows[rank].count(letter)] + self.message

    def run_next(self, letter: str, rank: int) -> None:
        begin = max(self.now[rank], self.input_comes(letter, rank))
        if self.rows[rank]:
            self.idle[rank] += begin - self.now[rank]
        self.now[rank] = begin + {"F": self.f, "I": self.i, "W": self.w}[letter][rank]
        self.end[letter, rank, self.rows[rank].count(letter)] = self.now[rank]
        self.rows[rank] += letter

    def fill_the_pipeline(self) -> None:
        """A forward each; then, from the last rank on, as many as there is time and memory for until the gradient comes."""
        for rank in range(self.p):
            self.run_next("F", rank)
        more = [0] * self.p
        gradient_leaves = self.now[-1] + self.i[-1]
        for rank in range(self.p - 2, -1, -1):
            comes, end = gradient_leaves + self.message, self.now[rank]
            while (
                more[rank] < min(self.m, self.limit) - 1
                and end < comes
                and (self.overfill or end + self.f[rank] <= comes)
            ):
                more[rank], end = more[rank] + 1, end + self.f[rank]
            gradient_leaves = max(comes, end) + self.i[rank]
        for rank in range(1, self.p):  # one forward fewer than the rank before, which has to send it
            while 0 < more[rank] >= more[rank - 1] < self.m - 1:
                more[rank] -= 1
        for rank in range(self.p):
            for _ in range(more[rank]):
                self.run_next("F", rank)
        for rank in range(self.p - 1, -1, -1):
            self.run_next("I", rank)

    def ranks_that_run_a_forward(self) -> list[int]:
        """Those from which on every later rank runs one too."""
        wanting = [self.rows[rank].count("F") < self.m and not self.may_wait(rank) for rank in range(self.p)]
        return [rank for rank in range(self.p) if all(wanting[rank:])]

    def may_wait(self, rank: int) -> bool:
        """Return whether the rank does better to wait for its next gradient, since the next rank has forwards enough to run."""
        if not self.backward_first or rank == self.p - 1:
            return False
        if self.rows[rank].count("F") - self.rows[rank + 1].count("F") < 2:
            return False
        gradient_comes = self.now[rank + 1] + self.f[rank + 1] + self.i[rank + 1] + self.message
        if self.now[rank] >= gradient_comes:
            return True
        weights = 0
        while self.held(rank) + 1 - weights > self.limit and weights < self.owes_weights(rank):
            weights += 1
        if self.now[rank] + weights * self.w[rank] + self.f[rank] <= gradient_comes:
            return False
        return gradient_comes - self.now[rank] <= max(self.idle) - self.idle[rank]

    def make_room_and_run_a_forward(self, rank: int) -> None:
        if rank and self.rows[rank].count("F") == self.rows[rank - 1].count("F"):
            return  # nothing has come
        while self.held(rank) >= self.limit and self.owes_weights(rank):
            self.run_next("W", rank)
        if self.held(rank) < self.limit:
            self.use_the_wait_for("F", rank)
            self.run_next("F", rank)

    def use_the_wait_for(self, letter: str, rank: int) -> None:
        """W's as long as they fit; one that does not where the rank would else wait longest, or short gaps are filled."""
        comes = self.input_comes(letter, rank)
        while self.owes_weights(rank) and self.now[rank] + self.w[rank] <= comes:
            self.run_next("W", rank)
        wait = comes - self.now[rank]
        is_behind = wait <= max(self.idle) - self.idle[rank]
        if self.owes_weights(rank) and wait > 0 and (self.fill_short_gaps or not is_behind):
            self.run_next("W", rank)


def list_orders(heuristic: Heuristic, weight_waits: bool) -> list[str]:
    """Order of a list scheduler: of all ranks' next actions the one that can begin first, I before F before W.

    ``weight_waits``: no W that would end after an input has come.
    """
    h = heuristic
    h.rows, h.now, h.idle = [""] * h.p, [0] * h.p, [0] * h.p
    while candidates := [choice for rank in range(h.p) for choice in _choices(h, rank, weight_waits)]:
        _, kind, rank = min(candidates)
        h.run_next("IFW"[kind], rank)
    return h.rows


def _choices(h: Heuristic, rank: int, weight_waits: bool) -> list[tuple[int, int, int]]:
    """(begin, place in "IFW", rank) of what a rank can run next, of which a W only where nothing else can begin at once."""
    row, inputs = h.rows[rank], []
    gradient, forward = ("I", rank + 1, row.count("I")), ("F", rank - 1, row.count("F"))
    if row.count("I") < row.count("F") and (rank == h.p - 1 or gradient in h.end):
        inputs.append((max(h.now[rank], h.input_comes("I", rank)), 0, rank))
    if row.count("F") < h.m and h.held(rank) < h.limit and (rank == 0 or forward in h.end):
        inputs.append((max(h.now[rank], h.input_comes("F", rank)), 1, rank))
    if not h.owes_weights(rank):
        return inputs
    soonest = min(inputs)[0] if inputs else None
    is_idle = soonest is None or soonest > h.now[rank]
    if is_idle and (soonest is None or not weight_waits or soonest >= h.now[rank] + h.w[rank]):
        return [(h.now[rank], 2, rank)]
    return inputs
