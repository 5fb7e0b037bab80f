"""Candidate plans: those of the registry that ranks may have run by the kinds of their ops, and the number of forwards of each.

All ranks of a pipeline, some or one: the fewer there are, the more plans are left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from pptrace.errors import ScheduleError
from pptrace.schedule import registry
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import Schedule


@dataclass(frozen=True, slots=True)
class CandidatePlan:
    """A plan that is not built yet: a schedule and its shape."""

    entry: Schedule
    pp: int
    chunks: int
    microbatches: int
    group_size: int | None = None
    lean: bool = False

    @property
    def num_forwards(self) -> int:
        return self.pp * self.chunks * self.microbatches

    def build(self) -> Plan | None:
        """The plan; None where the schedule has none of this shape."""
        try:
            return registry.build(self.entry.name, self.pp, self.microbatches, self.chunks, self.group_size, self.lean)
        except ScheduleError:
            return None


def num_leading(kinds: Sequence[str]) -> int:
    """The forwards before any other op."""
    return next((index for index, kind in enumerate(kinds) if kind != "F"), len(kinds))


def candidates_by_kinds(pp: int, kinds: Collection[str], total: int, leading: int) -> Iterator[CandidatePlan]:
    """The plans of a pipeline that nothing labels.

    Args:
        pp: ranks of the pipeline.
        kinds: of all ops.
        total, leading: forwards of a rank, and those before any other op.
    """
    for entry in registry.SCHEDULES.values():
        if not has_kinds(entry, kinds):
            continue
        for chunks, microbatches in _sizes(entry, total, leading, pp):
            groups = range(0)
            if (
                entry.takes_group_size
            ):  # groups of N > p let a rank run between (v−1)·N and that + 2p forwards before others
                least = max(pp + 1, (leading - 2 * pp) // (chunks - 1))
                groups = range(least, min(microbatches, leading // (chunks - 1)) + 1)
            for group_size, lean in variants_of(entry, groups):
                if entry.runs_without_labels(pp, microbatches, group_size):
                    yield CandidatePlan(entry, pp, chunks, microbatches, group_size, lean)


def variants_of(entry: Schedule, group_sizes: Sequence[int]) -> Iterator[tuple[int | None, bool]]:
    """The microbatch groups, of p where None, and whether the warmup is lean."""
    yield None, False
    if entry.takes_group_size:
        yield None, True
        yield from ((size, False) for size in group_sizes)


def has_kinds(entry: Schedule, kinds: Collection[str]) -> bool:
    """Return whether a schedule has weight gradients of their own, and overlapped pairs, where ops of these kinds do."""
    return _splits(entry.name) == (bool({"I", "W"} & set(kinds)), "OVERLAP_F_B" in kinds)


@cache
def _splits(name: str) -> tuple[bool, bool]:
    """Return whether a schedule has weight gradients of their own, and whether it has overlapped pairs, whatever its shape."""
    plan = registry.build(name, 2, 4)
    return plan.splits_backward, any(action.parts for row in plan.ranks for action in row)


def _sizes(entry: Schedule, total: int, leading: int, pp: int) -> Iterator[tuple[int, int]]:
    """(v, m) that a schedule may have with so many forwards on a rank."""
    if entry.default_chunks == 1:
        yield 1, total
    elif pp > 1 and entry.bidirectional:
        yield 2, total
    elif pp > 1:  # nobody cuts a model for one rank
        for chunks in range(2, (total if entry.takes_any_chunks else entry.default_chunks) + 1):
            if total % chunks == 0 and (chunks - 1) * min(pp, total // chunks) <= leading:
                yield chunks, total // chunks  # all chunks but the last run forward before the first backward


def match_by_kinds(
    pp: int, kinds: Mapping[int, Sequence[str]], received: int | None = None, like: Plan | None = None
) -> Plan | None:
    """The registry's plan whose ranks run these kinds of ops in this order.

    Several may: microbatch groups of p come before larger ones, and then fewer chunks before more.

    Args:
        pp: ranks of the pipeline.
        kinds: by pipeline rank, those that are in the trace.
        received: activations that the first rank receives, m for each chunk but its first; None: unknown.
        like: a plan of the same schedule with as many chunks, if it is known.
    """
    forwards = {list(row).count("F") for row in kinds.values()}
    if len(forwards) != 1 or not (total := forwards.pop()):
        return None
    chunks = None if like is None else like.num_chunks
    if received is not None and 0 <= received < total and total % (total - received) == 0:
        chunks = total // (total - received)
    every = {kind for row in kinds.values() for kind in row}
    candidates = candidates_by_kinds(pp, every, total, num_leading(kinds[min(kinds)]))
    # The order of a schedule that is always labelled, where there are no labels, is that of another one.
    for candidate in sorted(
        candidates, key=lambda each: (each.group_size or 0, each.chunks, each.lean, each.entry.always_labelled)
    ):
        entry = candidate.entry
        if entry.searches or chunks not in (None, candidate.chunks) or (like is not None and entry.name != like.name):
            continue
        plan = candidate.build()
        if plan is not None and all(
            [action.kind for action in plan.compute_actions(rank)] == list(row) for rank, row in kinds.items()
        ):
            return plan
    return None
