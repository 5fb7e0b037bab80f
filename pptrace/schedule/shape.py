"""The size of a schedule, as its builder takes it, and the placement of its stages: which is chunk c of rank r, of p ranks."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import chain

from pptrace.errors import ShapeError


def loop(chunk: int, rank: int, pp: int) -> int:
    """The stage under loop placement, as Megatron-LM's virtual pipeline has it: c·p + r."""
    return chunk * pp + rank


def zigzag(chunk: int, rank: int, pp: int) -> int:
    """The stage where every other chunk runs over the ranks in reverse; with two chunks a V: stages r and 2p − 1 − r."""
    return chunk * pp + (pp - 1 - rank if chunk % 2 else rank)


_MOST_FORWARDS = 10_000_000
"""Larger plans would take minutes and gigabytes; no cluster has one."""


@dataclass(frozen=True, slots=True)
class OpCosts:
    """Costs of one F, I and W of a chunk and of one message, in any unit, for schedules that are searched.

    ``of_ranks`` are (F, I, W) of each pipeline rank, where these differ; empty: all ranks cost the same.
    """

    forward: int = 1
    input_grad: int = 1
    weight_grad: int = 1
    p2p: int = 0
    of_ranks: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        if min(self.forward, self.input_grad, self.weight_grad, self.p2p, *chain.from_iterable(self.of_ranks)) < 0:
            raise ShapeError(f"{self} has a negative cost; expected at least 0")

    def by_rank(self, pp: int) -> tuple[tuple[int, int, int], ...]:
        """The cost of F, I and W on each of p ranks.

        Raises:
            ShapeError: they are those of another number of ranks.
        """
        if self.of_ranks and len(self.of_ranks) != pp:
            raise ShapeError(f"costs of {len(self.of_ranks)} ranks; expected {pp}")
        return self.of_ranks or ((self.forward, self.input_grad, self.weight_grad),) * pp


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a schedule: p = ``pp`` ranks, m = ``num_microbatches``, v = ``num_chunks`` per rank.

    ``group_size`` is N, the microbatch group size per virtual-pipeline stage of interleaved schedules (None: p). ``lean``
    selects the interleaved variant with fewer warmup forwards. ``memory_limit`` is the number of activations (of
    one chunk and one microbatch) that a rank may hold, and ``costs`` what its ops take; only searched schedules read them.
    """

    pp: int
    num_microbatches: int
    num_chunks: int = 1
    group_size: int | None = None
    lean: bool = False
    memory_limit: int | None = None
    costs: OpCosts = OpCosts()

    def __post_init__(self) -> None:
        sizes: dict[str, object] = {
            "pp": self.pp,
            "microbatches": self.num_microbatches,
            "chunks": self.num_chunks,
            "group_size": self.group_size,
            "memory_limit": self.memory_limit,
        }
        for name, value in sizes.items():
            _require_size(name, value)
        costs: object = self.costs
        if not isinstance(costs, OpCosts):
            raise ShapeError(f"costs are {costs!r}; expected an OpCosts")
        size = self.pp * self.num_microbatches * self.num_chunks
        if size > _MOST_FORWARDS:
            raise ShapeError(
                f"{self.pp} ranks × {self.num_microbatches} microbatches × {self.num_chunks} chunks are {size:,} forwards; "
                f"expected at most {_MOST_FORWARDS:,}"
            )


def _require_size(name: str, value: object) -> None:
    if value is None and name in ("group_size", "memory_limit"):
        return
    try:
        size = operator.index(value)  # type: ignore[arg-type]  # this is the question
    except TypeError:
        raise ShapeError(f"{name} is {value!r}; expected a whole number") from None
    if size < 1:
        raise ShapeError(f"{name} is {value}; expected at least 1")


def require_two_chunks(name: str, shape: Shape) -> None:
    """Refuse anything but the two chunks per rank of a V, and the options of interleaved schedules."""
    if shape.num_chunks != 2:
        raise ShapeError(f"{name}: {shape.num_chunks} chunks per rank; this schedule has 2, stage r and stage 2p−1−r")
    _require_no_groups(name, shape)


def _require_no_groups(name: str, shape: Shape) -> None:
    if shape.group_size is not None or shape.lean:
        raise ShapeError(f"{name}: microbatch groups and the lean warmup belong to interleaved schedules")


def require_one_chunk(name: str, shape: Shape) -> None:
    """Refuse virtual stages and their options for a schedule that has none."""
    if shape.num_chunks != 1:
        raise ShapeError(f"{name}: {shape.num_chunks} chunks per rank; this schedule has 1 (try interleaved-1f1b)")
    _require_no_groups(name, shape)
