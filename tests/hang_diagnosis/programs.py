"""Random programs of communication, run on paper with rendezvous: an execution that knows nothing of wait-for graphs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from pptrace.hang_diagnosis.calls import Call, CallState, Group, Presence, RankCalls


@dataclass(frozen=True)
class Op:
    """A collective of all ``ranks``, or a message from the first to the second of them."""

    kind: str
    ranks: tuple[int, ...]
    group: str
    number: int
    num_bytes: int = 64

    def is_like(self, other: Op) -> bool:
        """Return whether a backend could not tell the two apart."""
        return (self.kind, self.ranks, self.group) == (other.kind, other.ranks, other.group)


def correct_program(rng: random.Random, num_ranks: int, num_ops: int) -> list[list[Op]]:
    """Ops of each rank, cut from one order of everything: they cannot deadlock."""
    world = tuple(range(num_ranks))
    groups = {"world": world}
    for index in range(3):
        groups[f"g{index}"] = tuple(sorted(rng.sample(world, rng.randint(2, num_ranks))))
    programs: list[list[Op]] = [[] for _ in world]
    for number in range(num_ops):
        name = rng.choice(list(groups))
        if rng.random() < 0.5:
            op = Op("message", tuple(rng.sample(groups[name], 2)), name, number)
        else:
            op = Op(rng.choice(["all_reduce", "all_gather", "barrier"]), groups[name], name, number)
        for rank in op.ranks:
            programs[rank].append(op)
    return programs


@dataclass
class Execution:
    """Ranks go through their programs; an op is over when all its ranks are at it. ``stops`` do not go beyond a place."""

    programs: Sequence[Sequence[Op]]
    stops: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.at = [0] * len(self.programs)

    def current(self, rank: int) -> Op | None:
        """Op that the rank is in; None where it is at its end, or where it stops."""
        index = self.at[rank]
        done = index >= len(self.programs[rank]) or index >= self.stops.get(rank, len(self.programs[rank]))
        return None if done else self.programs[rank][index]

    def run(self, rng: random.Random, most: int | None = None) -> None:
        """Until nothing can go on, or for so many ops."""
        count = 0
        while most is None or count < most:
            ready = [op for op in self._waiting() if all(self.current(rank) is op for rank in op.ranks)]
            if not ready:
                return
            for rank in rng.choice(ready).ranks:
                self.at[rank] += 1
            count += 1

    def _waiting(self) -> list[Op]:
        return list(
            {id(op): op for rank in range(len(self.programs)) if (op := self.current(rank)) is not None}.values()
        )

    def stuck(self) -> dict[int, set[int]]:
        """Each rank that is in an op → the other ranks of it that are not."""
        return {
            rank: {other for other in op.ranks if self.current(other) is not op}
            for rank in range(len(self.programs))
            if (op := self.current(rank)) is not None
        }

    def calls(self, rank: int, groups: dict[str, tuple[int, ...]]) -> tuple[Call, ...]:
        """The log of a rank: what it has done, and what it is in."""
        counts: Counter[tuple[object, ...]] = Counter()
        made = []
        last = self.at[rank] + (self.current(rank) is not None)
        for index, op in enumerate(self.programs[rank][:last]):
            state = CallState.DONE if index < self.at[rank] else CallState.BLOCKING
            kind, peer = op.kind, -1
            if op.kind == "message":
                kind, peer = ("send", op.ranks[1]) if rank == op.ranks[0] else ("recv", op.ranks[0])
            key = (op.group, kind, peer) if op.kind == "message" else (op.group,)
            call = Call(kind, Group(op.group, groups[op.group]), counts[key], state, peer, op.num_bytes)
            counts[key] += 1
            made.append(call)
        return tuple(made)

    def known(self, gone: Collection[int] = ()) -> list[RankCalls]:
        groups = {op.group: op.ranks for ops in self.programs for op in ops if op.kind != "message"}
        world = tuple(range(len(self.programs)))
        for op in (op for ops in self.programs for op in ops):
            groups.setdefault(op.group, world)
        return [
            RankCalls(rank, self.calls(rank, groups), Presence.GONE if rank in gone else Presence.ALIVE)
            for rank in world
        ]


def closure(targets: dict[int, set[int]], num_ranks: int) -> list[list[float]]:
    """Lengths of shortest paths, by Floyd and Warshall."""
    far = float("inf")
    length = [[1.0 if b in targets.get(a, ()) else far for b in range(num_ranks)] for a in range(num_ranks)]
    for middle in range(num_ranks):
        for a in range(num_ranks):
            for b in range(num_ranks):
                length[a][b] = min(length[a][b], length[a][middle] + length[middle][b])
    return length
