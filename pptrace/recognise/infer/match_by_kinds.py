"""Match the kinds of ops, in order, against the schedules of the registry: all that is known without labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pptrace.errors import ScheduleError
from pptrace.schedule import registry
from pptrace.schedule.plan import Plan


def match_by_kinds(pp: int, kinds: Mapping[int, Sequence[str]], received: int | None = None) -> Plan | None:
    """The registry's plan whose ranks run these kinds of ops in this order.

    Several may: microbatch groups of p come before larger ones, and then fewer chunks before more.

    Args:
        pp: ranks of the pipeline.
        kinds: by pipeline rank, those that are in the trace.
        received: activations that the first rank receives, m for each chunk but its first; None: unknown.
    """
    forwards = {list(row).count("F") for row in kinds.values()}
    if len(forwards) != 1 or not (total := forwards.pop()):
        return None
    for plan in _candidates(pp, total, _chunk_counts(total, received), _num_leading(kinds[min(kinds)])):
        if _runs(plan, kinds):
            return plan
    return None


def match_schedule_by_kinds(plan: Plan, kinds: Mapping[int, Sequence[str]]) -> Plan | None:
    """The plan of the same schedule, with as many chunks, whose ranks run these kinds of ops in this order."""
    forwards = {list(row).count("F") for row in kinds.values()}
    if len(forwards) != 1 or not (total := forwards.pop()) or total % plan.num_chunks:
        return None
    for candidate in _candidates(plan.pp, total, [plan.num_chunks], _num_leading(kinds[min(kinds)])):
        if candidate.name == plan.name and _runs(candidate, kinds):
            return candidate
    return None


def _runs(plan: Plan, kinds: Mapping[int, Sequence[str]]) -> bool:
    return all([a.kind for a in plan.compute_actions(rank)] == list(row) for rank, row in kinds.items())


def _chunk_counts(total: int, received: int | None) -> list[int]:
    """Possible numbers of chunks for this number of forwards per rank."""
    if received is not None and 0 <= received < total and total % (total - received) == 0:
        return [total // (total - received)]
    return [chunks for chunks in range(1, total + 1) if total % chunks == 0]


def _num_leading(row: Sequence[str]) -> int:
    """The forwards before any other op."""
    return next((index for index, kind in enumerate(row) if kind != "F"), len(row))


def _candidates(pp: int, total: int, chunk_counts: Sequence[int], leading: int) -> Iterator[Plan]:
    """The plans of the registry with so many forwards per rank."""
    grouped = sorted((size, c) for c in chunk_counts if c > 1 for size in _group_sizes(pp, total // c, c, leading))
    variants: list[tuple[int, int | None, bool]] = [(c, None, lean) for c in chunk_counts for lean in (False, True)]
    for chunks, group, lean in (*variants, *((c, size, False) for size, c in grouped)):
        if lean and chunks == 1:
            continue
        # The order of one that is always labelled, where there are no labels, is that of another one.
        for entry in sorted(registry.SCHEDULES.values(), key=lambda entry: entry.always_labelled):
            if entry.searches or (group is not None and not entry.takes_group_size):
                continue
            if not entry.runs_without_labels(pp, total // chunks, group):
                continue
            try:
                plan = registry.build(entry.name, pp, total // chunks, chunks, group, lean)
            except ScheduleError:
                continue
            yield plan


def _group_sizes(pp: int, microbatches: int, chunks: int, leading: int) -> range:
    """The group sizes N > p that let a rank run so many forwards before its first backward: between (v−1)·N and that + 2p."""
    return range(max(pp + 1, (leading - 2 * pp) // (chunks - 1)), min(microbatches, leading // (chunks - 1)) + 1)
