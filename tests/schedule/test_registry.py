"""Catalogue entry of each schedule, against what its builder does."""

from __future__ import annotations

import pytest

from pptrace.errors import ShapeError
from pptrace.schedule.actions import Action
from pptrace.schedule.registry import SCHEDULES, Schedule, build

ENTRIES = pytest.mark.parametrize("entry", SCHEDULES.values(), ids=SCHEDULES.keys())
PP, MICROBATCHES = 2, 8


def is_taken(entry: Schedule, chunks: int | None = None, **options: int | bool) -> bool:
    try:
        plan = entry.build(PP, MICROBATCHES, chunks, **options)
    except ShapeError:
        return False
    assert chunks is None or plan.num_chunks == chunks
    return True


@ENTRIES
def test_a_schedule_takes_any_number_of_chunks_or_its_default_alone(entry: Schedule) -> None:
    assert build(entry.name, PP, MICROBATCHES).num_chunks == entry.default_chunks
    assert is_taken(entry, entry.default_chunks)
    others = [chunks for chunks in (1, 2, 3, 4) if chunks != entry.default_chunks]
    taken = [chunks for chunks in others if is_taken(entry, chunks)]
    assert [chunks for chunks in taken if chunks > 1] == ([3, 4] if entry.takes_any_chunks else [])


@ENTRIES
def test_only_interleaved_schedules_take_groups_and_a_lean_warmup_and_only_searched_ones_a_memory_limit(
    entry: Schedule,
) -> None:
    assert is_taken(entry, group_size=PP) == entry.takes_group_size
    assert is_taken(entry, lean=True) == (entry.name == "interleaved-1f1b")
    assert is_taken(entry, memory_limit=4) == entry.searches


@ENTRIES
def test_a_bidirectional_plan_has_two_chains(entry: Schedule) -> None:
    assert (build(entry.name, PP, MICROBATCHES).num_chains == 2) == entry.bidirectional


@ENTRIES
def test_ranks_run_the_same_order_where_the_catalogue_says_so(entry: Schedule) -> None:
    def order(row: tuple[Action, ...]) -> list[tuple[str, int, int | None]]:
        return [(str(action.kind), action.chunk, action.microbatch) for action in row]

    plan = build(entry.name, 4, 8)
    orders = [order(row) for row in plan.ranks]
    assert all(of_rank == orders[0] for of_rank in orders) == entry.same_order_on_every_rank


def test_what_is_known_of_frameworks() -> None:
    """No runtime runs breadth-first without labels; Megatron ran all forwards first for m = p alone."""
    assert [entry.name for entry in SCHEDULES.values() if entry.always_labelled] == ["combined-1f1b", "looped-bfs"]
    assert [entry.name for entry in SCHEDULES.values() if entry.only_if_m_is_p] == ["interleaved-afab"]
    first = SCHEDULES["interleaved-afab"]
    assert [first.runs_without_labels(4, m, None) for m in (3, 4, 8)] == [False, True, False]
    interleaved = SCHEDULES["interleaved-1f1b"]
    assert [interleaved.runs_without_labels(4, *sizes) for sizes in ((8, None), (10, None), (10, 6), (9, 8))] == [
        *(True, False, True, False),
    ]
    assert SCHEDULES["1f1b"].runs_without_labels(4, 3, None)
